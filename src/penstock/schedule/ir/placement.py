"""Where cuts lie: several of them on a rank, or several copies of one."""

from __future__ import annotations

from penstock.schedule.ir.schedule import Node


def looped(ranks: int, chunks: int, replica: int = 0, reverse: bool = False) -> tuple[Node, ...]:
    """Cut c on rank c mod p: round and round. In reverse, on the rank opposite to that.

    Args:
        ranks: p.
        chunks: v, cuts per rank.
        replica: of the cuts.
        reverse: the first cut lies on the last rank.
    """
    places = [cut % ranks for cut in range(ranks * chunks)]
    return tuple(Node(cut, replica, ranks - 1 - r if reverse else r) for cut, r in enumerate(places))


def zigzag(ranks: int, chunks: int, replica: int = 0, reverse: bool = False) -> tuple[Node, ...]:
    """There and back: 0 .. p-1, p-1 .. 0, and so on, so that the folds need no message.

    Args:
        ranks: p.
        chunks: v, cuts per rank.
        replica: of the cuts.
        reverse: the first cut lies on the last rank.
    """
    places = [r if loop % 2 == 0 else ranks - 1 - r for loop in range(chunks) for r in range(ranks)]
    return tuple(Node(cut, replica, ranks - 1 - r if reverse else r) for cut, r in enumerate(places))


def by_rank(nodes: tuple[Node, ...], ranks: int) -> list[list[Node]]:
    """The nodes of each rank, in the order of their cuts."""
    return [sorted(node for node in nodes if node.rank == rank) for rank in range(ranks)]
