"""Habits within the loop over batches, which is that over reports here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.habits import WIDTH, Differs, Refused, Script, around, habit, regression

LOOP = "In the loop"
F64 = torch.float64


class Tempered(nn.Module):
    """A nonlinearity with a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.tau = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / self.tau)


@habit(LOOP)
def annealed() -> Script:
    """A temperature on a module is annealed (`block.tau = ...`)."""

    def anneal(number: int, blocks: dict[str, Any]) -> None:
        blocks["second"].tau = blocks["third"].tau = 1 / (number + 2)

    return Script(around(Tempered), regression(), in_loop=anneal)


@habit(LOOP)
def annealed_loss() -> Script:
    """A weight of the loss is annealed."""
    weight = {"beta": 1.0}

    def anneal(number: int, blocks: dict[str, Any]) -> None:
        weight["beta"] = 1 / (number + 2)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return weight["beta"] * F.mse_loss(output, target)

    return Script(around(nn.Tanh), regression(), loss, in_loop=anneal)


def normed() -> nn.Module:
    return nn.BatchNorm1d(WIDTH, dtype=F64)


@habit(LOOP)
def left_in_eval() -> Script:
    """`model.eval()` for a validation, and `model.train()` is forgotten; gradients accumulated in plain torch, too."""

    def forget(number: int, blocks: dict[str, Any]) -> None:
        for block in blocks.values():
            block.eval()

    return Script(around(normed), regression(), in_loop=forget, accumulates=True)


@habit(LOOP)
def eval_and_train() -> Script:
    """`model.eval()` for a validation, and `model.train()` again; the same."""

    def validate(number: int, blocks: dict[str, Any]) -> None:
        for block in blocks.values():
            block.eval()
        for block in blocks.values():
            block.train()

    return Script(around(normed), regression(), in_loop=validate, accumulates=True)


@habit(LOOP)
def hooked_later() -> Script:
    """A forward hook is registered."""

    def register(number: int, blocks: dict[str, Any]) -> None:
        if not number:
            blocks["second"].register_forward_hook(lambda module, given, output: output / 2)

    return Script(around(nn.Tanh), regression(), in_loop=register)


FORGOTTEN = "batches are in flight there, and graphs need them; write between two runs"


@habit(LOOP, Refused("write between two runs", FORGOTTEN))
def reset_statistics() -> Script:
    """Statistics are reset (`reset_running_stats()`)."""

    def reset(number: int, blocks: dict[str, Any]) -> None:
        blocks["second"].reset_running_stats()

    return Script(around(normed), regression(), in_loop=reset, accumulates=True)


SETTLED = "what is trained is settled when the pipeline is made; make a new one"


@habit(LOOP, Refused("requires_grad of first.weight was changed in the loop", SETTLED))
def frozen_later() -> Script:
    """A layer is frozen (`requires_grad_(False)`)."""

    def freeze(number: int, blocks: dict[str, Any]) -> None:
        blocks["first"].requires_grad_(False)

    return Script(around(nn.Tanh), regression(), in_loop=freeze)


@habit(LOOP)
def forgetful_optimizer() -> Script:
    """The state of the optimizer is cleared (`optimizer.state.clear()`)."""
    made = []

    def make(named: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(named, lr=0.1, momentum=0.9))
        return made[-1]

    def clear(number: int, blocks: dict[str, Any]) -> None:
        for optimizer in made:
            optimizer.state.clear()

    return Script(around(nn.Tanh), regression(), optimizer=make, in_loop=clear)


STEPPED = "updates lag behind reports; pass `lr_scheduler`, or set the rate between two runs"


@habit(LOOP, Refused("was set from 0.1 to", STEPPED))
def rate_by_hand() -> Script:
    """The learning rate is set (`group["lr"] = ...`)."""
    made = []

    def make(named: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(named, lr=0.1, momentum=0.9))
        return made[-1]

    def decay(number: int, blocks: dict[str, Any]) -> None:
        for optimizer in made:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (number + 2)

    return Script(around(nn.Tanh), regression(), optimizer=make, in_loop=decay)


class Growing:
    """Batches that become harder."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in regression():
            yield inputs * self.scale, targets


AHEAD = "batches are fetched ahead, as by a `DataLoader` with workers; let the data count batches by themselves"


@habit(LOOP, Differs(AHEAD), stash=None)
def curriculum() -> Script:
    """The dataset is changed for the next batch (a curriculum)."""
    batches = Growing()

    def harder(number: int, blocks: dict[str, Any]) -> None:
        batches.scale = number + 2.0

    return Script(around(nn.Tanh), batches, in_loop=harder)


LAG = "updates lag behind reports, so these are weights of before; use `Evaluating`, `Checkpoints`, `on_update`"


def looking(look: Any) -> Script:
    """A script that ends with what was seen in the loop."""
    seen: dict[str, Tensor] = {}

    def note(number: int, blocks: dict[str, Any]) -> None:
        seen[f"seen {number}"] = look(blocks)

    both = (lambda model: dict(seen), lambda pipeline: dict(seen))
    return Script(around(nn.Tanh), regression(), in_loop=note, result=both)


@habit(LOOP, Differs(LAG))
def best_weights() -> Script:
    """The best weights are kept (`copy.deepcopy(model.state_dict())`)."""
    return looking(lambda blocks: blocks["first"].state_dict()["weight"].clone())


@habit(LOOP, Differs(LAG))
def validated() -> Script:
    """A validation by the model itself (`with torch.no_grad(): model(x)`)."""

    def look(blocks: dict[str, Any]) -> Tensor:
        x = torch.ones(2, WIDTH, dtype=F64)
        with torch.no_grad():
            for block in blocks.values():
                x = block(x)
        return x

    return looking(look)
