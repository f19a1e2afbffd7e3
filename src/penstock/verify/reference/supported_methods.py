"""The methods that have a reference, and the options of each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from penstock.errors import ConfigError

FLUSH = (
    "sequential", "gpipe", "1f1b", "eager", "interleaved", "depth-first-full", "breadth-first", "layered", "zb-h1",
    "zb-h2", "zb-h2-post", "zb-interleaved", "zb-auto", "zb-auto-post", "zb-v", "v-half", "v-min", "v-auto", "hanayo",
    "chimera", "dualpipe", "dualpipe-v", "bitpipe", "bpipe", "vocabulary-1f1b", "seq1f1b", "terapipe",
)  # fmt: skip
DOUBLE_BUFFER = ("2bw", "2bw-eager", "error-feedback", "2bw-ahead", "2bw-layered")
TRIPLE_BUFFER = ("3bw", "3bw-ahead")
UPDATES_LATE = MappingProxyType({**dict.fromkeys(DOUBLE_BUFFER, 1), **dict.fromkeys(TRIPLE_BUFFER, 2)})
"""The delay of methods under which it is the same everywhere."""

NF1B = ("timeprest", "v-timeprest", "i-timeprest")
NEWEST = ("newest", "pipemare", "timeprest", "v-timeprest")
OWN_DELAYS = (*FLUSH, *UPDATES_LATE)
"""Methods whose delays follow from their definition, not from the order of a schedule."""

PREDICTION = ("spectrain", "spectrain-stash", "xpipe", "pipeoptim")
METHODS = (*OWN_DELAYS, "vertical-sync", "stash", *NEWEST, "i-timeprest", *PREDICTION)

BY_RULE: Mapping[str, str] = MappingProxyType(
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

NEEDED = "needed"
OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "pipemare": {"reschedule": NEEDED, "decay": 0.135},
        "xpipe": {"bias": "paper"},
        "i-timeprest": {"beta": 0.5},
        "2bw-ahead": {"motion": False, "horizon": 1.0, "a": None, "b": None},
        "3bw-ahead": {"motion": False, "horizon": 2.0, "a": None, "b": None},
    }
)
"""Options and defaults of each method: the paper's values. No paper gives a
number of updates for `reschedule`: a quarter of the first phase if the rate falls in steps, five times a linear
warm-up. The `beta` of `i-timeprest` is ours."""

_CHOICES = {"bias": ("paper", "adam")}


def method_options(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a method, given or by default.

    Raises:
        ConfigError: unknown method, option or value, or a required option is missing.
    """
    if method not in METHODS:
        raise ConfigError(f"no reference of method {method!r}; known: {', '.join(METHODS)}")
    known = OPTIONS.get(method, {})
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{method} has no option {name!r}; it has: {', '.join(known) or 'none'}")
        if name in _CHOICES and value not in _CHOICES[name]:
            raise ConfigError(f"{method}: {name} is {value!r}; give one of {', '.join(_CHOICES[name])}")
        if name == "beta" and not 0.0 <= value <= 1.0:
            raise ConfigError(f"{method}: beta is {value}; give a number from 0 (newest weights) to 1 (the forward's)")
    options = {**known, **given}
    for name, value in options.items():
        if value == NEEDED:
            raise ConfigError(f"{method} needs the option {name!r}, which has no default: give a number")
    return options
