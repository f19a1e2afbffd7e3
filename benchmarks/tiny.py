"""Arms whose stages are so small that only the engine counts: one `Linear(4, 4)` each.

`InProcessArm` runs all ranks of a Penstock pipeline in one process. `PlainArm` runs the same passes as a plain loop in
torch, on the same modules, with the same losses and optimizer steps: every microbatch goes forward through all stages
and back, gradients add up over the m microbatches of a batch, and each stage makes one optimizer step per batch. So
both find the same losses, and the difference between their times is the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.arms import Data, Task
from penstock import Pipeline, make_schedule

DEPTH, WIDTH, SAMPLES = 4, 4, 4
"""Ranks in process, features of a stage, samples per microbatch."""


def tiny_stages(count: int) -> list[nn.Sequential]:
    """So many stages, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(count)]


def make_sgd(parameters: object) -> torch.optim.Optimizer:
    """The optimizer of every arm: the cheapest one, so that the engine does not hide behind it."""
    return torch.optim.SGD(parameters, lr=0.01)  # type: ignore[arg-type]


TINY = Task(tiny_stages, F.mse_loss, make_sgd)


def tiny_data() -> Data:
    """Random inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    pairs = [torch.randn(2, SAMPLES, WIDTH, generator=generator) for _ in range(64)]
    return Data([(x, y) for x, y in pairs])


def stages_of(method: str, microbatches: int) -> int:
    """The stages of a method on `DEPTH` ranks: more where a rank holds several."""
    return make_schedule(method, DEPTH, microbatches).schedule.num_stages


class InProcessArm:
    """A method of Penstock with all ranks in this process; each run is a span.

    Attributes:
        losses: of the batches of the last run.
    """

    def __init__(self, method: str, microbatches: int, data: Data) -> None:
        self.microbatches, self.data = microbatches, data
        self.losses: list[float] = []
        schedule = make_schedule(method, DEPTH, microbatches)
        self.pipeline = Pipeline(
            TINY.stages(schedule.schedule.num_stages),
            schedule,
            loss=TINY.loss,
            optimizer=TINY.optimizer,
            partition=[1] * schedule.schedule.num_stages,
        )

    def run(self, batches: int) -> None:
        """One span."""
        self.losses = [report.loss for report in self.pipeline.run(self.data.batches(batches, self.microbatches))]

    def close(self) -> None:
        """Nothing is under way between spans."""


class PlainArm:
    """The passes of a method as a loop: those of a microbatch one after the other.

    Args:
        method: its number of stages counts; whether backwards come in two halves (the ZB orders); and for 2bw, that
            batch t reads W(max(t - 1, 0)) and its gradient updates W(t).
        microbatches: m.
        data: what it trains on.

    Attributes:
        losses: of the batches of the last run.
    """

    def __init__(self, method: str, microbatches: int, data: Data) -> None:
        self.microbatches, self.data = microbatches, data
        self.losses: list[float] = []
        self._newest = TINY.stages(stages_of(method, microbatches))
        self._read = deepcopy(self._newest) if method == "2bw" else self._newest
        self._splits = method.startswith("zb-")
        self._optimizers = [TINY.optimizer(stage.parameters()) for stage in self._newest]

    def run(self, batches: int) -> None:
        """Forward and backward of every microbatch, an update per batch."""
        self.losses = []
        for batch in self.data.batches(batches, self.microbatches):
            self.losses.append(sum(self._train(x, y) for x, y in batch) / self.microbatches)
            self._update()

    def close(self) -> None:
        """Nothing is under way between batches."""

    def _train(self, x: Tensor, target: Tensor) -> float:
        """A microbatch: its loss, and its gradient is added."""
        inputs, outputs = [x], [self._read[0](x)]
        for stage in self._read[1:]:
            inputs.append(outputs[-1].detach().requires_grad_())
            outputs.append(stage(inputs[-1]))
        loss = TINY.loss(outputs[-1], target)
        outputs[-1] = loss / self.microbatches
        (self._backward_in_halves if self._splits else self._backward)(inputs, outputs)
        return float(loss.detach())

    def _backward(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        gradient = None
        for x, output in zip(reversed(inputs), reversed(outputs), strict=True):
            torch.autograd.backward(output, gradient)
            gradient = x.grad

    def _backward_in_halves(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """For the inputs of all stages first, and then for their weights."""
        gradient, arrived = None, []
        for x, output in zip(reversed(inputs), reversed(outputs), strict=True):
            arrived.append(gradient)
            if x.requires_grad:
                (gradient,) = torch.autograd.grad(output, x, gradient, retain_graph=True)
        for stage, output, gradient in zip(reversed(self._read), reversed(outputs), arrived, strict=True):
            parameters = list(stage.parameters())
            for p, found in zip(parameters, torch.autograd.grad(output, parameters, gradient), strict=True):
                if p.grad is None:
                    p.grad = found
                else:
                    p.grad += found

    def _update(self) -> None:
        if self._read is not self._newest:
            self._hand_over()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def _hand_over(self) -> None:
        """The gradient is that of the version read; the version that it updates is read next."""
        for stage, reader in zip(self._newest, self._read, strict=True):
            for p, read in zip(stage.parameters(), reader.parameters(), strict=True):
                p.grad, read.grad = read.grad, None
                read.copy_(p)
