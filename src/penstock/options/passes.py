"""The options of passes: the number format, what is computed a second time, and which weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, cast, get_args

import torch

from penstock.checks import check_number
from penstock.errors import ConfigError
from penstock.options.sdpa_and_tf32 import Kernels, SdpaName
from penstock.partition.emulated_delays import Delays
from penstock.repr_without_defaults import ShortRepr
from penstock.schedule.methods.corrections import CorrectionSpec, find_correction
from penstock.schedule.transforms.recompute import Segments
from penstock.stage.autograd.recompute import RecomputeMode, RecomputeModes, check_recompute
from penstock.weights.corrections.base import Correction, correction_spec
from penstock.weights.decision import LossScale

PrecisionName = Literal["fp32", "bf16", "fp16"]
NAMES = MappingProxyType({torch.bfloat16: "bf16", torch.float16: "fp16"})
_ELSEWHERE = MappingProxyType({"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "no": "fp32"})
BoundaryGradients = Literal["same", "bf16"]


@dataclass(frozen=True, repr=False)
class Precision(ShortRepr):
    """The number format of forwards and backwards, and how small gradients survive in it.

    Attributes:
        precision: "fp32" (whatever the parameters have), "bf16" or "fp16". In the latter two, parameters and inputs in
            float32 are cast, parameters once per version; the optimizer works on one master copy in float32, and
            gradients accumulate in float32. The loss gets the output in float32, as under autocast. A stage whose
            parameters are all in float64 is refused.
        loss_scale: how the loss is scaled for its backward; a `LossScale()` with "fp16" if None.
        divisor: c, roughly the weight of a batch, such as its number of tokens. Gradients are computed of the loss sum
            divided by c, and corrected to the mean by c / N at the update, when the weight N is known. So c never
            matters but for rounding, overflow, and hooks on parameters that are not linear (clamps), which see what
            plain torch has with c = N. The number of microbatches of a batch if None; in low precision the nearest
            power of two is taken.
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


OffloadMode = Literal["none", "activations"]


@dataclass(frozen=True, repr=False)
class Recompute(ShortRepr):
    """Which forwards are run a second time, so that their activations need not be kept; and where others are kept.

    Attributes:
        recompute: "none"; "block" runs each block again just before its backward; "stage" runs whole stages again,
            while their gradients are still on their way. The numbers are the same, module buffers and random numbers
            included (those of torch, numpy, `random`, and of generators that are attributes of a block's modules, or
            variables that its code names; of others, held in further objects, they are not); only the gradient of a
            parameter that several blocks of one stage share is added up in another order with "block". (Under the
            version rule "newest", the second run reads the newest weights, or PipeMare's estimate.) A list has one of
            these for each stage; `penstock.choose_recompute` finds the one that costs least time and fits into a given
            memory.
        segments: with recompute="stage", the number of consecutive stages that recompute together. Only the first of
            them keeps its input, and the others get theirs from the stage before once more. "auto" is the square root
            of the number of stages, rounded.
        offload: "activations" moves what stages that recompute nothing keep for their backwards to the memory of the
            host, and back some passes before the backward; an accelerator copies beside its passes. Where the host
            computes nothing is moved: it takes its own memory. A list has one of the two for each stage.

    Raises:
        ConfigError: an unknown value, segments without recompute="stage", or `offload` of stages that recompute.
    """

    recompute: RecomputeMode | Sequence[RecomputeMode] = "none"
    segments: Segments = 1
    offload: OffloadMode | Sequence[OffloadMode] = "none"

    def __post_init__(self) -> None:
        """Check all together."""
        if isinstance(self.recompute, list):  # frozen: what users pass may change later
            object.__setattr__(self, "recompute", tuple(self.recompute))
        check_recompute(self.recompute, self.segments)
        if isinstance(self.offload, list):
            object.__setattr__(self, "offload", tuple(self.offload))
        each, known = self.offload if isinstance(self.offload, tuple) else (self.offload,), get_args(OffloadMode)
        if not each or not all(isinstance(word, str) and word in known for word in each):
            raise ConfigError(
                f"offload must be one of {', '.join(known)}, or a list with one of these for each stage; got "
                f"{self.offload!r:.80}"
            )
        if self.offload == "activations" and self.recompute == "block":
            raise ConfigError(
                "offload moves the activations of stages that recompute nothing, but recompute is 'block'; leave one "
                "of them out, or list what each stage recomputes"
            )
        if isinstance(self.offload, tuple):
            said = len(self.recompute) if isinstance(self.recompute, tuple) else len(each)
            both = [i for i, word in enumerate(each[:said]) if word != "none" and self.of(i) != "none"]
            if both:
                raise ConfigError(
                    f"offload moves the activations of stage {both[0]}, but recompute is {self.of(both[0])!r} there, "
                    "so it keeps none; set one of them to none"
                )

    @property
    def offloaded(self) -> bool | tuple[int, ...]:
        """Whether activations are moved: of no stage, of all that recompute nothing, or of some by index."""
        if isinstance(self.offload, tuple):
            return tuple(index for index, word in enumerate(self.offload) if word == "activations")
        if self.offload == "activations" and isinstance(self.recompute, tuple):
            return tuple(index for index, mode in enumerate(self.recompute) if mode == "none")
        return self.offload == "activations"

    @property
    def modes(self) -> tuple[RecomputeMode, ...]:
        """The different ones that stages have."""
        each = cast("RecomputeModes", self.recompute)
        return tuple(sorted(set(each))) if isinstance(each, tuple) else (each,)

    def of(self, stage: int) -> RecomputeMode:
        """What is run again of a stage, by its index."""
        each = cast("RecomputeModes", self.recompute)
        return each[stage] if isinstance(each, tuple) else each

    @property
    def in_schedule(self) -> bool | tuple[int, ...]:
        """Whether stages are run again by actions of their own: none, all, or some by index."""
        each = cast("RecomputeModes", self.recompute)
        if isinstance(each, tuple):
            return tuple(index for index, mode in enumerate(each) if mode == "stage")
        return each == "stage"

    def check_stages(self, num_stages: int) -> None:
        """Make sure that lists have as many entries as there are stages.

        Raises:
            ConfigError: one has not.
        """
        for name, given in (("recompute", self.recompute), ("offload", self.offload)):
            if isinstance(given, tuple) and len(given) != num_stages:
                raise ConfigError(
                    f"{name} has {len(given)} entries, but there are {num_stages} stages; give one for each, or one "
                    "word for all"
                )


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
    def spec(self) -> CorrectionSpec:
        """The row of the correction; that of "none" without one."""
        return find_correction("none") if self.correction is None else correction_spec(self.correction)

    @property
    def chosen(self) -> bool:
        """Whether delays are given, be they zero."""
        return self.delays is not None or self.backward_delays is not None


def low_precision(precision: PrecisionName) -> torch.dtype | None:
    """Return the dtype that parameters are cast to; None where they stay as they are.

    Raises:
        ConfigError: the precision is unknown.
    """
    if precision not in get_args(PrecisionName):
        meant = _ELSEWHERE.get(str(precision).removeprefix("torch."))
        hint = "" if meant is None else f"; write precision={meant!r}"
        known = ", ".join(get_args(PrecisionName))
        raise ConfigError(f"precision must be one of {known}; got {precision!r:.80}{hint}")
    return next((dtype for dtype, name in NAMES.items() if name == precision), None)


def boundary_format(name: BoundaryGradients) -> torch.dtype | None:
    """Return the format that float32 gradients are rounded to between stages; None where they stay as they are.

    Raises:
        ConfigError: the format is unknown.
    """
    if name not in get_args(BoundaryGradients):
        known = ", ".join(get_args(BoundaryGradients))
        raise ConfigError(f"boundary_gradients must be one of {known}; got {name!r:.80}")
    return torch.bfloat16 if name == "bf16" else None
