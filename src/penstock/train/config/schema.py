"""The configuration of a training run: one schema, every field described once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.errors import CapabilityError
from penstock.schedule.ir.limits import MOST_BATCHES, MOST_MICROBATCHES, MOST_STAGES
from penstock.schedule.ir.rank_numbers import RankOrder
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.methods.method import Method
from penstock.train.config.own_schedule import own_row
from penstock.train.config.sections import (
    CheckpointSection,
    CombineSection,
    EvaluateSection,
    FallbackSection,
    ModelSection,
    OptimizerSection,
    PredictedSection,
    RateSection,
    SyncSection,
)
from penstock.train.config.values import (
    LONGEST,
    MANY,
    MOST,
    MOST_THREADS,
    BlockDelays,
    ByteSize,
    DeviceName,
    Number,
    OffloadModes,
    OrderOptions,
    RecomputeModes,
    Strict,
)


class TrainConfig(Strict):
    """Everything about a training run."""

    method: str | None = Field(
        default="2bw", description="a row of `penstock methods`; null with a schedule of your own"
    )
    schedule: str | None = Field(
        default=None,
        description="an order or a method of your own (--file): a Python file with a function (stages, microbatches) "
        "-> order or with a penstock.Method, a schedule as text, or torch's CSV",
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
    rank_order: RankOrder = Field(
        default="tp-pp-dp",
        description="what changes fastest from rank to rank first: the ranks of a pipeline follow each other, on one "
        "machine if they fit, or with tp-dp-pp the replicas of a stage (docs/launchers.md)",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=MOST_STAGES,
        description="processes that share each stage: they divide heads and MLPs of its layers, and the vocabulary if "
        "it is a multiple of them (tensor parallelism)",
    )
    microbatches: int = Field(
        default=4, ge=1, le=MOST_MICROBATCHES, description="m, microbatches per batch (per update) and pipeline"
    )
    microbatch_size: int = Field(default=2, ge=1, le=MANY, description="samples per microbatch")
    batches: int = Field(default=1000, ge=1, le=MOST_BATCHES, description="updates to make")
    max_grad_norm: Number | None = Field(
        default=1.0,
        gt=0,
        le=MOST,
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
    recompute: RecomputeModes = Field(
        default="none",
        description="forwards to run again instead of keeping what their backward needs: none, block or stage, a list "
        "with one for each stage, or auto: as few as fit into memory_limit",
    )
    memory_limit: ByteSize | None = Field(
        default=None,
        gt=0,
        le=1e18,
        description="with recompute=auto, the most bytes that a rank holds of weights, gradients, optimizer states, "
        "activations and messages, as in 2e9 or 16GiB",
    )
    segments: int | Literal["auto"] = Field(
        default=1, description="with recompute=stage, stages that do so together; auto: sqrt(stages), rounded"
    )
    offload: OffloadModes = Field(
        default="none",
        description="what is moved to the host's memory between forward and backward: activations, of stages that "
        "recompute nothing, or a list with none or activations for each stage",
    )
    offload_optimizer: Literal["none", "stages", "pieces"] = Field(
        default="none",
        description="where optimizer states are between updates: on the device (none) or in the host's memory, from "
        "where they come a stage at a time (stages), or a few parameters at a time (pieces)",
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
        le=MANY,
        description="messages that may be outstanding on a lane between two ranks, each of which is memory; as few as "
        "cost no time if not set, where messages take none (what they cost: `penstock simulate --latency`)",
    )
    in_flight_bytes: ByteSize | None = Field(
        default=None,
        gt=0,
        le=1e18,
        description="with options.in_flight=auto, the most bytes of activations on a rank, as in 2e9 or 16GiB; any "
        "number if not set",
    )
    balance: list[int] | None = Field(default=None, description="blocks per stage; balanced by cost if not set")
    cut: list[str] | None = Field(
        default=None, description="in place of balance, the first block of each stage but the first, as in [layers.2]"
    )
    placement: list[str] | None = Field(
        default=None, description="what penstock plan chose among devices that differ, for each rank; it is said only"
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="of initialisation, sample order and dropout")
    data: str | None = Field(
        default=None, description="text file, folder or token array; the standard library if not set"
    )
    held_out: Number = Field(default=0.05, gt=0, le=0.5, description="fraction of the text held out for validation")
    validation_samples: int = Field(
        default=512, ge=1, le=MOST_BATCHES, description="held-out samples for the loss at the end"
    )
    prompt: str = Field(default="def ", description="the sample at the end begins like this (text corpora only)")
    sample_length: int = Field(default=200, ge=0, le=MANY, description="tokens of the sample at the end; 0 for none")
    out: str = Field(default="runs", description="folder in which a folder for this run is made")
    ema_decay: Number | None = Field(
        default=None, gt=0, lt=1, description="decay of an average of the weights, such as 0.999; null for none"
    )
    restarts: int = Field(default=0, ge=0, le=MANY, description="times that failed workers are started again")
    timeout: Number = Field(
        default=300.0, ge=1e-3, le=LONGEST, description="seconds after which a missing message ends the run"
    )
    device: DeviceName = Field(
        default="auto",
        description="auto (a GPU if there is one), cpu, cuda (the ranks of a machine take its GPUs in turns), or one "
        "such as cuda:1, which several ranks then share",
    )
    cuda_graphs: bool = Field(
        default=False, description="record passes as CUDA graphs, so that the host issues each by one call"
    )
    backend: Literal["auto", "gloo", "nccl", "cpu:gloo,cuda:nccl"] = Field(
        default="auto", description="of messages: gloo, nccl, or auto: nccl where every rank has a GPU of its own"
    )
    waits: Literal["auto", "latency", "shared"] = Field(
        default="auto", description="waits for messages: latency (look), shared (sleep); auto sleeps if cores are few"
    )
    threads: int | None = Field(
        default=None, ge=1, le=MOST_THREADS, description="threads per rank; cores divided by ranks if not set"
    )
    keep_freed_memory: bool = Field(
        default=True,
        description="processes keep memory that tensors leave, for later ones; if not, they take little more than the "
        "memory ledger says, and on CPUs longer",
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
    predicted: PredictedSection = Field(
        default=PredictedSection(),
        description="what penstock plan predicted; left out where a change is of what it planned",
    )
    combine: CombineSection = Field(default=CombineSection(), description="how parallel pipelines agree")

    @property
    def row(self) -> Method:
        """The row of the method table; with a schedule of one's own, one with its name, rule and correction."""
        return find_method(self.method or "") if self.schedule is None else own_row(self.schedule, self.corrected_by)

    @property
    def processes(self) -> int:
        """The number of processes of a run."""
        return self.stages * self.width * self.tensor_parallel

    def check_chain(self, what: str, why: str) -> None:
        """Refuse a divided output layer where it is not offered.

        Args:
            what: for what it is not offered.
            why: it does not go with stages that are no chain.

        Raises:
            CapabilityError: it is wanted.
        """
        if self.row.divides_head:
            raise CapabilityError(
                f"{self.row.name}, whose stages are no chain, is not offered for {what} yet, {why}; take another "
                "method, such as 1f1b, whose numbers are the same to rounding"
            )

    def check_own_stages(self, what: str, why: str) -> None:
        """Refuse tensor parallelism where it is not offered.

        Args:
            what: for what it is not offered.
            why: it does not go with stages that processes share.

        Raises:
            CapabilityError: it is wanted.
        """
        if self.tensor_parallel > 1:
            raise CapabilityError(
                f"tensor_parallel={self.tensor_parallel} is not offered for {what} yet, {why}; set tensor_parallel to 1"
            )

    @property
    def delayed(self) -> bool:
        """Whether weights are read late by choice."""
        return self.delays is not None or self.backward_delays is not None

    @property
    def phased(self) -> bool:
        """Whether it may be trained by several methods, one after the other."""
        return self.sync.batches > 0 or self.fallback.at is not None or bool(self.fallback.when)
