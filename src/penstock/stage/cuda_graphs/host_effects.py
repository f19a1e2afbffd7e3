"""What blocks do on the host while they run, which a CUDA graph of them would not do again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from penstock.stage.autograd.other_generators import drawn_from, generator_states
from penstock.stage.module import StageModule

_LOOKED_INTO = ("_modules", "_buffers", "_forward_hooks", "_forward_pre_hooks")


class ModuleAttributes:
    """The attributes of the modules of a stage, to find out whether any has been given another value.

    Args:
        module: the blocks of the stage.
    """

    def __init__(self, module: StageModule) -> None:
        self._blocks = module.modules
        self._values = self._now()

    def changed(self) -> bool:
        """Return whether one has another value now."""
        now = self._now()
        return len(now) != len(self._values) or any(
            a.keys() != b.keys() or any(a[name] is not b[name] for name in a)
            for a, b in zip(now, self._values, strict=True)
        )

    def _now(self) -> list[dict[str, Any]]:
        modules = [module for block in self._blocks for module in block.modules()]
        return [attributes for module in modules for attributes in _attributes(module)]


def _attributes(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the attributes of a module, without its parameters: those of versions take their places in turns."""
    yield {name: value for name, value in vars(module).items() if name != "_parameters"}
    yield from (dict(vars(module)[name]) for name in _LOOKED_INTO)


@contextmanager
def noticing_host_effects(module: StageModule) -> Iterator[Callable[[], str | None]]:
    """A context for a pass, which yields a function: what the pass has done that a CUDA graph would not do again."""
    states = generator_states(module.blocks.values())
    attributes = ModuleAttributes(module)
    with module.rng.noticing_draws() as drew:

        def reason() -> str | None:
            if drew() or drawn_from(states):
                return "they draw random numbers"
            return "they write attributes of their modules" if attributes.changed() else None

        yield reason
