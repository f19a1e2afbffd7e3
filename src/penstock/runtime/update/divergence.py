"""Detection of diverging training from the decisions on updates.

Decisions are the same on all ranks, so every rank finds the same batch, whenever it receives them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from penstock.options.updates import Divergence
from penstock.weights.decision import Decision


class Trouble(NamedTuple):
    """The first batch at which training was found to have diverged.

    Attributes:
        batch: its number since the start of training.
        why: the reason, for people.
    """

    batch: int
    why: str


class DivergenceDetector:
    """Looks for a divergence in the decisions that one rank receives; its state is part of every snapshot.

    Args:
        divergence: the criteria; None finds nothing.
        scaled: losses are scaled.

    Attributes:
        trouble: the first divergence found at or after the batch given to `watch_from`; None if there is none.
    """

    def __init__(self, divergence: Divergence | None, scaled: bool) -> None:
        self._divergence, self._scaled = divergence, scaled
        self._losses: deque[float] = deque(maxlen=1 if divergence is None else divergence.window)
        self._first = 0.0
        self.trouble: Trouble | None = None

    def watch_from(self, first: float) -> None:
        """Judge batches from `first` on (infinity for none), and forget what was found before it."""
        self._first = first
        if self.trouble is not None and self.trouble.batch < first:
            self.trouble = None

    def observe(self, decision: Decision) -> None:
        """Judge a decision; decisions come in the order of their batches."""
        if self._divergence is None or not decision.weight:
            return
        if self.trouble is None and decision.batch >= self._first:
            why = self._fault(self._divergence, decision)
            self.trouble = None if why is None else Trouble(decision.batch, why)
        if math.isfinite(decision.loss):
            self._losses.append(decision.loss)

    def _fault(self, divergence: Divergence, decision: Decision) -> str | None:
        loss = decision.loss
        if divergence.nonfinite and not math.isfinite(loss):
            return f"the loss was {loss}"
        if divergence.nonfinite and not decision.finite and not self._scaled:
            return "the gradient was not finite"
        if divergence.spike is None or len(self._losses) < divergence.window:
            return None
        usual = median(self._losses)
        if math.isfinite(loss) and loss <= divergence.spike * usual:
            return None
        return f"the loss was {loss:.4g}, {loss / usual:.3g} times the median of the {divergence.window} batches before"

    def state(self) -> dict[str, Any]:
        """Return its state as plain JSON values."""
        if self._divergence is None:
            return {}
        return {"losses": list(self._losses)} | ({} if self.trouble is None else {"trouble": list(self.trouble)})

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned."""
        self._losses.clear()
        self._losses.extend(state.get("losses", ()))
        self.trouble = Trouble(*state["trouble"]) if "trouble" in state and self._divergence is not None else None
