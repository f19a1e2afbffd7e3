"""Orders: the passes of each rank in sequence, without updates and versions.

An order only says in which sequence each rank runs its passes. Where the weights are updated
and which version a pass reads is decided by the version rule (`penstock.schedule.ir.version_rules`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.checks import no_option
from penstock.errors import ConfigError
from penstock.schedule.ir.schedule import Action, Edge, Kind, Op, Program, Stage, Unit, chain, straight


@dataclass(frozen=True)
class Order:
    """The passes of one period (and of the epilogue) on every rank.

    Attributes:
        programs: per rank, actions without reads; units as in `penstock.schedule.ir.schedule`.
        stages: every stage with its rank; by default one per rank.
        edges: data flow between stages; by default a chain.
        frozen, segments, window: as in `penstock.schedule.ir.schedule.Schedule`.
    """

    programs: tuple[Program, ...]
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    frozen: frozenset[int] = frozenset()
    segments: tuple[tuple[int, ...], ...] = ()
    window: int | None = None

    @property
    def endless(self) -> bool:
        """True if backwards of a batch run in the period of a later one, so that batches overlap."""
        return any(program.epilogue for program in self.programs)


OrderFunction = Callable[..., "Order | Sequence[Iterable[Action | str]]"]
"""(stages, microbatches, options) -> Order, or per rank the passes of one flushed batch as actions or text."""

Options = Mapping[str, Any]
"""Of an order: whole numbers; `in_flight` may also be one for every rank, or "auto"."""
NO_OPTIONS: Options = MappingProxyType({})


def order_options(function: OrderFunction) -> dict[str, Any]:
    """Return the options of an order function and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def check_options(
    function: OrderFunction,
    options: Options,
    others: Mapping[str, OrderFunction] = MappingProxyType({}),
    asked: str | None = None,
) -> None:
    """Raise an error if an order function lacks one of these options.

    Args:
        function: the order function.
        options: the options to look for.
        others: other order functions by name, to suggest one that has the option.
        asked: what was asked for, if it was not the order itself, such as "method 2bw".

    Raises:
        ConfigError: an option is missing.
    """
    known, name = order_options(function), asked or f"order {order_name(function, others)}"
    for option in options:
        if option not in known:
            owners = ", ".join(name for name, other in others.items() if option in order_options(other))
            hint = f" Remove it, or choose an order that has it: {owners}" if owners else ""
            raise ConfigError(no_option(name, option, known) + hint)


def order_name(function: OrderFunction, known: Mapping[str, OrderFunction]) -> str:
    """Return the name under which an order is registered, or else that of its function."""
    return next((name for name, other in known.items() if other is function), getattr(function, "__name__", "order"))


def make_order(
    ranks: Sequence[Iterable[Action]],
    epilogues: Sequence[Iterable[Action]] | None = None,
    stages: tuple[Stage, ...] | None = None,
    edges: tuple[Edge, ...] | None = None,
    window: int | None = None,
) -> Order:
    """Make an order from per-rank lists of passes; by default a chain of one stage per rank."""
    stages = stages or straight(len(ranks))
    tails: Sequence[Iterable[Action]] = epilogues or [()] * len(ranks)
    programs = tuple(Program(tuple(p), tuple(e)) for p, e in zip(ranks, tails, strict=True))
    edges = chain(1 + max(n.index for n in stages)) if edges is None else edges
    return Order(programs, stages, edges, window=window)


def pass_of(op: Op, microbatch: int, stage: Stage, kind: Kind = Kind.TRAIN) -> Action:
    """Make a pass over one microbatch."""
    return Action(op, stage, Unit(microbatch, kind=kind))


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """Return a warm-up of `ahead` forwards, then one forward and one backward in turn, then the remaining backwards."""
    found = list(forwards[:ahead])
    for k in range(max(len(forwards) - ahead, 0)):
        found += [forwards[ahead + k], backwards[k]]
    return found + list(backwards[max(len(forwards) - ahead, 0) :])
