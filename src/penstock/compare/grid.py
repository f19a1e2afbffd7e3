"""The runs of a comparison: every method with every seed and every learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.compare.config import ComparisonConfig
from penstock.compare.contender import Contender, parse_contender
from penstock.errors import ConfigError


def contenders(config: ComparisonConfig) -> list[Contender]:
    """Return the methods of a comparison, in the order given.

    Raises:
        ConfigError: see `parse_contender`; also if a method is given twice.
    """
    found = [parse_contender(text, config.schedules) for text in config.methods]
    labels = [contender.label for contender in found]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ConfigError(f"methods: {twice} is given twice (perhaps under another name); name each method once")
    return found


def other_settings(config: ComparisonConfig) -> list[str]:
    """List settings of methods' papers that differ from the shared ones; `penstock train` would use the papers'."""
    found = []
    for contender in contenders(config):
        for key, value in contender.method.settings.items():
            section, _, name = key.partition(".")
            there = getattr(config.optimizer, name) if section == "optimizer" else value
            if there != value:
                found.append(f"{contender.label}: its paper has {key}={value}, here all methods have {there}")
    return found


class Key(NamedTuple):
    """Identifies one run of a comparison.

    Attributes:
        method: the contender's label.
        seed: of the initial weights and the order of samples.
        lr: peak learning rate.
    """

    method: str
    seed: int
    lr: float

    @property
    def file(self) -> str:
        """The name of the file with its results."""
        return f"{self.method.replace(':', '+')}-seed-{self.seed}-lr-{self.lr!r}.json"

    def __str__(self) -> str:
        return f"{self.method}, seed {self.seed}, lr {self.lr:g}"


def grid_of(config: ComparisonConfig) -> Iterator[Key]:
    """Yield every run that may be needed: all methods with all seeds and all rates."""
    labels = [contender.label for contender in contenders(config)]
    for seed in range(config.seeds):
        for lr in config.rates:
            for label in labels:
                yield Key(label, seed, lr)


def rounds_of(config: ComparisonConfig, best: Callable[[str], float | None]) -> Iterator[list[Key]]:
    """Yield all runs that are needed, in rounds that need the results of those before them.

    Each is ordered seed by seed, so that early results compare all methods.

    Args:
        config: the comparison.
        best: label of a method -> its best rate, asked for when all rates have been tried; if it returns None, the
            method's further runs are left out.
    """
    tuned = config.tuned
    yield [key for key in grid_of(config) if key.seed < tuned]
    rates = {contender.label: best(contender.label) for contender in contenders(config)}
    yield [Key(label, seed, lr) for seed in range(tuned, config.seeds) for label, lr in rates.items() if lr is not None]
