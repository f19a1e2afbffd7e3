"""Ways to combine parallel pipelines: a table of them, and the options that a user chooses.

With `reduce` all pipelines sum their gradients in every batch, and hold the same weights. With the others every
pipeline makes its own updates, from its own microbatches, loss weight and decisions (global norm, skipped updates);
pipelines synchronize after every H-th batch, counted from the start of training. W_r are the newest weights of
pipeline r of w directly after its update of such a batch, and mean is over all pipelines, added in their order:

    average   W_r <- mean(W)
              LocalSGD (Stich, arXiv 1805.09767), periodic averaging.
    bmuf      G = B - mean(W);  D <- eta D + zeta G;  V <- V - D;  B <- V, or V - eta D (nesterov);  W_r <- B
              block momentum (Chen and Huo, ICASSP 2016). V is the global model, B the weights from which the pipelines
              started; both start at the initial weights, D at 0. By default eta is 1 - 1/w and zeta 1.
    elastic   W_r <- W_r - alpha (W_r - Z);  Z <- Z + alpha sum_r (W_r - Z), both from the values before
              our interpretation ("penstock") of AvgPipe (PPoPP 2023), which pulls each pipeline's model towards a
              reference and the reference towards the models: elastic averaging as in EASGD (Zhang et al., arXiv
              1412.6651). The sum of all W_r and Z is unchanged, and Z moves by the share w alpha of its distance to the
              mean. By default alpha is 0.9/w. Z starts at the initial weights; every pipeline keeps a copy of it, which
              needs no message besides the sum.
    wsp       W_r(c) = W(0) + sum_{c' <= c} u_r(c') + share sum_{q != r} sum_{c' <= c - lag_q} u_q(c')
              wave-synchronous parallel (HetPipe, Park et al., USENIX ATC 2020, arXiv 2005.14038, section 5). The
              clock c counts waves of H batches, in HetPipe the N_m minibatches in flight; u_r(c) is the sum of the
              weight changes by the optimizer of pipeline r in wave c, and W_r(c) its weights at the end of the wave.
              There each pipeline sends u_r(c) to the others and continues; it waits only for those of wave c - lag_q,
              0 <= lag_q <= D. Updates are added, not averaged: share is 1, as on HetPipe's parameter server. Another
              share scales only the updates of others. They are added by wave, then by pipeline.

The lag of wsp is D for all pipelines, or chosen for each, so that runs are reproducible. HetPipe adds whatever updates
have reached its server by then, at least those that are D waves old. "record" does the same, but for each stage
separately, and only with waves that its own pipeline has finished, too. Where HetPipe says nothing, this is our
interpretation ("penstock"): the global model is W_g = W(0) + the sum of all u that every pipeline has by now. When a
run ends or is drained, the current wave ends early and is sent, too; all outstanding updates are awaited and added, so
that W_g contains all updates, and (if share is 1) every pipeline continues from W_g itself, bit for bit the same
everywhere. A new wave starts there and ends at the next multiple of H batches since the start of training.

Where versions are double-buffered or stashed, W_r is the newest version only: batches in flight keep reading the
version that they started with, which is their pipeline's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from penstock.checks import check_whole, did_you_mean
from penstock.errors import ConfigError
from penstock.repr_without_defaults import ShortRepr
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.wave_lags import Lag, lag_fault, parting_fault, width_fault

STATES = ("keep", "average", "reset")
"""What happens to optimizer states when pipelines synchronize."""


@dataclass(frozen=True)
class CombineSpec:
    """One row of the table: a way to combine parallel pipelines.

    Attributes:
        name: the value of `Combine.kind` and `--set combine.kind=`.
        title: the name in the literature.
        source: the paper, or whose interpretation of it.
        options: the attributes of `Combine` that apply, besides the kind.
        buffers: parameter-sized buffers, in the precision of the parameters, that every rank keeps.
        passing: further buffers of that size during a synchronization.
        per_wave: further buffers of that size per pipeline and wave whose updates not all pipelines have yet: at most
            lag + 1 waves.
        drains: evaluations and snapshots during a run drain the pipeline, whatever the version rule.
        model: the weights that are evaluated and saved.
    """

    name: str
    title: str
    source: str
    options: tuple[str, ...] = ()
    buffers: int = 0
    passing: int = 0
    per_wave: int = 0
    drains: bool = False
    model: str = "the newest weights"


_TABLE = (
    CombineSpec("reduce", "gradients are added in every batch", "the definition of data parallelism"),
    CombineSpec(
        "average",
        "periodic averaging, LocalSGD",
        "arXiv 1805.09767",
        options=("every", "optimizer_state"),
        model="the newest weights, which are the mean after a synchronization",
    ),
    CombineSpec(
        "bmuf",
        "block momentum, BMUF",
        "Chen and Huo, ICASSP 2016",
        options=("every", "optimizer_state", "momentum", "step", "nesterov"),
        buffers=2,
        model="the global model V",
    ),
    CombineSpec(
        "elastic",
        "elastic averaging, as in AvgPipe",
        "variant penstock: after PPoPP 2023 and arXiv 1412.6651",
        options=("every", "optimizer_state", "pull"),
        buffers=1,
        passing=1,
        model="the reference model Z",
    ),
    CombineSpec(
        "wsp",
        "wave-synchronous parallel, HetPipe",
        "arXiv 2005.14038, section 5; drains as in variant penstock",
        options=("every", "distance", "lag", "share"),
        buffers=2,
        per_wave=1,
        drains=True,
        model="the global model W_g",
    ),
)

COMBINES: Mapping[str, CombineSpec] = MappingProxyType({spec.name: spec for spec in _TABLE})
"""Every way to combine pipelines by its name."""


@dataclass(frozen=True, repr=False)
class Combine(ShortRepr):
    """How parallel pipelines with weights of their own agree on a model now and then (equations: see this module).

    Attributes:
        kind: "reduce" (gradients are added in every batch), "average", "bmuf" (block momentum), "elastic" or "wsp"
            (waves).
        every: H, the number of batches between two synchronizations, or in a wave.
        optimizer_state: what happens to each pipeline's optimizer state at a synchronization: "keep" leaves it alone,
            "average" averages it, "reset" clears it. Only tensors with a value per element (or row) are averaged; step
            counters are left alone, and so is everything where a pipeline has not made an update yet.
        momentum: of bmuf, eta; 1 - 1/w if None.
        step: of bmuf, zeta.
        nesterov: of bmuf, whether to use its Nesterov form.
        pull: of elastic, alpha; 0.9/w if None, at most 1/w.
        distance: of wsp, D: the number of waves by which the slowest pipeline may be behind the fastest.
        lag: of wsp, the number of waves after which a pipeline's updates are added to the weights of the others: one
            number, or one per pipeline, at most `distance` (the default); "record", or recorded lags
            (`penstock.schedule.methods.wave_lags`).
        share: of wsp, the factor by which the updates of other pipelines are multiplied.

    Raises:
        ConfigError: the kind is unknown, a number is out of range, or the kind does not have an option.
    """

    kind: str = "reduce"
    every: int = 1
    optimizer_state: str = "keep"
    momentum: float | None = None
    step: float = 1.0
    nesterov: bool = False
    pull: float | None = None
    distance: int = 0
    lag: Lag | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.lag, list):
            object.__setattr__(self, "lag", tuple(self.lag))
        if self.kind not in COMBINES:
            hint = did_you_mean(self.kind, COMBINES)
            raise ConfigError(f"combine: unknown kind {self.kind!r}.{hint} Known kinds: {', '.join(COMBINES)}")
        takes = self.spec.options
        for field in fields(self)[1:]:
            if getattr(self, field.name) != field.default and field.name not in takes:
                owners = [spec.name for spec in _TABLE if field.name in spec.options]
                raise ConfigError(
                    f"combine: {field.name} is an option of {', '.join(owners)}, not of {self.kind}; remove it"
                )
        check_whole("combine: every", self.every)
        if self.optimizer_state not in STATES:
            raise ConfigError(f"combine: optimizer_state is one of {', '.join(STATES)}; got {self.optimizer_state!r}")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ConfigError(f"combine: momentum must be at least 0 and less than 1, got {self.momentum}")
        if not 0 < self.step < float("inf"):
            raise ConfigError(f"combine: step must be a positive number, got {self.step}")
        if self.pull is not None and not 0 < self.pull <= 1:
            raise ConfigError(f"combine: pull must be more than 0 and at most 1/w, got {self.pull}")
        self._check_waves()

    def _check_waves(self) -> None:
        """Check the options of wsp."""
        check_whole("combine: distance", self.distance, 0)
        if not 0 < self.share < float("inf"):
            raise ConfigError(f"combine: share must be a positive number, got {self.share}")
        fault = None if self.lag is None else lag_fault(self.lag, self.distance)
        if fault is not None:
            raise ConfigError(f"combine: {fault}")

    @property
    def spec(self) -> CombineSpec:
        """The row of the table for this kind."""
        return COMBINES[self.kind]

    @property
    def apart(self) -> bool:
        """True if pipelines have different weights between two synchronizations."""
        return self.kind != "reduce"

    @property
    def agrees(self) -> bool:
        """True if all pipelines have the same newest weights after a synchronization (for wsp, after a drain)."""
        return self.kind != "elastic" and self.share == 1

    def lags(self, width: int) -> tuple[int, ...]:
        """Return the largest lag, in waves, with which wsp adds the updates of each of `width` pipelines to others."""
        if isinstance(self.lag, tuple):
            return self.lag
        return (self.lag if isinstance(self.lag, int) else self.distance,) * width

    @property
    def chosen(self) -> bool:
        """True if the lags of wsp are the same for all stages and waves."""
        return self.lag is None or isinstance(self.lag, int | tuple)

    @property
    def behind(self) -> int:
        """Batches by which the sums that all pipelines have at a synchronization are behind its update."""
        return self.every * max(self.lags(1))

    def meets(self, batch: int) -> bool:
        """Return whether pipelines synchronize after the update of a batch, counted from the start of training."""
        return self.apart and (batch + 1) % self.every == 0

    def fault(
        self, schedule: Schedule, width: int, correction: str, *, tied: bool, fast: bool, delayed: bool
    ) -> str | None:
        """Return why this choice cannot be used with the others, or None if it can.

        Args:
            schedule: the schedule of each pipeline.
            width: w, the number of pipelines.
            correction: name of the correction.
            tied: stages share parameters.
            fast: gradients are summed by torch's all_reduce (reduce="fast").
            delayed: the delays of blocks are chosen (backward_delays).
        """
        if not self.apart:
            return None
        if width == 1:
            return (
                f"combine={self.kind} needs parallel pipelines; set data_parallel (penstock train: width) to at least 2"
            )
        if self.pull is not None and self.pull * width > 1:
            return f"combine: pull must be at most 1/w = {1 / width:g} with {width} pipelines, got {self.pull:g}"
        if self.lag is not None and (fault := width_fault(self.lag, width)) is not None:
            return f"combine: {fault}"
        if (fault := combine_fault(self.kind, schedule.rule, correction)) is not None:
            return fault
        if fast:
            return f"reduce=fast cannot be used with combine={self.kind}, which adds in a fixed order; remove it"
        if delayed:
            return (
                f"delays cannot be used with combine={self.kind}, which changes versions that delayed passes keep; "
                "remove one of them"
            )
        parting = parting_fault(self.lag, schedule.directions, tied)
        return None if parting is None else f"combine: {parting}"


REDUCE = Combine()
"""The default: gradients are summed in every batch."""


def combine_fault(kind: str, rule: str, correction: str = "none") -> str | None:
    """Return why a way to combine pipelines cannot be used with a version rule and a correction, or None if it can."""
    if kind == "reduce":
        return None
    if correction != "none":
        return (
            f"combine {kind!r} is not supported with correction {correction!r}, which would mistake a synchronization "
            "of pipelines for an update; use a method without correction, such as 2bw, or remove combine"
        )
    if RULES[rule].rebinds or RULES[rule].copies_forward:
        return (
            f"combine {kind!r} is not supported with rule {rule!r}, under which a microbatch reads several versions; "
            "use a method whose backwards read the version of their forward, such as stash, or remove combine"
        )
    if RULES[rule].provisional:
        return (
            f"combine {kind!r} changes weights directly after an update, but under rule {rule!r} forwards read them "
            "before the update is validated, and it may be repeated; use the method without post-validation"
        )
    return None
