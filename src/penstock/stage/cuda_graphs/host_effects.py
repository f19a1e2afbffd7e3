"""What blocks do on the host while they run, which a CUDA graph of them would not do again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.stage.autograd.other_generators import drawn_from, generator_states
from penstock.stage.autograd.saved_bytes import has_memory
from penstock.stage.blocks.module import StageModule

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModuleAttributes:
    """The attributes of the modules of a stage, to find out whether any has been given another value.

    Values in lists and dicts count one by one; the memory of frozen parameters and buffers also has to stay the same.

    Args:
        module: the blocks of the stage, and its loss.
    """

    def __init__(self, module: StageModule) -> None:
        self._module = module
        self._values, self._shape, self._places = self._now()

    def changed(self) -> bool:
        """Return whether one has another value now."""
        values, shape, places = self._now()
        same = shape == self._shape and all(a is b for a, b in zip(self._values, values, strict=True))
        return not same or places != self._places

    def _now(self) -> tuple[list[Any], pytree.TreeSpec, list[int]]:
        """The values, the lists and dicts that they are in, and where the memory of fixed tensors is."""
        values, shape = pytree.tree_flatten([_attributes(module) for module in _modules(self._module)])
        return values, shape, [tensor.data_ptr() for tensor in self._module.tensors.fixed if has_memory(tensor)]


def _modules(module: StageModule) -> list[nn.Module]:
    """All modules that a stage computes with."""
    roots = [*module.modules.values(), *([module.loss] if isinstance(module.loss, nn.Module) else [])]
    return [inner for root in roots for inner in root.modules()]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module, and of its parameters in their places: those of versions take these in turns."""
    own = {name: value for name, value in vars(module).items() if name != "_parameters"}
    return own | {"_parameters": {name: vars(p) for name, p in module._parameters.items() if p is not None}}


@contextmanager
def noticing_host_effects(module: StageModule, given: Sequence[Tensor]) -> Iterator[Callable[[], str | None]]:
    """A context for a pass, which yields a function: why a CUDA graph of the pass would not do the same again.

    Args:
        module: the stage.
        given: tensors that the pass gets.
    """
    states = generator_states(module.blocks.values())
    attributes, versions = ModuleAttributes(module), _versions(given)
    with module.rng.noticing_draws() as drew:

        def reason() -> str | None:
            if any(vars(inner)[name] for inner in _modules(module) for name in _HOOKS):
                return "their modules have hooks"
            if drew() or drawn_from(states):
                return "they draw random numbers"
            if _versions(given) != versions:
                return "they write in place into what they get"
            return "they write attributes of their modules or parameters" if attributes.changed() else None

        yield reason


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often tensors have been written to, as far as torch counts."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
