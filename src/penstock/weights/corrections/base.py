"""The interface of corrections for stale weights, which `penstock.schedule.methods.corrections` lists.

A `Correction` holds the settings, the same for all stages; for each stage it creates a `Corrector`, whose methods are
called in the updates and backwards of that stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.schedule.methods.corrections import CorrectionSpec, find_correction
from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.optim.directions import check_predictable
from penstock.weights.optim.optimizer_adapters import name_of
from penstock.weights.updates.parameter_change import Step
from penstock.weights.updates.updater import Updater

NO_RECOMPUTE = (
    "recompute is not supported: the predicted weights that a forward read are gone before it could be recomputed; set "
    "recompute=none"
)
"""Why corrections that predict weights cannot be used with recompute."""


class StagePlace(NamedTuple):
    """The position of a stage in the pipeline.

    Attributes:
        stage, num_stages: index of the stage, and number of stages.
        microbatches: m.
        delay: updates between the version that its forwards read and the one that is updated, mean over a batch.
        where: name of the stage for error messages.
    """

    stage: int
    num_stages: int
    microbatches: int
    delay: float
    where: str


def rescheduled(delay: float, updates: int, over: int) -> float:
    """Return PipeMare's T1 factor, 1 / max(delay, 1)^(1 - min(updates / over, 1)); 1 if `over` is 0."""
    return float(max(delay, 1.0) ** -(1.0 - min(updates / over, 1.0))) if over else 1.0


class Corrector:
    """Corrects the updates and passes of one stage; this base class does nothing.

    Args:
        layout: the layout of the parameters.
        place: the position of the stage.

    Attributes:
        name: name of the correction.
        motion: backwards read the newest weights minus n times this, where their forwards read weights that were n
            updates older; None for the newest weights themselves.
        watches: True if `stepped` is to be called for each parameter that an update changes.
        predicts: True if predictions need the optimizer state.
        compares: True if `backward_done` and `before_step` are to be called, with the newest weights.
        reads_ahead: True if passes read `ahead` of every update in place of the version that it has made.
        began: updates made before the correction began.
    """

    name = ""
    watches = False
    predicts = False
    compares = False
    reads_ahead = False

    def __init__(self, layout: Layout, place: StagePlace) -> None:
        self.layout, self.place = layout, place
        self.motion: Buffer | None = None
        self.began = 0

    @property
    def buffers(self) -> dict[str, Buffer]:
        """Return all parameter-sized buffers, by name; a snapshot saves them."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    @staticmethod
    def name_of(optimizer: torch.optim.Optimizer) -> str:
        """Return the name of an optimizer's class; of one that is wrapped, that of the class within."""
        return name_of(optimizer)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise an error if the correction does not support the optimizer.

        Raises:
            CapabilityError: it is not supported.
        """
        if self.predicts:
            check_predictable(optimizer)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Inspect the optimizer, or change its settings, before it steps.

        Raises:
            CapabilityError: the correction does not support it.
        """
        self.check(optimizer)

    def rate(self, updates: int) -> float:  # noqa: ARG002
        """Return the factor on the learning rate of the stage, `updates` updates after the correction began."""
        return 1.0

    def backward_done(self, updater: Updater, read: Buffer, newest: Buffer) -> None:
        """Observe a backward on the weights `read` that its forward read, while they still exist."""

    def before_step(self, gradient: Buffer, newest: Buffer, factor: float) -> None:
        """Adjust the gradient before an update.

        Args:
            gradient: the gradient of the update, which nothing else reads any more.
            newest: the weights before the update.
            factor: the factor by which the updater will multiply the gradient.
        """

    def stepped(self, step: Step) -> None:
        """Observe that an update has changed a parameter."""

    def looks_back(self, optimizer: torch.optim.Optimizer) -> bool:  # noqa: ARG002
        """Return whether `ahead` needs the weights before an update."""
        return False

    def ahead(self, step: Step) -> Tensor:
        """Return the values that passes read after an update has changed a parameter."""
        raise NotImplementedError

    def estimate(self, weights: Buffer, gap: int, out: Buffer) -> None:
        """Write an estimate of the weights before the last `gap` updates: weights - gap * motion, cast once.

        Args:
            weights: the newest weights, as the optimizer steps them.
            gap: number of updates.
            out: the buffer to write, in the precision that passes read.
        """
        assert self.motion is not None
        out.rewrite()
        with torch.no_grad():
            for name, view in out.views.items():
                view.copy_(weights.views[name] - gap * self.motion.views[name])

    def look_ahead(self, updates: int, gradient: Buffer | None, factor: float) -> object:  # noqa: ARG002
        """Prepare a derived copy; `predict` follows, unless there is a copy with the same content.

        Args:
            updates: number of updates between the newest weights and the backward of the copy's microbatch.
            gradient: the gradient accumulated so far for the next of these updates; None if there is none.
            factor: c / (N S), which scales it to a part of the gradient of the mean loss: S is its loss scale, N the
                loss weight of the batch before, since that of its own is not known yet.

        Returns:
            A key of what the content of the copy depends on, besides version and label.
        """
        return None

    def predict(self, updater: Updater, weights: Buffer, label: str, out: Buffer) -> None:
        """Write a derived copy of the newest weights.

        Args:
            updater: the updater of the stage.
            weights: the newest weights.
            label: label of the copy in the schedule.
            out: the buffer to write.
        """
        raise NotImplementedError

    def blend(self, forward: Buffer, newest: Buffer, updates: int, out: Buffer) -> None:
        """Write the weights that the backward of a microbatch reads.

        Args:
            forward: the weights that its forward read.
            newest: the newest weights.
            updates: number of updates between the two.
            out: the buffer to write.
        """
        raise NotImplementedError


@runtime_checkable
class Correction(Protocol):
    """What a method does about stale weights, with its settings; `correction_of` makes one."""

    @property
    def name(self) -> str:
        """Its name in the table of corrections."""
        ...

    def refuses(self, precision: torch.dtype | None, recompute: str, /) -> str | None:
        """Return why the correction does not support this precision or recompute mode, or None if it does."""
        ...

    def on(self, layout: Layout, place: StagePlace, /) -> Corrector:
        """Create the corrector of a stage with parameters of this layout."""
        ...


@dataclass(frozen=True)
class OwnCorrection:
    """A correction whose row brings the class that corrects a stage, with its settings.

    Attributes:
        spec: its row.
        options: all its options, by name.
    """

    spec: CorrectionSpec
    options: Mapping[str, float | None]

    @property
    def name(self) -> str:
        """Its name."""
        return self.spec.name

    def refuses(self, precision: torch.dtype | None, recompute: str) -> str | None:
        """Return why the correction does not support this precision or recompute mode, or None if it does."""
        if precision is not None and not self.spec.low_precision:
            return f"correction {self.name!r} needs weights in float32; set precision to fp32, or use another method"
        return NO_RECOMPUTE if recompute != "none" and not self.spec.recomputes else None

    def on(self, layout: Layout, place: StagePlace) -> Corrector:
        """Create the corrector of a stage with parameters of this layout."""
        assert self.spec.corrector is not None
        if not isinstance(self.spec.corrector, type) or not issubclass(self.spec.corrector, Corrector):
            raise ConfigError(
                f"correction {self.name!r}: {self.spec.corrector!r} must be a subclass of penstock.Corrector"
            )
        made = self.spec.corrector(layout, place, **self.options)
        if not hasattr(made, "place"):
            raise ConfigError(
                f"correction {self.name!r}: {type(made).__name__}.__init__ must call super().__init__(layout, place)"
            )
        for method, flag in _CALLED_IF.items():
            if _defines(made, method) and not _defines(made, flag):
                raise ConfigError(
                    f"correction {self.name!r}: {type(made).__name__}.{method} is called only if {flag} is True; set "
                    "it in the class, or in __init__ for some stages"
                )
        if made.reads_ahead and not _defines(made, "ahead"):
            raise ConfigError(f"correction {self.name!r}: reads_ahead is True, but {type(made).__name__} has no ahead")
        return made


_CALLED_IF = {"stepped": "watches", "backward_done": "compares", "before_step": "compares", "ahead": "reads_ahead"}
"""Methods of a corrector -> the attribute without which nothing calls them."""


def _defines(corrector: Corrector, name: str) -> bool:
    """Return whether a corrector or its class has an attribute that is not the base class's."""
    return name in vars(corrector) or getattr(type(corrector), name) is not getattr(Corrector, name)


def correction_spec(correction: Correction) -> CorrectionSpec:
    """Return the row of a correction.

    Raises:
        ConfigError: there is none.
    """
    return correction.spec if isinstance(correction, OwnCorrection) else find_correction(correction.name)
