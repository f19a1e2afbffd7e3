"""What only the order of the passes tells, where it is neither 1F1B nor nF1B: numbers, no weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.verify.reference.methods import OWN_DELAYS

Delays = Sequence[Sequence[int]]
"""Per stage and microbatch of a batch, a number of updates that the stage makes between two passes."""


class ReferenceOrder(NamedTuple):
    """How many updates lie between passes.

    Attributes:
        delays: the updates that a stage makes between the forward of a microbatch and the microbatch's own update, away
            from the beginning of a span; if None, those of 1F1B, or of nF1B for the TiMePReSt methods.
        recompute: None, "block" or "stage": what keeps its input, and runs forward a second time.
        segment: of so many stages in a row only the first one keeps its input ("stage"); a number for all segments, or
            one for each.
        early: the updates that a stage makes between the second run and the microbatch's own update; none if None.
    """

    delays: Delays | None = None
    recompute: str | None = None
    segment: int | Sequence[int] = 1
    early: Delays | None = None

    def of_stage(self, s: int) -> Sequence[int] | None:
        """The delays of stage s."""
        return None if self.delays is None else self.delays[s]

    def sizes(self, d: int) -> list[int]:
        """How many of d stages each segment has."""
        if not isinstance(self.segment, int):
            return list(self.segment)
        size = self.segment
        return [min(size, d - s) for s in range(0, d, size)] if size > 0 else [size]

    def moment(self, t: int, s: int, k: int, version: int) -> int:
        """The newest version when stage s runs microbatch k of batch t again, whose forward has read `version`."""
        return t if self.early is None else max(version, t - self.early[s][k])

    def check(self, method: str, d: int, m: int) -> None:
        """Refuse what does not fit d stages and m microbatches.

        Raises:
            ConfigError: the method has delays of its own; there are not d lists of m numbers, none below 0; wpipe is
                to divide an odd number of stages into two groups; or something is said about recompute that is not
                possible, or without it.
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
                raise ConfigError("early says when forwards are run again, but recompute is None: leave it out")
            _check("early", self.early, d, m)
        if method == "wpipe" and d % 2:
            raise ConfigError(f"wpipe has two groups of equally many stages, but the model has {d}: take {d + 1}")
        if self.delays is None:
            return
        if method in OWN_DELAYS:
            raise ConfigError(f"the delays of {method} do not depend on an order: leave delays out")
        if method == "ftpipe-aggregated":
            raise ConfigError(
                "ftpipe-aggregated predicts with what is there of a batch's gradient, which delays do not tell: leave "
                "delays out"
            )
        _check("delays", self.delays, d, m)


USUAL = ReferenceOrder()
"""That of the method."""


def _check(name: str, numbers: Delays, d: int, m: int) -> None:
    if [len(row) for row in numbers] != [m] * d or min(n for row in numbers for n in row) < 0:
        raise ConfigError(
            f"{name} are {[list(row) for row in numbers]}: for {d} stages and {m} microbatches give {d} lists of {m} "
            "numbers each, none of them below 0"
        )
