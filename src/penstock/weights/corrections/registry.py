"""The corrections of the method table, with the options that a configuration gives them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from penstock.errors import ConfigError
from penstock.schedule.methods.table import correction_options, find_method
from penstock.weights.corrections.base import Correction
from penstock.weights.corrections.blending import Blending
from penstock.weights.corrections.error_feedback import ErrorFeedback
from penstock.weights.corrections.ftpipe import FTPipe
from penstock.weights.corrections.gap_aware import GapAware
from penstock.weights.corrections.nag_pp import NagPP
from penstock.weights.corrections.pipelined_backprop import Form, PipelinedBackprop
from penstock.weights.corrections.pipemare import PipeMare
from penstock.weights.corrections.prediction import Prediction

PIPELINED_BACKPROP: Mapping[str, tuple[bool, Form]] = MappingProxyType(
    {
        "spike": (True, "none"),
        "lwp": (False, "velocity"),
        "lwp-weights": (False, "weights"),
        "spike-lwp": (True, "velocity"),
        "spike-lwp-weights": (True, "weights"),
    }
)
"""Name -> whether spikes are compensated, and the form of prediction."""


def correction_of(method: str, **options: float | None) -> Correction | None:
    """What a method does about staleness; None if nothing.

    Args:
        method: a row of the method table.
        options: of its correction, such as reschedule=500.

    Raises:
        ConfigError: no such method, or option; or one is missing that has no default.
    """
    row = find_method(method)
    name, given = row.correction, correction_options(row, options)
    if given.get("reschedule", 0) is None:
        raise ConfigError(
            f"correction {name!r}: say over how many updates rates rise, such as reschedule=500; 0 for none"
        )
    return make_correction(name, given, 0, 0)


def make_correction(name: str, options: dict[str, float | None], updates: int, warm_up: int) -> Correction | None:
    """The correction of a method.

    Args:
        name: in the table of corrections.
        options: all that it has, by name.
        updates: of the run.
        warm_up: of the learning rate, in updates.
    """
    if name == "none":
        return None
    if name == "pipemare":
        return PipeMare(_reschedule(options["reschedule"], updates, warm_up), options["decay"])
    if name in ("spectrain", "spectrain-stash", "xpipe", "pipeoptim"):
        return Prediction(name, bool(options.get("uncorrected")))
    if name in PIPELINED_BACKPROP:
        return PipelinedBackprop(name, *PIPELINED_BACKPROP[name])
    if name == "error-feedback":
        return ErrorFeedback(float(options["share"] or 0.0))
    if name == "gap-aware":
        return GapAware(float(options["average"] or 0.0), float(options["eps"] or 0.0))
    if name in ("nag-pp", "nag-pp-no-stash"):
        return NagPP(name, name != "nag-pp", _reschedule(options.get("reschedule"), updates, warm_up))
    if name == "i-timeprest":
        return Blending(float(options["beta"] or 0.0))
    if name in ("ftpipe", "ftpipe-aggregated"):
        return FTPipe(name == "ftpipe-aggregated", bool(options["ahead"]), bool(options["weight_decay"]))
    raise AssertionError(f"no code for correction {name!r}")


def _reschedule(given: float | None, updates: int, warm_up: int) -> int:
    if given is not None:
        return int(given)
    return 5 * warm_up if warm_up else -(-updates // 4)
