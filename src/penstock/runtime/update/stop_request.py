"""The request to end a run early, from whoever makes it to the rank that decides which batch is the last.

It travels with the decisions of all stages on updates, where there are any, and with gradients: these lead to the stage
that reads the data, which ends the run by itself where it is the only one to read.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StopRequest:
    """Whether this process asks for the run to end, and whether it does.

    Attributes:
        asked: this process, or one that it has heard of, wants the run to end; it says so with the next gradients, and
            with the next decision of all stages.
        agreed: no batch is begun after those that have been announced.
        alone: where data is read in this process, nobody else reads it, so a request needs no agreement.
    """

    asked: bool = False
    agreed: bool = False
    alone: bool = False

    def ask(self) -> None:
        """Request the end of the run."""
        self.asked = True
        self.agreed = self.agreed or self.alone

    def reset(self) -> None:
        """Begin a run."""
        self.asked = self.agreed = False
