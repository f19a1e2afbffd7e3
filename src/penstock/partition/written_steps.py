"""Steps of a graph as Python, with the class of a block that takes them."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.node import Argument, Node

from penstock.partition.followed_forward import CannotFollowError

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
        operator.lt: "<",
        operator.le: "<=",
        operator.gt: ">",
        operator.ge: ">=",
        operator.eq: "==",
        operator.ne: "!=",
    }
)
_PATH = re.compile(r"get_submodule\('([^']*)'\)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class PartLines(NamedTuple):
    """What makes a block of some steps.

    Attributes:
        takes: the lines that take over what it has of the model.
        does: those of its forward.
    """

    takes: list[str]
    does: list[str]

    @property
    def number(self) -> int | None:
        """The one number in the paths of what it takes, as of a layer; None if there is none, or several."""
        found = {int(n) for line in self.takes for path in _PATH.findall(line) for n in _NUMBER.findall(path)}
        return found.pop() if len(found) == 1 else None

    @property
    def numbered(self) -> PartLines:
        """The same for any number i."""
        takes = [
            _PATH.sub(lambda m: f"get_submodule(f'{_NUMBER.sub('{i}', m[1])}')" if _NUMBER.search(m[1]) else m[0], line)
            for line in self.takes
        ]
        return PartLines(takes, self.does)

    def text(self, name: str, argument: str = "") -> str:
        """Write the class."""
        return "\n".join(
            [
                f"class {name}(torch.nn.Module):",
                f"    def __init__(self, model{argument}):",
                "        super().__init__()",
                *[f"        {line}" for line in self.takes],
                "",
                "    def forward(self, x):",
                *[f"        {line}" for line in self.does],
                "",
            ]
        )


def part_of(model: nn.Module, steps: Sequence[Node], given: Node, found: Node) -> PartLines:
    """Return what makes a block of some steps.

    Args:
        model: whose forward they are of.
        steps: in their order.
        given: the value that they begin with.
        found: the one that they return.

    Raises:
        CannotFollowError: a step cannot be written.
    """
    owned = [step for step in steps if step.op == "call_module"]
    owned += dict.fromkeys(n for step in steps for n in step.all_input_nodes if n.op == "get_attr")
    names: dict[str, str] = {}
    for node in owned:
        wanted = _NUMBER.sub("", str(node.target)).replace("..", ".").strip(".").replace(".", "_")
        own, more = wanted, 1
        while own in names.values():
            more += 1
            own = f"{wanted}_{more}"
        names[str(node.target)] = own
    writer = StepWriter({given: "x"} | {step: f"y{n}" for n, step in enumerate(steps, 1)}, names)
    does = [f"{writer.name(step)} = {writer.text(step)}" for step in steps]
    if found is steps[-1]:
        does[-1] = f"return {writer.text(found)}"
    else:
        does.append(f"return {writer.name(found)}")
    return PartLines([_taken(model, node, names[str(node.target)]) for node in dict.fromkeys(owned)], does)


def place_of(path: str) -> str:
    """Write where a module stands in the model."""
    return f"model.{path}" if all(map(str.isidentifier, path.split("."))) else f"model.get_submodule({path!r})"


def _value_of(path: str) -> str:
    owner, _, name = path.rpartition(".")
    return f"{place_of(owner)}.{name}" if owner else f"model.{name}"


def _taken(model: nn.Module, node: Node, own: str) -> str:
    """Write the line by which a class takes over a module, parameter or buffer."""
    path = str(node.target)
    owner, _, name = path.rpartition(".")
    holder = model.get_submodule(owner)
    if node.op == "call_module":
        return f"self.{own} = {place_of(path)}"
    if name in holder._buffers:
        lasts = name not in holder._non_persistent_buffers_set
        return f"self.register_buffer({own!r}, {_value_of(path)}{'' if lasts else ', persistent=False'})"
    if not isinstance(getattr(holder, name, None), Tensor):
        raise CannotFollowError(f"a part of it takes {path}")
    return f"self.{own} = {_value_of(path)}"


class StepWriter:
    """Writes steps as Python.

    Args:
        names: what nodes are called.
        own: what the block calls modules and tensors of the model, by their paths.
    """

    def __init__(self, names: Mapping[Node, str], own: Mapping[str, str]) -> None:
        self._names, self._own = names, own

    def name(self, node: Node) -> str:
        """Return what a node is called."""
        return f"self.{self._own[str(node.target)]}" if node.op == "get_attr" else self._names.get(node, node.name)

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
            return f"self.{self._own[str(target)]}({self._arguments(args, node.kwargs)})"
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
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
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
