"""The request to end a run early, from whoever makes it to the rank that decides which batch is the last."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StopRequest:
    """Whether this process asks for the run to end, and whether it does.

    Attributes:
        asked: this process wants the run to end; it says so with the next decision of all stages.
        agreed: no batch is begun after those that have been announced.
    """

    asked: bool = False
    agreed: bool = False

    def reset(self) -> None:
        """Begin a run."""
        self.asked = self.agreed = False
