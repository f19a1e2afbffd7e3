"""What is trained in the campaign of faults: small models, by several methods, depths and widths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BATCHES = 60
STALL = 8.0  # seconds of `timeout` where a worker is stopped; a slow machine must not stall by itself


@dataclass(frozen=True)
class Shape:
    """What is trained.

    Attributes:
        every: batches between two checkpoints.
        patience: evaluations that may find nothing better before the run ends; None to train all batches.
    """

    method: str
    stages: int
    width: int = 1
    every: int = 4
    patience: int | None = None

    @property
    def workers(self) -> int:
        return self.stages * self.width

    @property
    def name(self) -> str:
        stops = ", patience" if self.patience is not None else ""
        return f"{self.method} {f'{self.width} x ' if self.width > 1 else ''}{self.stages}{stops}"

    @property
    def lines(self) -> int:
        """Of the metrics of a run, roughly: losses, updates, checkpoints."""
        return 2 * BATCHES + BATCHES // 4 if self.patience is None else 45

    def settings(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "stages": self.stages,
            "width": self.width,
            "batches": BATCHES,
            "microbatches": max(self.stages, 2),
            "microbatch_size": 2,
            "validation_samples": 8,
            "sample_length": 0,
            "threads": 1,
            "timeout": 120.0,
            "model": {"layers": 2, "width": 32, "heads": 2, "context": 16},
            "checkpoint": {"every": self.every, "keep": 2},
            **(self._impatient() if self.patience is not None else {}),
        }

    def _impatient(self) -> dict[str, Any]:
        """A rate that is too high, so that a run with an average ends in the midst of its batches."""
        return {
            "ema_decay": 0.9,
            "optimizer": {"lr": 0.3},
            "lr_schedule": {"warm_up": 0},
            "evaluate": {"every": 2, "samples": 4, "patience": self.patience},
        }


SHAPES = (
    Shape("2bw", 2), Shape("2bw", 2), Shape("1f1b", 2), Shape("stash", 2, every=5), Shape("2bw", 2, patience=2),
    Shape("1f1b", 3), Shape("2bw", 3, every=3), Shape("2bw", 2, width=2), Shape("1f1b", 2, width=2),
    Shape("1f1b", 4), Shape("2bw", 4, every=3),
)  # fmt: skip
"""Those that are drawn from, some of them more often."""

LARGE = (Shape("1f1b", 3, width=2), Shape("2bw", 4, width=2))
"""Those of six and eight processes, which few cases have."""
