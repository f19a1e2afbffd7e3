"""The arms of the throughput benchmark: the same stages, data and optimizer, driven by different engines.

Two ranks, one thread each. An arm's `run(batches)` trains that many batches of m microbatches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional as F

from penstock import GPTConfig, Microbatches, Pipeline, gpt_blocks, make_schedule

Pair = tuple[Tensor, Tensor]
"""The input and the target of a microbatch."""

SHAPE = GPTConfig(layers=8, width=256, heads=8, context=128)
MICROBATCH = 4
STAGES = 2


@runtime_checkable
class Arm(Protocol):
    """A training engine to measure."""

    def run(self, batches: int) -> None:
        """Train `batches` batches."""
        ...

    def close(self) -> None:
        """Finish everything that is in flight."""
        ...


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Make the optimizer that every arm uses."""
    return torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of a microbatch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text(count: int = 64) -> list[Pair]:
    """Microbatches of real text."""
    # Imported here, so that arms on other data run on any version of Penstock with the same public API.
    from penstock.train.data.corpus import load_corpus
    from penstock.train.data.window_sampler import Windows

    windows = Windows(load_corpus(), SHAPE.context, held_out=0.05, seed=0)
    return [windows.samples(k * MICROBATCH, MICROBATCH) for k in range(count)]


class Data:
    """An endless supply of microbatches, made before the clock starts.

    Args:
        pairs: that it repeats; real text if None.
    """

    def __init__(self, pairs: Sequence[Pair] | None = None) -> None:
        self.pairs = read_text() if pairs is None else pairs

    def batches(self, count: int, microbatches: int) -> Iterator[list[Pair]]:
        """`count` batches of m microbatches."""
        for t in range(count):
            yield [self.pairs[(t * microbatches + k) % len(self.pairs)] for k in range(microbatches)]

    def joined(self, count: int, microbatches: int) -> Iterator[Pair]:
        """The same as whole batches."""
        for batch in self.batches(count, microbatches):
            yield torch.cat([x for x, _ in batch]), torch.cat([y for _, y in batch])


def stage_modules(stages: int, shape: GPTConfig | None = None) -> list[nn.Sequential]:
    """Split a model, that of `SHAPE` if None, into parts of as many layers, or one more.

    The first one also embeds, the last one also has the head.
    """
    shape = shape or SHAPE
    blocks = [block.make() for block in gpt_blocks(shape, seed=0).values()]
    ends = [1 + shape.layers * (c + 1) // stages for c in range(stages)]
    ends[-1] = len(blocks)
    starts = [0, *ends[:-1]]
    return [nn.Sequential(*blocks[a:b]) for a, b in zip(starts, ends, strict=True)]


class Task(NamedTuple):
    """What arms train.

    Attributes:
        stages: number of stages -> the model in so many parts.
        loss: (output, target) -> mean over a microbatch.
        optimizer: of parameters, named or not.
    """

    stages: Callable[[int], list[nn.Sequential]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]


GPT = Task(stage_modules, mean_loss, make_optimizer)


class PenstockArm:
    """A method of Penstock; each run is a span, filled once and drained once."""

    def __init__(
        self,
        method: str,
        microbatches: int,
        data: Data,
        clip: float | None = None,
        task: Task = GPT,
        ranks: int = STAGES,
        window: int | None = None,
        in_flight: str | None = None,
        **options: Any,
    ) -> None:
        self.microbatches, self.data = microbatches, data
        schedule = make_schedule(method, ranks, microbatches, window=window)
        stages = schedule.schedule.num_stages
        named = {"stages": ranks, "microbatches": Microbatches(microbatches, in_flight)}
        self.pipeline = Pipeline(
            task.stages(stages),
            method if in_flight else schedule,  # by position, where it has had several names
            loss=task.loss,
            optimizer=task.optimizer,
            max_grad_norm=clip,
            partition=[1] * stages,
            # A group of its own: a stream that is halted may have messages under way.
            **({"group": dist.new_group()} | options),
            **(named if in_flight else {}),
        )

    def run(self, batches: int) -> None:
        """Run one span."""
        for _ in self.pipeline.run(self.data.batches(batches, self.microbatches)):
            pass

    def close(self) -> None:
        """Do nothing: nothing is in flight between spans."""


class PenstockStream(PenstockArm):
    """A method of Penstock whose batches overlap: one span from beginning to end, of which each run executes a part.

    A rank stops in the middle of the stream, directly before the first backward of a batch, and continues from there.
    No work is left out or done twice, but the ranks lose their stagger, which costs the last one about a forward per
    run.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._reports = self.pipeline.run(self.data.batches(sys.maxsize, self.microbatches))

    def run(self, batches: int) -> None:
        """Run the next batches of the stream."""
        for _ in range(batches):
            next(self._reports)

    def close(self) -> None:
        """Drain the pipeline."""
        self.pipeline.stop()
        for _ in self._reports:
            pass


WHOLE, LOOPED, FOLDED = (
    lambda rank, _: [rank],
    lambda rank, ranks: [rank, rank + ranks],
    lambda rank, ranks: [rank, 2 * ranks - 1 - rank],
)
"""Placements: rank, number of ranks -> the indices of its stages."""

TORCH: dict[str, tuple[Any, Callable[[int, int], list[int]]]] = {
    "gpipe": (ScheduleGPipe, WHOLE),
    "1f1b": (Schedule1F1B, WHOLE),
    "interleaved": (ScheduleInterleaved1F1B, LOOPED),
    "zb1p": (ScheduleInterleavedZeroBubble, WHOLE),
    "zb-interleaved": (ScheduleInterleavedZeroBubble, LOOPED),
    "zbv": (ScheduleZBVZeroBubble, FOLDED),
    "dualpipev": (ScheduleDualPipeV, FOLDED),
}
"""torch's schedules, with how each places the stages on ranks."""


class TorchArm:
    """A schedule of `torch.distributed.pipelining`."""

    def __init__(self, name: str, microbatches: int, data: Data, task: Task = GPT, device: str = "cpu") -> None:
        self.microbatches, self.data, self.rank = microbatches, data, dist.get_rank()
        kind, place = TORCH[name]
        held = place(self.rank, dist.get_world_size())
        count = dist.get_world_size() * len(held)
        modules = task.stages(count)
        self.modules = [modules[index] for index in held]
        stages = [PipelineStage(modules[index], index, count, torch.device(device)) for index in held]
        arguments: dict[str, Any] = {"n_microbatches": microbatches, "loss_fn": task.loss}
        single = kind in (ScheduleGPipe, Schedule1F1B)
        self.schedule: Any = kind(stages[0] if single else stages, **arguments)
        self.takes_target = count - 1 in held
        self.optimizer = task.optimizer([p for module in self.modules for p in module.parameters()])

    def run(self, batches: int) -> None:
        """Make a step of the schedule and of the optimizer per batch."""
        for inputs, targets in self.data.joined(batches, self.microbatches):
            arguments = [inputs] if self.rank == 0 else []
            losses: list[Tensor] = []
            if self.takes_target:
                self.schedule.step(*arguments, target=targets, losses=losses)
            else:
                self.schedule.step(*arguments)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def close(self) -> None:
        """Do nothing: nothing is in flight between batches."""


class LoopArm:
    """Plain torch: every microbatch forward and backward, and an update per batch.

    Args:
        microbatches: m.
        data: endless.
        loopback: what stands for the input of the second of two parts, and for the gradient of the first one's output.
        task: what it trains.
        part: which of the two parts it trains, without communication; None for the whole model.
    """

    def __init__(
        self, microbatches: int, data: Data, loopback: Tensor, task: Task = GPT, part: int | None = None
    ) -> None:
        self.microbatches, self.data, self.part = microbatches, data, part
        self.loopback, self.loss = loopback, task.loss
        parts = task.stages(STAGES)
        self.module = nn.Sequential(*parts) if part is None else parts[part]
        self.optimizer = task.optimizer(self.module.parameters())

    def run(self, batches: int) -> None:
        """Train so many batches."""
        for batch in self.data.batches(batches, self.microbatches):
            for inputs, targets in batch:
                self.backward(*self.forward(inputs, targets))
            self.update()

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the tensor to begin the backward with, and its gradient unless it is a loss."""
        if self.part == 0:
            return self.module(inputs), self.loopback
        inputs = inputs if self.part is None else self.loopback.detach().requires_grad_()
        return self.loss(self.module(inputs), targets) / self.microbatches, None

    def backward(self, output: Tensor, gradient: Tensor | None) -> None:
        """Accumulate the gradients."""
        output.backward(gradient)  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Step the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        """Do nothing: nothing is ever in flight."""


class CeilingArm(LoopArm):
    """The upper bound of two processes: each runs its stage on inputs from a loop-back buffer, no communication."""

    def __init__(self, microbatches: int, data: Data) -> None:
        loopback = torch.randn(MICROBATCH, SHAPE.context, SHAPE.width)
        super().__init__(microbatches, data, loopback, part=dist.get_rank())


Maker = Callable[[int, Data], Arm]
"""(m, data) -> an arm."""

ARMS: dict[str, Maker] = {
    "ceiling": CeilingArm,
    "penstock 2bw": lambda m, data: PenstockStream("2bw", m, data),
    "penstock 2bw-eager": lambda m, data: PenstockStream("2bw-eager", m, data),
    "penstock 1f1b": lambda m, data: PenstockArm("1f1b", m, data),
    "torch 1f1b": lambda m, data: TorchArm("1f1b", m, data),
    "torch gpipe": lambda m, data: TorchArm("gpipe", m, data),
    "torch zbv": lambda m, data: TorchArm("zbv", m, data),
}
"""All arms by name."""
