"""The options of a pipeline, in groups, as users give them to `Pipeline`.

Each option is described here, and here alone; what can be said of it without a model and a schedule is checked here,
too. `penstock.runtime.plan.plan` checks the rest. A key of `penstock train` that has the name of an option is that
option (`penstock.train.setup.pipeline_options`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh

from penstock.checks import check_number, check_whole, is_number
from penstock.comm.collective.all_reduce import Reduce, is_fast
from penstock.comm.collective.polling import Waits
from penstock.errors import ConfigError
from penstock.partition.block_delays import Delays
from penstock.partition.sequence_slices import EQUAL_SLICES, Slicing
from penstock.runtime.plan.kernels import Kernels, SdpaName
from penstock.runtime.update.divergence import Divergence
from penstock.schedule.ir.in_flight import read_in_flight
from penstock.schedule.methods.combine import REDUCE, Combine
from penstock.schedule.transforms.batch_ops import what_decides
from penstock.schedule.transforms.recompute import Segments
from penstock.short_repr import ShortRepr
from penstock.stage.autograd.recompute import RecomputeMode, check_recompute
from penstock.stage.precision import BoundaryGradients, PrecisionName, boundary_format, low_precision
from penstock.weights.corrections.base import Correction
from penstock.weights.decision import LossScale, Policy
from penstock.weights.optim.lr_schedulers import SchedulerFactory, check_factory


@dataclass(frozen=True, repr=False)
class DataParallel(ShortRepr):
    """How many parallel pipelines share the work of a batch, and how they agree on the weights.

    Attributes:
        width: w, the number of parallel pipelines. Each takes m of the w * m microbatches of a batch. They hold the
            same weights, and their gradients are added while the passes go on (unless `combine` says otherwise). A
            report is about one pipeline's part of a batch, a decision (`Report.decided`) about the whole batch.
        reduce: how gradients are added: "ordered" adds in the order of the pipelines, and gives the same bits as one
            process; "fast" uses torch's all_reduce between processes, on the groups of the mesh along its width or on
            one group per stage. All pipelines still get the same bits. With two pipelines these are the bits of
            "ordered"; with more, a sum may differ from the ordered one by (w - 1) eps times the sum of the magnitudes.
        combine: lets pipelines make updates of their own and agree now and then, such as ``Combine("average",
            every=8)`` (equations: `penstock.schedule.methods.combine`). Each pipeline then decides by its own norm,
            loss weight and loss scale; reports and decisions are about one pipeline; `Pipeline.stop` ends the run at
            the next synchronization; sums are always in the order of the pipelines. With "wsp", pipelines read each
            other's updates some waves later, `stop` takes as many waves, and a run ends with a wave. Evaluations and
            `Pipeline.state_dict` are about the model that the pipelines have in common; with "average", evaluations are
            about the mean of their newest weights, and `state_dict` about those of the first pipeline in this process.
        mesh: a device mesh with the dimensions ("width", "depth") or ("width", "depth", "inner"), of which inner must
            be 1 so far; `width` is then taken from it. Its ranks must be those of the pipeline's group (of the whole
            job, if there is none) in the same order, as `init_device_mesh` lays them out. With reduce="fast", its
            groups along the width belong to a run while that is under way.

    Raises:
        ConfigError: a width below 1, or an unknown way to add gradients or to agree.
    """

    width: int = 1
    reduce: Reduce = "ordered"
    combine: Combine = REDUCE
    mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        """Check each by itself."""
        check_whole("data_parallel: width", self.width)
        is_fast(self.reduce)
        if not isinstance(self.combine, Combine):
            raise ConfigError(
                f"combine must be a Combine, such as Combine('average', every=4); got {self.combine!r:.80}"
            )

    @property
    def fast(self) -> bool:
        """Whether torch adds gradients, in an order of its own."""
        return is_fast(self.reduce)


@dataclass(frozen=True, repr=False)
class Precision(ShortRepr):
    """The number format of forwards and backwards, and how small gradients survive in it.

    Attributes:
        precision: "fp32" (whatever the parameters have), "bf16" or "fp16". In the latter two, parameters in float32 and
            floating-point inputs are cast, parameters once per version; the optimizer works on one master copy in
            float32, and gradients accumulate in float32.
        loss_scale: how the loss is scaled for its backward; a `LossScale()` with "fp16" if None.
        divisor: c, roughly the weight of a batch, such as its number of tokens. Gradients are computed of the loss sum
            divided by c, and corrected to the mean by c / N at the update, when the weight N is known. So c never
            matters but for rounding and overflow. The number of microbatches of a batch if None; in low precision the
            nearest power of two is taken.
        tf32: whether GPUs may compute products of float32 in TF32; as torch is set if None. Like `sdpa` it holds while
            the passes of this pipeline run, not in between.
        sdpa: the backend of attention, "flash", "efficient", "cudnn" or "math"; torch chooses if None.
        boundary_gradients: what stages hand back to the stages before them: gradients in the format of the activations
            ("same"), or rounded to bfloat16 ("bf16"), which halves those of float32 on their way between ranks.
            Every border of two stages counts, also within a rank and within a process, so the numbers depend on where
            the model is cut, but not on where stages run. Gradients of weights still accumulate in float32.

    Raises:
        ConfigError: an unknown precision, format or backend, a divisor that is not positive, or values of other types.
    """

    precision: PrecisionName = "fp32"
    loss_scale: LossScale | None = None
    divisor: float | None = None
    tf32: bool | None = None
    sdpa: SdpaName | None = None
    boundary_gradients: BoundaryGradients = "same"

    def __post_init__(self) -> None:
        """Check each by itself."""
        low_precision(self.precision)
        self.kernels.check()
        boundary_format(self.boundary_gradients)
        if self.loss_scale is not None and not isinstance(self.loss_scale, LossScale):
            raise ConfigError(
                "loss_scale must be a LossScale, such as LossScale(initial=1024.0), or None; got "
                f"{self.loss_scale!r:.80}"
            )
        check_number("divisor", self.divisor, "8")
        if self.divisor is not None and not self.divisor > 0:
            raise ConfigError(f"divisor must be positive, got {self.divisor}")

    @property
    def kernels(self) -> Kernels:
        """The settings of torch under which passes run."""
        return Kernels(self.tf32, self.sdpa)

    @property
    def low(self) -> torch.dtype | None:
        """The type that parameters are cast to; None where they stay as they are."""
        return low_precision(self.precision)

    @property
    def between_stages(self) -> torch.dtype | None:
        """The type that float32 gradients are rounded to between stages; None where they stay as they are."""
        return boundary_format(self.boundary_gradients)

    @property
    def scaling(self) -> LossScale | None:
        """The loss scale as given, or the one that comes with fp16."""
        return self.loss_scale or (LossScale() if self.precision == "fp16" else None)


@dataclass(frozen=True, repr=False)
class Recompute(ShortRepr):
    """Which forwards are run a second time, so that their activations need not be kept.

    Attributes:
        recompute: "none"; "block" runs each block again just before its backward; "stage" runs whole stages again,
            while their gradients are still on their way. The numbers are the same, random ones and module buffers
            included; only the gradient of a parameter that several blocks of one stage share is added up in another
            order with "block". (Under the version rule "newest", the second run reads the newest weights, or PipeMare's
            estimate.)
        segments: with recompute="stage", the number of consecutive stages that recompute together. Only the first of
            them keeps its input, and the others get theirs from the stage before once more. "auto" is the square root
            of the number of stages, rounded.

    Raises:
        ConfigError: an unknown value of `recompute`, or segments without recompute="stage".
    """

    recompute: RecomputeMode = "none"
    segments: Segments = 1

    def __post_init__(self) -> None:
        """Check both together."""
        check_recompute(self.recompute, self.segments)


@dataclass(frozen=True, repr=False)
class Staleness(ShortRepr):
    """What is done about weights that are read late; and delays of your own choice, to study them.

    Attributes:
        correction: such as `correction_of("pipemare", reschedule=500)`; a method by name brings its own.
        delays: by how many updates the weights that a block reads are late, on a schedule that flushes: batch t reads
            W(max(t - delay, 0)) in forward and backward, and its gradient updates W(t). One number for all blocks with
            trained parameters, a dict by block (0 for the others), a list, a function of the block's name, or the
            profile that a pipeline without flushes would have, such as "1f1b:8".
        backward_delays: the same for backwards, where they differ from forwards: wherever the formulas of a backward
            contain weights, these are W(max(t - delay, 0)); activations stay as the forward made them.

    Raises:
        ConfigError: `correction` is none.
    """

    correction: Correction | None = None
    delays: Delays | None = None
    backward_delays: Delays | None = None

    def __post_init__(self) -> None:
        """Check what can be said without a model."""
        if self.correction is not None and not isinstance(self.correction, Correction):
            raise ConfigError(
                "staleness must be what penstock.correction_of returned, such as correction_of('pipemare', "
                f"reschedule=500), or a Staleness; got {self.correction!r:.80}. A method brings its own: "
                "method=penstock.method('pipemare', reschedule=500)"
            )

    @property
    def correction_name(self) -> str:
        """The name of the correction; "none" without one."""
        return "none" if self.correction is None else self.correction.name

    @property
    def chosen(self) -> bool:
        """Whether delays are given, be they zero."""
        return self.delays is not None or self.backward_delays is not None


@dataclass(frozen=True, repr=False)
class Partition(ShortRepr):
    """How the model is divided into stages, and sequences into slices.

    Attributes:
        balance: the number of blocks of each stage; chosen by the cost of blocks if None.
        tied: parameters that are one and the same, such as {"head.weight": "embedding.weight"}. It is needed for lazy
            blocks only: where two modules hold one parameter, that is noticed. Each stage that uses it has a copy; the
            copies stay equal, and count once in the norm. The optimizer must treat all of them alike.
        slicing: how sequences are divided where a method takes slices of them, such as "seq1f1b".

    Raises:
        ConfigError: a value of another type.
    """

    balance: Sequence[int] | None = None
    tied: Mapping[str, str] | None = None
    slicing: Slicing = EQUAL_SLICES

    def __post_init__(self) -> None:
        """Check each by itself."""
        listed = self.balance is None or isinstance(self.balance, Sequence)
        if not listed or not all(isinstance(size, int) for size in self.balance or ()):
            raise ConfigError(
                "partition must be the number of blocks of each stage, such as [3, 2, 3], a Partition, or None; got "
                f"{self.balance!r:.80}"
            )
        if self.tied is not None and not isinstance(self.tied, Mapping):
            raise ConfigError(
                f"tied must be a dict, such as {{'head.weight': 'embedding.weight'}}, or None; got {self.tied!r:.80}"
            )
        if not isinstance(self.slicing, Slicing):
            raise ConfigError(f"slicing must be a Slicing, such as Slicing(dimension=1); got {self.slicing!r:.80}")


@dataclass(frozen=True, repr=False)
class InFlight(ShortRepr):
    """How many microbatches are in flight on each rank: begun there, and their backwards not yet (docs/orders.md).

    Attributes:
        in_flight: of the method's order: of the first rank, or one number for every rank; or "auto": between processes
            the first batches are measured, and the run goes on with as many as hide the time of messages, but without
            reading weights later; "auto+delay" may do that, too. What the method itself has if None.
        in_flight_bytes: with "auto", the most bytes of activations on a rank; any number if None.

    Raises:
        ConfigError: it is no such number or word.
    """

    in_flight: int | Sequence[int] | str | None = None
    in_flight_bytes: float | None = None

    def __post_init__(self) -> None:
        """Check each by itself."""
        if isinstance(self.in_flight, str):
            object.__setattr__(self, "in_flight", read_in_flight(self.in_flight))
        check_number("in_flight_bytes", self.in_flight_bytes, "2e9")
        if self.in_flight_bytes is not None and not self.in_flight_bytes > 0:
            raise ConfigError(f"in_flight_bytes must be positive, got {self.in_flight_bytes}")


@dataclass(frozen=True)
class UpdateOptions:
    """How the gradient of a batch becomes an update.

    Attributes:
        max_grad_norm: the largest global norm of the gradient of a batch's mean loss; larger ones are scaled down to
            it, as `torch.nn.utils.clip_grad_norm_` does, whatever the order and the version rule. With it, or with a
            loss scale, parallel pipelines or post-validation, a gradient that is not finite skips the update, and the
            next version is a copy.
        lr_scheduler: optimizer -> a scheduler of torch, such as ``lambda optimizer: OneCycleLR(optimizer, max_lr=1e-3,
            total_steps=500)``, or ``lambda optimizer: LambdaLR(optimizer, factor)`` for a function of the number of the
            update. One is made for each stage; it sets the rates of each update that is made, and momentum if it does
            that. Nobody steps it by hand. Resumed runs have it where it was.
        ema_decay: decay of an exponential moving average of the weights, A(t+1) = decay A(t) + (1 - decay) W(t+1),
            which `Pipeline.evaluate` and `Pipeline.state_dict` give on demand; none is kept if None.
        divergence: what `Pipeline.trouble` is to report, where stages decide together.

    Raises:
        ConfigError: a number is out of its range, or a value of another type.
    """

    max_grad_norm: float | None = None
    lr_scheduler: SchedulerFactory | None = None
    ema_decay: float | None = None
    divergence: Divergence | None = None

    def __post_init__(self) -> None:
        """Check each by itself."""
        check_number("max_grad_norm", self.max_grad_norm, "1.0")
        check_number("ema_decay", self.ema_decay, "0.999")
        Policy(self.max_grad_norm)
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError(f"ema_decay must be between 0 and 1, such as 0.999; got {self.ema_decay}")
        if self.lr_scheduler is not None:
            check_factory(self.lr_scheduler)
        if self.divergence is not None:
            if not isinstance(self.divergence, Divergence):
                raise ConfigError(
                    "divergence must be penstock.Divergence(spike=2.0) or the like, or None; got "
                    f"{self.divergence!r:.80}"
                )
            self.divergence.check()


@dataclass(frozen=True)
class RunOptions:
    """What belongs to a run as a whole.

    Attributes:
        seed: of the random numbers that blocks draw (`penstock.stage.rng`).
        timeout: seconds after which a missing message is an error; between runs, where all ranks meet, the group's own
            time-out counts.
        device: where ranks compute: "auto", "cpu", "cuda" (ranks of a machine take its GPUs in turns), one such as
            "cuda:1", or where the blocks are if None.
        waits: how a process waits for messages: "latency", "shared" or "auto" (`penstock.comm.collective.polling`).
        compile: blocks that are modules are compiled by torch.compile, each for every shape that it gets.

    Raises:
        ConfigError: a value is no such number, or no such name.
    """

    seed: int = 0
    timeout: float = 300.0
    device: str | torch.device | None = None
    waits: Waits = "auto"
    compile: bool = False

    def __post_init__(self) -> None:
        """Check each by itself."""
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be a whole number; got {self.seed!r:.80}")
        if not is_number(self.timeout) or not self.timeout > 0:
            raise ConfigError(f"timeout must be a number of seconds above 0; got {self.timeout!r:.80}")
        if not isinstance(self.compile, bool):
            raise ConfigError(f"compile must be True or False; got {self.compile!r:.80}")
        if self.waits not in get_args(Waits):
            raise ConfigError(f"waits must be one of {', '.join(get_args(Waits))}; got {self.waits!r:.80}")


@dataclass(frozen=True)
class PipelineOptions:
    """All options of a pipeline; no two groups have an option of one name.

    Raises:
        ConfigError: two options do not go together, whatever the model and the schedule.
    """

    data_parallel: DataParallel = field(default_factory=DataParallel)
    precision: Precision = field(default_factory=Precision)
    recompute: Recompute = field(default_factory=Recompute)
    staleness: Staleness = field(default_factory=Staleness)
    partition: Partition = field(default_factory=Partition)
    in_flight: InFlight = field(default_factory=InFlight)
    update: UpdateOptions = field(default_factory=UpdateOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        """Check options of different groups together."""
        combine, average = self.data_parallel.combine, self.update.ema_decay
        if average is not None and combine.apart:
            raise ConfigError(
                f"ema_decay={average} and combine={combine.kind} do not go together: each pipeline would average "
                "weights of its own; leave one of them out"
            )
        if self.update.divergence is not None and combine.apart:
            raise ConfigError(
                f"with combine={combine.kind} parallel pipelines see losses of their own, so they would not agree on a "
                "divergence; leave one of them out"
            )
        if self.update.divergence is not None and not self.deciding:
            raise ConfigError(
                "a divergence is noticed where all stages decide together; besides divergence=, set max_grad_norm=, "
                "precision='fp16' (or a Precision with a loss scale) or data_parallel= (penstock train: besides "
                "fallback.when, max_grad_norm, loss_scale or width)"
            )

    @classmethod
    def names(cls) -> frozenset[str]:
        """The name of every option, whatever its group."""
        default = cls()
        return frozenset(option.name for group in fields(cls) for option in fields(getattr(default, group.name)))

    def changed(self, **values: Any) -> PipelineOptions:
        """These options with other values for some.

        Args:
            values: by the name of the option, whatever its group.

        Raises:
            ConfigError: as the groups.
        """
        unknown = values.keys() - self.names()
        if unknown:
            raise TypeError(f"a pipeline has no option {sorted(unknown)[0]!r}")
        groups = {}
        for group in fields(self):
            present = getattr(self, group.name)
            own = {option.name: values[option.name] for option in fields(present) if option.name in values}
            groups[group.name] = replace(present, **own)
        return PipelineOptions(**groups)

    @property
    def policy(self) -> Policy:
        """What stages decide by."""
        return Policy(self.update.max_grad_norm, self.precision.scaling)

    @property
    def deciding(self) -> Mapping[str, str]:
        """For what all stages decide together before an update, each with how to be without it."""
        parallel, precision = self.data_parallel, self.precision
        return what_decides(
            self.update.max_grad_norm is not None,
            precision.scaling is not None,
            precision.loss_scale is None,
            parallel.width,
            parallel.combine.kind if parallel.combine.apart else None,
        )
