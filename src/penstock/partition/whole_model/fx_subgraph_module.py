"""The blocks that are made of a whole model, among them those that are some steps of its forward."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torch import Tensor, fx, nn


class ModelBlocks(dict[str, nn.Module]):
    """The blocks of a whole model, by name.

    Args:
        model: which.
        blocks: those that it calls one after the other.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__(blocks)
        self.model = model
        self._forwards = self._own_forwards()

    def _own_forwards(self) -> dict[str, Any]:
        """What stands in for the forwards of modules that are in no block, by its path."""
        inner = {id(module) for block in self.values() for module in block.modules()}
        outer = ((path, module) for path, module in self.model.named_modules() if id(module) not in inner)
        key = "forward"
        return {f"{path}.{key}".lstrip("."): vars(module)[key] for path, module in outer if key in vars(module)}

    def replaced_forward(self) -> str | None:
        """Return the path of a forward that was set on the model, or taken from it, since the blocks were made."""
        now = self._own_forwards()
        paths = self._forwards.keys() | now.keys()
        return next((path for path in sorted(paths) if now.get(path) is not self._forwards.get(path)), None)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Give the model other values, and so all blocks."""
        self.model.load_state_dict(state)
        for block in self.values():
            for path, origin in block.targets.items() if isinstance(block, ModelPart) else ():
                held, now = value_at(block, path), value_at(self.model, origin)
                if isinstance(held, Tensor) and held is not now:  # a bare buffer, on another device
                    held.copy_(now)


class ModelPart(nn.Module):
    """Some steps of the forward of a model, with the modules and tensors of it that they use.

    These are the model's own objects, and have the names that they have there: a part of steps with `layers.0` has
    parameters such as `layers.0.weight`.

    Args:
        model: whose forward it is a part of.
        graph: of the steps, with one input.
        aliases: for tensors that other blocks have, too, and so must have another name here: their paths in the model.

    Attributes:
        text: the steps as Python.
        targets: of the modules and bare tensors that it uses, the path in the model by the one in here.
        joined: of several layers that are not cut apart, the paths; () if there are few.
        why_joined: why they are not, and what to change.
    """

    joined: tuple[str, ...] = ()
    why_joined = ""

    def __init__(self, model: nn.Module, graph: fx.Graph, aliases: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__()
        nodes = [node for node in graph.nodes if node.op in ("call_module", "get_attr")]
        self.targets = {path: aliases.get(path, path) for path in (str(node.target) for node in nodes)}
        made = fx.GraphModule({path: value_at(model, origin) for path, origin in self.targets.items()}, graph)
        self._modules, self._parameters, self._buffers = made._modules, made._parameters, made._buffers
        self._steps, self.text = type(made).forward, made.code
        for path, origin in self.targets.items():  # GraphModule takes all buffers as persistent
            (owner, _, name), (known, _, key) = path.rpartition("."), origin.rpartition(".")
            if key in model.get_submodule(known)._non_persistent_buffers_set:
                self.get_submodule(owner)._non_persistent_buffers_set.add(name)

    def forward(self, x: Any) -> Any:
        """Take the steps."""
        return self._steps(self, x)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all parameters and buffers."""
        parameters = self.named_parameters(remove_duplicate=False)
        return frozenset(name for name, _ in (*parameters, *self.named_buffers(remove_duplicate=False)))


def value_at(model: nn.Module, path: str) -> Any:
    """Return what a model has at a path: a module, parameter or buffer; None if nothing."""
    owner, _, key = path.rpartition(".")
    try:
        return getattr(model.get_submodule(owner), key, None)
    except AttributeError:
        return None


def changed_part(blocks: ModelBlocks) -> str | None:
    """Return the path of something that a part has of a model, and the model no longer has, if there is one."""
    for block in blocks.values():
        for path, origin in block.targets.items() if isinstance(block, ModelPart) else ():
            held, now = value_at(block, path), value_at(blocks.model, origin)
            moved = isinstance(now, Tensor) and isinstance(held, Tensor) and now.device != held.device  # a buffer
            if now is not held and not moved:
                return origin
    return None
