"""What only the order of the passes tells, where it is neither 1F1B nor nF1B: numbers, no weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.train.reference.methods import OWN_DELAYS

Delays = Sequence[Sequence[int]]
"""Per stage and microbatch of a batch, a number of updates that the stage makes between two passes."""


class Order(NamedTuple):
    """How many updates lie between passes.

    Attributes:
        delays: the updates that a stage makes between the forward of a microbatch and the microbatch's own update, away
            from the beginning of a span; if None, those of 1F1B, or of nF1B for the TiMePReSt methods.
    """

    delays: Delays | None = None

    def of_stage(self, s: int) -> Sequence[int] | None:
        """The delays of stage s."""
        return None if self.delays is None else self.delays[s]

    def check(self, method: str, d: int, m: int) -> None:
        """Refuse what does not fit d stages and m microbatches.

        Raises:
            ConfigError: the method has delays of its own; or there are not d lists of m numbers, none below 0; or wpipe
                is to divide an odd number of stages into two groups.
        """
        if method == "wpipe" and d % 2:
            raise ConfigError(f"wpipe has two groups of equally many stages, but the model has {d}: take {d + 1}")
        if self.delays is None:
            return
        if method in OWN_DELAYS:
            raise ConfigError(f"the delays of {method} do not depend on an order: leave delays out")
        _check("delays", self.delays, d, m)


USUAL = Order()
"""That of the method."""


def _check(name: str, numbers: Delays, d: int, m: int) -> None:
    if [len(row) for row in numbers] != [m] * d or min(n for row in numbers for n in row) < 0:
        raise ConfigError(
            f"{name} are {[list(row) for row in numbers]}: for {d} stages and {m} microbatches give {d} lists of {m} "
            "numbers each, none of them below 0"
        )
