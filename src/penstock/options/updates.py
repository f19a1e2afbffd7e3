"""The options of updates: clipping, learning-rate scheduler, average of the weights, what counts as divergence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from penstock.checks import check_number, check_whole
from penstock.errors import ConfigError
from penstock.weights.decision import Policy
from penstock.weights.updates.lr_scheduler_table import SchedulerFactory, check_factory


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """How the gradient of a batch becomes an update.

    Attributes:
        max_grad_norm: the largest global norm of the gradient of a batch's mean loss; larger ones are scaled down to
            it, as `torch.nn.utils.clip_grad_norm_` does, whatever the order and the version rule. With it, or with a
            loss scale, parallel pipelines or post-validation, a gradient that is not finite skips the update, and the
            next version is a copy.
        lr_scheduler: optimizer -> a scheduler of torch, such as ``lambda optimizer: OneCycleLR(optimizer, max_lr=1e-3,
            total_steps=500)``, or ``lambda optimizer: LambdaLR(optimizer, factor)`` for a function of the number of the
            update. One is made for each stage; it sets the rates of each update that is made, and momentum if it does
            that. Nobody steps it by hand. Resumed runs have it where it was.
        ema_decay: decay of an exponential moving average of the weights, A(t+1) = decay A(t) + (1 - decay) W(t+1),
            which `Pipeline.evaluate` and `Pipeline.state_dict` give on demand; none is kept if None.
        divergence: what `Pipeline.trouble` is to report, where stages decide together.

    Raises:
        ConfigError: a number is out of its range, or a value of another type.
    """

    max_grad_norm: float | None = None
    lr_scheduler: SchedulerFactory | None = None
    ema_decay: float | None = None
    divergence: Divergence | None = None

    def __post_init__(self) -> None:
        """Check each by itself."""
        check_number("max_grad_norm", self.max_grad_norm, "1.0")
        check_number("ema_decay", self.ema_decay, "0.999")
        Policy(self.max_grad_norm)
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError(f"ema_decay must be between 0 and 1, such as 0.999; got {self.ema_decay}")
        if self.lr_scheduler is not None:
            check_factory(self.lr_scheduler)
        if self.divergence is not None:
            if not isinstance(self.divergence, Divergence):
                raise ConfigError(
                    "divergence must be penstock.Divergence(spike=2.0) or the like, or None; got "
                    f"{self.divergence!r:.80}"
                )
            self.divergence.check()


class Divergence(NamedTuple):
    """When training counts as diverged; what is found is `Pipeline.trouble`.

    Attributes:
        spike: a loss above this multiple of the median of the finite losses of the `window` batches before it counts;
            None if the size of losses does not matter.
        window: the number of batches in that median; no loss is judged before there have been as many.
        nonfinite: whether a loss or gradient that is not finite counts. With loss scaling such gradients are usual, so
            that only the loss counts.
    """

    spike: float | None = None
    window: int = 20
    nonfinite: bool = True

    def check(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: `spike` is not above 1, or `window` no whole number of at least 1; or nothing counts.
        """
        if self.spike is None and not self.nonfinite:
            raise ConfigError("divergence: nothing counts as one; set spike=2.0 or the like, or leave nonfinite True")
        check_number("divergence: spike", self.spike, "2.0")
        if self.spike is not None and not self.spike > 1:
            raise ConfigError(f"divergence: spike must be above 1, got {self.spike}")
        check_whole("divergence: window", self.window)
