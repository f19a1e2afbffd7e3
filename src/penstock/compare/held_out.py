"""Held-out losses of a model in training, without touching the pipeline that trains it.

The weights of a version are copied as its stages make them, one after the other, and a model of its own reads them. So
evaluations change nothing, whatever the method: to evaluate in the pipeline itself, rules such as stash would have to
drain it, and delays would begin anew every time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.compare.tasks import Task
from penstock.errors import ConfigError
from penstock.weights.optim.updater import OptimizerFactory

_CHUNK = 64  # samples at a time


class Score(NamedTuple):
    """What an evaluation has found.

    Attributes:
        updates: that the weights have seen.
        loss: the mean over the units of the held-out samples.
        accuracy: the part of them that is right; None where the task does not ask for that.
    """

    updates: int
    loss: float
    accuracy: float | None


class Scorer:
    """A copy of a task's model to evaluate with.

    Args:
        task: whose.
        seed: of the initial weights.
        samples: how many held-out ones to take, at most.

    Raises:
        ConfigError: a block has a buffer that it would save, so weights alone are not its state.
    """

    def __init__(self, task: Task, seed: int, samples: int) -> None:
        self._task, self._samples = task, min(samples, task.held_out_samples)
        self._blocks = {name: block.make() for name, block in task.blocks(seed).items()}
        self.parameters = {
            f"{b}.{own}": p for b, module in self._blocks.items() for own, p in module.named_parameters()
        }
        saved = {f"{b}.{own}" for b, module in self._blocks.items() for own in module.state_dict()}
        if saved != self.parameters.keys():
            raise ConfigError(
                f"a comparison evaluates copies of the weights alone, but the model also has "
                f"{min(saved ^ self.parameters.keys())}; take a norm without statistics, such as GroupNorm"
            )

    def score(self, updates: int, weights: Mapping[str, Tensor] | None = None) -> Score:
        """Evaluate; `weights` are all that are trained, those at the beginning if None."""
        total, count, correct = 0.0, 0.0, 0
        asked = True
        with torch.no_grad():
            for name, weight in (weights or {}).items():
                self.parameters[name].copy_(weight)
            for first in range(0, self._samples, _CHUNK):
                x, target = self._task.held_out(first, min(_CHUNK, self._samples - first))
                for module in self._blocks.values():
                    x = module(x)
                loss, units = self._task.loss(x, target)
                right = self._task.correct(x, target)
                total, count, correct = total + float(loss), count + units, correct + (right or 0)
                asked = right is not None
        return Score(updates, total / count, correct / count if asked else None)


class Gatherer:
    """An optimizer factory that collects the weights of some versions, and the norms of all gradients.

    The weights are copied when an optimizer is about to make the next version: after the step itself corrections may
    still change them. So the last version of a run is not among them.

    Args:
        factory: makes the optimizers.
        names: of all parameters.
        wanted: versions whose weights to collect.
    """

    def __init__(self, factory: OptimizerFactory, names: Collection[str], wanted: Collection[int]) -> None:
        self._factory, self._names, self._wanted = factory, len(names), wanted
        self._updates: dict[str, int] = {}
        self._last: dict[Optimizer, list[str]] = {}  # parameters that its last update has stepped, for `undone`
        self._weights: dict[int, dict[str, Tensor]] = {}
        self._squares: dict[int, dict[str, float]] = {}

    def __call__(self, named: list[tuple[str, nn.Parameter]]) -> Optimizer:
        """Make an optimizer; where several hold one stage, the first one is looked at."""
        optimizer = self._factory(named)
        if named[0][0] not in self._updates:
            self._updates |= dict.fromkeys((name for name, _ in named), 0)
            self._last[optimizer] = [name for name, _ in named]
            optimizer.register_step_pre_hook(lambda *_: self._see(named))
        return optimizer

    def undone(self, optimizer: Optimizer) -> None:
        """The last update has been taken back."""
        for name in self._last.get(optimizer, ()):
            self._updates[name] -= 1

    def _see(self, named: list[tuple[str, nn.Parameter]]) -> None:
        for name, parameter in named:
            if parameter.grad is None:  # only a few are stepped at a time
                continue
            version = self._updates[name]
            norm = float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64))
            self._squares.setdefault(version, {})[name] = norm * norm
            if version in self._wanted:
                self._weights.setdefault(version, {})[name] = parameter.detach().clone()
            self._updates[name] += 1

    def complete(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The versions that all stages have made since the last time, with their weights."""
        for number in sorted(number for number, found in self._weights.items() if len(found) == self._names):
            yield number, self._weights.pop(number)

    def norms(self) -> dict[int, float]:
        """Of all complete updates, the norm of the gradient that the optimizers were given."""
        complete = {number: found for number, found in self._squares.items() if len(found) == self._names}
        return {number: math.sqrt(math.fsum(found.values())) for number, found in complete.items()}
