"""Keeps modules that another process trains from being taken for trained ones.

Every process builds the whole model and trains its own stages. What it has of the others keeps the weights that it
began with, so ``torch.save(model.state_dict())`` after a run would save those without a word. Hooks refuse that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError

_SAMPLE = 16  # values of a tensor by which somebody's writing is noticed, where torch does not count it
_LINES = (
    "    weights = pipeline.full_state_dict()  # all ranks call it; rank 0 gets the tensors, the others an empty dict\n"
    "    if weights:\n        {then}"
)


class HeldModule:
    """A module with weights that another process trains.

    Args:
        block: the name of its block.
        module: the module. Its own tensors count, not those of the modules inside it.
    """

    def __init__(self, block: str, module: nn.Module) -> None:
        self._block, self._module = block, module
        self._seen: list[_Look] | None = []  # as it was when the other process began to train; None: a copy of that
        module.register_state_dict_pre_hook(self._check_state)  # type: ignore[no-untyped-call]
        module.register_forward_pre_hook(self._check_call)
        module.register_load_state_dict_post_hook(self._loaded)  # type: ignore[no-untyped-call]

    @property
    def stale(self) -> bool:
        """Whether the module has weights from before a run of the other process."""
        if self._seen is None:
            return True
        now = {look.identity: look for look in _looks(self._module)}
        return any(now.get(look.identity) == look for look in self._seen)

    def mark(self) -> None:
        """Note that the other process trains from here on."""
        self._seen = _looks(self._module)

    def clear(self) -> None:
        """Note that the weights are as they should be."""
        self._seen = []

    def _check_state(self, *_: Any) -> None:
        if self.stale:
            self._refuse("this would be no state of the trained model", "torch.save(weights, path)")

    def _check_call(self, *_: Any) -> None:
        if self.stale:
            then = "model.load_state_dict(weights)  # rank 0 has the trained model then"
            self._refuse("it would not compute what the trained model does", then)

    def _loaded(self, *_: Any) -> None:
        """Let a copy of a stale module be what was loaded into it."""
        self._seen = [] if self._seen is None else self._seen

    def _refuse(self, what: str, then: str) -> NoReturn:
        raise ConfigError(
            f"block {self._block!r} is trained by another process. In this one it has the weights from before, so "
            f"{what}. Write:\n{_LINES.format(then=then)}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldModule:
        """Belong to a copy of the module, which stays stale."""
        other = HeldModule.__new__(HeldModule)
        memo[id(self)] = other
        other._block, other._seen = self._block, None if self.stale else []
        other._module = memo.get(id(self._module), self._module)
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
    sample: list[float]


def _looks(module: nn.Module) -> list[_Look]:
    return [_Look(id(p), 0 if p.is_inference() else p._version, _sample(p)) for p in _own(module)]


def _own(module: nn.Module) -> list[Tensor]:
    return [p for p in module._parameters.values() if p is not None and p.requires_grad]


def _sample(tensor: Tensor) -> list[float]:
    """Return some values of a tensor; none of one whose values are nowhere, or not at hand."""
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.is_contiguous() or not tensor.numel():
        return []
    found: list[float] = tensor.detach().view(-1)[:: max(1, tensor.numel() // _SAMPLE)].tolist()
    return found


class HeldElsewhere:
    """What a process has of the stages of others.

    Args:
        blocks: of the whole model.
        here: names of the blocks of the stages in this process.
    """

    def __init__(self, blocks: Mapping[str, Any], here: Sequence[str]) -> None:
        self._others, self._unloaded = _others(blocks, here), _stale(blocks, here)

    def built(self) -> None:
        """Note that building stages has given their parameters other memory, with the same values."""
        for held in self._own():
            held.mark()

    def _own(self) -> list[HeldModule]:
        return [held for block in self._unloaded.values() for held in block]

    def begin(self) -> None:
        """Note that a run begins.

        Raises:
            ConfigError: this process is to train what another one has trained for an earlier pipeline, from the weights
                before.
        """
        stale = next((name for name, block in self._unloaded.items() if any(held.stale for held in block)), None)
        if stale is not None:
            raise ConfigError(
                f"block {stale!r} was trained by another process for an earlier pipeline, and has its weights from "
                "before that in this one. Load the trained ones on every rank before the run: "
                "penstock.Checkpoints(pipeline, folder).load(), or pipeline.load_state_dict(weights) with what "
                "full_state_dict() of the earlier one returned on rank 0"
            )
        for held in self._others:
            held.mark()

    def loaded(self) -> None:
        """Note that a saved state was loaded into the stages here, and only there."""
        for held in self._own():
            held.clear()
        for held in self._others:
            held.mark()


def _others(blocks: Mapping[str, Any], here: Sequence[str]) -> list[HeldModule]:
    """The modules with parameters that only other processes train."""
    own = [block for name, block in blocks.items() if name in here and isinstance(block, nn.Module)]
    modules = {id(module) for block in own for module in block.modules()}
    parameters = {id(p) for block in own for p in block.parameters()}
    found: dict[int, HeldModule] = {}
    for name, block in blocks.items():
        for module in block.modules() if name not in here and isinstance(block, nn.Module) else ():
            trained = {id(p) for p in _own(module)}
            if trained and not trained & parameters and id(module) not in modules | found.keys():
                found[id(module)] = _known(module) or HeldModule(name, module)
    return list(found.values())


def _stale(blocks: Mapping[str, Any], here: Iterable[str]) -> dict[str, list[HeldModule]]:
    """Return, by block, what another process trained for an earlier pipeline and this process is to train now."""
    found = {}
    for name in here:
        block = blocks[name]
        known = [_known(module) for module in block.modules()] if isinstance(block, nn.Module) else []
        stale = [one for one in known if one is not None and one.stale]
        if stale:
            found[name] = stale
    return found


def _known(module: nn.Module) -> HeldModule | None:
    owners = (getattr(hook, "__self__", None) for hook in module._state_dict_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, HeldModule)), None)
