"""Habits with optimizers, schedulers and updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from support.habits import Refused, Script, around, habit, regression

OPTIMIZERS = "Optimizers"
SCHEDULERS = "Learning rates"
UPDATES = "Updates"


def stepped_by(make: Callable[[Any], torch.optim.Optimizer], **more: Any) -> Script:
    return Script(around(nn.Tanh), regression(), optimizer=make, **more)


@habit(OPTIMIZERS)
def sgd() -> Script:
    """`SGD` with Nesterov momentum and weight decay."""
    return stepped_by(lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01))


@habit(OPTIMIZERS)
def maximize() -> Script:
    """`maximize=True`."""
    return stepped_by(lambda named: torch.optim.SGD(named, lr=0.01, maximize=True))


@habit(OPTIMIZERS)
def adam() -> Script:
    """`Adam` with amsgrad."""
    return stepped_by(lambda named: torch.optim.Adam(named, lr=0.01, amsgrad=True))


@habit(OPTIMIZERS)
def adamw() -> Script:
    """`AdamW`, `foreach=True`."""
    return stepped_by(lambda named: torch.optim.AdamW(named, lr=0.01, foreach=True))


@habit(OPTIMIZERS)
def adamw_fused() -> Script:
    """`AdamW`, `fused=True`."""
    return stepped_by(lambda named: torch.optim.AdamW(named, lr=0.01, fused=True))


@habit(OPTIMIZERS)
def nadam() -> Script:
    """`NAdam`."""
    return stepped_by(lambda named: torch.optim.NAdam(named, lr=0.01))


@habit(OPTIMIZERS)
def radam() -> Script:
    """`RAdam`."""
    return stepped_by(lambda named: torch.optim.RAdam(named, lr=0.01))


@habit(OPTIMIZERS)
def adamax() -> Script:
    """`Adamax`."""
    return stepped_by(lambda named: torch.optim.Adamax(named, lr=0.01))


@habit(OPTIMIZERS)
def adadelta() -> Script:
    """`Adadelta`."""
    return stepped_by(lambda named: torch.optim.Adadelta(named))


@habit(OPTIMIZERS)
def adagrad() -> Script:
    """`Adagrad`."""
    return stepped_by(lambda named: torch.optim.Adagrad(named, lr=0.05))


@habit(OPTIMIZERS)
def rmsprop() -> Script:
    """`RMSprop`, centered, with momentum."""
    return stepped_by(lambda named: torch.optim.RMSprop(named, lr=0.01, centered=True, momentum=0.5))


@habit(OPTIMIZERS)
def rprop() -> Script:
    """`Rprop`."""
    return stepped_by(lambda named: torch.optim.Rprop(named, lr=0.01))


@habit(OPTIMIZERS)
def asgd() -> Script:
    """`ASGD`."""
    return stepped_by(lambda named: torch.optim.ASGD(named, lr=0.05))


@habit(OPTIMIZERS)
def adafactor() -> Script:
    """`Adafactor`."""
    return stepped_by(lambda named: torch.optim.Adafactor(named, lr=0.05))


@habit(OPTIMIZERS)
def tensor_rate() -> Script:
    """A learning rate that is a tensor."""
    return stepped_by(lambda named: torch.optim.Adam(named, lr=torch.tensor(0.01), foreach=False))


@habit(OPTIMIZERS)
def groups() -> Script:
    """Parameter groups: no decay for biases, another rate for the head."""

    def make(named: Any) -> torch.optim.Optimizer:
        named = list(named)
        head = [p for name, p in named if name.startswith("head")]
        biases = [p for name, p in named if name.endswith("bias") and not name.startswith("head")]
        rest = [p for name, p in named if not name.endswith("bias") and not name.startswith("head")]
        some = [{"params": head, "lr": 0.003}, {"params": biases, "weight_decay": 0.0}, {"params": rest}]
        return torch.optim.AdamW([group for group in some if group["params"]], lr=0.01, weight_decay=0.1)

    return stepped_by(make)


@habit(OPTIMIZERS)
def own_optimizer() -> Script:
    """An optimizer of one's own (`class Sign(Optimizer)`)."""
    return stepped_by(lambda named: Sign([p for _, p in named]))


class Sign(torch.optim.Optimizer):
    """Steps by the sign of the gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])


@habit(OPTIMIZERS, Refused("closure", "its `step` evaluates the model again, which a stage alone cannot do"))
def lbfgs() -> Script:
    """`LBFGS`."""
    return stepped_by(lambda named: torch.optim.LBFGS([p for _, p in named]))


SPARSE = "gradients are dense, in the buffer of a stage; use Adam and `sparse=False`"


@habit(OPTIMIZERS, Refused("SparseAdam", SPARSE))
def sparse_adam() -> Script:
    """`SparseAdam`."""
    return stepped_by(lambda named: torch.optim.SparseAdam([p for _, p in named], lr=0.01))


DIFFERENTIABLE = "weights are versions in memory that is used again, so no graph can lead through updates"


@habit(OPTIMIZERS, Refused("differentiable", DIFFERENTIABLE))
def differentiable() -> Script:
    """`differentiable=True`."""
    return stepped_by(lambda named: torch.optim.SGD(named, lr=0.1, differentiable=True))


# --- learning rates ---------------------------------------------------------------------------------------------------


def scheduled_by(make: Callable[[torch.optim.Optimizer], Any]) -> Script:
    return stepped_by(lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9), lr_scheduler=make)


@habit(OPTIMIZERS)
def lookahead() -> Script:
    """An optimizer that wraps another one, with a `zero_grad` of its own (Lookahead)."""
    return stepped_by(lambda named: Lookahead(torch.optim.SGD(named, lr=0.1, momentum=0.9)))


class Lookahead(torch.optim.Optimizer):
    """Goes half of the way back to slow weights at every second step (arXiv 1907.08610)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.steps = inner, 0
        self.param_groups, self.state = inner.param_groups, inner.state
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    def zero_grad(self) -> None:  # type: ignore[override]
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.steps += 1
        for p, slow in self.slow.items() if self.steps % 2 == 0 else ():
            p.copy_(slow.lerp_(p, 0.5))


WHOLE = "one optimizer is made for each stage, of the parameters that the function gets"


@habit(OPTIMIZERS, Refused("left out", WHOLE))
def of_the_whole_model() -> Script:
    """An optimizer of all parameters of the model (`SGD(model.parameters())`), for every stage."""
    script = stepped_by(lambda named: torch.optim.SGD(named, lr=0.1))
    everything = [p for block in script.blocks.values() for p in block.parameters()]
    script.optimizer = lambda _: torch.optim.SGD(everything, lr=0.1)
    return script


@habit(SCHEDULERS)
def step_lr() -> Script:
    """`StepLR`."""
    return scheduled_by(lambda optimizer: schedulers.StepLR(optimizer, step_size=1, gamma=0.5))


@habit(SCHEDULERS)
def multi_step_lr() -> Script:
    """`MultiStepLR`."""
    return scheduled_by(lambda optimizer: schedulers.MultiStepLR(optimizer, milestones=[1, 2], gamma=0.5))


@habit(SCHEDULERS)
def cosine() -> Script:
    """`CosineAnnealingLR`."""
    return scheduled_by(lambda optimizer: schedulers.CosineAnnealingLR(optimizer, T_max=3))


@habit(SCHEDULERS)
def cosine_restarts() -> Script:
    """`CosineAnnealingWarmRestarts`."""
    return scheduled_by(lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, T_0=2))


@habit(SCHEDULERS)
def one_cycle() -> Script:
    """`OneCycleLR`, with momentum."""
    return scheduled_by(lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.2, total_steps=4))


@habit(SCHEDULERS)
def cyclic() -> Script:
    """`CyclicLR`."""
    return scheduled_by(lambda optimizer: schedulers.CyclicLR(optimizer, base_lr=0.01, max_lr=0.2, step_size_up=2))


@habit(SCHEDULERS)
def lambda_lr() -> Script:
    """`LambdaLR`."""
    return scheduled_by(lambda optimizer: schedulers.LambdaLR(optimizer, lambda update: 1 / (1 + update)))


@habit(SCHEDULERS)
def warm_up() -> Script:
    """Warm-up and decay by `SequentialLR`."""

    def make(optimizer: torch.optim.Optimizer) -> Any:
        parts = [schedulers.LinearLR(optimizer, total_iters=2), schedulers.ExponentialLR(optimizer, gamma=0.5)]
        return schedulers.SequentialLR(optimizer, parts, milestones=[1])

    return scheduled_by(make)


@habit(SCHEDULERS)
def chained() -> Script:
    """`ChainedScheduler`."""

    def make(optimizer: torch.optim.Optimizer) -> Any:
        parts = [schedulers.ConstantLR(optimizer, total_iters=2), schedulers.PolynomialLR(optimizer, total_iters=4)]
        return schedulers.ChainedScheduler(parts, optimizer)

    return scheduled_by(make)


@habit(SCHEDULERS, Refused("ReduceLROnPlateau", "it needs a metric, which no update has: step it between two runs"))
def plateau() -> Script:
    """`ReduceLROnPlateau` as `lr_scheduler`."""
    return scheduled_by(schedulers.ReduceLROnPlateau)


@habit(SCHEDULERS)
def swa_lr() -> Script:
    """`swa_utils.SWALR`."""
    return scheduled_by(lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=2))


# --- updates ----------------------------------------------------------------------------------------------------------


@habit(UPDATES)
def clipped() -> Script:
    """`clip_grad_norm_`, as `max_grad_norm`."""
    return stepped_by(
        lambda named: torch.optim.SGD(named, lr=0.1),
        before_step=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        options={"max_grad_norm": 0.1},
    )


@habit(UPDATES)
def clip_hook() -> Script:
    """`clip_grad_value_`, as a step hook of the optimizer (`register_step_pre_hook`)."""

    def make(named: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(named, lr=0.1)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(parameters, 0.01))
        return optimizer

    return stepped_by(make)


@habit(UPDATES)
def averaged() -> Script:
    """An EMA of the weights (`swa_utils.AveragedModel`), as `ema_decay`."""
    kept: dict[str, Tensor] = {}

    def follow(model: nn.Module) -> None:
        for name, p in model.named_parameters():
            kept[name] = kept[name] * 0.5 + p.detach() * 0.5

    script = stepped_by(lambda named: torch.optim.SGD(named, lr=0.1))
    for prefix, block in script.blocks.items():
        kept |= {f"{prefix}.{name}": p.detach().clone() for name, p in block.named_parameters()}
    script.after_step, script.options = follow, {"ema_decay": 0.5}
    script.result = (lambda _: kept, lambda pipeline: pipeline.full_state_dict(averaged=True))
    return script


@habit(UPDATES)
def projected() -> Script:
    """Weights that are projected after each update, as a step hook (`register_step_post_hook`)."""

    def make(named: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(named, lr=0.1)

        @torch.no_grad()
        def project(*_: Any) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.3, 0.3)

        optimizer.register_step_post_hook(project)
        return optimizer

    return stepped_by(make)
