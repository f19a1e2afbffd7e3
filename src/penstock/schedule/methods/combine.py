"""Ways in which parallel pipelines agree: a table, and what a user chooses from it.

With `reduce` all pipelines add their gradients in every batch, and hold the same weights. With the others every
pipeline makes updates of its own, from its own microbatches, its own loss weight and its own decisions (a norm, a
skipped update); they meet after every H-th batch, counted from the start of training. W_r are the newest weights of
pipeline r of w directly after its update of such a batch, and mean is over all pipelines, added in their order:

    average   W_r <- mean(W)
              LocalSGD (Stich, arXiv 1805.09767), periodic averaging.
    bmuf      G = B - mean(W);  D <- eta D + zeta G;  V <- V - D;  B <- V, or V - eta D (nesterov);  W_r <- B
              block momentum (Chen and Huo, ICASSP 2016). V is the global model, B what the pipelines began from; both
              begin with the initial weights, D with 0. eta is 1 - 1/w and zeta 1 unless told otherwise.
    elastic   W_r <- W_r - alpha (W_r - Z);  Z <- Z + alpha sum_r (W_r - Z), both from the values before
              our reading ("penstock") of AvgPipe (PPoPP 2023), which pulls each pipeline's model towards a reference
              and the reference towards the models: elastic averaging as in EASGD (Zhang, Choromanska, LeCun, arXiv
              1412.6651). The sum of all W_r and Z stays what it was, and Z goes the share w alpha of the way to the
              mean. alpha is 0.9/w unless told otherwise. Z begins with the initial weights; every pipeline keeps a
              copy of it, which takes no message beside the sum.
    wsp       W_r(c) = W(0) + sum_{c' <= c} u_r(c') + share sum_{q != r} sum_{c' <= c - lag_q} u_q(c')
              wave-synchronous parallel (HetPipe, Park et al., USENIX ATC 2020, arXiv 2005.14038, section 5). The
              clock c counts waves of H batches, in HetPipe the N_m minibatches in flight; u_r(c) is what wave c of
              pipeline r has changed by updates of its own, as its optimizer makes them, and W_r(c) its weights at the
              end of it. Each pipeline sends u_r(c) to the others there, and goes on; it waits only for those of wave
              c - lag_q, 0 <= lag_q <= D. Updates are added, not averaged: share is 1, as on HetPipe's parameter server.
              Another share counts for the updates of others alone. They are added by wave, then by pipeline.

The lag of wsp is D for all, or chosen for each pipeline; what a run takes is so the same every time. HetPipe takes
whatever has come to its server by then, at least what is D waves old. So does "record", but each stage for itself, and
only of waves that its own pipeline has ended, too. Where HetPipe says nothing, this is our reading ("penstock"): the
global model is W_g = W(0) + sum of all u that every pipeline has by now. When a run ends, or is drained, the wave under
way ends early and is sent, too; all that is outstanding is awaited and added, so that W_g is that of all updates, and
(where share is 1) every pipeline goes on from W_g itself, the same bits everywhere. Waves are counted anew from there,
up to the next multiple of H batches since the start of training.

Where versions are double-buffered or stashed, W_r is the newest version alone: batches under way go on reading the
version that they have begun with, which is their pipeline's own.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from penstock.errors import ConfigError
from penstock.schedule.ir.rules import RULES
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.methods.wave_lags import Lag, lag_fault, parting_fault, width_fault

STATES = ("keep", "average", "reset")
"""What becomes of what optimizers remember when pipelines meet."""


@dataclass(frozen=True)
class CombineSpec:
    """One row of the table.

    Attributes:
        name: what `Combine.kind` and `--set combine.kind=` take.
        title: the name in the literature.
        source: paper, or whose reading it is.
        options: of `Combine`, beside the kind.
        buffers: blocks of memory as large as the trained parameters, in their precision, that every rank keeps.
        passing: the same, while pipelines meet.
        per_wave: the same, of every pipeline and wave whose updates not all pipelines have: lag + 1 waves at most.
        drains: evaluations and snapshots in a run drain the pipeline, whatever the version rule.
        model: what evaluations and saved weights are of.
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
        model="the newest weights, which are the mean after a meeting",
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
"""Every way by its name."""


@dataclass(frozen=True)
class Combine:
    """How parallel pipelines agree (this module has the equations).

    Attributes:
        kind: a name in `COMBINES`.
        every: H, batches from one meeting to the next; of a wave.
        optimizer_state: what optimizers remember stays each pipeline's own ("keep"), is averaged, too, or forgotten
            ("reset"). Only tensors with a value per element (or row) are averaged; counters of steps stay as they are,
            and so does everything where a pipeline has not made an update yet.
        momentum: eta of bmuf; 1 - 1/w if None.
        step: zeta of bmuf.
        nesterov: bmuf looks ahead.
        pull: alpha of elastic; 0.9/w if None, at most 1/w.
        distance: D of wsp, waves that the slowest pipeline may be behind the fastest.
        lag: of wsp, after how many waves the updates of a pipeline are added to the weights of others: one number, or
            one per pipeline, at most `distance`, which it is if None; "record", or what that has taken down
            (`penstock.schedule.methods.wave_lags`).
        share: of wsp, what the updates of others are multiplied by.

    Raises:
        ConfigError: an unknown kind, a number out of its range, or an option that the kind does not have.
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
        """Check the numbers."""
        if isinstance(self.lag, list):
            object.__setattr__(self, "lag", tuple(self.lag))
        if self.kind not in COMBINES:
            near = difflib.get_close_matches(str(self.kind), COMBINES, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"combine: unknown kind {self.kind!r}.{hint} Known kinds: {', '.join(COMBINES)}")
        takes = self.spec.options
        for field in fields(self)[1:]:
            if getattr(self, field.name) != field.default and field.name not in takes:
                owners = [spec.name for spec in _TABLE if field.name in spec.options]
                raise ConfigError(
                    f"combine: {field.name} is an option of {', '.join(owners)}, not of {self.kind}; leave it out"
                )
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"combine: every must be a whole number of at least 1, got {self.every!r}")
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
        """Check the numbers of wsp."""
        if isinstance(self.distance, bool) or not isinstance(self.distance, int) or self.distance < 0:
            raise ConfigError(f"combine: distance must be a whole number of waves, at least 0, got {self.distance!r}")
        if not 0 < self.share < float("inf"):
            raise ConfigError(f"combine: share must be a positive number, got {self.share}")
        fault = None if self.lag is None else lag_fault(self.lag, self.distance)
        if fault is not None:
            raise ConfigError(f"combine: {fault}")

    @property
    def spec(self) -> CombineSpec:
        """Its row of the table."""
        return COMBINES[self.kind]

    @property
    def apart(self) -> bool:
        """Whether pipelines have weights of their own between two meetings."""
        return self.kind != "reduce"

    @property
    def agrees(self) -> bool:
        """Whether all pipelines have the same newest weights directly after a meeting (of wsp, after a drain)."""
        return self.kind != "elastic" and self.share == 1

    def lags(self, width: int) -> tuple[int, ...]:
        """Of wsp, after how many waves the updates of each of `width` pipelines are added to others at the latest."""
        if isinstance(self.lag, tuple):
            return self.lag
        return (self.lag if isinstance(self.lag, int) else self.distance,) * width

    @property
    def chosen(self) -> bool:
        """Whether the lags of wsp are the same for all stages and waves."""
        return self.lag is None or isinstance(self.lag, int | tuple)

    @property
    def behind(self) -> int:
        """Batches from the update after which pipelines meet to the one whose sums all of them have there."""
        return self.every * max(self.lags(1))

    def meets(self, batch: int) -> bool:
        """Whether pipelines meet after the update of a batch, counted from the start of training."""
        return self.apart and (batch + 1) % self.every == 0

    def fault(
        self, schedule: Schedule, width: int, correction: str, *, tied: bool, fast: bool, delayed: bool
    ) -> str | None:
        """Why it cannot be had, or None.

        Args:
            schedule: of each of the pipelines.
            width: w.
            correction: name of what is done about staleness.
            tied: stages share parameters.
            fast: sums are to be made by torch's all_reduce.
            delayed: delays are chosen.
        """
        if not self.apart:
            return None
        if width == 1:
            return f"combine={self.kind} takes parallel pipelines; set a width of at least 2"
        if self.pull is not None and self.pull * width > 1:
            return f"combine: pull must be at most 1/w = {1 / width:g} with {width} pipelines, got {self.pull:g}"
        if self.lag is not None and (fault := width_fault(self.lag, width)) is not None:
            return f"combine: {fault}"
        if (fault := combine_fault(self.kind, schedule.rule, correction)) is not None:
            return fault
        if fast:
            return f"reduce=fast does not go with combine={self.kind}, whose sums are added in order; leave it out"
        if delayed:
            return (
                f"delays do not go with combine={self.kind}, which changes versions that are kept; leave one of them "
                "out"
            )
        parting = parting_fault(self.lag, schedule.directions, tied)
        return None if parting is None else f"combine: {parting}"


REDUCE = Combine()
"""Gradients are added in every batch."""


def combine_fault(kind: str, rule: str, correction: str = "none") -> str | None:
    """Why pipelines under a version rule, and with a correction, cannot agree in a way; None where they can."""
    if kind == "reduce":
        return None
    if correction != "none":
        return (
            f"combine {kind!r} is not offered with correction {correction!r}, which would take meetings for updates; "
            "take a method without correction, such as 2bw, or leave combine out"
        )
    if RULES[rule].rebinds or RULES[rule].copies_forward:
        return (
            f"combine {kind!r} is not offered with rule {rule!r}, under which a microbatch reads several weights; take "
            "a method whose backwards read what their forwards have read, such as stash, or leave combine out"
        )
    if RULES[rule].provisional:
        return (
            f"combine {kind!r} changes weights directly after an update, but under rule {rule!r} forwards read them "
            "before it is decided on, and it may be made again; take the method without post-validation"
        )
    return None
