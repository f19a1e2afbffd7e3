"""Keeps modules that another process trains from being taken for trained ones.

Every process builds the whole model and trains its own stages. What it has of the others keeps the weights that it
began with, so ``torch.save(model.state_dict())`` after a run would save those without a word. Hooks refuse that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.partition.replay.units import Guard

_HOOKS = ("_state_dict_pre_hooks", "_forward_pre_hooks", "_load_state_dict_post_hooks")  # of an nn.Module
_SAMPLE = 16  # values of a tensor by which somebody's writing is noticed, where torch does not count it
_LINES = (
    "    weights = pipeline.full_state_dict(model)  # all ranks call it; rank 0 gets the tensors, the others nothing\n"
    "    if weights:\n        {then}"
)


class HeldModule(Guard):
    """A module with weights from before a run in which another process trains it; torch's hooks on it refuse its use.

    The module has the hooks only as long as it is stale, so that before a run, and after fresh weights have been
    loaded, it is scripted, compiled and pickled like any other.

    Args:
        block: the name of its block.
        module: the module. Its own tensors count, not those of the modules inside it.
    """

    def __init__(self, block: str, module: nn.Module) -> None:
        self._block, self._module = block, module
        self._seen: list[_Look] | None = []  # as it was when the other process began to train; None: a copy of that

    @property
    def stale(self) -> bool:
        """Whether the module has weights from before a run of the other process."""
        if self._seen is None:
            return True
        now = {id(p): p for p in _own(self._module)}
        return any(look.identity in now and look.unchanged(now[look.identity]) for look in self._seen)

    def mark(self) -> None:
        """Note that the other process trains from here on what is trained of the module."""
        before = {look.identity for look in self._seen or ()}
        self._seen = [_look(p) for p in _own(self._module) if p.requires_grad or id(p) in before]
        if self._seen and _known(self._module) is not self:
            _remove_hooks(self._module)
            self._module.register_state_dict_pre_hook(self._check_state)  # type: ignore[no-untyped-call]
            self._module.register_forward_pre_hook(self._check_call)
            self._module.register_load_state_dict_post_hook(self._loaded)  # type: ignore[no-untyped-call]

    def clear(self, running: str = "") -> None:
        """Note that the weights are as they should be, and take the hooks from the module.

        Args:
            running: the hooks that torch is iterating over. The one of this module then stays, unless it is the last.
        """
        self._seen = []
        _remove_hooks(self._module, running)

    def _check_state(self, *_: Any) -> None:
        if self.stale:
            self._refuse("this would be no state of the trained model", "torch.save(weights, path)")
        self.clear("_state_dict_pre_hooks")

    def _check_call(self, *_: Any) -> None:
        if self.stale:
            then = "model.load_state_dict(weights)  # rank 0 has the trained model then"
            self._refuse("it would not compute what the trained model does", then)
        self.clear()

    def _loaded(self, *_: Any) -> None:
        """Let a module be what was loaded into it, and a copy of a stale one, too."""
        if self._seen is None or not self.stale:
            self.clear("_load_state_dict_post_hooks")

    def _refuse(self, what: str, then: str) -> NoReturn:
        raise ConfigError(
            f"block {self._block!r} is trained by another process. In this one it has the weights from before, so "
            f"{what}. Write:\n{_LINES.format(then=then)}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldModule:
        """Belong to a copy of the module, which stays stale."""
        other = HeldModule.__new__(HeldModule)
        memo[id(self)] = other
        other._block, other._seen = self._block, []
        other._module = memo.get(id(self._module), self._module)
        if self.stale:
            copies = [memo.get(id(p)) for p in _own(self._module)]  # made before hooks are copied
            other._seen = [_look(copy) for copy in copies if isinstance(copy, Tensor)] or None
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Let a whole model be pickled where its weights are those that it should have."""
        if self.stale:
            self._refuse("a pickle of it would not be the trained model", "torch.save(weights, path)")
        return dict(vars(self))


class _Look(NamedTuple):
    """What changes when somebody writes into a tensor, or another one takes its place."""

    identity: int
    version: int
    sample: Tensor

    def unchanged(self, tensor: Tensor) -> bool:
        """Whether a tensor has the same values as then, be it in another format."""
        version, seen, now = _version(tensor), self.sample.to(tensor.dtype), _sample(tensor)
        return version == self.version and torch.equal(seen.view(torch.uint8), now.view(torch.uint8))  # NaN, too


def _look(tensor: Tensor) -> _Look:
    return _Look(id(tensor), _version(tensor), _sample(tensor))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _own(module: nn.Module) -> list[Tensor]:
    return [p for p in module._parameters.values() if p is not None]


def _sample(tensor: Tensor) -> Tensor:
    """Return some values of a tensor; none of one whose values are nowhere, or not at hand."""
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.is_contiguous() or not tensor.numel():
        return torch.empty(0, dtype=tensor.dtype)
    return tensor.detach().view(-1)[:: max(1, tensor.numel() // _SAMPLE)].to("cpu", copy=True)


class HeldElsewhere:
    """What a process has of the stages of others.

    Args:
        blocks: of the whole model.
        here: names of the blocks of the stages in this process.
    """

    def __init__(self, blocks: Mapping[str, Any], here: Sequence[str]) -> None:
        self._blocks, self._here = blocks, list(here)
        self._others, self._unbuilt = _others(blocks, here), list(self._stale())

    def built(self) -> None:
        """Note that building stages has given their parameters other memory, with the same values."""
        for _, held in self._unbuilt:
            held.mark()
        self._unbuilt = []

    def _own(self) -> Iterator[tuple[str, HeldModule]]:
        """What another process trained for another pipeline and this process trains for this one; with its block."""
        for name in self._here:
            block = self._blocks[name]
            for module in block.modules() if isinstance(block, nn.Module) else ():
                held = _known(module)
                if held is not None:
                    yield name, held

    def _stale(self) -> Iterator[tuple[str, HeldModule]]:
        return ((name, held) for name, held in self._own() if held.stale)

    def check(self) -> None:
        """Make sure that the weights of the stages here can be trained further, evaluated and saved.

        Raises:
            ConfigError: another process has trained them further, for another pipeline.
        """
        stale = next((name for name, _ in self._stale()), None)
        if stale is not None:
            raise ConfigError(
                f"block {stale!r} was trained by another process for another pipeline, and has its weights from "
                "before that in this one. Load the trained ones on every rank first: "
                "penstock.Checkpoints(pipeline, folder).load(), or pipeline.load_state_dict(weights) with what "
                "full_state_dict() of the other one returned on rank 0"
            )

    def begin(self) -> None:
        """Note that a run begins, so that the other processes train the rest of the model."""
        for name, module in self._others:
            (_known(module) or HeldModule(name, module)).mark()

    def loaded(self) -> None:
        """Note that a saved state was loaded into the stages here, and only there."""
        for _, held in list(self._own()):
            held.clear()
        self.begin()


def _others(blocks: Mapping[str, Any], here: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The modules with parameters that only other processes train, with the names of their blocks."""
    own = [block for name, block in blocks.items() if name in here and isinstance(block, nn.Module)]
    modules = {id(module) for block in own for module in block.modules()}
    parameters = {id(p) for block in own for p in block.parameters()}
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, block in blocks.items():
        for module in block.modules() if name not in here and isinstance(block, nn.Module) else ():
            trained = {id(p) for p in _own(module) if p.requires_grad}
            if trained and not trained & parameters and id(module) not in modules:
                found.setdefault(id(module), (name, module))
    return list(found.values())


def _known(module: nn.Module) -> HeldModule | None:
    """What is known of a module that has been marked and not been cleared since."""
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())  # always removed
    return next((owner for owner in owners if isinstance(owner, HeldModule)), None)


def _remove_hooks(module: nn.Module, running: str = "") -> None:
    for name in _HOOKS:
        hooks = getattr(module, name)
        own = [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), HeldModule)]
        for key in own:
            if name != running or key == next(reversed(hooks)):  # else the iteration would fail
                del hooks[key]
