"""Follows the forward of a module with a stand-in for its input (torch.fx), and refuses where that says too little.

Whatever a graph would not show is refused: parts without gradients, in another precision or with a backward of their
own, what depends on the mode or the type of a value, and what a forward keeps on the module.
"""

from __future__ import annotations

import dis
import inspect
import random
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import Node

_MAKERS = (torch.arange, torch.zeros, torch.ones, torch.full, torch.linspace, torch.empty, torch.eye)  # of sizes
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class CannotFollowError(Exception):
    """Why no blocks can be proposed."""


class Guard:
    """Has methods which, as hooks before the forward of a module, refuse its use, and otherwise change nothing."""


def forward_graph(model: nn.Module) -> fx.Graph:
    """Return the graph of a forward that gets its first argument only.

    Raises:
        CannotFollowError: it does something that a graph would not show.
    """
    if any(map(hooked, (model, *_layered(model)))):
        raise CannotFollowError("it has hooks, which blocks would not call")
    if type(model).__call__ is not nn.Module.__call__ or "forward" in vars(model):
        raise CannotFollowError("it is called in a way of its own")
    graph, other = (_trace(model, training) for training in (True, False))
    if str(graph) != str(other):
        raise CannotFollowError("it does something else in training, beside its modules (use an nn.Dropout)")
    return graph


def hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks that run when it is called."""
    return any(getattr(module, kind) for kind in _HOOKS)


@contextmanager
def without_guards(model: nn.Module) -> Iterator[None]:
    """Take the hooks of guards from all modules of a model meanwhile, so that its forward is like any other."""
    before = []
    try:
        for module in model.modules():
            hooks = module._forward_pre_hooks
            guards = [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), Guard)]
            if guards:
                before.append((hooks, dict(hooks)))
            for key in guards:
                del hooks[key]
        yield
    finally:
        for hooks, held in before:
            hooks.clear()
            hooks.update(held)


class _Value(fx.Proxy):
    """Stands in for a tensor, whose in-place operators are what they are, as are assertions about it."""

    def __bool__(self) -> bool:
        frame = inspect.currentframe()
        if frame is not None and frame.f_back is not None and _asserts(frame.f_back):
            self.tracer.create_proxy("call_function", torch._assert, (self, "an assertion of the model fails"), {})
            return True
        return super().__bool__()

    def __iadd__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_method", "add_", (self, other), {})

    def __isub__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_method", "sub_", (self, other), {})

    def __imul__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_method", "mul_", (self, other), {})

    def __itruediv__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_method", "div_", (self, other), {})


def _asserts(frame: FrameType) -> bool:
    """Return whether a frame asks for the truth of a value in an assert statement."""
    steps = [step for step in dis.get_instructions(frame.f_code) if step.offset >= frame.f_lasti][:3]
    return any("IF_TRUE" in jump.opname and _raises(following) for jump, following in pairwise(steps))


def _raises(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_ASSERTION_ERROR" or step.argrepr == "AssertionError"


def _has_layers(module: nn.Module) -> bool:
    layered = any(isinstance(child, nn.ModuleList) for child in module.children())
    return layered and not type(module).__module__.startswith("torch.")


def _layered(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if _has_layers(module)]


def _check_source(module: nn.Module) -> None:
    """Refuse a forward that asks for types, of which a stand-in has another one.

    Raises:
        CannotFollowError: it does.
    """
    code = getattr(type(module).forward, "__code__", None)
    asked = {"isinstance", "is_tensor", "type"} & set(code.co_names if code is not None else ())
    if asked:
        raise CannotFollowError(f"it asks for types ({sorted(asked)[0]})")


class _Follower(fx.Tracer):
    """Follows a forward into modules with layers inside, and takes all others as they are."""

    proxy_buffer_attributes = True

    def __init__(self, deep: bool) -> None:
        super().__init__(autowrap_functions=_MAKERS)
        self._autowrap_search.append(torch)
        self._deep = deep
        self._grad = torch.is_grad_enabled()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        if not self._deep or not _has_layers(m):
            return True
        _check_source(m)
        return False

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:  # noqa: ARG002
        """Give the forward its first argument only, so that others have their defaults."""
        _check_source(self.root)
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        if len(needed) > 1:
            raise CannotFollowError(f"it takes {len(needed)} values ({', '.join(needed)}), and a block takes one")
        return root_fn, [self.root, self.create_proxy("placeholder", "x", (), {})]

    def proxy(self, node: Node) -> fx.Proxy:
        """Return the stand-in for a value."""
        return _Value(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        """Note what is not part of the graph."""
        if torch.is_grad_enabled() != self._grad:
            raise CannotFollowError("it has a part under torch.no_grad(), or a torch.autograd.Function")
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise CannotFollowError("it has a part under torch.autocast")
        return super().create_node(*args, **kwargs)


def _trace(model: nn.Module, training: bool) -> fx.Graph:
    failed: Exception | None = None
    for deep in (True, False):
        try:
            with _kept(model, training):
                return _Follower(deep).trace(model)
        except CannotFollowError:
            raise
        except Exception as error:  # whatever a forward does with a stand-in
            failed = failed or error
    raise CannotFollowError(f"it looks at its input ({type(failed).__name__}: {first_sentence(failed)})") from failed


def first_sentence(error: Exception | None) -> str:
    """Return the first sentence of what an error says, and a few words of it if that is long."""
    sentence = str(error).strip().partition("\n")[0].partition(". ")[0]
    return textwrap.shorten(sentence, 120, placeholder=" ...")


@contextmanager
def _kept(model: nn.Module, training: bool) -> Iterator[None]:
    """Put all modules into a mode, and take back whatever the forward changes on them, and what it draws.

    Raises:
        CannotFollowError: it changes something, or draws random numbers.
    """
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    drawn, drawn_by_torch = random.getstate(), torch.get_rng_state()
    for module, *_ in before:
        module.training = training
    changed = []
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            now = {k: v for k, v in vars(module).items() if k != "training"}
            known = {k: v for k, v in attributes.items() if k != "training"}
            changed += [k for k in now.keys() | known.keys() if now.get(k) is not known.get(k)]
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        draws = random.getstate() != drawn or not torch.equal(torch.get_rng_state(), drawn_by_torch)
        random.setstate(drawn)
        torch.set_rng_state(drawn_by_torch)
    made = [name for name in changed if name.startswith("_tensor_constant")]
    if made:
        raise CannotFollowError("it makes a tensor of its own, whatever the input (register it as a buffer)")
    if changed:
        raise CannotFollowError(f"it keeps something on the module ({changed[0]})")
    if draws:
        raise CannotFollowError("it draws random numbers beside its modules")
