"""I-TiMePReSt: backwards on a blend of the weights that their forward read and the newest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.weights.corrections.base import Corrector, StagePlace
from penstock.weights.memory.buffers import Buffer, Layout


@dataclass(frozen=True)
class Blending:
    """Settings: backwards read W_B = lambda W_f + (1 - lambda) W_n with lambda = beta^v (variant "penstock").

    W_f are the weights that the forward of the same microbatch read, W_n the newest ones of the stage when the
    backward begins, v the number of updates between the two. If v = 0, W_B is W_f, bit for bit. beta = 1 reads the
    weights of the forward, as in PipeDream; beta = 0 the newest. I-TiMePReSt (Dutta, Chaki and De, arXiv 2509.23241)
    says that the share of stale weights falls exponentially with the degree of staleness; its exact form was not
    available.

    Args:
        beta: from 0 to 1.
    """

    beta: float = 0.5
    name: str = "i-timeprest"

    def refuses(self, precision: torch.dtype | None, _recompute: str) -> str | None:
        """Return why it does not support this precision or recompute mode, or None if it does."""
        if precision is not None:
            return (
                "blends of two versions need fp32, since in low precision only the newest weights have a master copy; "
                "set precision to fp32"
            )
        return None

    def on(self, layout: Layout, place: StagePlace) -> _BlendingOnStage:
        """Create the corrector of a stage."""
        return _BlendingOnStage(self, layout, place)


class _BlendingOnStage(Corrector):
    def __init__(self, wanted: Blending, layout: Layout, place: StagePlace) -> None:
        super().__init__(layout, place)
        self._beta = wanted.beta

    @torch.no_grad()
    def blend(self, forward: Buffer, newest: Buffer, updates: int, out: Buffer) -> None:
        """Write W_B."""
        if not updates:
            out.load(newest.views)
            return
        out.rewrite()
        share = self._beta**updates
        for name, view in out.views.items():  # one by one, so that temporaries are no larger than a parameter
            view.copy_(share * forward.views[name] + (1.0 - share) * newest.views[name])
