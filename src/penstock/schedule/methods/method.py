"""A method: a combination of an order, a version rule, a correction, a sharding and a way to combine pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.schedule.ir.order import OrderFunction
from penstock.schedule.ir.sharding import Level
from penstock.schedule.methods.corrections import CorrectionSpec, find_correction
from penstock.schedule.orders import ORDERS
from penstock.schedule.transforms.sharding import sharding_fault


@dataclass(frozen=True, repr=False)
class Method:
    """A row of the table of methods, or a method of a user's own, which goes wherever the name of one does.

    Attributes:
        name: the value of `--set method=`; of a user's own another one than all in the table.
        title: the name in the literature.
        source: paper and section.
        order: a name in `penstock.schedule.orders.ORDERS`, or a function (stages, microbatches, *, options) -> order.
        rule: a name in `penstock.schedule.ir.version_rules.RULES`.
        correction: the remedy for stale weights: a name in `penstock.schedule.methods.corrections.CORRECTIONS`, or a
            row like those there, with the class that corrects a stage.
        sharding: what of the state of a stage is split over parallel pipelines unless a user says otherwise, as
            `read_sharding` reads it.
        combine: the default way to combine parallel pipelines, a name in
            `penstock.schedule.methods.data_parallel_sync.COMBINES`.
        aliases: other names in use.
        limit: (stages, microbatches, options of the order) -> why they cannot be combined, beyond what the proof finds.
        settings: defaults of `penstock train --set` keys under this method, as it requires or as its paper says.
        divides_head: whether its stages are no chain, but a graph that only a model with a divided output layer fits,
            such as that of `penstock.models.vocabulary_parallel_gpt`.
        reference: of a correction of a user's own, for `penstock verify`: (stage, place, **options) sets how a
            `penstock.verify.reference.ReferenceStage` reads and steps, and may return the factor on its rate, a
            function of the updates made before.
        delays: of an order of a user's own, for `penstock verify`: (stages, microbatches) -> per stage and microbatch
            of a batch, the updates of the stage between the forward and the microbatch's own update; None to derive
            them from the schedule.
    """

    name: str
    title: str
    source: str
    order: str | OrderFunction
    rule: str
    correction: str | CorrectionSpec = "none"
    sharding: str = "none"
    combine: str = "reduce"
    aliases: tuple[str, ...] = ()
    limit: Callable[..., str | None] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    divides_head: bool = False
    reference: Callable[..., Callable[[int], float] | None] | None = None
    delays: Callable[[int, int], Sequence[Sequence[int]]] | None = None

    def __str__(self) -> str:
        """Its name."""
        return self.name

    __repr__ = __str__  # the same in every process, unlike that of a function

    @property
    def spec(self) -> CorrectionSpec:
        """The row of its correction."""
        return find_correction(self.correction)

    @property
    def order_function(self) -> OrderFunction:
        """The function that makes its order."""
        return ORDERS[self.order] if isinstance(self.order, str) else self.order

    @property
    def needs_sharded_state(self) -> bool:
        """Whether it splits the state of stages unless a user says otherwise."""
        return self.sharding != Level.NONE

    @property
    def in_turns(self) -> bool:
        """Whether ranks alternate between stages, or versions of them, with every microbatch or a few of them."""
        return self.order not in ("breadth-first", "endless-breadth-first")

    @property
    def shardings(self) -> tuple[Level, ...]:
        """The levels of sharding that it takes, without `none`."""
        return tuple(
            level
            for level in tuple(Level)[1:]
            if sharding_fault(self.rule, level, self.spec.name, self.in_turns) is None
        )
