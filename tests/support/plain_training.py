"""A small model trained by a pipeline and by plain torch in one process, to compare what users do by habit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Pipeline

SAMPLES, MICROBATCHES = 8, 2
Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def make_model() -> nn.Sequential:
    """Three layers in double precision, so that only rounding of another kind shows."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def make_data(count: int = 4) -> list[Batch]:
    """Batches of 8 samples."""
    generator = torch.Generator().manual_seed(2)
    shapes = (SAMPLES, 3), (SAMPLES, 2)
    return [tuple(torch.randn(s, generator=generator, dtype=torch.double) for s in shapes) for _ in range(count)]  # type: ignore[misc]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def pipeline_of_model(
    model: nn.Sequential | list[Any], optimizer: MakeOptimizer = sgd, method: Any = "1f1b", **options: Any
) -> Pipeline:
    """A pipeline of two stages; its optimizer gets parameters without their names."""
    return Pipeline(
        model,
        method=method,
        stages=2,
        microbatches=MICROBATCHES,
        loss=F.mse_loss,
        optimizer=lambda named: optimizer([p for _, p in named]),
        **options,
    )


class PlainTraining:
    """Training in plain torch, microbatch by microbatch, on weights that are `delay` updates old.

    Attributes:
        model: with the newest weights.
        optimizer: of its parameters.
        older: the weights of the updates before, the newest last, or with `ahead` each moved on by `delay` times the
            update that made it.
    """

    def __init__(self, model: nn.Module, optimizer: MakeOptimizer = sgd, delay: int = 0, ahead: bool = False) -> None:
        self.model, self.optimizer, self.delay = model, optimizer(model.parameters()), delay
        self.older: list[dict[str, Tensor]] = []
        self._ahead = ahead
        self._before: dict[str, Tensor] = {}

    def run(self, batches: Sequence[Batch]) -> None:
        """Make an update with each batch: the loss of each microbatch is divided by their number."""
        for inputs, targets in batches:
            with self._passes():
                for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
                    (F.mse_loss(self.model(x), y) / MICROBATCHES).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()

    def update(self, microbatches: Iterable[tuple[Any, Any]], loss: Callable[[Any, Any], tuple[Tensor, Any]]) -> float:
        """Make an update with pairs of inputs and targets, and return the loss.

        Args:
            microbatches: of a batch. A dict or a tuple are the arguments of the model.
            loss: returns a sum and its weight, by which all are divided in the end.
        """
        total, weight = 0.0, 0.0
        with self._passes():
            for inputs, targets in microbatches:
                part, count = loss(called_with(self.model, inputs), targets)
                part.backward()  # type: ignore[no-untyped-call]
                total, weight = total + float(part.detach()), weight + float(count)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= 1 / weight
        self.optimizer.step()
        return total / weight

    @contextmanager
    def _passes(self) -> Iterator[None]:
        """Give the model the weights that passes read."""
        newest = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        before = self._before if self.older and self._ahead else newest
        self.older.append({name: w + self.delay * (w - before[name]) for name, w in newest.items()})
        self._before = newest
        self._set(self.older[max(len(self.older) - 1 - self.delay, 0)])
        self.optimizer.zero_grad()
        yield
        self._set(newest)

    @torch.no_grad()
    def _set(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(weights[name])


def called_with(model: nn.Module, inputs: Any) -> Any:
    """Call a model: a dict by name, a tuple by position."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def assert_close_weights(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Compare two states up to rounding in double precision."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")
