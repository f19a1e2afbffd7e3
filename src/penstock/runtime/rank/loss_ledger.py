"""The losses of one rank's batches, from their microbatches to their updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from penstock.schedule.stage_state.microbatch_state import Piece
from penstock.stage.blocks.loss import Loss, UnreadLoss, read_losses, summed
from penstock.weights.decision import check_size, common_size


class BatchLoss(NamedTuple):
    """The loss of a whole batch on a rank.

    Attributes:
        mean: the loss sum / weight; None where the weight is zero.
        weight: N, what the sum is divided by.
        numbers: sums of what the loss has returned beside it.
    """

    mean: float | None
    weight: float
    numbers: Mapping[str, float]


class LossLedger:
    """Adds the losses of microbatches, and knows the loss weight N of batches until they are updated with.

    Batches are counted from the start of training. The last stage knows N after the last forward of a batch; to the
    other stages it rides on gradients, or comes with the decision of all stages.

    Args:
        steps: updates of a batch on this rank: its trained stages.
        waits: updates take N from the decision of all stages.
    """

    def __init__(self, steps: int, waits: bool) -> None:
        self._steps, self._waits = steps, waits
        self._losses: dict[int, dict[Piece, UnreadLoss]] = {}
        self._weights: dict[int, tuple[float, int]] = {}  # N, and the updates that still ask for it
        self._shares: dict[int, Loss] = {}  # of batches that stages have not decided on

    def add(self, batch: int, key: Piece, loss: UnreadLoss) -> None:
        """Add the loss of a microbatch (or slice); of one that is added twice the last counts."""
        self._losses.setdefault(batch, {})[key] = loss

    def close(self, batch: int, shares: bool, *, trains: bool = True) -> BatchLoss | None:
        """Sum up a batch whose last forward is done; None on ranks that know no loss.

        Args:
            batch: which.
            shares: keep the sum until it is contributed to a decision.
            trains: the means of all microbatches have to be of as many elements of each sample.
        """
        losses = self._losses.pop(batch, None)
        if losses is None:
            return None
        totals, weights, each, sizes = zip(*read_losses([*losses.values()]), strict=True)
        total, weight, numbers = sum(totals), sum(weights), summed(each)
        size = common_size(sizes) if trains else 0.0
        check_size(batch, size)
        if shares:
            self._shares[batch] = Loss(total, weight, numbers, size)
        return BatchLoss(total / weight if weight else None, weight, numbers)

    def share(self, batch: int) -> Loss | None:
        """The sum of a batch for the decision of all stages, once; None where it is not known."""
        return self._shares.pop(batch, None)

    def learn(self, batch: int, weight: float) -> None:
        """Note the loss weight of a whole batch; NaN says that the sender did not know it."""
        if weight == weight and batch not in self._weights:
            self._weights[batch] = weight, self._steps

    def learn_here(self, batch: int, weight: float) -> None:
        """Note the loss weight of a batch that ends on this rank, unless updates wait for the decision anyway."""
        if not self._waits:
            self.learn(batch, weight)

    def weight(self, batch: int) -> float:
        """The loss weight of a whole batch; NaN while it is not known."""
        found = self._weights.get(batch)
        return math.nan if found is None else found[0]

    def weight_for_update(self, batch: int) -> float:
        """The same for one of the updates of this rank; the last one forgets it."""
        weight, left = self._weights.pop(batch, (math.nan, 0))
        assert self._waits or not math.isnan(weight), f"the weight of batch {batch} is not known"
        if left > 1:
            self._weights[batch] = weight, left - 1
        return weight
