"""NAG-PP: Nesterov momentum as a remedy for delay.

Ajanthan et al. (ICML 2025, arXiv 2505.01099): the look-ahead of Nesterov momentum, with its gradient discounted by
1 - momentum, compensates for the delay; in practice torch's NAdam with beta1 = 0.99, on stashed weights. Without a
stash, a stage with delay tau has its rate divided by max(tau, 1)^(1 - min(k / K, 1)) at update k, and the momentum
0.9 + 0.09 (P - i) / P on stage i of P, counted from 1.

tau is the mean delay of the schedule, where the paper has floor((2 (P - i) + 1) / (2 K)), the smallest for K
microbatches per update; k counts updates from 0, where the paper's code counts from 1.

    penstock train --file examples/methods/nag_pp.py:method=nag-pp --stages 4
    penstock verify --file examples/methods/nag_pp.py:method=nag-pp-no-stash:reschedule=100
"""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import NAdam, Optimizer

import penstock
from penstock.verify.reference import Newest, ReferencePlace, ReferenceStage, mean_delay


class NagPP(penstock.Corrector):
    """NAG-PP on stashed weights: nothing but NAdam with a high beta1."""

    instead = "use optimizer nadam with beta1=0.99"

    def check(self, optimizer: Optimizer) -> None:
        """Accept NAdam."""
        if not isinstance(optimizer, NAdam):
            raise penstock.CapabilityError(f"NAG-PP needs NAdam, not {type(optimizer).__name__}; {self.instead}")


class NagPPWithoutStash(NagPP):
    """NAG-PP on the newest weights: momentum and rate by the position of the stage.

    Args:
        reschedule: K, the updates over which rates rise to the common one; 0 for none.
    """

    instead = "use optimizer nadam"

    def __init__(self, layout: object, place: penstock.StagePlace, reschedule: float) -> None:
        super().__init__(layout, place)
        self._reschedule = reschedule

    def begin(self, optimizer: Optimizer) -> None:
        """Set the momentum."""
        super().begin(optimizer)
        behind = self.place.num_stages - 1 - self.place.stage
        for group in optimizer.param_groups:
            group["betas"] = 0.9 + 0.09 * behind / self.place.num_stages, group["betas"][1]

    def rate(self, updates: int) -> float:
        """Return the rate factor, which starts lower where the delay is long."""
        if not self._reschedule:
            return 1.0
        return max(self.place.delay, 1.0) ** -(1.0 - min(updates / self._reschedule, 1.0))


def reference(stage: ReferenceStage, _: ReferencePlace) -> None:
    """Check the optimizer of a stage of the reference; it reads what `stash` reads."""
    if stage.optimizer is not None and not isinstance(stage.optimizer, NAdam):
        raise penstock.CapabilityError(f"NAG-PP is NAdam, but the optimizer is {type(stage.optimizer).__name__}")


def reference_without_stash(
    stage: ReferenceStage, place: ReferencePlace, *, reschedule: float
) -> Callable[[int], float]:
    """Set what a stage of the reference reads, and its momentum; return the factor on its rate."""
    reference(stage, place)
    stage.reading = Newest()
    momentum = 0.9 + (place.depth - 1 - place.stage) / place.depth * 0.09
    for group in [] if stage.optimizer is None else stage.optimizer.param_groups:
        group["betas"] = (momentum, group["betas"][1])
    tau = max(mean_delay(*place), 1.0)
    return lambda k: tau ** -(1.0 - min(k / reschedule, 1.0)) if reschedule else 1.0


SETTINGS = {"optimizer.name": "nadam", "optimizer.weight_decay": 0.01}

nag_pp = penstock.Method(
    "nag-pp",
    "NAG-PP, Nesterov's momentum on stashed weights",
    "arXiv 2505.01099",
    order="endless-1f1b",
    rule="stash",
    correction=penstock.CorrectionSpec("nag-pp", "torch's NAdam with a high beta1", rules=("stash",), corrector=NagPP),
    settings={**SETTINGS, "optimizer.beta1": 0.99},
    reference=reference,
)
nag_pp_no_stash = penstock.Method(
    "nag-pp-no-stash",
    "NAG-PP on the newest weights",
    "arXiv 2505.01099",
    order="endless-1f1b",
    rule="newest",
    correction=penstock.CorrectionSpec(
        "nag-pp-no-stash",
        "the same with momentum and rate by stage",
        rules=("newest",),
        options={
            "reschedule": penstock.Option(
                None,
                "K, updates over which the rates of stages rise to the common one; 0 for none; if not set, five times "
                "the warm-up of the rate, or else a quarter of the run",
                "count",
                nullable=True,
            )
        },
        alike=False,
        corrector=NagPPWithoutStash,
    ),
    settings=SETTINGS,
    reference=reference_without_stash,
)
