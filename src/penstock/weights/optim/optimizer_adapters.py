"""Optimizer adapters: several optimizers as one, and optimizers of other libraries with state by parameter.

A stage has one optimizer, which may be stepped with a few parameters at a time and whose state a snapshot holds by
parameter, so that it loads at another depth. `Joined` joins several, each with its own parameters (Muon for matrices,
AdamW for the rest). `ByParameter` is for classes that count steps in their groups or keep lists, as those of
pytorch-optimizer do: it calls them with one parameter at a time, and keeps their state itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import CapabilityError
from penstock.weights.optim.basis_rotation import BasisRotation
from penstock.weights.optim.muon import Muon

_ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Classes of torch whose update of an element depends on no other element."""
_STEP = "step"
_COUNT = "length"  # key of the length of a list, which a snapshot holds item by item


class Joined(Optimizer):
    """Several optimizers as one; each steps its own parameters, in the order given.

    Args:
        parts: the optimizers, which must not share parameters.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = tuple(parts)
        self._owners = {p: part for part in parts for group in part.param_groups for p in group["params"]}

    def part_of(self, parameter: nn.Parameter) -> Optimizer:
        """Return the optimizer that steps a parameter."""
        return self._owners[parameter]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step all of them."""
        loss = None if closure is None else _evaluated(closure)
        first = 0
        for part in self.parts:  # `load_state_dict` replaces groups and state; the parts need the new ones
            end = first + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[first:end], self.state
            part.step()
            first = end
        return loss


class ByParameter(Optimizer):
    """An optimizer of another library, which is called with one parameter at a time and keeps no state itself.

    Lists in its state become an entry per item, and step counters in its groups become one per parameter. Gradients
    are left unchanged, even if it would write into them. It must treat each parameter independently: no setting may
    involve all of them, such as a norm by which it clips.

    Args:
        inner: the optimizer, which must not have stepped yet.
    """

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step all parameters that have a gradient."""
        loss = None if closure is None else _evaluated(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)
        return loss

    def _step_one(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        gradient, known = parameter.grad, dict(self.state[parameter])
        assert gradient is not None
        alone = {**group, "params": [parameter], _STEP: known.pop(_STEP, 0)}
        self.inner.param_groups = [alone]
        self.inner.state = defaultdict(dict, {parameter: _with_lists(known)} if known else {})
        parameter.grad = gradient.clone()
        try:
            self.inner.step()
        finally:
            parameter.grad = gradient
        found = _without_lists(self.inner.state[parameter])
        self.inner.state = defaultdict(dict)
        self.state[parameter].clear()
        self.state[parameter].update(found, **{_STEP: alone[_STEP]})


def name_of(optimizer: Optimizer, parameter: nn.Parameter | None = None) -> str:
    """Return the class name of an optimizer; of joined ones, that of the one for `parameter` if given."""
    if isinstance(optimizer, Joined):
        if parameter is not None:
            return name_of(optimizer.part_of(parameter))
        return " and ".join(dict.fromkeys(map(name_of, optimizer.parts)))
    return type(optimizer.inner if isinstance(optimizer, ByParameter) else optimizer).__name__


def optimizer_of(optimizer: Optimizer, parameter: nn.Parameter) -> Optimizer:
    """Return the optimizer that steps a parameter: itself, or one of those that it joins."""
    return optimizer.part_of(parameter) if isinstance(optimizer, Joined) else optimizer


def optimizers_in(optimizer: Optimizer) -> Sequence[Optimizer]:
    """Return the optimizers that an optimizer joins, or itself."""
    return optimizer.parts if isinstance(optimizer, Joined) else (optimizer,)


def is_separable(optimizer: Optimizer) -> bool:
    """Return whether parameters may be stepped a few at a time; torch's own classes skip those without a gradient."""
    if isinstance(optimizer, Joined):
        return all(map(is_separable, optimizer.parts))
    return isinstance(optimizer, ByParameter | BasisRotation | Muon) or type(optimizer).__module__.startswith(
        "torch.optim"
    )


def takes_rows(optimizer: Optimizer) -> bool:
    """Return whether an optimizer can step some rows of a parameter; if not, it must have whole parameters.

    Raises:
        CapabilityError: it may look at several parameters together.
    """
    if not is_separable(optimizer):
        raise CapabilityError(
            f"{name_of(optimizer)} may look at several parameters together, but with sharding each pipeline steps some "
            "of them; use an optimizer of torch (penstock train: any of its own), or set sharding to none"
        )
    return all(type(part) in _ELEMENTWISE for part in optimizers_in(optimizer))


def check_averages(optimizer: Optimizer, averages: bool) -> None:
    """Raise an error if optimizer state is to be averaged over pipelines and cannot be.

    Raises:
        CapabilityError: it holds orthogonal matrices, whose mean is not orthogonal.
    """
    for part in optimizers_in(optimizer):
        if averages and (isinstance(part, BasisRotation) or name_of(part) == "SOAP"):
            raise CapabilityError(
                f"{name_of(part)} holds orthogonal bases, whose mean is not orthogonal; use optimizer_state=keep or "
                "reset"
            )


def _without_lists(state: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, list):
            found[key] = value
            continue
        found[f"{key}.{_COUNT}"] = len(value)
        found |= {f"{key}.{i}": item for i, item in enumerate(value) if isinstance(item, Tensor)}
    return found


def _with_lists(state: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the lists; an item that is no tensor is an empty list, SOAP's sign for a side without a basis."""
    lists = {key.removesuffix(f".{_COUNT}"): n for key, n in state.items() if key.endswith(f".{_COUNT}")}
    found = {key: value for key, value in state.items() if key.partition(".")[0] not in lists}
    for key, n in lists.items():
        found[key] = [state.get(f"{key}.{i}", []) for i in range(n)]
    return found


def _evaluated(closure: Callable[[], float]) -> float:
    with torch.enable_grad():
        return closure()
