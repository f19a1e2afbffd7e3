"""Proxies that take the place of a stage's weights while a forward runs, so that what reads a weight is intercepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import CapabilityError


class WeightOperation(NamedTuple):
    """An operation that reads weights, and other tensors as well.

    Attributes:
        func, args, kwargs: the operation, on the tensors that proxies represent.
        tensors: all tensors that it reads, proxies included.
        names: names of the weights among them, by identity; empty for tensors computed from weights.
    """

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: Sequence[Tensor]
    names: Mapping[int, str]


class Splitting(Protocol):
    """What operations that read weights are handed to while a forward runs."""

    @property
    def known(self) -> Mapping[Callable[..., Any], Callable[..., Tensor | None]]:
        """What runs an operation on proxies by itself, and returns None where only `run` can."""

    def run(self, operation: WeightOperation) -> Any:
        """Run any operation that reads weights."""

    def share(self, names: Iterable[str]) -> None:
        """Note weights whose gradients are summed before they are added to those of other microbatches."""


class WeightProxy(Tensor):
    """A proxy for a weight, or for a tensor computed from weights alone, that intercepts the operations that read it.

    It shares the memory of the weight. It never enters a graph, except through a custom autograd Function: then the
    gradients go on to the weight.

    Attributes:
        plain: the tensor that it represents.
        detached: the same memory, without a gradient.
        key: name of the weight; empty for a tensor computed from weights.
        owner: the set of proxies that it belongs to.
    """

    __slots__ = ("detached", "key", "owner", "plain")  # apart from the attributes of the parameter, in `__dict__`

    plain: Tensor
    detached: Tensor
    key: str
    owner: ProxyWeights

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation on the represented tensors, detached from the graph if it also reads others."""
        kwargs = kwargs or {}
        splitting = _splitting_of(args, kwargs)
        if splitting is not None and func in splitting.known and torch.is_grad_enabled():
            found = splitting.known[func](*args, **kwargs)
            if found is not None:
                return found
        if func in (torch.autograd.grad, torch.autograd.backward):
            raise CapabilityError(
                "a block asks for the gradients of its own weights while it runs, which are not in its graph where the "
                "backward is made in two halves; take an order without I and W, such as 1f1b"
            )
        tensors: list[Tensor] = []
        collect_tensors((*args, *kwargs.values()) if kwargs else args, tensors)
        proxies = [tensor for tensor in tensors if isinstance(tensor, WeightProxy)]
        plain = {id(proxy): proxy.plain for proxy in proxies}
        args = [replaced(value, plain) for value in args]
        kwargs = {key: replaced(value, plain) for key, value in kwargs.items()}
        owner = proxies[0].owner
        splitting = owner.splitting
        if splitting is None or not torch.is_grad_enabled() or _writes(func, kwargs):
            return func(*args, **kwargs)
        if len(proxies) < len(tensors):
            names = {id(proxy.plain): proxy.key for proxy in proxies}
            return splitting.run(WeightOperation(func, args, kwargs, tensors, names))
        splitting.share(proxy.key for proxy in proxies)
        return pytree.tree_map(owner.proxy_of, func(*args, **kwargs))


class ProxyWeights:
    """Proxies for the weights of a stage.

    Attributes:
        tensors: name -> proxy, to be bound to the modules instead of the weight.
        splitting: runs the operations that read them; None while no forward is split.
    """

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        self.splitting: Splitting | None = None
        self.tensors = {name: self.proxy_of(leaf, name) for name, leaf in leaves.items()}

    def proxy_of(self, value: Any, name: str = "") -> Any:
        """Make a proxy for a tensor through which weights are trained; return other values as they are."""
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        proxy: WeightProxy = value.as_subclass(WeightProxy)
        proxy.plain, proxy.detached, proxy.key, proxy.owner = value, value.detach(), name, self
        return proxy


def collect_tensors(values: Iterable[Any], found: list[Tensor]) -> None:
    """Append the tensors among some values, and in lists, tuples and dicts of them, to `found`."""
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            collect_tensors(value, found)
        elif isinstance(value, dict):
            collect_tensors(value.values(), found)


def replaced(value: Any, others: Mapping[int, Tensor]) -> Any:
    """Replace tensors in a value, by identity."""
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if isinstance(value, list | tuple | dict):
        return pytree.tree_map(lambda leaf: others.get(id(leaf), leaf), value)
    return value


def _splitting_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Splitting | None:
    """Return what runs an operation, by the first proxy among its arguments, without a look into lists."""
    for value in args:
        if type(value) is WeightProxy:
            return value.owner.splitting
    for value in kwargs.values():
        if type(value) is WeightProxy:
            return value.owner.splitting
    return None


def _writes(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if an operation writes into one of its arguments."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith("__i") or name in ("__setitem__", "__set__") or kwargs.get("out") is not None
