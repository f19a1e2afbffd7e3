"""Habits with state that modules keep beside their parameters, from one forward to another, or for each other."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.habits import WIDTH, Differs, Refused, Script, around, habit, linear, regression

KEPT = "State kept on modules"
RANDOMNESS = "Randomness"
F64 = torch.float64


class Keeping(nn.Module):
    """A layer that keeps its output on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = linear(), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.layer(x)
        return torch.tanh(self.kept)


class Using(nn.Module):
    """A layer that adds what another one has kept."""

    def __init__(self, other: Keeping, detaches: bool) -> None:
        super().__init__()
        self.layer, self._other, self._detaches = linear(), [other], detaches

    def forward(self, x: Tensor) -> Tensor:
        kept = self._other[0].kept
        found: Tensor = self.layer(x) + (kept.detach() if self._detaches else kept)
        return found


PASSED = "what was kept belongs to another microbatch by then; let the blocks hand it on, as in `(x, kept)`"


def skipping(detaches: bool, apart: bool) -> Script:
    """A skip connection over an attribute."""
    keeping = Keeping()
    using = Using(keeping, detaches)
    between = (nn.Tanh(), nn.Tanh()) if apart else (using, nn.Tanh())
    last = using if apart else linear()
    return Script(
        {"first": keeping, "second": between[0], "third": between[1], "head": last}, regression(), accumulates=True
    )


@habit(KEPT, Refused("kept on a module or by a hook", PASSED))
def kept_for_another_stage() -> Script:
    """A skip connection over an attribute (`self.kept = x`, read by a block of another stage)."""
    return skipping(detaches=False, apart=True)


@habit(KEPT, Differs(PASSED))
def detached_for_another_stage() -> Script:
    """The same, detached."""
    return skipping(detaches=True, apart=True)


APART = 'blocks are run again one by one; let them hand it on, or take `recompute="stage"`'


@habit(KEPT, recompute=Refused("kept a tensor with its graph", APART))
def kept_within_a_stage() -> Script:
    """The same within a stage; gradients accumulated in plain torch, too."""
    return skipping(detaches=False, apart=False)


def with_features(where: str) -> Script:
    """A penalty of an activation, which a hook keeps for the loss."""
    blocks, features = around(linear), dict[str, Tensor]()
    blocks[where].register_forward_hook(lambda module, given, output: features.update(kept=output))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + 0.1 * features["kept"].square().mean()

    return Script(blocks, regression(), loss, accumulates=True)


@habit(KEPT, Refused("kept on a module or by a hook", PASSED))
def features_of_another_stage() -> Script:
    """A forward hook of the first stage that keeps its output for the loss (feature matching)."""
    return with_features("first")


@habit(KEPT, recompute=Refused("kept on a module or by a hook", APART))
def features_of_the_last_stage() -> Script:
    """The same of the last stage; gradients accumulated in plain torch, too."""
    return with_features("third")


@habit(KEPT, Refused("kept on a module or by a hook", PASSED))
def auxiliary_losses() -> Script:
    """Auxiliary losses that blocks keep for the loss (`block.aux_loss` of a mixture of experts)."""
    blocks = {"first": Keeping(), "second": nn.Tanh(), "third": Keeping(), "head": linear()}

    def loss(output: Tensor, target: Tensor) -> Tensor:
        kept = blocks["first"].kept.square().mean() + blocks["third"].kept.square().mean()  # type: ignore[union-attr]
        return F.mse_loss(output, target) + 0.1 * kept

    return Script(blocks, regression(), loss, accumulates=True)


class Shifting(nn.Module):
    """A shift that its first forward sets (as ActNorm does)."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.shift, self._assigns, self._done = nn.Parameter(torch.zeros(WIDTH, dtype=F64)), assigns, False

    def forward(self, x: Tensor) -> Tensor:
        if not self._done and self._assigns:
            self.shift.data = -x.detach().mean(0)
        elif not self._done:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
        self._done = True
        return x + self.shift


@habit(KEPT)
def set_by_the_first_forward() -> Script:
    """A parameter that the first forward sets by `copy_` (ActNorm); gradients accumulated in plain torch, too."""
    return Script(around(lambda: Shifting(assigns=False)), regression(), accumulates=True)


ASSIGNED = "forwards have views of the memory of all weights; write into it (`copy_`), or use a step hook"


@habit(KEPT, Refused("has assigned other memory to", ASSIGNED))
def assigned_by_the_first_forward() -> Script:
    """The same by `.data = ...`."""
    return Script(around(lambda: Shifting(assigns=True)), regression(), accumulates=True)


class Teaching(nn.Module):
    """A layer, and a frozen one that follows it in every forward."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.student, self.teacher, self._copies = linear(), linear().requires_grad_(False), copies

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.mul_(0.9).add_(other, alpha=0.1)
        weight = self.teacher.weight.clone() if self._copies else self.teacher.weight
        found: Tensor = self.student(x) + F.linear(x, weight)
        return found


FOLLOWS = "graphs of other microbatches need it; let the forward use a copy"
AGAIN = "it would follow twice; make it a buffer"


@habit(KEPT, Refused("let the forward use a copy", FOLLOWS), recompute=Refused("make it a buffer", AGAIN))
def following_teacher() -> Script:
    """A frozen teacher that follows its student in the forward (mean teacher, momentum encoder)."""
    return Script(around(lambda: Teaching(copies=False)), regression(), accumulates=True)


@habit(KEPT, recompute=Refused("make it a buffer", AGAIN))
def copied_teacher() -> Script:
    """The same, where the forward uses a copy of it; gradients accumulated in plain torch, too."""
    return Script(around(lambda: Teaching(copies=True)), regression(), accumulates=True)


class Counting(nn.Module):
    """A layer that adds a buffer, and may write into it."""

    def __init__(self, buffer: Tensor, writes: bool) -> None:
        super().__init__()
        self.register_buffer("seen", buffer)
        self.seen: Tensor
        self._writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self._writes:
            self.seen.add_(x.detach().mean(0))
        return x + self.seen.clone()


SHARED = "microbatches are in both stages at the same time; give each a buffer of its own"


@habit(KEPT, Refused("one buffer that stage", SHARED))
def shared_statistics() -> Script:
    """One buffer in two stages, which forwards write into."""
    buffer = torch.ones(WIDTH, dtype=F64)
    return Script(around(lambda: Counting(buffer, writes=True)), regression(), accumulates=True)


@habit(KEPT)
def shared_table() -> Script:
    """One buffer in two stages, which forwards only read (a table of positions, a mask)."""
    buffer = torch.ones(WIDTH, dtype=F64)
    return Script(around(lambda: Counting(buffer, writes=False)), regression())


# --- randomness -------------------------------------------------------------------------------------------------------

OTHERS = "numbers come in the order of passes, which go through stages at the same time; seed them by what a sample has"


class Dropped(nn.Module):
    """A layer that is left out now and then."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self._draw = linear(), draw

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) if self._draw() < 0.5 else x
        return found


def dropping(draw: Callable[[], float]) -> Script:
    random.seed(0)
    np.random.seed(0)
    return Script(around(lambda: Dropped(draw)), regression(), accumulates=True)


@habit(RANDOMNESS, Differs(OTHERS))
def stochastic_depth() -> Script:
    """`random.random()` in a block (stochastic depth)."""
    return dropping(random.random)


@habit(RANDOMNESS, Differs(OTHERS))
def stochastic_depth_by_numpy() -> Script:
    """`numpy.random.rand()` in a block."""
    return dropping(np.random.rand)


class Seeded(nn.Module):
    """Adds the same noise in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return x + torch.randn(WIDTH, dtype=F64)


@habit(RANDOMNESS)
def seeded_in_a_block() -> Script:
    """`torch.manual_seed(3)` in a block."""
    return Script(around(Seeded), regression())
