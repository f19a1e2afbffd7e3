"""Configures the stages of the reference for a method, by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer

from penstock.errors import ConfigError
from penstock.verify.reference.corrections import (
    Blend,
    Discrepancy,
    Feedback,
    Newest,
    Rescheduling,
)
from penstock.verify.reference.delays import mean_delay, prediction_horizons
from penstock.verify.reference.predictions import Ahead, ReferencePrediction, check_velocity
from penstock.verify.reference.stage import ReferenceReading, ReferenceStage
from penstock.verify.reference.supported_methods import NEWEST, PREDICTION

UNEQUAL = ("pipemare",)
"""Methods whose updates depend on the stage, so that copies of a parameter on two stages would diverge."""


class ReferencePlace(NamedTuple):
    """Position of a stage: s of d, counted from 0; m microbatches of a pipeline to an update; its delays, if given."""

    stage: int
    depth: int
    microbatches: int
    delays: Sequence[int] | None = None


def correct(
    stage: ReferenceStage, place: ReferencePlace, method: str, options: Mapping[str, Any], tied: bool
) -> Callable[[int], float]:
    """Set how a stage reads weights and makes updates under a method.

    Args:
        stage: a new one.
        place: its position.
        method: its name.
        options: all options of the method.
        tied: whether stages share parameters.

    Returns:
        A function: number of updates made before -> the stage's own factor on learning rates.

    Raises:
        ConfigError: stages share parameters, and the method would update them differently.
        CapabilityError: the method does not support this optimizer.
    """
    if tied and method in UNEQUAL:
        raise ConfigError(f"{method} updates each stage differently, so stages cannot share parameters: untie them")
    stage.reading = _reading(method, options, place, stage.optimizer)
    if method == "error-feedback":
        stage.step = Feedback()
    if method == "pipemare":
        return Rescheduling(mean_delay(*place), options["reschedule"])
    return lambda _: 1.0


def _reading(
    method: str, options: Mapping[str, Any], place: ReferencePlace, optimizer: Optimizer | None
) -> ReferenceReading:
    if method == "pipemare" and options["decay"] is not None:
        return Discrepancy(mean_delay(*place), options["decay"])
    if method in NEWEST:
        return Newest()
    if method in ("2bw-ahead", "3bw-ahead"):
        return Ahead(**options)
    if method == "i-timeprest":
        return Blend(options["beta"])
    if method not in PREDICTION:
        return ReferenceReading()
    forward, backward = prediction_horizons(method, place.stage, place.depth, place.microbatches)
    if optimizer is not None:
        check_velocity(optimizer)
    return ReferencePrediction(forward, backward, method == "spectrain-stash", options.get("bias", "adam"))
