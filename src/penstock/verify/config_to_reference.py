"""Which equations of the reference a configuration has, and their options."""

from __future__ import annotations

from typing import Any

from penstock.errors import ConfigError
from penstock.schedule.methods.method import Method
from penstock.train.config.own_schedule import held_method
from penstock.train.config.schema import TrainConfig
from penstock.verify.reference.supported_methods import BY_RULE
from penstock.weights.corrections.base import Correction, OwnCorrection
from penstock.weights.corrections.blending import Blending
from penstock.weights.corrections.pipemare import PipeMare
from penstock.weights.corrections.prediction import Prediction
from penstock.weights.corrections.two_bw_ahead import ReadingAhead


def reference_method(config: TrainConfig) -> str:
    """Return the method whose equations the reference trains.

    Raises:
        ConfigError: no method of the reference has the rule of a schedule of one's own.
    """
    if config.schedule is None:
        return config.row.name
    rule, correction = config.row.rule, config.row.spec.name
    if held_method(config.schedule) is not None:
        return base_of(config.row)
    if correction != "none":
        return "3bw-ahead" if rule == "triple-buffer" else correction  # the method that is called like it
    if rule not in BY_RULE:
        raise ConfigError(
            f"{config.row.name}: there is no reference for orders of your own under rule {rule!r}; there is one for "
            f"{', '.join(BY_RULE)}"
        )
    return BY_RULE[rule]


def base_of(row: Method) -> str:
    """Return the method of the reference whose versions the forwards of a method of a user's own read.

    Raises:
        ConfigError: it has a correction, but no reference of it.
    """
    if row.spec.name != "none" and row.reference is None:
        raise ConfigError(
            f"method {row.name!r} has no reference to compare with: write its equations as a function, and give that "
            "as penstock.Method(reference=...) (docs/own-methods.md)"
        )
    of_copies = {"predicted-shared": "xpipe", "blended": "i-timeprest"}
    return BY_RULE.get(row.rule) or of_copies.get(row.rule, "stash")


def reference_options(correction: Correction | None) -> dict[str, Any]:
    """Return the options of a correction in the reference's names."""
    match correction:
        case OwnCorrection():
            return dict(correction.options)
        case PipeMare():
            return {"reschedule": correction.reschedule, "decay": correction.decay}
        case Prediction(name="xpipe"):
            return {"bias": "paper" if correction.uncorrected else "adam"}
        case Blending():
            return {"beta": correction.beta}
        case ReadingAhead():
            found = {key: getattr(correction, key) for key in ("motion", "horizon", "a", "b")}
            return {key: value for key, value in found.items() if value is not None}
    return {}
