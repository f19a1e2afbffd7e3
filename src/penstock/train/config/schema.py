"""The configuration of a training run: one schema, every field described once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock.errors import ConfigError
from penstock.models.limits import LARGEST
from penstock.schedule.ir.in_flight import read_in_flight
from penstock.schedule.ir.limits import MOST_BATCHES, MOST_MICROBATCHES, MOST_STAGES
from penstock.schedule.methods.combine import Combine
from penstock.schedule.methods.table import Method, find_method
from penstock.train.config.lags_file import lag_of
from penstock.train.config.own_schedule import own_row


def _as_number(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text; a number is meant where the field is one."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _as_delays(value: Any) -> Any:
    """Names of blocks may look like numbers; what the names and numbers mean is the runtime's business."""
    whole = {str(key): number for key, number in value.items()} if isinstance(value, dict) else value
    numbers = whole.values() if isinstance(whole, dict) else whole if isinstance(whole, list) else [whole or 0]
    if not isinstance(whole, str) and not all(
        isinstance(n, int) and not isinstance(n, bool) and n <= MOST_DELAY for n in numbers
    ):
        raise PydanticCustomError(
            "delays", "Input should be a number, a list of numbers, {block: number, ...} or a profile such as 1f1b:8"
        )
    return whole


def _as_plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def _as_options(value: Any, others: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Options of orders are whole numbers; microbatches in flight may be one for every rank, or a word."""
    if not isinstance(value, dict) or "in_flight" not in value:
        return others(value)
    found, given = others({name: number for name, number in value.items() if name != "in_flight"}), value["in_flight"]
    try:
        found["in_flight"] = read_in_flight(given) if isinstance(given, str) else given
    except ConfigError as error:
        raise PydanticCustomError("in_flight", "{why}", {"why": str(error)}) from None
    if isinstance(given, list | tuple):
        found["in_flight"] = tuple(given)  # their number is checked with that of the ranks
    elif not isinstance(given, str | int) or isinstance(given, bool):
        raise PydanticCustomError("in_flight", "in_flight takes a number, one for every rank, or auto")
    return found


_MANY, _MOST = 10**6, 1e12  # largest counts and numbers, far above what is of use
_LONGEST = 1e7  # seconds, about four months
MOST_THREADS = 4096
MOST_DELAY = 10_000  # updates; so many versions of the weights are kept
Number = Annotated[float, BeforeValidator(_as_number), AllowInfNan(False)]
BlockDelays = Annotated[int | str | list[int] | dict[str, int] | None, PlainValidator(_as_delays)]
OrderOptions = Annotated[dict[str, int], WrapValidator(_as_options), PlainSerializer(_as_plain)]
OptimizerName = Literal["adamw", "adam", "nadam", "sgd", "muon", "adan", "soap", "basis-rotation"]


class Strict(BaseModel):
    """Refuses unknown keys and values of other types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class ModelSection(Strict):
    """The GPT."""

    preset: str = Field(default="tiny", description="a shape by name: tiny, small, 124m, 355m, 1.3b, 2.2b, 3.8b")
    layers: int | None = Field(
        default=None, ge=1, le=LARGEST["layers"], description="transformer layers, instead of the preset's"
    )
    width: int | None = Field(
        default=None, ge=1, le=LARGEST["width"], description="model width, instead of the preset's"
    )
    heads: int | None = Field(
        default=None, ge=1, le=LARGEST["heads"], description="attention heads, instead of the preset's"
    )
    context: int | None = Field(
        default=None, ge=2, le=LARGEST["context"], description="tokens per sample, instead of the preset's"
    )
    tied: bool = Field(default=False, description="input and output embedding are one parameter")
    vocabulary: int | None = Field(
        default=None, ge=2, le=LARGEST["vocabulary"], description="size of the vocabulary; that of the data if not set"
    )


_TAKERS: Mapping[str, tuple[OptimizerName, ...]] = MappingProxyType(
    {
        "beta2": ("adamw", "adam", "nadam", "muon", "adan", "soap", "basis-rotation"),
        "nesterov": ("sgd", "muon"),
        "momentum": ("muon",),
        "difference": ("adan",),
        "refresh": ("soap", "basis-rotation"),
        "sides": ("basis-rotation",),
    }
)
"""Options of optimizers that not all of them take."""


class OptimizerSection(Strict):
    """The optimizer, one per stage."""

    name: OptimizerName = Field(
        default="adamw", description="adamw, adam, nadam, sgd, muon, adan, soap or basis-rotation (docs/optimizers.md)"
    )
    lr: Number = Field(default=3e-3, gt=0, le=_MOST, description="peak learning rate")
    weight_decay: Number = Field(default=0.1, ge=0, le=_MOST, description="decay of matrices; vectors are not decayed")
    beta1: Number = Field(default=0.9, ge=0, lt=1, description="first moment; the momentum of sgd")
    beta2: Number = Field(default=0.95, ge=0, lt=1, description="second moment")
    nesterov: bool = Field(default=True, description="sgd and muon look ahead, as Nesterov's momentum does")
    momentum: Number = Field(default=0.95, ge=0, lt=1, description="of muon, for the matrices that it steps")
    difference: Number = Field(default=0.92, ge=0, lt=1, description="of adan, the mean of differences of gradients")
    refresh: int = Field(
        default=10, ge=1, le=MOST_BATCHES, description="of soap and basis-rotation, updates between new bases"
    )
    sides: Literal["both", "smaller"] = Field(default="both", description="of a matrix, which basis-rotation rotates")

    @model_validator(mode="after")
    def _takes_what_is_set(self) -> OptimizerSection:
        """Nothing is set that the optimizer does not take."""
        for key, takers in _TAKERS.items():
            field = type(self).model_fields[key]
            if getattr(self, key) != field.default and self.name not in takers:
                instead = " (whose momentum is beta1)" if (key, self.name) == ("momentum", "sgd") else ""
                raise PydanticCustomError(
                    "apart",
                    "{key} is an option of {takers}, not of {name}; leave it out",
                    {"key": key, "takers": ", ".join(takers), "name": self.name + instead},
                )
        return self


class RateSection(Strict):
    """How the learning rate changes with the number of updates."""

    warm_up: int = Field(
        default=50, ge=0, le=MOST_BATCHES, description="updates over which the rate rises linearly from zero"
    )
    decay: Literal["cosine", "linear", "none"] = Field(
        default="cosine", description="shape of the fall after the warm-up"
    )
    floor: Number = Field(default=0.1, ge=0, le=1, description="fraction of the peak rate at the end")


class CheckpointSection(Strict):
    """From which a run that has ended goes on."""

    every: int | None = Field(
        default=250, ge=1, le=MOST_BATCHES, description="batches between two checkpoints; null for none"
    )
    keep: int = Field(default=2, ge=1, le=_MANY, description="checkpoints that stay; older ones are removed")


class EvaluateSection(Strict):
    """Evaluations in the midst of training, on held-out samples."""

    every: int | None = Field(
        default=None, ge=1, le=MOST_BATCHES, description="batches between two evaluations; null for none"
    )
    samples: int = Field(
        default=64, ge=1, le=MOST_BATCHES, description="held-out samples, rounded down to whole batches, at least one"
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        le=MOST_BATCHES,
        description="evaluations without a better loss after which the run ends; null for no end",
    )


class SyncSection(Strict):
    """A synchronous method for the first batches, before `method` goes on (PipeMare's T3)."""

    method: str = Field(default="1f1b", description="a synchronous row of `penstock methods`")
    batches: int = Field(default=0, ge=0, le=MOST_BATCHES, description="batches that it trains; 0 for none")


class FallbackSection(Strict):
    """A synchronous method that takes the place of `method`, from a batch on or where that diverges."""

    method: str = Field(default="1f1b", description="a synchronous row of `penstock methods`")
    at: int | None = Field(
        default=None, ge=0, le=MOST_BATCHES, description="batch from which it goes on; null for none"
    )
    when: list[Literal["spike", "nonfinite"]] = Field(
        default=[], description="what is a divergence: spike (of the loss), nonfinite (a loss or gradient); [] for none"
    )
    spike: Number = Field(
        default=2.0, gt=1, le=1e100, description="times the median loss of the batches before: a spike"
    )
    window: int = Field(default=20, ge=1, le=_MANY, description="batches of that median; none is judged before as many")
    batches: int | None = Field(
        default=None, ge=1, le=MOST_BATCHES, description="batches until `method` goes on again; null for never"
    )
    restore: Literal["needed", "always"] = Field(
        default="needed",
        description="after a divergence, go back to a checkpoint from before: where weights are not finite, or always",
    )


class CombineSection(Strict):
    """How parallel pipelines agree."""

    kind: Literal["reduce", "average", "bmuf", "elastic", "wsp"] = Field(
        default="reduce",
        description="reduce adds gradients in every batch; with average, bmuf, elastic and wsp pipelines meet at times",
    )
    every: int = Field(default=1, ge=1, le=_MANY, description="batches from one meeting to the next; of a wave of wsp")
    optimizer_state: Literal["keep", "average", "reset"] = Field(
        default="keep", description="what becomes of the optimizers' state when pipelines meet"
    )
    momentum: Number | None = Field(default=None, ge=0, lt=1, description="of bmuf, eta; 1 - 1/width if not set")
    step: Number = Field(default=1.0, gt=0, le=_MOST, description="of bmuf, zeta")
    nesterov: bool = Field(default=False, description="bmuf looks ahead")
    pull: Number | None = Field(default=None, gt=0, le=1, description="of elastic, alpha; 0.9/width if not set")
    distance: int = Field(default=0, ge=0, le=_MANY, description="of wsp, waves that pipelines may be apart")
    lag: int | list[int] | str | None = Field(
        default=None,
        description="of wsp, waves until updates of a pipeline are added to others, as 1 or [0, 2]; record, or the "
        "lags.json of a run with that; distance if not set",
    )
    share: Number = Field(
        default=1.0, gt=0, le=_MOST, description="of wsp, what the updates of others are multiplied by"
    )

    @property
    def chosen(self) -> Combine:
        """As a pipeline takes it.

        Raises:
            ConfigError: an option that the kind does not have, or a file of lags that cannot be read.
        """
        return Combine(**(self.model_dump() | {"lag": lag_of(self.lag)}))


class TrainConfig(Strict):
    """Everything about a training run."""

    method: str | None = Field(
        default="2bw", description="a row of `penstock methods`; null with a schedule of your own"
    )
    schedule: str | None = Field(
        default=None,
        description="an order of your own (--file): a Python file with a function (stages, microbatches) -> order, a "
        "schedule as text, or torch's CSV",
    )
    rule: str | None = Field(
        default=None,
        description="version rule of an order of your own in Python (--rule), a `version rule` of `penstock methods`; "
        "flush if not set",
    )
    corrected_by: str | None = Field(
        default=None,
        description="correction of an order of your own (--correction), such as spectrain, or with options, as in "
        "pipemare:reschedule=100",
    )
    stages: int = Field(default=2, ge=1, le=MOST_STAGES, description="d, ranks of the pipeline")
    options: OrderOptions = Field(default={}, description="of the method's order, such as {chunks: 4}")
    correction: dict[str, Number | None] = Field(
        default={}, description="of the method's correction, such as {reschedule: 500, decay: 0.135}"
    )
    width: int = Field(default=1, ge=1, le=MOST_STAGES, description="w, parallel pipelines")
    reduce: Literal["ordered", "fast"] = Field(
        default="ordered",
        description="how parallel pipelines add gradients: in their order, or by all_reduce, off by roundings if w > 2",
    )
    sharding: str | None = Field(
        default=None,
        description="what of each stage parallel pipelines divide among them: none, optimizer (ZeRO-1), gradients "
        "(ZeRO-2) or full (ZeRO-3); by default what the method has",
    )
    microbatches: int = Field(
        default=4, ge=1, le=MOST_MICROBATCHES, description="m, microbatches per batch (per update) and pipeline"
    )
    microbatch_size: int = Field(default=2, ge=1, le=_MANY, description="samples per microbatch")
    batches: int = Field(default=1000, ge=1, le=MOST_BATCHES, description="updates to make")
    max_grad_norm: Number | None = Field(
        default=1.0,
        gt=0,
        le=_MOST,
        description="largest global norm of a gradient; null for none, and no vote on overflow (in fp32, if w = 1)",
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="what passes compute in; weights are updated in float32"
    )
    tf32: bool | None = Field(
        default=None, description="whether GPUs may compute products of float32 in TF32; as torch is set if not set"
    )
    sdpa: Literal["flash", "efficient", "cudnn", "math"] | None = Field(
        default=None, description="backend of attention; torch chooses if not set"
    )
    compile: bool = Field(
        default=False, description="compile each block by torch.compile, for every shape that it gets (takes minutes)"
    )
    boundary_gradients: Literal["same", "bf16"] = Field(
        default="same",
        description="what stages hand back: gradients in the format of activations, or rounded to bfloat16",
    )
    recompute: Literal["none", "block", "stage"] = Field(
        default="none", description="forwards to run again instead of keeping what their backward needs"
    )
    segments: int | Literal["auto"] = Field(
        default=1, description="with recompute=stage, stages that do so together; auto: sqrt(stages), rounded"
    )
    undo: Literal["copies", "in-place"] = Field(
        default="copies",
        description="how methods with post-validation take an update back: exactly, from copies, or off by roundings",
    )
    delays: BlockDelays = Field(
        default=None,
        description="updates that weights are read late by: 3, {layers.0: 3}, a list by block, 1f1b:8 (docs/delays.md)",
    )
    backward_delays: BlockDelays = Field(
        default=None, description="the same of the weights in the formulas of backwards; as delays if not set"
    )
    window: int | None = Field(
        default=None,
        ge=1,
        le=_MANY,
        description="messages that may be outstanding on a lane between two ranks, each of which is memory; as few as "
        "cost no time if not set, where messages take none (what they cost: `penstock simulate --latency`)",
    )
    in_flight_bytes: Number | None = Field(
        default=None,
        gt=0,
        le=1e18,
        description="with options.in_flight=auto, the most bytes of activations on a rank; any number if not set",
    )
    balance: list[int] | None = Field(default=None, description="blocks per stage; balanced by cost if not set")
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="of initialisation, sample order and dropout")
    data: str | None = Field(
        default=None, description="text file, folder or token array; the standard library if not set"
    )
    held_out: Number = Field(default=0.05, gt=0, le=0.5, description="fraction of the text held out for validation")
    validation_samples: int = Field(
        default=512, ge=1, le=MOST_BATCHES, description="held-out samples for the loss at the end"
    )
    prompt: str = Field(default="def ", description="the sample at the end begins like this (text corpora only)")
    sample_length: int = Field(default=200, ge=0, le=_MANY, description="tokens of the sample at the end; 0 for none")
    out: str = Field(default="runs", description="folder in which a folder for this run is made")
    ema_decay: Number | None = Field(
        default=None, gt=0, lt=1, description="decay of an average of the weights, such as 0.999; null for none"
    )
    restarts: int = Field(default=0, ge=0, le=_MANY, description="times that failed workers are started again")
    timeout: Number = Field(
        default=300.0, ge=1e-3, le=_LONGEST, description="seconds after which a missing message ends the run"
    )
    device: str = Field(
        default="auto",
        description="auto (a GPU if there is one), cpu, cuda (the ranks of a machine take its GPUs in turns), or one "
        "such as cuda:1, which several ranks then share",
    )
    backend: str = Field(
        default="auto", description="of messages: gloo, nccl, or auto: nccl where every rank has a GPU of its own"
    )
    waits: Literal["auto", "latency", "shared"] = Field(
        default="auto", description="waits for messages: latency (look), shared (sleep); auto sleeps if cores are few"
    )
    threads: int | None = Field(
        default=None, ge=1, le=MOST_THREADS, description="threads per rank; cores divided by ranks if not set"
    )
    model: ModelSection = Field(default=ModelSection(), description="the model")
    optimizer: OptimizerSection = Field(default=OptimizerSection(), description="the optimizer")
    lr_schedule: RateSection = Field(default=RateSection(), description="the learning rate over time")
    checkpoint: CheckpointSection = Field(default=CheckpointSection(), description="from which a run goes on")
    evaluate: EvaluateSection = Field(default=EvaluateSection(), description="evaluations in the midst of training")
    sync: SyncSection = Field(default=SyncSection(), description="a synchronous method for the first batches (T3)")
    fallback: FallbackSection = Field(
        default=FallbackSection(), description="a synchronous method from a batch on, or where `method` diverges"
    )
    combine: CombineSection = Field(default=CombineSection(), description="how parallel pipelines agree")

    @property
    def row(self) -> Method:
        """The row of the method table; with a schedule of one's own, one with its name, rule and correction."""
        return find_method(self.method or "") if self.schedule is None else own_row(self.schedule, self.corrected_by)

    @property
    def delayed(self) -> bool:
        """Whether weights are read late by choice."""
        return self.delays is not None or self.backward_delays is not None

    @property
    def phased(self) -> bool:
        """Whether it may be trained by several methods, one after the other."""
        return self.sync.batches > 0 or self.fallback.at is not None or bool(self.fallback.when)
