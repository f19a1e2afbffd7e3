"""Sharding: what of a stage's state is split over the parallel pipelines that hold the same weights.

The levels are those of ZeRO (Rajbhandari et al., arXiv 1910.02054, sec. 5), over the data-parallel axis (width w): each
of the w pipelines owns one shard, 1/w, of what is split. The stage is the unit of weights: it is gathered, reduced and
updated as a whole, so a stage per block has the granularity of layered gradient accumulation (Lamy-Poirier, arXiv
2106.02679).
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from penstock.checks import did_you_mean
from penstock.errors import ConfigError


class Level(StrEnum):
    """What is split; each level splits what the ones before it split, too."""

    NONE = "none"
    OPTIMIZER = "optimizer"  # ZeRO-1: optimizer states; gradients are summed whole, updates made of shards and gathered
    GRADIENTS = "gradients"  # ZeRO-2: sums of gradients, too: a REDUCE is a reduce-scatter
    FULL = "full"  # ZeRO-3: weights, too: they are whole only between a GATHER and its RELEASE

    @property
    def splits_gradients(self) -> bool:
        """Whether a REDUCE leaves a shard of the sum."""
        return self in (Level.GRADIENTS, Level.FULL)


class Cache(StrEnum):
    """Which of its stages a rank releases when it needs another one, and which gradient it reduces."""

    OPTIMAL = "optimal"  # the one that is used again last (Belady): the fewest gathers
    DIRECT = "direct"  # that in the slot of the same number: stage i of a rank has slot i mod slots (Fast-LLM)


class Sharding(NamedTuple):
    """What of the state of stages is split over parallel pipelines, and what of it is whole at once.

    Attributes:
        level: what is split.
        weights: the most stages of a rank that are gathered at once, with level full. None: the schedule does not say.
        gradients: the most full-size gradients that a rank has at once, with levels gradients and full; a backward that
            would begin another one waits until the sum of an older one is there. None: as many as there are.
        cache: how the GATHERs were placed.
    """

    level: Level = Level.NONE
    weights: int | None = None
    gradients: int | None = None
    cache: Cache = Cache.OPTIMAL

    def __str__(self) -> str:
        """The form that `read_sharding` reads: `full:weights=2:gradients=2`."""
        numbers = ((name, getattr(self, name)) for name in ("weights", "gradients"))
        options = [f"{name}={number}" for name, number in numbers if number is not None]
        options += [] if self.cache is Cache.OPTIMAL else [f"cache={self.cache}"]
        return ":".join([self.level.value, *options])


REPLICATED = Sharding()
"""Every pipeline holds everything."""

_MOST = 10**6


def read_sharding(given: str | Sharding) -> Sharding:
    """Read a sharding: a level, with options if wanted, such as `full:weights=3:gradients=1:cache=direct`.

    Args:
        given: as it is written, or the sharding itself.

    Raises:
        ConfigError: there is no such level or option, or the level does not have it, or a number is below 1.
    """
    level, *options = str(given).split(":")
    if level not in set(Level):
        raise ConfigError(
            f"unknown sharding {level!r:.40}.{did_you_mean(level, tuple(Level))} Known: none, optimizer (as ZeRO-1), "
            "gradients (ZeRO-2), full (ZeRO-3)"
        )
    found = Sharding(Level(level))
    allowed = {Level.GRADIENTS: ("gradients",), Level.FULL: ("weights", "gradients", "cache")}.get(found.level, ())
    for option in options:
        name, _, value = (word.strip() for word in option.partition("="))
        if name not in allowed:
            has = f"the options {', '.join(allowed)}" if allowed else "no options"
            raise ConfigError(f"sharding {level!r} has {has}; got {option!r:.40}")
        if name == "cache":
            if value not in set(Cache):
                raise ConfigError(f"the cache of a sharding is {' or '.join(Cache)}; got {value!r:.40}")
            found = found._replace(cache=Cache(value))
        elif value.isascii() and value.isdigit() and len(value) < len(str(_MOST)) and int(value) > 0:
            count = int(value)
            found = found._replace(weights=count) if name == "weights" else found._replace(gradients=count)
        else:
            raise ConfigError(f"{name} of a sharding is a whole number from 1 to {_MOST - 1}; got {value!r:.40}")
    return found
