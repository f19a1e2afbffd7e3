"""Wave-synchronous parallel pipelines (WSP of HetPipe, Park et al., USENIX ATC 2020, arXiv 2005.14038).

w pipelines make updates of their own. A wave is H batches, and the clock counts waves. u_r^c is the change by the
updates of pipeline r in wave c: its weights after them minus those before, both including what came from others. After
the last update of wave c pipeline r adds to its newest weights what it has not added yet of

    W_r = W(0) + sum_{c' <= c} u_r^c' + share * sum_{q != r} sum_{c' <= c - lag} u_q^c'

product by product, by wave and, in a wave, by pipeline; its own updates are included as its optimizer made them. With
lag 0 all have all sums at the end of each wave; a lag of at most D is what HetPipe's clock distance D allows. Passes
in flight continue with the versions that they read.

Our interpretation ("penstock"): HetPipe adds updates as they are, so `share` is 1 by default, and it applies to the
updates of others only; a pipeline that is drained may add everything outstanding (`settle`), and lags start anew; the
common model is W(0) + share * the sum of all updates of complete waves, each pipeline's own included.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import ConfigError, DataError
from penstock.verify.reference.decisions import Scale, Scaling, equal_copies
from penstock.verify.reference.order_delays import USUAL, ReferenceOrder
from penstock.verify.reference.passes import Loss
from penstock.verify.reference.run import Reference, Run, with_end
from penstock.verify.reference.stage import Block, Factory, ReferenceStage, Weights
from penstock.verify.reference.supported_methods import DOUBLE_BUFFER, FLUSH, method_options

APART = (
    *FLUSH,
    *(m for m in DOUBLE_BUFFER if m not in ("error-feedback", "2bw-ahead")),
    "wpipe",
    "stash",
    "vertical-sync",
    "newest",
)
"""Methods that keep no history of the weights, which would include changes by the updates of other pipelines."""

Lag = int | Sequence[int] | Callable[[int, int, int, int], int]
"""By how many waves sums come late: a constant, a number per sender, or f(stage, receiver, sender, wave)."""


class Wsp(NamedTuple):
    """Settings of the exchange of updates between parallel pipelines.

    Attributes:
        width: w, the number of pipelines.
        every: H, the batches of a wave.
        lag: by how many waves the sums of others come late.
        share: what these are multiplied by.
        settle: batches, multiples of H, before which (or after the last of which) all was drained and added.
    """

    width: int
    every: int
    lag: Lag = 0
    share: float = 1.0
    settle: Collection[int] = ()

    def check(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: one is out of range, or not a multiple of a wave.
        """
        for name, number, least in (("width", self.width, 1), ("every", self.every, 1), ("lag", self.lag, 0)):
            if isinstance(number, int) and number < least:
                raise ConfigError(f"{name} is {number}: give {least} or more")
        if isinstance(self.lag, Sequence) and (len(self.lag) != self.width or min(self.lag) < 0):
            raise ConfigError(f"lag is {list(self.lag)}: give {self.width} non-negative numbers, one for each pipeline")
        if apart := [t for t in self.settle if t % self.every]:
            raise ConfigError(f"settle has batch {min(apart)}: give multiples of {self.every}, where waves end")

    def late(self, s: int, r: int, q: int, wave: int) -> int:
        """Return by how many waves the sums of pipeline q come late to stage s of pipeline r at the end of a wave."""
        if callable(self.lag):
            return self.lag(s, r, q, wave)
        return self.lag if isinstance(self.lag, int) else self.lag[q]


@dataclass
class ReferenceWaves:
    """The numbers of pipelines that exchange updates in waves.

    Attributes:
        pipelines: the numbers of each; version t+1 includes the updates of others that were added after batch t.
        common: before the first wave and after each complete one, the weights that the pipelines have in common.
    """

    pipelines: list[Reference]
    common: list[Weights]


def train_wsp(
    stages: Sequence[Mapping[str, Block]],
    loss: Loss,
    batches: Iterable[Sequence[tuple[Any, Any]]],
    wsp: Wsp,
    *,
    method: str,
    optimizer: Factory,
    rate: Callable[[int], float] = lambda _: 1.0,
    divisor: float | None = None,
    drains: Collection[int] = (),
    clip: float | None = None,
    scaling: Scaling | None = None,
    seed: int | None = None,
    tied: Mapping[str, str] = MappingProxyType({}),
    precision: torch.dtype | None = None,
    order: ReferenceOrder = USUAL,
) -> ReferenceWaves:
    """Train copies of a model in parallel pipelines that exchange their updates wave by wave.

    Args:
        stages, loss, method, optimizer, rate, drains, clip, scaling, seed, tied, precision, order: as in
            `train_reference`, for each pipeline separately: norms, loss scales and skipped updates are its own.
        batches: the microbatches of each batch, those of the first pipeline first.
        wsp: how the pipelines exchange updates.
        divisor: the constant c of one pipeline; m if None.

    Raises:
        ConfigError: as `train_reference`; the method does not support waves; or `wsp` is out of range.
        DataError: batches cannot be divided, or have different numbers of microbatches.
    """
    wsp.check()
    if method not in APART:
        raise ConfigError(f"{method} does not support waves; methods that do: {', '.join(APART)}")
    chosen, drains, runs = method_options(method, {}), {*drains, *wsp.settle}, []
    for _ in range(wsp.width):
        built = [ReferenceStage(blocks, optimizer) for blocks in stages]
        equal_copies(built, tied)
        for stage in built:
            stage.cast_frozen(precision)
        scale = Scale(scaling)
        runs.append(
            Run(built, loss, method, chosen, rate, divisor, drains, clip, scale, seed, None, tied, precision, order)
        )
    meeting = _Meeting(runs, wsp)
    for t, batch in enumerate(batches):
        meeting.train(t, batch)
    return ReferenceWaves([with_end(run.result, run.stages) for run in runs], meeting.common)


class _Meeting:
    """Exchanges updates between pipelines at the end of waves.

    Args:
        runs: of the pipelines.
        wsp: how they exchange updates.
    """

    def __init__(self, runs: list[Run], wsp: Wsp) -> None:
        self.runs, self.wsp = runs, wsp
        self.stages = range(len(runs[0].stages))
        self.before = [[stage.copy_newest() for stage in run.stages] for run in runs]
        self.sums: list[list[list[Weights]]] = []  # u by wave, pipeline and stage
        self.seen = {(s, r, q): 0 for s in self.stages for r in range(len(runs)) for q in range(len(runs)) if r != q}
        self.common = [{name: w for weights in self.before[0] for name, w in weights.items()}]

    def train(self, t: int, batch: Sequence[tuple[Any, Any]]) -> None:
        """Train all pipelines on batch t, one after the other, and exchange updates if it ends a wave."""
        m, rest = divmod(len(batch), len(self.runs))
        if rest or not m:
            raise DataError(
                f"batch {t} has {len(batch)} microbatches for {len(self.runs)} pipelines: give each one equally many"
            )
        for r, run in enumerate(self.runs):
            run.parts = [range(r * m, (r + 1) * m)]
            run.divisor = m if run.divisor is None else run.divisor
            run.train(t, batch)
        if (t + 1) % self.wsp.every == 0:
            self.end_wave()
        if t + 1 in self.wsp.settle:
            self.add(dict.fromkeys(self.seen, len(self.sums)))

    def end_wave(self) -> None:
        """End a wave after the last update of all pipelines."""
        wave, own = len(self.sums), []
        for run, before in zip(self.runs, self.before, strict=True):
            own.append([_less(stage.copy_newest(), old) for stage, old in zip(run.stages, before, strict=True)])
        self.sums.append(own)
        common = dict(self.common[-1])
        for stages in own:
            common |= {name: common[name] + self.wsp.share * u for sums in stages for name, u in sums.items()}
        self.common.append(common)
        self.add({key: wave + 1 - self.wsp.late(*key, wave) for key in self.seen})

    def add(self, visible: Mapping[tuple[int, int, int], int]) -> None:
        """Add the given number of waves of each sender, as far as they have not been added."""
        for s in self.stages:
            for r, run in enumerate(self.runs):
                others = [q for q in range(len(self.runs)) if q != r]
                new = sorted((wave, q) for q in others for wave in range(self.seen[s, r, q], visible[s, r, q]))
                for wave, q in new:
                    run.stages[s].add(self.sums[wave][q][s], self.wsp.share)
                for q in others:
                    self.seen[s, r, q] = max(self.seen[s, r, q], visible[s, r, q])
                self.before[r][s] = run.stages[s].copy_newest()


def _less(a: Weights, b: Weights) -> dict[str, Tensor]:
    return {name: w - b[name] for name, w in a.items()}
