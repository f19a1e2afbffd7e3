"""The blocks of a whole model, found by following its forward with a stand-in for the input (torch.fx).

Blocks are cut where one value is alive. What lies between two cuts is a module of the model, a function, or a few of
them with whatever else the forward does there, written out as a class. Where the forward cannot be followed, or the
blocks would not compute what it does, there are none.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument, Node

_MAKERS = (torch.arange, torch.zeros, torch.ones, torch.full, torch.linspace, torch.empty, torch.eye)  # of sizes
_INFIX = MappingProxyType(
    {
        operator.add: "+",
        operator.sub: "-",
        operator.mul: "*",
        operator.truediv: "/",
        operator.floordiv: "//",
        operator.mod: "%",
        operator.pow: "**",
        operator.matmul: "@",
    }
)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class CannotFollowError(Exception):
    """Why no blocks can be proposed."""


class BlockLines:
    """Lines that make the blocks of a model.

    Attributes:
        classes: that they need, each as a text.
        items: of a dict of blocks.
    """

    def __init__(self) -> None:
        self.classes: list[str] = []
        self.items: list[str] = []


def blocks_of_forward(model: nn.Module) -> BlockLines:
    """Return the lines that cut a model.

    Raises:
        CannotFollowError: there are none that compute the same.
    """
    if any(map(_hooked, (model, *_layered(model)))):
        raise CannotFollowError("it has hooks, which blocks would not call")
    if type(model).__call__ is not nn.Module.__call__ or "forward" in vars(model):
        raise CannotFollowError("it is called in a way of its own")
    graph, other = (_trace(model, training) for training in (True, False))
    if str(graph) != str(other):
        raise CannotFollowError("it does something else in training, beside its modules (use an nn.Dropout)")
    return _Cut(model, graph).code()


class _Value(fx.Proxy):
    """Stands in for a tensor, whose in-place operators are what they are."""

    def __iadd__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_method", "add_", (self, other), {})

    def __isub__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_method", "sub_", (self, other), {})

    def __imul__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_method", "mul_", (self, other), {})

    def __itruediv__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_method", "div_", (self, other), {})


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
    reason = str(failed).strip().partition("\n")[0].partition(". ")[0]
    raise CannotFollowError(f"it looks at its input ({type(failed).__name__}: {reason:.90})") from failed


@contextmanager
def _kept(model: nn.Module, training: bool) -> Iterator[None]:
    """Put all modules into a mode, and take back whatever the forward changes on them.

    Raises:
        CannotFollowError: it changes something.
    """
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
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
    made = [name for name in changed if name.startswith("_tensor_constant")]
    if made:
        raise CannotFollowError("it makes a tensor of its own, whatever the input (register it as a buffer)")
    if changed:
        raise CannotFollowError(f"it keeps something on the module ({changed[0]})")


def _hooked(module: nn.Module) -> bool:
    return any(getattr(module, kind) for kind in _HOOKS)


class _Cut:
    """A graph that is cut where one value is alive.

    Args:
        model: whose forward it is.
        graph: of it.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self._model, self._modules = model, dict(model.named_modules(remove_duplicate=False))
        nodes = list(graph.nodes)
        self._steps = [n for n in nodes if n.op not in ("placeholder", "output", "get_attr")]
        (self._input,) = (n for n in nodes if n.op == "placeholder")
        self._output = next(n for n in nodes if n.op == "output").args[0]
        if not isinstance(self._output, Node) or not self._steps:
            raise CannotFollowError("it does not return one value that its modules compute")
        self._last = {n: max((self._at(user) for user in n.users), default=-1) for n in nodes}
        self._code = BlockLines()
        self._called: set[str] = set()
        self._names: set[str] = set()

    def _at(self, node: Node) -> int:
        return len(self._steps) if node.op == "output" else self._steps.index(node)

    def code(self) -> BlockLines:
        """Return the lines.

        Raises:
            CannotFollowError: a part cannot be written.
        """
        begun, given = 0, self._input
        for place, _ in enumerate(self._steps):
            alive = [n for n in (self._input, *self._steps[: place + 1]) if self._last[n] > place]
            if len(alive) == 1:
                self._part(self._steps[begun : place + 1], given, alive[0])
                begun, given = place + 1, alive[0]
        if begun != len(self._steps):
            raise CannotFollowError("it computes values that it does not return")
        self._merge()
        return self._code

    def _part(self, steps: list[Node], given: Node, found: Node) -> None:
        """Write the block of some steps."""
        (first, *more) = steps
        if first.op == "call_module" and not more and first.args == (given,) and not first.kwargs:
            path = str(first.target)
            self._check_call(path)
            self._code.items.append(f"{self._name(path)!r}: {place_of(path)}")
            return
        owned = [step for step in steps if step.op == "call_module"]
        owned += dict.fromkeys(n for step in steps for n in step.all_input_nodes if n.op == "get_attr")
        writer = _Writer({given: "x"})
        texts = [(step, writer.text(step)) for step in steps]
        if not owned and len(steps) == 1 and found is first:
            self._code.items.append(f"{self._name(writer.short(first))!r}: lambda x: {texts[0][1]}")
            return
        owners: dict[str, str] = {}
        for node in owned:
            path = str(node.target)
            if node.op == "call_module":
                self._check_call(path)
            owners[path] = _owned(self._model, node)
        name = f"Part{len(self._code.classes) + 1}"
        self._code.classes.append(_class(name, owners, texts, writer.name(found)))
        self._code.items.append(f"{self._name(name.lower())!r}: {name}(model)")

    def _check_call(self, path: str) -> None:
        """Refuse a second use of weights."""
        module = self._modules[path]
        if path in self._called and next(iter((*module.parameters(), *module.buffers())), None) is not None:
            raise CannotFollowError(f"it calls {path} more than once")
        self._called.add(path)

    def _name(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self._names:
            number += 1
            name = f"{wanted}_{number}"
        self._names.add(name)
        return name

    def _merge(self) -> None:
        """Write layers in a row as one item, and the parts of a Sequential."""
        for prefix, module in self._modules.items():
            if not isinstance(module, nn.ModuleList | nn.Sequential) or not len(module):
                continue
            each = [f"{f'{prefix}.{i}'!r}: {place_of(f'{prefix}.{i}')}" for i in range(len(module))]
            items = self._code.items
            at = items.index(each[0]) if each[0] in items else -1
            if at >= 0 and items[at : at + len(each)] == each:
                items[at : at + len(each)] = [spread(prefix)]
        for path, module in self._modules.items():
            whole = f"{path!r}: {place_of(path)}" if path else ""
            if whole in self._code.items:
                at = self._code.items.index(whole)
                self._code.items[at : at + 1] = parts_of(path, module) or [whole]


def parts_of(path: str, module: nn.Module) -> list[str]:
    """Return the items of a dict with the parts that a module of torch calls in turn; none for others."""
    prefix = f"{path}." if path else ""
    if type(module) is nn.TransformerEncoder and not _hooked(module):
        norm = [] if module.norm is None else [f"'{prefix}norm': {place_of(f'{prefix}norm')}"]
        return [spread(f"{prefix}layers"), *norm]
    plain = type(module).forward is nn.Sequential.forward and type(module).__call__ is nn.Module.__call__
    if not plain or _hooked(module) or module._parameters or module._buffers or "forward" in vars(module):
        return []
    names = list(module._modules)
    if len({id(part) for part in module._modules.values()}) < len(names) or len(names) < 2:
        return []
    if names == [str(i) for i in range(len(names))]:
        return [spread(path)]
    return [f"**{{f'{path}.{{part}}': block for part, block in {place_of(path)}.named_children()}}"]


def spread(prefix: str) -> str:
    """Write the items of a dict with the parts of a list of modules."""
    return f"**{{f'{prefix}.{{i}}': block for i, block in enumerate({place_of(prefix)})}}"


def place_of(path: str) -> str:
    """Write where a module stands in the model."""
    return f"model.{path}" if all(map(str.isidentifier, path.split("."))) else f"model.get_submodule({path!r})"


def _value_of(path: str) -> str:
    owner, _, name = path.rpartition(".")
    return f"{place_of(owner)}.{name}" if owner else f"model.{name}"


def _own_name(path: str) -> str:
    return path.replace(".", "_")


def _owned(model: nn.Module, node: Node) -> str:
    """Write the line by which a class takes over a module, parameter or buffer."""
    path = str(node.target)
    owner, _, name = path.rpartition(".")
    holder, own = model.get_submodule(owner), _own_name(path)
    if node.op == "call_module":
        return f"self.{own} = {place_of(path)}"
    if name in holder._buffers:
        lasts = name not in holder._non_persistent_buffers_set
        return f"self.register_buffer({own!r}, {_value_of(path)}{'' if lasts else ', persistent=False'})"
    if not isinstance(getattr(holder, name, None), Tensor):
        raise CannotFollowError(f"a part of it takes {path}")
    return f"self.{own} = {_value_of(path)}"


def _class(name: str, owners: Mapping[str, str], texts: list[tuple[Node, str]], found: str) -> str:
    """Write a class for some steps, with what they use of the model."""
    lines = [f"class {name}(torch.nn.Module):", "    def __init__(self, model):", "        super().__init__()"]
    lines += [f"        {line}" for line in owners.values()]
    lines += ["", "    def forward(self, x):"]
    lines += [f"        {step.name} = {text}" for step, text in texts]
    if lines[-1].startswith(f"        {found} = "):
        lines[-1] = f"        return {texts[-1][1]}"
    else:
        lines.append(f"        return {found}")
    return "\n".join([*lines, ""])


class _Writer:
    """Writes steps as Python.

    Args:
        names: what some nodes are called.
    """

    def __init__(self, names: dict[Node, str]) -> None:
        self._names = names

    def name(self, node: Node) -> str:
        """Return what a node is called."""
        return f"self.{_own_name(str(node.target))}" if node.op == "get_attr" else self._names.get(node, node.name)

    def short(self, node: Node) -> str:
        """Return the name of what a step calls."""
        return str(node.target) if isinstance(node.target, str) else str(getattr(node.target, "__name__", "function"))

    def text(self, node: Node) -> str:
        """Write a step.

        Raises:
            CannotFollowError: it has no short form.
        """
        args, target = node.args, node.target
        if node.op == "call_module":
            return f"self.{_own_name(str(target))}({self._arguments(args, node.kwargs)})"
        if node.op == "call_method":
            return f"{self._value(args[0])}.{target}({self._arguments(args[1:], node.kwargs)})"
        if target in _INFIX and len(args) == 2:
            return f"{self._operand(args[0])} {_INFIX[target]} {self._operand(args[1])}"  # type: ignore[index]
        if target is operator.neg:
            return f"-{self._operand(args[0])}"
        if target is operator.getitem:
            return f"{self._value(args[0])}[{self._value(args[1])}]"
        if target is getattr and isinstance(args[1], str):
            return f"{self._value(args[0])}.{args[1]}"
        return f"{_qualified(target)}({self._arguments(args, node.kwargs)})"

    def _arguments(self, args: Any, kwargs: Mapping[str, Any]) -> str:
        return ", ".join([*map(self._value, args), *(f"{name}={self._value(value)}" for name, value in kwargs.items())])

    def _operand(self, value: Argument) -> str:
        text = self._value(value)
        return text if isinstance(value, Node) or not text.startswith("-") else f"({text})"

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.name(value)
        if isinstance(value, tuple | list):
            inner = ", ".join(map(self._value, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
        if isinstance(value, slice):
            return f"slice({self._value(value.start)}, {self._value(value.stop)}, {self._value(value.step)})"
        if value is Ellipsis:
            return "..."
        if value is None or isinstance(value, bool | int | str | torch.dtype):
            return repr(value)
        if isinstance(value, float) and value == value and abs(value) != float("inf"):
            return repr(value)
        raise CannotFollowError(f"a part of it takes {value!r:.40}")


def _qualified(target: Any) -> str:
    """Write where a function of torch stands.

    Raises:
        CannotFollowError: it is another one.
    """
    name = getattr(target, "__name__", "")
    for where in (torch, torch.nn.functional):
        if name and getattr(where, name, None) is target:
            return f"{where.__name__}.{name}"
    raise CannotFollowError(f"a part of it calls {getattr(target, '__qualname__', target)!s:.60}")
