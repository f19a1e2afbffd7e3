"""When training diverges, as decisions alone tell: so every rank comes to the same batch, whenever it hears of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.weights.decision import Decision


class Divergence(NamedTuple):
    """What counts as divergence.

    Attributes:
        spike: a loss above so many times the median of the finite ones of the `window` batches before; None for none.
        window: batches of that median; nothing is judged before there have been as many.
        nonfinite: a loss that is not finite, or a gradient. Where losses are scaled, a gradient that is not finite is
            nothing unusual, and only the loss counts.
    """

    spike: float | None = None
    window: int = 20
    nonfinite: bool = True

    def check(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: they cannot be.
        """
        if self.spike is not None and not self.spike > 1:
            raise ConfigError(f"divergence: spike must be above 1, got {self.spike}")
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise ConfigError(f"divergence: window must be a whole number of at least 1, got {self.window!r}")


class Trouble(NamedTuple):
    """The first batch that has shown a divergence, and what it has shown."""

    batch: int
    why: str


class Lookout:
    """Looks for a divergence in decisions, as one rank learns them; what it has found is part of every snapshot.

    Args:
        divergence: what counts; nothing if None.
        scaled: losses are scaled.

    Attributes:
        trouble: what was found since the batch from which it looks.
    """

    def __init__(self, divergence: Divergence | None, scaled: bool) -> None:
        self._divergence, self._scaled = divergence, scaled
        self._losses: deque[float] = deque(maxlen=1 if divergence is None else divergence.window)
        self._first = 0.0
        self.trouble: Trouble | None = None

    def look(self, first: float) -> None:
        """Look at batches from `first` on, infinite for none; what was found before it is forgotten."""
        self._first = first
        if self.trouble is not None and self.trouble.batch < first:
            self.trouble = None

    def hear(self, decision: Decision) -> None:
        """Take notice of a decision; they come in the order of their batches."""
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
        """What it remembers, as JSON can say it."""
        if self._divergence is None:
            return {}
        return {"losses": list(self._losses)} | ({} if self.trouble is None else {"trouble": list(self.trouble)})

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._losses.clear()
        self._losses.extend(state.get("losses", ()))
        self.trouble = Trouble(*state["trouble"]) if "trouble" in state and self._divergence is not None else None
