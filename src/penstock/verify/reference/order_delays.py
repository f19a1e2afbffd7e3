"""Facts about orders of passes other than 1F1B and nF1B: numbers of updates, no weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.verify.reference.supported_methods import OWN_DELAYS

Delays = Sequence[Sequence[int]]
"""Per stage and microbatch of a batch, the number of updates that the stage makes between two passes."""


class ReferenceOrder(NamedTuple):
    """The numbers of updates between passes.

    Attributes:
        delays: the updates that a stage makes between the forward of a microbatch and the microbatch's own update, away
            from the beginning of a span; if None, those of 1F1B, or of nF1B for the TiMePReSt methods.
        recompute: None, "block" or "stage": the unit that keeps only its input and is recomputed.
        segment: only the first of so many consecutive stages keeps its input ("stage"); a number for all segments, or
            one for each.
        early: the updates that a stage makes between the recomputation and the microbatch's own update; 0 if None.
    """

    delays: Delays | None = None
    recompute: str | None = None
    segment: int | Sequence[int] = 1
    early: Delays | None = None

    def of_stage(self, s: int) -> Sequence[int] | None:
        """Return the delays of stage s."""
        return None if self.delays is None else self.delays[s]

    def sizes(self, d: int) -> list[int]:
        """Return the number of stages of each segment, for d stages."""
        if not isinstance(self.segment, int):
            return list(self.segment)
        size = self.segment
        return [min(size, d - s) for s in range(0, d, size)] if size > 0 else [size]

    def moment(self, t: int, s: int, k: int, version: int) -> int:
        """Return the newest version when stage s recomputes microbatch k of batch t, whose forward read `version`."""
        return t if self.early is None else max(version, t - self.early[s][k])

    def check(self, method: str, d: int, m: int) -> None:
        """Check that this fits a method with d stages and m microbatches.

        Raises:
            ConfigError: the method's delays do not depend on an order; the delays are not d lists of m non-negative
                numbers; or the settings of recompute contradict each other.
        """
        if self.recompute not in (None, "block", "stage"):
            raise ConfigError(f"recompute is {self.recompute!r}; give None, 'block' or 'stage'")
        sizes = self.sizes(d)
        if min(sizes) < 1 or sum(sizes) != d or (max(sizes) > 1 and self.recompute != "stage"):
            raise ConfigError(
                f"segment is {self.segment}: give a number above 0 (or such numbers that make {d} together), and above "
                "1 only if recompute='stage'"
            )
        if self.early is not None:
            if self.recompute is None:
                raise ConfigError("early says when forwards are recomputed, but recompute is None: leave early out")
            _check("early", self.early, d, m)
        if self.delays is None:
            return
        if method in OWN_DELAYS:
            raise ConfigError(f"the delays of {method} do not depend on an order: leave delays out")
        _check("delays", self.delays, d, m)


USUAL = ReferenceOrder()
"""The method's own order."""


def _check(name: str, numbers: Delays, d: int, m: int) -> None:
    if [len(row) for row in numbers] != [m] * d or min(n for row in numbers for n in row) < 0:
        raise ConfigError(
            f"{name} are {[list(row) for row in numbers]}: for {d} stages and {m} microbatches give {d} lists of {m} "
            "numbers each, none of them below 0"
        )
