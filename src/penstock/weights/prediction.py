"""Passes on weights predicted some updates ahead: SpecTrain, XPipe, PipeOptim.

These follow the papers' equations. The public code differs: PipeOptim's looks one update further ahead, SpecTrain's
takes momentum times the buffer plus the last gradient for the velocity, fairscale's scales it by 1 - momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch

from penstock.schedule.predictions import BACKWARD, FORWARD
from penstock.weights.buffers import Buffer, Layout
from penstock.weights.corrections import Corrector, Place
from penstock.weights.update import Updater


@dataclass(frozen=True)
class Prediction:
    """Forwards, and with some methods backwards, read weights predicted some updates ahead.

    Stages are k of N, counted from 0, with m microbatches per update. The papers count microbatches (m = 1) or, XPipe,
    updates; numbers of microbatches are divided by m here. All are rounded half to even.

        spectrain        forward floor(k / 2) + N - k - 1, backward floor(k / 2) (arXiv 1809.02839)
        spectrain-stash  N - k - 1, for both passes (the second form in its authors' code)
        xpipe            forward (N + m - k / 2 - 2) / m, backward (m + floor(k / 2) - 1) / m (arXiv 1911.04610)
        pipeoptim        forward N - k - 1; the backward reads the newest weights (arXiv 2312.00839)

    Args:
        name: one of these.
        uncorrected: the direction of Adam with 1 - beta instead of 1 - beta^t, as in XPipe's paper: in the long run
            0.316 times the true one, with the usual betas.
    """

    name: str
    uncorrected: bool = False

    def refuses(self, _precision: torch.dtype | None, recompute: str) -> str | None:
        """A forward that is run again would need its copy again."""
        if recompute != "none":
            return "what a forward has read is gone when it would be run again; do without recompute"
        return None

    def on(self, layout: Layout, place: Place) -> _Predicted:
        """For a stage."""
        return _Predicted(self, layout, place)


def horizons(name: str, k: int, n: int, m: int) -> tuple[int, int]:
    """How many updates ahead a method predicts on stage k of n, for forwards and for backwards (see `Prediction`)."""
    forward, backward = {
        "spectrain": (Fraction(k // 2 + n - k - 1, m), Fraction(k // 2, m)),
        "spectrain-stash": (Fraction(n - k - 1, m), Fraction(n - k - 1, m)),
        "xpipe": (Fraction(2 * (n + m - 2) - k, 2 * m), Fraction(m + k // 2 - 1, m)),
        "pipeoptim": (Fraction(n - k - 1, m), Fraction(0)),
    }[name]
    return round(forward), round(backward)


class _Predicted(Corrector):
    """What is predicted on one stage."""

    predicts = True

    def __init__(self, wanted: Prediction, layout: Layout, place: Place) -> None:
        super().__init__(layout, place)
        ahead = horizons(wanted.name, place.cut, place.cuts, place.microbatches)
        self._horizons, self._uncorrected = dict(zip((FORWARD, BACKWARD), ahead, strict=True)), wanted.uncorrected

    def predict(self, updater: Updater, weights: Buffer, label: str, out: Buffer) -> None:
        """For forwards or backwards."""
        updater.predict(weights, self._horizons[label], self._uncorrected, out)
