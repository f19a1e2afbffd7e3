"""What an order function returns: the passes of each rank, without updates and versions.

An order answers one question only: in which sequence does each rank run its passes? Where the weights are updated
and which version a pass reads is the business of the version rule (`penstock.schedule.versions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.schedule.ir import Action, Edge, Kind, Node, Op, Program, Unit, chain, straight


@dataclass(frozen=True)
class Order:
    """The passes of one period (and of the epilogue) on every rank.

    Attributes:
        programs: per rank, actions without reads; units as in `penstock.schedule.ir`.
        nodes: the stages; one cut per rank unless told otherwise.
        edges: data flow between cuts; a chain unless told otherwise.
        frozen, segments: as in `penstock.schedule.ir.Schedule`.
    """

    programs: tuple[Program, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    frozen: frozenset[int] = frozenset()
    segments: tuple[tuple[int, ...], ...] = ()

    @property
    def endless(self) -> bool:
        """Whether backwards of one batch run in the period of a later one, so that batches overlap."""
        return any(program.epilogue for program in self.programs)


OrderFunction = Callable[[int, int], "Order | Sequence[Iterable[Action | str]]"]
"""(stages, microbatches) -> Order, or per rank the passes of one flushed batch as actions or text."""


def make_order(
    ranks: Sequence[Iterable[Action]],
    epilogues: Sequence[Iterable[Action]] | None = None,
    nodes: tuple[Node, ...] | None = None,
    edges: tuple[Edge, ...] | None = None,
) -> Order:
    """An order from per-rank lists of passes; a straight chain of one cut per rank unless told otherwise."""
    nodes = nodes or straight(len(ranks))
    tails: Sequence[Iterable[Action]] = epilogues or [()] * len(ranks)
    programs = tuple(Program(tuple(p), tuple(e)) for p, e in zip(ranks, tails, strict=True))
    return Order(programs, nodes, edges or chain(1 + max(n.cut for n in nodes)))


def pass_of(op: Op, microbatch: int, node: Node, kind: Kind = Kind.TRAIN) -> Action:
    """One pass over one microbatch."""
    return Action(op, node, Unit(microbatch, kind=kind))
