"""Placements of stages on ranks: several stages per rank, or several copies of a stage."""

from __future__ import annotations

from penstock.schedule.ir.schedule import Stage


def looped(ranks: int, chunks: int, direction: int = 0, reverse: bool = False) -> tuple[Stage, ...]:
    """Place stage c on rank c mod p, as in interleaved pipelines; in reverse, on rank p - 1 - c mod p.

    Args:
        ranks: p.
        chunks: v, stages per rank.
        direction: the direction of all stages.
        reverse: place the first stage on the last rank.
    """
    places = [index % ranks for index in range(ranks * chunks)]
    return tuple(Stage(index, direction, ranks - 1 - r if reverse else r) for index, r in enumerate(places))


def zigzag(ranks: int, chunks: int, direction: int = 0, reverse: bool = False) -> tuple[Stage, ...]:
    """Place stages on ranks 0 .. p-1, p-1 .. 0, and so on, so that the turning points need no message.

    Args:
        ranks: p.
        chunks: v, stages per rank.
        direction: the direction of all stages.
        reverse: place the first stage on the last rank.
    """
    places = [r if loop % 2 == 0 else ranks - 1 - r for loop in range(chunks) for r in range(ranks)]
    return tuple(Stage(index, direction, ranks - 1 - r if reverse else r) for index, r in enumerate(places))


def by_rank(stages: tuple[Stage, ...], ranks: int) -> list[list[Stage]]:
    """Return the stages of each rank, by index."""
    return [sorted(stage for stage in stages if stage.rank == rank) for rank in range(ranks)]
