"""Which equations of the reference a configuration has, and their options."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from penstock.errors import ConfigError
from penstock.train.config.schema import TrainConfig
from penstock.weights.corrections.base import Correction
from penstock.weights.corrections.blending import Blending
from penstock.weights.corrections.ftpipe import FTPipe
from penstock.weights.corrections.gap_aware import GapAware
from penstock.weights.corrections.nag_pp import NagPP
from penstock.weights.corrections.pipelined_backprop import PipelinedBackprop
from penstock.weights.corrections.pipemare import PipeMare
from penstock.weights.corrections.prediction import Prediction
from penstock.weights.corrections.two_bw_ahead import ReadingAhead

_BY_RULE = MappingProxyType(
    {
        "flush": "1f1b",
        "provisional": "zb-h2-post",
        "double-buffer": "2bw",
        "triple-buffer": "3bw",
        "stash": "stash",
        "vertical-sync": "vertical-sync",
        "newest": "newest",
        "admitted-newest": "timeprest",
    }
)
"""For every rule that needs no correction, a method with its equations; the delays of an order are derived from it."""

_OF_ITS_ORDER = ("ftpipe-aggregated",)
"""Corrections whose reference knows one order only."""

_STASHED = "predicted-stash"
"""The rule under which corrections predict for backwards what forwards read, where a choice is theirs."""


def reference_method(config: TrainConfig) -> str:
    """Return the method whose equations the reference trains.

    Raises:
        ConfigError: no method of the reference has the rule of a schedule of one's own.
    """
    if config.schedule is None:
        return config.row.name
    rule, correction = config.row.rule, config.row.correction
    if correction in _OF_ITS_ORDER:
        raise ConfigError(
            f"{config.row.name}: there is no reference for orders of your own with correction {correction!r}, which "
            f"predicts from the gradients of the order of 1F1B; verify method {correction}"
        )
    if correction != "none":
        return "3bw-ahead" if rule == "triple-buffer" else correction  # the method that is called like it
    if rule not in _BY_RULE:
        raise ConfigError(
            f"{config.row.name}: there is no reference for orders of your own under rule {rule!r}; there is one for "
            f"{', '.join(_BY_RULE)}"
        )
    return _BY_RULE[rule]


def reference_options(correction: Correction | None, rule: str) -> dict[str, Any]:
    """Return the options of a correction, under a version rule, in the reference's names."""
    match correction:
        case PipelinedBackprop() if rule in (_STASHED, "stash"):
            return {"backward": "stash"}
        case FTPipe() if rule == _STASHED and not correction.decays and correction.ahead:
            return {"backward": "stash"}
        case PipeMare():
            return {"reschedule": correction.reschedule, "decay": correction.decay}
        case FTPipe() if correction.decays or not correction.ahead:
            raise ConfigError(
                f"correction {correction.name!r}: the reference predicts without weight decay, and each update at its "
                "own rate; verify it with ahead=1 and weight_decay=0"
            )
        case NagPP(adapts=True):
            return {"reschedule": correction.reschedule}
        case Prediction(name="xpipe"):
            return {"bias": "paper" if correction.uncorrected else "adam"}
        case Blending():
            return {"beta": correction.beta}
        case ReadingAhead():
            found = {key: getattr(correction, key) for key in ("motion", "horizon", "a", "b")}
            return {key: value for key, value in found.items() if value is not None}
        case GapAware():
            return {"average": correction.average, "eps": correction.eps}
    return {}
