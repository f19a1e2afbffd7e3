"""Silent edges of plain training, run by one process or by several: what each ends with, or what it refuses to do."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Pipeline, Precision
from penstock.errors import PenstockError
from support.plain_training import MICROBATCHES, SAMPLES, PlainTraining, make_data, make_model, sgd

METHODS = ("1f1b", "2bw")
AS_IN_TORCH = Precision(divisor=float(SAMPLES))  # gradients have the scale that hooks see in plain torch


def nothing(_: Any) -> None:
    """No change."""


def hook_gradients(model: nn.Sequential) -> None:
    """Hooks that are not linear, and hooks that return nothing."""
    for name in ("0.weight", "2.bias", "4.weight"):
        model.get_parameter(name).register_hook(lambda g: g.clamp(-0.02, 0.03))
        model.get_parameter(name).register_hook(lambda g: None)


def hook_accumulated(model: nn.Sequential) -> None:
    """Hooks after a gradient has been accumulated."""

    def halve(p: nn.Parameter) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    for name in ("0.weight", "4.bias"):
        model.get_parameter(name).register_post_accumulate_grad_hook(halve)


def write(model: nn.Sequential) -> None:
    """Other values in the same memory, of the first stage only; its peers hear of it."""
    with torch.no_grad():
        model[0].weight.mul_(0.5).add_(0.01)


def assign(model: nn.Sequential) -> None:
    """Other values in other memory."""
    for p in model.parameters():
        p.data = p.data * 0.5 + 0.01


def freeze(model: nn.Sequential) -> None:
    """A parameter is trained no more."""
    model[0].weight.requires_grad_(False)


class Assigning(torch.optim.Optimizer):
    """Assigns new tensors to its parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make new weights beside the old ones."""
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data = p - 0.1 * p.grad


def with_step_hook(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD that scales its gradients in a hook before each step."""
    optimizer = sgd(parameters)

    def scale(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad.mul_(0.5)

    optimizer.register_step_pre_hook(scale)
    return optimizer


def tie(model: nn.Sequential) -> None:
    """One parameter in two places, which are in two stages."""
    model[4].bias = model[0].extra = nn.Parameter(torch.full((2,), 0.5, dtype=torch.double))


def share_memory(model: nn.Sequential) -> None:
    """Two parameters over one memory, in two stages."""
    model[4].weight = nn.Parameter(model[2].weight.detach()[:2])


def refill(batches: list[Any]) -> Iterable[Any]:
    """The same tensors with new values."""
    x, y = (torch.empty_like(part) for part in batches[0])
    for inputs, targets in batches:
        yield x.copy_(inputs), y.copy_(targets)


def fresh(batches: list[Any]) -> Iterable[Any]:
    """Tensors of their own."""
    return iter(batches)


def no_optimizer(_: Iterable[nn.Parameter]) -> Any:
    """A factory that forgets its return."""


HABITS: dict[str, dict[str, Any]] = {
    "none": {},
    "hooks of gradients": {"before": hook_gradients},
    "hooks after accumulation": {"before": hook_accumulated},
    "weights written between runs": {"between": write},
    "weights assigned between runs": {"between": assign},
    "a parameter frozen between runs": {"between": freeze},
    "an optimizer that assigns": {"optimizer": Assigning},
    "a step hook": {"optimizer": with_step_hook},
    "a tied parameter": {"before": tie},
    "shared memory": {"before": share_memory},
    "a loader that refills": {"loader": refill},
    "a factory of nothing": {"optimizer": no_optimizer},
}
"""What is done before a pipeline is made or between two runs, with which optimizer and loader."""

PLAIN = tuple(name for name in HABITS if name.startswith(("none", "hooks", "weights", "an optimizer", "a step")))
"""Those that plain torch does, too, and with the same numbers."""


def train(group: Any, name: str, method: str) -> dict[str, Any]:
    """Train in two runs by a habit.

    Args:
        group: of the processes, one per stage; None for all stages in this one.

    Returns:
        The weights of the stages here and, on the first rank, of all; the updates of all stages as a hook has seen
        them; and the error if the habit was refused.
    """
    habit = {"before": nothing, "between": nothing, "optimizer": sgd, "loader": fresh} | HABITS[name]
    model, seen, result = make_model(), list[str](), dict[str, Any]()
    make: Callable[..., Any] = habit["optimizer"]
    try:
        habit["before"](model)
        pipeline = Pipeline(
            model, method=method, microbatches=MICROBATCHES, loss=F.mse_loss,
            optimizer=lambda named: make([p for _, p in named]), group=group, precision=AS_IN_TORCH,
            **({} if group else {"stages": 2}),
        )  # fmt: skip
        pipeline.on_update(
            lambda update, weights: seen.extend(f"{update} {n} {_digest(w)}" for n, w in weights.items())
        )
        list(pipeline.run(habit["loader"](make_data()[:2])))
        habit["between"](model)
        list(pipeline.run(habit["loader"](make_data()[2:])))
        result |= {"own": pipeline.state_dict(), "weights": dict(pipeline.full_state_dict())}
    except (PenstockError, TypeError) as error:
        result["error"] = f"{type(error).__name__}: {error}"
    if group is not None and "error" not in result:
        everything: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everything, seen, group=group)
        seen = [line for part in everything for line in part]
    return result | {"updates": sorted(seen)}


def train_plainly(name: str, method: str) -> dict[str, Tensor]:
    """The same in plain torch; returns the weights at the end."""
    habit = {"before": nothing, "between": nothing, "optimizer": sgd} | HABITS[name]
    model = make_model()
    habit["before"](model)
    plain = PlainTraining(model, habit["optimizer"], delay=int(method == "2bw"))
    plain.run(make_data()[:2])
    habit["between"](plain.model)
    if habit["between"] is not nothing:
        plain.older = []  # under 2bw, too, the next batch reads what was written
    plain.run(make_data()[2:])
    return dict(plain.model.state_dict())


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().numpy().tobytes()).hexdigest()[:12]
