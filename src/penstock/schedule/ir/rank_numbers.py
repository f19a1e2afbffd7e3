"""The numbers of ranks in a job: to which of the parallel pipelines each belongs, and which rank of it it is."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from penstock.checks import did_you_mean, in_words
from penstock.errors import ConfigError

RankOrder = Literal["tp-pp-dp", "tp-dp-pp"]
"""What changes fastest from rank to rank comes first, as in Megatron: tensor ranks, stages, parallel pipelines."""

RANK_ORDERS: tuple[RankOrder, ...] = get_args(RankOrder)


class RankNumbers(NamedTuple):
    """The numbers of ranks, without tensor ranks, which are always next to each other.

    Attributes:
        width: w, parallel pipelines.
        depth: d, ranks of each.
        order: with "tp-pp-dp" the ranks of a pipeline follow each other, with "tp-dp-pp" the replicas of a stage.
    """

    width: int
    depth: int
    order: RankOrder = "tp-pp-dp"

    def number(self, pipeline: int, rank: int) -> int:
        """Return the number of a rank of a pipeline."""
        return pipeline + rank * self.width if self.order == "tp-dp-pp" else pipeline * self.depth + rank

    def place(self, number: int) -> tuple[int, int]:
        """Return the pipeline of a rank, and its rank there."""
        if self.order == "tp-dp-pp":
            rank, pipeline = divmod(number, self.width)
            return pipeline, rank
        return divmod(number, self.depth)

    def of_pipeline(self, pipeline: int) -> list[int]:
        """Return the numbers of the ranks of a pipeline."""
        return [self.number(pipeline, rank) for rank in range(self.depth)]

    def of_rank(self, rank: int) -> list[int]:
        """Return the numbers of a rank in all pipelines: those of the replicas of its stages."""
        return [self.number(pipeline, rank) for pipeline in range(self.width)]


def check_rank_order(value: object) -> None:
    """Refuse what is no order of ranks.

    Raises:
        ConfigError: it is none.
    """
    if value not in RANK_ORDERS:
        raise ConfigError(
            f"rank_order must be {in_words(RANK_ORDERS)}, got {value!r:.80}.{did_you_mean(str(value), RANK_ORDERS)}"
        )
