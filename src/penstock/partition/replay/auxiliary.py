"""Losses that blocks add to that of the batch on their way, such as those that balance experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from penstock.checks import is_number
from penstock.errors import ConfigError


class Auxiliary(NamedTuple):
    """A loss that a block has added, of one number, in its graph; and what it is multiplied by."""

    loss: Tensor
    coefficient: float


_collecting: ContextVar[tuple[list[Auxiliary], bool] | None] = ContextVar("penstock auxiliary losses", default=None)


def auxiliary(loss: Tensor, coefficient: float = 1.0) -> Tensor:
    """Add a loss of a block to that of the batch; it is called where the block computes it.

        def forward(self, x):
            penstock.auxiliary(self.router.balance(x), 0.01)
            return self.experts(x)

    In a pipeline the gradient is that of ``coefficient * loss``, added to the loss of each microbatch: so of the mean
    over microbatches, each weighted as the loss weighs it, such as by its tokens. Nothing is added to the loss that is
    reported: `Report.auxiliary` has the mean beside it, which the host of a GPU waits for. Evaluations report it, too.
    With precision="fp16", compute it in float32 (``x.float()``), or the scale of the loss is out of range.

    Args:
        loss: a tensor of one number, of the microbatch: the larger, the worse.
        coefficient: what it is multiplied by.

    Returns:
        ``coefficient * loss``: in a pipeline without its graph; in plain torch with it, for the caller to add to the
        loss, since nobody else does.

    Raises:
        ConfigError: it is no tensor of one number, or a run has no graph of it, as within torch's checkpoint with
            ``use_reentrant=True``.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not is_number(coefficient):
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"auxiliary() takes a loss, a tensor of one number, and a coefficient; got {given}")
    if has_torch_function((loss,)):
        made: Tensor = handle_torch_function(auxiliary, (loss,), loss, coefficient)
        return made
    found = _collecting.get()
    if found is None:
        return loss * coefficient
    added, trains = found
    if trains and not torch.is_grad_enabled():
        raise ConfigError(
            "auxiliary() is called under torch.no_grad(), so its loss would train nothing; within torch's checkpoint "
            "set use_reentrant=False"
        )
    added.append(Auxiliary(loss, float(coefficient)))
    return loss.detach() * coefficient


@contextmanager
def collecting() -> Iterator[list[Auxiliary]]:
    """Collect the auxiliary losses of what runs meanwhile."""
    found: list[Auxiliary] = []
    token = _collecting.set((found, torch.is_grad_enabled()))
    try:
        yield found
    finally:
        _collecting.reset(token)
