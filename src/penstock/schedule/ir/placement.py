"""Where stages lie: several of them on a rank, or several copies of one."""

from __future__ import annotations

from penstock.schedule.ir.schedule import Stage


def looped(ranks: int, chunks: int, direction: int = 0, reverse: bool = False) -> tuple[Stage, ...]:
    """Stage c on rank c mod p: round and round. In reverse, on the rank opposite to that.

    Args:
        ranks: p.
        chunks: v, stages per rank.
        direction: of all of them.
        reverse: the first stage lies on the last rank.
    """
    places = [index % ranks for index in range(ranks * chunks)]
    return tuple(Stage(index, direction, ranks - 1 - r if reverse else r) for index, r in enumerate(places))


def zigzag(ranks: int, chunks: int, direction: int = 0, reverse: bool = False) -> tuple[Stage, ...]:
    """There and back: 0 .. p-1, p-1 .. 0, and so on, so that the folds need no message.

    Args:
        ranks: p.
        chunks: v, stages per rank.
        direction: of all of them.
        reverse: the first stage lies on the last rank.
    """
    places = [r if loop % 2 == 0 else ranks - 1 - r for loop in range(chunks) for r in range(ranks)]
    return tuple(Stage(index, direction, ranks - 1 - r if reverse else r) for index, r in enumerate(places))


def by_rank(stages: tuple[Stage, ...], ranks: int) -> list[list[Stage]]:
    """The stages of each rank, by index."""
    return [sorted(stage for stage in stages if stage.rank == rank) for rank in range(ranks)]
