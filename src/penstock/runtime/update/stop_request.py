"""The request to end a run or a span, from whoever makes it to the rank that decides which batch is the last.

It travels with the decisions of all stages on updates, where there are any, and with gradients: these lead to the stage
that reads the data, which ends the run by itself where it is the only one to read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def end_of(batch: int, left: float) -> float:
    """The end that a message about a batch asks for, which says `left`; infinite for none."""
    return batch + left - 1 if left > 1 else math.inf if not left else 0


@dataclass
class StopRequest:
    """The batch before which this process asks for the end, and that before which it comes.

    It is 0 for a run that ends as soon as possible; else, counted from the start of training, the first batch that the
    data of a rank lack, which ends the span.

    Attributes:
        asked: of this process, or one that it has heard of; it says so with the next gradients, and with the next
            decision of all stages.
        agreed: this batch is not begun, and no later one; those that have been announced are.
        alone: where data is read in this process, nobody else reads it, so a request needs no agreement.
    """

    asked: float = math.inf
    agreed: float = math.inf
    alone: bool = False

    def ask(self, before: float = 0) -> None:
        """Request the end."""
        self.asked = min(self.asked, before)
        if self.alone:
            self.agree(before)

    def agree(self, before: float = 0) -> None:
        """Let the end come."""
        self.agreed = min(self.agreed, before)

    def left(self, batch: int) -> int:
        """What a message about a batch says: 1 more than the batches from it on before the end; 0 without a request.

        So 1 ends the run: whoever lacks data says so with a batch before.
        """
        return 0 if self.asked == math.inf else int(max(self.asked - batch, 0)) + 1

    def reset(self, *, run: bool = True) -> None:
        """Begin a run, or only a span, whose data may go on."""
        self.asked, self.agreed = (math.inf if run or end else end for end in (self.asked, self.agreed))
