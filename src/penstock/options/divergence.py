"""When training counts as diverged; `penstock.runtime.update.divergence` looks for it."""

from __future__ import annotations

from typing import NamedTuple

from penstock.checks import check_number, check_whole
from penstock.errors import ConfigError


class Divergence(NamedTuple):
    """When training counts as diverged; what is found is `Pipeline.trouble`.

    Attributes:
        spike: a loss above this multiple of the median of the finite losses of the `window` batches before it counts;
            None if the size of losses does not matter.
        window: the number of batches in that median; no loss is judged before there have been as many.
        nonfinite: whether a loss or gradient that is not finite counts. With loss scaling such gradients are usual, so
            that only the loss counts.
    """

    spike: float | None = None
    window: int = 20
    nonfinite: bool = True

    def check(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: `spike` is not above 1, or `window` no whole number of at least 1; or nothing counts.
        """
        if self.spike is None and not self.nonfinite:
            raise ConfigError("divergence: nothing counts as one; set spike=2.0 or the like, or leave nonfinite True")
        check_number("divergence: spike", self.spike, "2.0")
        if self.spike is not None and not self.spike > 1:
            raise ConfigError(f"divergence: spike must be above 1, got {self.spike}")
        check_whole("divergence: window", self.window)
