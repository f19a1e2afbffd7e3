"""Weight prediction by a fixed horizon per stage: SpecTrain, XPipe, PipeOptim.

These follow the papers' equations. The public code differs: PipeOptim's looks one update further ahead, SpecTrain's
uses momentum times the buffer plus the last gradient as velocity, fairscale's scales it by 1 - momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch

from penstock.schedule.transforms.predictions import BACKWARD, FORWARD
from penstock.weights.corrections.base import NO_RECOMPUTE, Corrector, StagePlace
from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.updates.forecasts import go_on
from penstock.weights.updates.updater import Updater


@dataclass(frozen=True)
class Prediction:
    """Settings: forwards, and with some methods backwards, read weights predicted some updates ahead.

    Stages are k of N, counted from 0, with m microbatches per update. XPipe's horizons are in updates, and rounded,
    half to even. The others' are in microbatches, each of which made an update in their papers (m = 1): they are
    divided by m here, and not rounded, so that they are mean numbers of updates.

        spectrain        forward floor(k / 2) + N - k - 1, backward floor(k / 2) (arXiv 1809.02839)
        spectrain-stash  N - k - 1, for both passes (the second form in its authors' code)
        xpipe            forward (N + m - k / 2 - 2) / m, backward (m + floor(k / 2) - 1) / m (arXiv 1911.04610)
        pipeoptim        forward N - k - 1; the backward reads the newest weights (arXiv 2312.00839)

    Args:
        name: one of these.
        uncorrected: use 1 - beta instead of 1 - beta^t in Adam's direction, as in XPipe's paper: in the long run it is
            sqrt(1 - beta2) / (1 - beta1) times the true one, 0.316 with betas of 0.9 and 0.999, 2.24 with 0.9 and 0.95.
    """

    name: str
    uncorrected: bool = False

    def refuses(self, _precision: torch.dtype | None, recompute: str) -> str | None:
        """Return why recompute is not supported, since a recomputed forward would need its copy again."""
        if recompute != "none":
            return NO_RECOMPUTE
        return None

    def on(self, layout: Layout, place: StagePlace) -> _Predicted:
        """Create the corrector of a stage."""
        return _Predicted(self, layout, place)


def horizons(name: str, k: int, n: int, m: int) -> tuple[float, float]:
    """Return how many updates ahead stage k of n predicts for forwards and for backwards (see `Prediction`)."""
    return {
        "spectrain": ((k // 2 + n - k - 1) / m, (k // 2) / m),
        "spectrain-stash": ((n - k - 1) / m, (n - k - 1) / m),
        "xpipe": (round(Fraction(2 * (n + m - 2) - k, 2 * m)), round(Fraction(m + k // 2 - 1, m))),
        "pipeoptim": ((n - k - 1) / m, 0.0),
    }[name]


class _Predicted(Corrector):
    predicts = True

    def __init__(self, wanted: Prediction, layout: Layout, place: StagePlace) -> None:
        super().__init__(layout, place)
        ahead = horizons(wanted.name, place.stage, place.num_stages, place.microbatches)
        self._horizons, self._uncorrected = dict(zip((FORWARD, BACKWARD), ahead, strict=True)), wanted.uncorrected

    def predict(self, updater: Updater, weights: Buffer, label: str, out: Buffer) -> None:
        """Write the weights predicted for forwards or backwards, by the label."""
        go_on(updater, weights, self._horizons[label], self._uncorrected, out)
