"""Optimizer adapters: several optimizers as one, and optimizers of other libraries with state by parameter.

A stage has one optimizer, which may be stepped with a few parameters at a time and whose state a snapshot holds by
parameter, so that it loads at another depth. `Joined` joins several, each with its own parameters (Muon for matrices,
AdamW for the rest). `ByParameter` is for classes that count steps in their groups or keep lists, as those of
pytorch-optimizer do: it calls them with one parameter at a time, and keeps their state itself.
"""

from __future__ import annotations

import copy
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
_STEP, _OWN_STEP = "step", "own.step"
_NUMBERS = (bool, int, float, Tensor)
_UPDATES, _SIDE = 4, 8  # of a rehearsal: updates, and the longest side of its parameters
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

    What it keeps for a parameter becomes the state of that parameter, as does what it counts or changes in its groups
    (`group.KEY`, but `step` for a step counter) and in numbers of its own (`self.NAME`); lists become an entry per
    item, and a step counter of a parameter is `own.step`. Gradients are left unchanged, even if it would write into
    them.
    It must treat each parameter independently: no setting may involve all of them, such as a norm by which it clips.

    Args:
        inner: the optimizer, which must not have stepped yet.
        rehearsed: its class is known to make the same updates so; otherwise a few are tried on small parameters.

    Raises:
        CapabilityError: its updates are others with one parameter at a time, or from a state that was saved.
    """

    def __init__(self, inner: Optimizer, *, rehearsed: bool = False) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        parameters = [p for group in inner.param_groups for p in group["params"]]
        if not rehearsed and not any(p.is_meta for p in parameters):
            _rehearse(inner, parameters)

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
        gradient, inner = parameter.grad, self.inner
        assert gradient is not None
        known, counted, numbers = _apart(self.state[parameter])
        alone = {key: _copied(value) for key, value in group.items() if key != "params"} | counted
        alone["params"] = [parameter]
        before = {key: value for key, value in vars(inner).items() if isinstance(value, _NUMBERS)}
        inner.param_groups = [alone]
        inner.state = defaultdict(dict, {parameter: _with_lists(known)} if known else {})
        vars(inner).update({key: _copied(value) for key, value in before.items()} | numbers)
        parameter.grad = gradient.clone()
        try:
            inner.step()
            found = _joined(
                _without_lists(inner.state[parameter]), _changed(group, alone), _changed(before, vars(inner))
            )
            if len(inner.state) > 1:
                other = next(key for key in inner.state if key is not parameter)
                raise CapabilityError(f"{name_of(self)} keeps state by {other!r:.40}, not by parameter")
        finally:
            parameter.grad, inner.state = gradient, defaultdict(dict)
            for key in _changed(before, vars(inner)):
                vars(inner).pop(key)
            vars(inner).update(before)
        self.state[parameter].clear()
        self.state[parameter].update(found)


def _apart(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return what a class has kept for one parameter: in its state, in its group, and in numbers of its own."""
    known, counted, numbers = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for key, value in state.items():
        kind, _, rest = key.partition(".")
        if key == _STEP or (kind == "group" and rest):
            counted[rest or key] = _copied(value)
        elif kind == "self" and rest:
            numbers[rest] = _copied(value)
        else:
            known[_STEP if key == _OWN_STEP else key] = value
    return known, counted, numbers


def _joined(known: Mapping[str, Any], counted: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of which `_apart` returns the parts."""
    found = {_OWN_STEP if key == _STEP else key: value for key, value in known.items()}
    found |= {key if key == _STEP else f"group.{key}": value for key, value in counted.items()}
    return found | {f"self.{key}": value for key, value in numbers.items()}


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is new or another value, but for parameters; of attributes only numbers."""
    attributes = "params" not in before
    return {
        key: value
        for key, value in now.items()
        if key != "params"
        and not (attributes and not isinstance(value, _NUMBERS))
        and not (key in before and _equal(before[key], value))
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or (type(one) is type(other) and bool(one == other))


def _copied(value: Any) -> Any:
    """Return a value that a class may change in place, leaving the original as it is."""
    return copy.deepcopy(value) if isinstance(value, Tensor | list | dict | set) else value


def _rehearse(inner: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Make sure that updates with one parameter at a time are those with all, from what is in the state alone.

    Raises:
        CapabilityError: they are not, or cannot be made.
    """
    name, random = type(inner).__name__, torch.Generator().manual_seed(0)
    try:
        (whole, stands), (begun, _) = _twin(inner, parameters), _twin(inner, parameters)
        states: list[dict[str, Any]] = [{} for _ in stands]
        with torch.random.fork_rng(devices=[]):
            for update in range(_UPDATES):
                single, others = _twin(inner, parameters)
                apart = ByParameter(single, rehearsed=True)
                for stand, other, state in zip(stands, others, states, strict=True):
                    other.data.copy_(stand.detach())
                    apart.state[other] = state
                    drawn = torch.randn(stand.shape, dtype=stand.dtype, generator=random).to(stand.device)
                    stand.grad, other.grad = drawn.clone(), drawn
                for optimizer in (whole, apart):
                    torch.manual_seed(update)
                    optimizer.step()
                states = [apart.state[other] for other in others]
                if any("group.lr" in state for state in states):
                    raise CapabilityError("it sets lr itself, which schedules set at every update")
                wanted = _states(whole, begun)
                for stand, other, state in zip(stands, others, states, strict=True):
                    _check_same({"a weight": stand.detach()}, {"a weight": other.detach()})
                    _check_same(wanted[stand], state)
                    held = {key: value for key, value in state.items() if value is not None}
                    for key in (key for key, value in held.items() if not isinstance(value, (*_NUMBERS, str))):
                        raise CapabilityError(
                            f"it keeps a {type(held[key]).__name__} in {key}, which no checkpoint holds"
                        )
    except Exception as error:
        reason = str(error).partition("\n")[0] or f"it raises {type(error).__name__}"
        raise CapabilityError(
            f"{name} cannot be stepped with one parameter at a time ({reason}, in a trial on small ones); pass it "
            "without ByParameter, which steps all parameters of a stage at once"
        ) from error


def _states(whole: Optimizer, begun: Optimizer) -> dict[nn.Parameter, dict[str, Any]]:
    """Return what of an optimizer that steps all parameters is the state of each, as `ByParameter` keeps it."""
    numbers = _changed(vars(begun), vars(whole))
    return {
        p: _joined(_without_lists(whole.state.get(p, {})), _changed(before, group), numbers)
        for before, group in zip(begun.param_groups, whole.param_groups, strict=True)
        for p in group["params"]
    }


def _check_same(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Make sure that two states are the same; NaN equals itself.

    Raises:
        CapabilityError: they are not.
    """
    for key in sorted(wanted.keys() | found.keys()):
        one, other = wanted.get(key), found.get(key)
        if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape:
            if bool(((one == other) | ((one != one) & (other != other))).all()):
                continue
        elif one == other or (one != one and other != other):
            continue
        raise CapabilityError(f"{key} would be another than with all at once")


def _twin(inner: Optimizer, parameters: Sequence[nn.Parameter]) -> tuple[Optimizer, list[nn.Parameter]]:
    """Return a copy of an optimizer that steps small parameters, and these."""
    corners = [p.detach()[tuple(slice(_SIDE) for _ in p.shape)] for p in parameters]
    stands = [nn.Parameter(corner.clone(memory_format=torch.contiguous_format)) for corner in corners]
    twin: Optimizer = object.__new__(type(inner))
    copies: dict[int, Any] = {id(p): stand for p, stand in zip(parameters, stands, strict=True)} | {id(inner): twin}
    vars(twin).update(copy.deepcopy(vars(inner), copies))
    return twin, stands


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
