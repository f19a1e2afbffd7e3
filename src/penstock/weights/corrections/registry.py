"""Create the corrections of the method table from the options in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from penstock.errors import ConfigError
from penstock.schedule.methods.compatibility import correction_options
from penstock.schedule.methods.find_method import find_method
from penstock.weights.corrections.base import Correction
from penstock.weights.corrections.blending import Blending
from penstock.weights.corrections.error_feedback import ErrorFeedback
from penstock.weights.corrections.ftpipe import FTPipe
from penstock.weights.corrections.gap_aware import GapAware
from penstock.weights.corrections.nag_pp import NagPP
from penstock.weights.corrections.pipelined_backprop import Form, PipelinedBackprop
from penstock.weights.corrections.pipemare import PipeMare
from penstock.weights.corrections.prediction import Prediction
from penstock.weights.corrections.two_bw_ahead import ReadingAhead

PIPELINED_BACKPROP: Mapping[str, tuple[bool, Form]] = MappingProxyType(
    {
        "spike": (True, "none"),
        "lwp": (False, "velocity"),
        "lwp-weights": (False, "weights"),
        "spike-lwp": (True, "velocity"),
        "spike-lwp-weights": (True, "weights"),
    }
)
"""Name -> (use spike compensation, form of prediction)."""


def correction_of(method: str, **options: float | None) -> Correction | None:
    """Return what a method does about stale weights; None if it does nothing.

    Args:
        method: its name.
        options: of its correction, such as reschedule=500.

    Raises:
        ConfigError: the method or option is unknown, or an option without a default is missing.
    """
    row = find_method(method)
    name, given = row.correction, correction_options(row, options)
    if given.get("reschedule", 0) is None:
        raise ConfigError(
            f"{row.name}: over how many updates do the rates of its stages rise to the common one? Write "
            f"method='{row.name}:reschedule=500', or method=penstock.method({row.name!r}, reschedule=500); 0 for none "
            f"(for a schedule of your own staleness=penstock.correction_of({row.name!r}, reschedule=500))"
        )
    return make_correction(name, given, 0, 0)


def make_correction(name: str, options: dict[str, float | None], updates: int, warm_up: int) -> Correction | None:
    """Create a correction by its name; None for "none".

    Args:
        name: its name in the table of corrections.
        options: all its options, by name.
        updates: number of updates of the run.
        warm_up: warm-up of the learning rate, in updates.
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
    if name == "2bw-ahead":
        return ReadingAhead(bool(options["motion"]), options["horizon"], options["a"], options["b"])
    if name == "gap-aware":
        return GapAware(float(options["average"] or 0.0), float(options["eps"] or 0.0))
    if name in ("nag-pp", "nag-pp-no-stash"):
        return NagPP(name, name != "nag-pp", _reschedule(options.get("reschedule"), updates, warm_up))
    if name == "i-timeprest":
        return Blending(float(options["beta"] or 0.0))
    if name in ("ftpipe", "ftpipe-aggregated"):
        return FTPipe(name == "ftpipe-aggregated", bool(options["ahead"]), bool(options["weight_decay"]))
    raise AssertionError(f"correction {name!r} is not implemented")


def _reschedule(given: float | None, updates: int, warm_up: int) -> int:
    if given is not None:
        return int(given)
    return 5 * warm_up if warm_up else -(-updates // 4)
