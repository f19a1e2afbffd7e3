"""Steps and samples that training takes, by the size of its batch (McCandlish et al., arXiv 1812.06162).

(S / S_min - 1) (E / E_min - 1) = 1 for S steps and E samples, with the critical batch B_crit = E_min / S_min.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Samples = TypeVar("Samples", float, npt.NDArray[np.float64])


def steps_at(batch: Samples, critical: float, least: float) -> Samples:
    """Return the steps with a batch.

    Args:
        batch: in samples.
        critical: the critical batch; with it steps are twice the least.
        least: steps with an infinite batch.
    """
    return least * (1 + critical / batch)


def samples_at(batch: Samples, critical: float, least: float) -> Samples:
    """Return the samples with a batch.

    Args:
        batch: in samples.
        critical: the critical batch; with it samples are twice the least.
        least: samples with an infinitely small batch.
    """
    return least * (1 + batch / critical)
