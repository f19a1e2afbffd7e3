"""A method: a combination of an order, a version rule, a correction, a sharding and a way to combine pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.schedule.ir.sharding import Level
from penstock.schedule.transforms.sharding import sharding_fault


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        name: the value of `--set method=`.
        title: the name in the literature.
        source: paper and section.
        order: a name in `penstock.schedule.orders.ORDERS`.
        rule: a name in `penstock.schedule.ir.version_rules.RULES`.
        correction: the remedy for stale weights, a name in `penstock.schedule.methods.corrections.CORRECTIONS`.
        sharding: what of the state of a stage is split over parallel pipelines unless a user says otherwise, as
            `read_sharding` reads it.
        combine: the default way to combine parallel pipelines, a name in
            `penstock.schedule.methods.data_parallel_sync.COMBINES`.
        aliases: other names in use.
        limit: (stages, microbatches, options of the order) -> why they cannot be combined, beyond what the proof finds.
        settings: defaults of `penstock train --set` keys under this method, as it requires or as its paper says.
        divides_head: whether its stages are no chain, but a graph that only a model with a divided output layer fits,
            such as that of `penstock.models.vocabulary_parallel_gpt`.
    """

    name: str
    title: str
    source: str
    order: str
    rule: str
    correction: str = "none"
    sharding: str = "none"
    combine: str = "reduce"
    aliases: tuple[str, ...] = ()
    limit: Callable[..., str | None] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    divides_head: bool = False

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
            if sharding_fault(self.rule, level, self.correction, self.in_turns) is None
        )
