"""Backwards between the weights that their forward read and the newest: I-TiMePReSt."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.errors import ConfigError
from penstock.weights.corrections.base import Corrector, StagePlace
from penstock.weights.memory.buffers import Buffer, Layout


@dataclass(frozen=True)
class Blending:
    """A backward reads W_B = lambda W_f + (1 - lambda) W_n with lambda = beta^v (variant "penstock").

    W_f are the weights that the forward of the same microbatch read, W_n the newest ones of the stage where the
    backward begins, v the updates between the two. Where there are none (v = 0), W_B is W_f, bit for bit. beta = 1
    reads what the forward read, as in PipeDream; beta = 0 the newest. I-TiMePReSt (Dutta, Chaki and De, arXiv
    2509.23241) says that the share of stale weights falls exponentially with the degree of staleness; its exact form
    was not at hand.

    Args:
        beta: from 0 to 1.
    """

    beta: float = 0.5
    name: str = "i-timeprest"

    def __post_init__(self) -> None:
        """Make sure that the number makes sense."""
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"beta must lie between 0 (the newest weights) and 1 (the forward's); got {self.beta}")

    def refuses(self, precision: torch.dtype | None, _recompute: str) -> str | None:
        """What the forward read is there in the precision of passes only."""
        if precision is not None:
            return (
                "blends of two versions are offered in fp32 so far: there is one master copy, of the newest weights; "
                "set precision to fp32"
            )
        return None

    def on(self, layout: Layout, place: StagePlace) -> _BlendingOnStage:
        """For a stage."""
        return _BlendingOnStage(self, layout, place)


class _BlendingOnStage(Corrector):
    """What is blended on one stage."""

    def __init__(self, wanted: Blending, layout: Layout, place: StagePlace) -> None:
        super().__init__(layout, place)
        self._beta = wanted.beta

    @torch.no_grad()
    def blend(self, forward: Buffer, newest: Buffer, updates: int, out: Buffer) -> None:
        """W_B."""
        if not updates:
            out.load(newest.views)
            return
        out.rewrite()
        share = self._beta**updates
        for name, view in out.views.items():  # one by one: what is made on the way is no larger than a parameter
            view.copy_(share * forward.views[name] + (1.0 - share) * newest.views[name])
