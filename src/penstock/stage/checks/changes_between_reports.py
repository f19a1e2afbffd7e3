"""The check that nobody writes weights or gradients in the loop over reports.

Microbatches under way have read these weights and add to these gradients; updates are part of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.stage.checks.released_weight_placeholders import AbsentWeight

Counts = list[tuple[Tensor, int, bool, int, int, bytes]]
"""Tensors that modules compute with: writes into each, whether it is trained, its gradient, writes into that, values.
"""
_SAMPLE = 16  # values of a parameter that are compared in the first report of a run


class _Tensors(Protocol):
    """The tensors that the blocks of a stage compute with while a run is under way."""

    where: str
    bound: Mapping[str, Tensor] | None

    def replaced(self) -> str | None: ...


class LoopCheck:
    """Compares what torch counts of weights and gradients before and after the code in a caller's loop.

    What clamp_, load_state_dict, clip_grad_norm_, zero_grad or a step of the caller's own do there would spoil an
    update. Torch does not count writes through `.data`: in the first report of a run some values are compared, too.

    Args:
        stages: the tensors of each.
        alone: no other rank writes into the weights of these stages meanwhile.
    """

    def __init__(self, stages: Iterable[_Tensors], *, alone: bool = True) -> None:
        self._stages, self._alone = list(stages), alone

    def counts(self, *, first: bool = False, summing: bool = False) -> Counts:
        """Return the counts as they are.

        Args:
            first: this is the first report of a run.
            summing: gradients may be added to those of other ranks meanwhile.
        """
        return [
            (
                leaf,
                leaf._version if self._alone else 0,
                leaf.requires_grad,
                id(leaf.grad),
                0 if summing or leaf.grad is None else leaf.grad._version,
                _sample(leaf) if first and self._alone else b"",
            )
            for stage in self._stages
            for leaf in (stage.bound or {}).values()
            if type(leaf) is not AbsentWeight  # which refuses whatever is done to it
        ]

    def check(self, before: Counts, *, first: bool = False, summing: bool = False) -> None:
        """Make sure that nothing was written since.

        Raises:
            ConfigError: something was.
        """
        for stage in self._stages:
            if (name := stage.replaced()) is not None:
                raise _changed(stage.where, name)
        now = self.counts(first=first, summing=summing)
        if [counts[1:] for counts in now] == [counts[1:] for counts in before]:
            return
        changed = next(old[0] for old, new in zip(before, now, strict=True) if old[1:] != new[1:])
        raise next(
            _changed(stage.where, name)
            for stage in self._stages
            for name, leaf in (stage.bound or {}).items()
            if leaf is changed
        )


def _changed(where: str, name: str) -> ConfigError:
    return ConfigError(
        f"{where}: {name} or its gradient was changed in the loop over reports (as by load_state_dict, clamp_, "
        "zero_grad, clip_grad_norm_, requires_grad_, another Parameter in its place or a step of your own), where "
        "microbatches under way have read it and add to it. Updates are part of run(), and gradients need no zeroing; "
        "clip with Pipeline(max_grad_norm=1.0), limit weights in a hook of the optimizer "
        "(optimizer.register_step_post_hook), and write other weights between two runs. Make a new pipeline, and load "
        "its last checkpoint if there is one"
    )


def _sample(leaf: Tensor) -> bytes:
    """Return the bytes of some values of a tensor on the host, in which NaN equals itself; of others none."""
    if not leaf.is_cpu or not leaf.is_contiguous() or not leaf.numel():
        return b""
    return leaf.detach().view(-1)[:: max(1, leaf.numel() // _SAMPLE)].clone().view(torch.uint8).numpy().tobytes()
