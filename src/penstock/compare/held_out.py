"""Computes held-out losses during training, without touching the pipeline.

The weights of a version are copied as the stages make them, one after the other, and evaluated in a separate model. So
evaluations change nothing, whatever the method: an evaluation in the pipeline itself would have to drain it under rules
such as stash, and delays would start anew every time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.comm.core.devices import find_device, on_device
from penstock.compare.tasks import Task
from penstock.errors import ConfigError
from penstock.weights.optim.optimizer_factory import OptimizerFactory

_CHUNK = 64  # samples per forward


class Score(NamedTuple):
    """The result of one evaluation.

    Attributes:
        updates: the number of updates that had been made.
        loss: mean over the units (tokens or images) of the held-out samples.
        accuracy: fraction of correct units; None if the task does not define it.
    """

    updates: int
    loss: float
    accuracy: float | None


class Scorer:
    """Evaluates weights in a copy of a task's model.

    Args:
        task: model and data.
        seed: of the initial weights.
        samples: the largest number of held-out samples to use.
        device: to compute on, as in `Device`.

    Raises:
        ConfigError: a block has a persistent buffer, so its weights alone are not its state.
    """

    def __init__(self, task: Task, seed: int, samples: int, device: str = "cpu") -> None:
        self._task, self._samples, self._device = task, min(samples, task.held_out_samples), find_device(device)
        self._blocks = {name: block.make().to(self._device) for name, block in task.blocks(seed).items()}
        self.parameters = {
            f"{b}.{own}": p for b, module in self._blocks.items() for own, p in module.named_parameters()
        }
        saved = {f"{b}.{own}" for b, module in self._blocks.items() for own in module.state_dict()}
        if saved != self.parameters.keys():
            raise ConfigError(
                f"a comparison evaluates copies of the weights only, but the model also has the buffer "
                f"{min(saved ^ self.parameters.keys())}; use a norm without statistics, such as GroupNorm"
            )

    def score(self, updates: int, weights: Mapping[str, Tensor] | None = None) -> Score:
        """Evaluate `weights`, which are all trained parameters; the initial ones if None."""
        total, count, correct = 0.0, 0.0, 0
        asked = True
        with torch.no_grad():
            for name, weight in (weights or {}).items():
                self.parameters[name].copy_(weight)
            for first in range(0, self._samples, _CHUNK):
                held_out = self._task.held_out(first, min(_CHUNK, self._samples - first))
                x, target = on_device(held_out, self._device)
                for module in self._blocks.values():
                    x = module(x)
                loss, units = self._task.loss(x, target)
                right = self._task.correct(x, target)
                total, count, correct = total + float(loss), count + units, correct + (right or 0)
                asked = right is not None
        return Score(updates, total / count, correct / count if asked else None)


class Gatherer:
    """An optimizer factory that collects the weights of some versions, and the norms of all gradients.

    Weights are copied when an optimizer is about to make the next version, as corrections may still change them after
    the step itself. So the last version of a run is not collected.

    Args:
        factory: makes the optimizers, all of them before training.
        wanted: versions whose weights to collect.
    """

    def __init__(self, factory: OptimizerFactory, wanted: Collection[int]) -> None:
        self._factory, self._wanted = factory, wanted
        self._updates: dict[str, int] = {}
        self._last: dict[Optimizer, list[str]] = {}  # parameters stepped in its last update, for `undone`
        self._weights: dict[int, dict[str, Tensor]] = {}
        self._squares: dict[int, dict[str, float]] = {}

    def __call__(self, named: list[tuple[str, nn.Parameter]]) -> Optimizer:
        """Make an optimizer; if several ranks hold a stage, only the first one's is recorded."""
        optimizer = self._factory(named)
        if named[0][0] not in self._updates:
            self._updates |= dict.fromkeys((name for name, _ in named), 0)
            self._last[optimizer] = [name for name, _ in named]
            optimizer.register_step_pre_hook(lambda *_: self._see(named))
        return optimizer

    def undone(self, optimizer: Optimizer) -> None:
        """Discard what was recorded of the last update, which has been undone."""
        for name in self._last.get(optimizer, ()):
            self._updates[name] -= 1

    def _see(self, named: list[tuple[str, nn.Parameter]]) -> None:
        stepped = [(name, p) for name, p in named if p.grad is not None]  # only some parameters at a time
        if not stepped:
            return
        norms = torch.stack([torch.linalg.vector_norm(p.grad, dtype=torch.float64) for _, p in stepped])
        for (name, parameter), norm in zip(stepped, norms.tolist(), strict=True):  # one wait for the device for all
            version = self._updates[name]
            self._squares.setdefault(version, {})[name] = norm * norm
            if version in self._wanted:
                self._weights.setdefault(version, {})[name] = parameter.detach().clone()
            self._updates[name] += 1

    def complete(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield versions, with their weights, that have become complete since the last call."""
        for number in sorted(number for number, found in self._weights.items() if len(found) == len(self._updates)):
            yield number, self._weights.pop(number)

    def norms(self) -> dict[int, float]:
        """Return the norms of the gradients given to the optimizers in all complete updates."""
        complete = {number: found for number, found in self._squares.items() if len(found) == len(self._updates)}
        return {number: math.sqrt(math.fsum(found.values())) for number, found in complete.items()}
