"""Keeps modules that another process trains from being taken for trained ones.

Every process builds the whole model and trains its own stages. What it has of the others keeps the weights that it
began with, so ``torch.save(model.state_dict())`` after a run would save those without a word. Their parameters have
marks, and hooks of torch refuse the state and the forward of a module while its parameters are as they were marked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.partition.replay.units import Guard

_MARK = "trained_elsewhere"  # an attribute of parameters
_SAMPLE = 16  # values of a tensor by which somebody's writing is noticed, where torch does not count it


class _Mark:
    """Says that another process trains a parameter from here on, and how it was then.

    Args:
        block: of the parameter.
        parameter: which.
    """

    def __init__(self, block: str, parameter: nn.Parameter) -> None:
        self.block, self._of = block, ref(parameter)
        self._version, self._sample = _counted(parameter), _sample(parameter)

    @property
    def stale(self) -> bool:
        """Whether nobody has written into the parameter since; the mark of a copy is not."""
        now = self._of()
        if now is None or getattr(now, _MARK, None) is not self or _counted(now) != self._version:
            return False
        seen, values = self._sample.to(now.dtype), _sample(now)
        return torch.equal(seen.view(torch.uint8), values.view(torch.uint8))  # NaN, too

    def refuse(self, what: str, then: str) -> NoReturn:
        """Raise the error of what somebody makes of the module."""
        raise ConfigError(
            f"block {self.block!r} is trained by another process. In this one it has the weights from before, so "
            f"{what}. Write:\n"
            "    weights = pipeline.full_state_dict(model)  # all ranks call it; rank 0 gets the tensors, the others "
            f"nothing\n    if weights:\n        {then}"
        )

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Let a whole model be pickled where its weights are those that it should have, without marks."""
        if self.stale:
            self.refuse("a pickle of it would not be the trained model", "torch.save(weights, path)")
        return object, ()


class _Hooks(Guard):
    """The hooks of modules with marked parameters."""

    def add(self, module: nn.Module) -> None:
        """Let a module have them, once."""
        hooks = module._forward_pre_hooks.values()
        if not any(isinstance(getattr(hook, "__self__", None), _Hooks) for hook in hooks):
            module.register_state_dict_pre_hook(self._check_state)  # type: ignore[no-untyped-call]
            module.register_forward_pre_hook(self._check_call)

    def _check_state(self, module: nn.Module, *_: Any) -> None:
        if (mark := _mark_of(module)) is not None:
            mark.refuse("this would be no state of the trained model", "torch.save(weights, path)")

    def _check_call(self, module: nn.Module, *_: Any) -> None:
        if (mark := _mark_of(module)) is not None:
            then = "model.load_state_dict(weights)  # rank 0 has the trained model then"
            mark.refuse("it would not compute what the trained model does", then)


class HeldElsewhere:
    """What a process has of the stages of others.

    Args:
        blocks: of the whole model.
        here: names of the blocks of the stages in this process.
    """

    def __init__(self, blocks: Mapping[str, Any], here: Sequence[str]) -> None:
        self._hooks = _Hooks()
        self._here = [(name, module) for name in here for module in _modules(blocks[name])]
        own = {id(p) for _, module in self._here for p in _parameters(module)}
        others = ((name, module) for name in blocks if name not in here for module in _modules(blocks[name]))
        self._others = [(name, module) for name, module in others if own.isdisjoint(map(id, _parameters(module)))]
        self._unbuilt = list(self._stale())

    def built(self) -> None:
        """Note that building stages has given their parameters other memory, with the same values."""
        for name, parameter in self._unbuilt:
            setattr(parameter, _MARK, _Mark(name, parameter))
        self._unbuilt = []

    def _stale(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What another process trained for another pipeline and this process trains for this one; with its block."""
        for name, module in self._here:
            yield from ((name, p) for p in _parameters(module) if _stale_mark(p) is not None)

    def check(self) -> None:
        """Make sure that the weights of the stages here can be trained further, evaluated and saved.

        Raises:
            ConfigError: another process has trained them further, for another pipeline.
        """
        for name, _ in self._stale():
            raise ConfigError(
                f"block {name!r} was trained by another process for another pipeline, and has its weights from "
                "before that in this one. Load the trained ones on every rank first: "
                "penstock.Checkpoints(pipeline, folder).load(), or pipeline.load_state_dict(weights) with what "
                "full_state_dict() of the other one returned on rank 0"
            )

    def begin(self) -> None:
        """Note that a run begins, so that the other processes train the rest of the model."""
        for name, module in self._others:
            marked = [p for p in _parameters(module) if p.requires_grad or hasattr(p, _MARK)]
            for parameter in marked:
                setattr(parameter, _MARK, _Mark(name, parameter))
            if marked:
                self._hooks.add(module)

    def loaded(self) -> None:
        """Note that a saved state was loaded into the stages here, and only there."""
        for _, module in self._here:
            for parameter in _parameters(module):
                vars(parameter).pop(_MARK, None)
        self.begin()


def _modules(block: Any) -> list[nn.Module]:
    return list(block.modules()) if isinstance(block, nn.Module) else []


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the own parameters of a module."""
    return [p for p in module._parameters.values() if p is not None]


def _mark_of(module: nn.Module) -> _Mark | None:
    """Return the mark of a parameter that is as it was before another process has trained it."""
    return next((mark for p in _parameters(module) if (mark := _stale_mark(p)) is not None), None)


def _stale_mark(parameter: nn.Parameter) -> _Mark | None:
    mark = getattr(parameter, _MARK, None)
    return mark if isinstance(mark, _Mark) and mark.stale else None


def _counted(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return some values of a tensor; none of one whose values are nowhere, or not at hand."""
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.is_contiguous() or not tensor.numel():
        return torch.empty(0, dtype=tensor.dtype)
    return tensor.detach().view(-1)[:: max(1, tensor.numel() // _SAMPLE)].to("cpu", copy=True)
