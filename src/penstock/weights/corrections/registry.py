"""Create the corrections of the method table from the options in a configuration."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.schedule.methods.compatibility import correction_options
from penstock.schedule.methods.corrections import CorrectionSpec, find_correction
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.methods.method import Method
from penstock.weights.corrections.base import Correction, OwnCorrection
from penstock.weights.corrections.blending import Blending
from penstock.weights.corrections.error_feedback import ErrorFeedback
from penstock.weights.corrections.pipemare import PipeMare
from penstock.weights.corrections.prediction import Prediction
from penstock.weights.corrections.two_bw_ahead import ReadingAhead


def correction_of(method: str | Method, **options: float | None) -> Correction | None:
    """Return what a method does about stale weights; None if it does nothing.

    Args:
        method: its name; or a `Method` of your own.
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


def make_correction(
    correction: str | CorrectionSpec, options: dict[str, float | None], updates: int, warm_up: int
) -> Correction | None:
    """Create a correction by its name, or that of a user's own row; None for "none".

    Args:
        correction: its name in the table of corrections, or its row.
        options: all its options, by name.
        updates: number of updates of the run.
        warm_up: warm-up of the learning rate, in updates.
    """
    spec = find_correction(correction)
    name = spec.name
    if options.get("reschedule", 0) is None:
        options = {**options, "reschedule": 5 * warm_up if warm_up else -(-updates // 4)}
    if spec.corrector is not None:
        return OwnCorrection(spec, options)
    if name == "none":
        return None
    if name == "pipemare":
        return PipeMare(int(options["reschedule"] or 0), options["decay"])
    if name in ("spectrain", "spectrain-stash", "xpipe", "pipeoptim"):
        return Prediction(name, bool(options.get("uncorrected")))
    if name == "error-feedback":
        return ErrorFeedback(float(options["share"] or 0.0))
    if name == "2bw-ahead":
        return ReadingAhead(bool(options["motion"]), options["horizon"], options["a"], options["b"])
    if name == "i-timeprest":
        return Blending(float(options["beta"] or 0.0))
    raise AssertionError(f"correction {name!r} is not implemented")
