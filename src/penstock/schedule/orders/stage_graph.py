"""1F1B on stages that do not form a chain: branches, skips, several ends (GraphPipe, Jeon et al., arXiv 2406.17145).

Each rank holds one stage. A stage runs as many forwards ahead as there are stages on the longest path from it to an
end, itself included, so branches run in parallel, and the pipeline is as deep as the graph, not as the number of its
stages. A stage to which no gradient returns (an edge without backward, as in PPLL's local losses) is an end.

Two towers that are joined, 0>2 1>2 2>3, m=4:
    r0: F0 F1 F2 B0 F3 B1 B2 B3
    r1: F0 F1 F2 B0 F3 B1 B2 B3
    r2: F0 F1 B0 F2 B1 F3 B2 B3
    r3: F0 B0 F1 B1 F2 B2 F3 B3
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache

from penstock.errors import ScheduleError
from penstock.schedule.ir.order import Order, OrderFunction, alternate, make_order, pass_of
from penstock.schedule.ir.schedule import Edge, Op, straight


def over(edges: Sequence[Edge | tuple[int, int]], frozen: Collection[int] = ()) -> OrderFunction:
    """Return the 1F1B order function of a graph of stages.

    Args:
        edges: edges between stages, each from a lower number to a higher one.
        frozen: stages that are not trained and receive no gradient.
    """
    joined = tuple(sorted(Edge(*edge) for edge in edges))

    def graph_1f1b(stages: int, microbatches: int) -> Order:
        """Run 1F1B on the graph.

        Raises:
            ScheduleError: an edge runs backwards or beyond the last stage, or a gradient would have to pass a frozen
                stage.
        """
        wrong = next((e for e in joined if not 0 <= e.source < e.target < stages), None)
        if wrong is not None:
            raise ScheduleError(
                f"edge {wrong.source}>{wrong.target} of a graph of {stages} stages: edges must go from a lower number "
                "to a higher one"
            )

        barred = next((e for e in joined if e.target in frozen and e.source not in frozen and e.backward), None)
        if barred is not None:
            raise ScheduleError(
                f"no gradient passes the frozen stage {barred.target}, so stage {barred.source} before it would get "
                f"none: freeze it, too, or use an edge without backward, ({barred.source}, {barred.target}, False), "
                f"and give stage {barred.source} a loss"
            )

        @cache
        def ahead(index: int) -> int:
            """Return the number of stages on the longest path to a loss."""
            return 1 + max((ahead(e.target) for e in joined if e.source == index and e.backward), default=0)

        programs = []
        for stage in straight(stages):
            forwards, backwards = ([pass_of(op, k, stage) for k in range(microbatches)] for op in (Op.F, Op.B))
            programs.append(
                forwards if stage.index in frozen else alternate(forwards, backwards, ahead(stage.index) - 1)
            )
        return replace(make_order(programs, edges=joined), frozen=frozenset(frozen))

    return graph_1f1b
