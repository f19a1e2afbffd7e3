"""The configurations whose step times are predicted, and the grids among which a planner chooses."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

from benchmarks.network.arms import MODELS, Model
from penstock import GPTConfig
from penstock.plan.run_forecast import RunSettings

ALL_MODELS: dict[str, Model] = {
    **MODELS,
    "middle": Model(GPTConfig(layers=10, width=128, heads=4, context=64, vocabulary=64), samples=2),
}
"""Those of `benchmarks.links`, and one of 2 million parameters for the grids."""
GRID_MODEL, GRID_SAMPLES = "middle", 16
"""What the configurations of a grid train, and the samples of a batch."""
GRID_METHODS = ("1f1b", "gpipe", "2bw")
SHAPED = ("1 Gbit/s", "200 Mbit/s", "100 Mbit/s")
LOOPBACK = "loopback"


class Configuration(NamedTuple):
    """What a set of ranks trains, and how.

    Attributes:
        model: of `ALL_MODELS`.
        method: of the planner's.
        depth, width: of the pipelines.
        m: microbatches per batch and pipeline.
        samples: of a microbatch.
        link: of `benchmarks.network.hosts.LINKS`.
        recompute: forwards are run again, block by block.
        balance: blocks of each stage; as many as can be equal if empty.
    """

    model: str
    method: str
    depth: int
    width: int
    m: int
    samples: int
    link: str = LOOPBACK
    recompute: bool = False
    balance: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """How many processes it takes."""
        return self.depth * self.width

    @property
    def shape(self) -> Model:
        """The model, with microbatches of this size."""
        return ALL_MODELS[self.model]._replace(samples=self.samples)

    @property
    def stages(self) -> tuple[int, ...]:
        """Blocks of each stage: layers in equal parts, the embedding in the first one, the head in the last one."""
        if self.balance:
            return self.balance
        layers = self.shape.shape.layers
        ends = [1 + layers * (stage + 1) // self.depth for stage in range(self.depth)]
        ends[-1] = layers + 2
        return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))

    @property
    def settings(self) -> RunSettings:
        """The same as profiles know it."""
        sizes = self.depth, self.width, self.m, self.samples
        return RunSettings(self.method, *sizes, (self.recompute,) * self.depth, self.stages)

    def __str__(self) -> str:
        """Return it in words."""
        again = ", recompute" if self.recompute else ""
        return (
            f"{self.model}, {self.method}, {self.depth} x {self.width}, m = {self.m}, {self.samples} samples{again}, "
            f"{self.link}"
        )


_CALIBRATING = (
    ("few", "1f1b", 8, 8),
    ("few", "2bw", 8, 16),
    ("many", "1f1b", 4, 2),
    ("many", "2bw", 8, 4),
    ("middle", "1f1b", 4, 2),
    ("middle", "2bw", 8, 4),
    ("tiny", "1f1b", 4, 1),
)


def calibrating(model: str, ranks: int) -> list[Configuration]:
    """Return what so many ranks run of a model before anything is predicted of it; none of these is predicted."""
    return [Configuration(name, method, ranks, 1, m, size) for name, method, m, size in _CALIBRATING if name == model]


def of_row(row: dict[str, Any]) -> Configuration:
    """Return the configuration that raw data tell."""
    return Configuration(**row)._replace(balance=tuple(row["balance"]))


def timed(processes: int) -> list[Configuration]:
    """Return those whose times are predicted: all methods of the planner, half of them on shaped links."""
    given = (
        ("few", "1f1b", 4, 8),
        ("few", "2bw", 4, 16),
        ("few", "gpipe", 8, 8),
        ("few", "2bw-eager", 8, 4),
        ("few", "1f1b", 16, 4),
        ("many", "1f1b", 8, 2),
        ("many", "2bw", 4, 4),
        ("many", "eager", 4, 4),
    )
    found = []
    for at, (model, method, m, samples) in enumerate(given):
        of = Configuration(model, method, processes, 1, m, samples)
        found += [of, of._replace(link=SHAPED[at % len(SHAPED)])]
    return found


def grid(processes: int, model: str = GRID_MODEL, samples: int = GRID_SAMPLES) -> list[Configuration]:
    """Return every configuration that uses all processes: method x depth and width x microbatch size x recompute.

    On a single stage, methods that flush are the same, so one of them stands for all.
    """
    found = []
    for depth, size, method, again in product(
        (d for d in (4, 2, 1) if processes % d == 0), (1, 2, 4), GRID_METHODS, (False, True)
    ):
        width = processes // depth
        m = samples // size // width
        if m * size * width == samples and m >= depth and (depth > 1 or method != "gpipe"):
            found.append(Configuration(model, method, depth, width, m, size, recompute=again))
    return found
