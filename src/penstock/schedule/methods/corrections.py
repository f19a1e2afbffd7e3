"""The table of corrections, which are remedies for stale weights, each with its options.

They are implemented in `penstock.weights.corrections`, whose `registry.py` lists them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from penstock.checks import did_you_mean, in_words, no_option
from penstock.errors import ConfigError
from penstock.schedule.ir.version_rules import VersionRule

Kind = Literal["number", "amount", "count", "switch", "share", "inner share", "share below 1", "above 0"]

_KINDS: Mapping[Kind, tuple[str, Callable[[float], bool]]] = MappingProxyType(
    {
        "number": ("a number", lambda _: True),
        "amount": ("a number of at least 0", lambda x: x >= 0),
        "count": ("a whole number of at least 0", lambda x: x >= 0 and x == int(x)),
        "switch": ("0 or 1", lambda x: x in (0, 1)),
        "share": ("a number from 0 to 1", lambda x: 0 <= x <= 1),
        "inner share": ("a number between 0 and 1", lambda x: 0 < x < 1),
        "share below 1": ("a number from 0 to below 1", lambda x: 0 <= x < 1),
        "above 0": ("a number above 0", lambda x: x > 0),
    }
)
"""The kinds of values: what they are in words, and whether a finite number is one."""


@dataclass(frozen=True)
class Option:
    """A numeric option of a correction.

    Attributes:
        default: the value if it is not given.
        meaning: what the values mean.
        kind: which values are accepted; True and False only as a "switch".
        nullable: None is accepted, too.
    """

    default: float | None
    meaning: str
    kind: Kind = "number"
    nullable: bool = False

    def __post_init__(self) -> None:
        """Refuse a kind that there is not."""
        if self.kind not in _KINDS:
            raise ConfigError(f"unknown kind {self.kind!r} of an option; there are {in_words(_KINDS, 'and')}")

    @property
    def takes(self) -> str:
        """The accepted values, in words."""
        return _KINDS[self.kind][0] + (", or null" if self.nullable else "")

    def fits(self, value: object) -> bool:
        """Return whether `value` is accepted."""
        if value is None:
            return self.nullable
        if not isinstance(value, int | float) or not math.isfinite(value):
            return False
        return (self.kind == "switch" or not isinstance(value, bool)) and _KINDS[self.kind][1](value)


@dataclass(frozen=True, repr=False)
class CorrectionSpec:
    """One row of the table: a correction.

    Attributes:
        name: its name in the method table.
        summary: what it does, and its source.
        rules: the version rules that it supports; empty for all.
        buffers: parameter-sized buffers that it needs besides those of the rule.
        options: its options by name.
        alike: all stages make the same updates from the same gradients, so that parameters they share stay equal.
        reads_ahead: passes read what updates predict, in place of versions; only the newest weights are kept.
        fault: returns why values of all its options do not go together, or None.
        watches: updates of stages with a delay show it the weights before and after; each takes a scratch then.
        estimates: backwards read an estimate of other weights than a version, in a buffer of its own.
        without_delay: it corrects stages without a delay, too.
        rewrites: it changes weights after the optimizer's step, where `penstock verify` does not observe it.
        reads_states: it may look at optimizer states between updates.
        recomputes: it goes with forwards that are run again.
        low_precision: it goes with passes in 16 bits.
        exact: its numbers equal those of the reference bit for bit; False if they differ by roundings.
        corrector: (layout, place, **options) -> `penstock.Corrector` of a stage; None for the corrections that Penstock
            brings, which `penstock.weights.corrections.registry` makes.
    """

    name: str
    summary: str
    rules: tuple[str, ...] = ()
    buffers: int = 0
    options: Mapping[str, Option] = field(default_factory=dict)
    alike: bool = True
    reads_ahead: bool = False
    fault: Callable[[Mapping[str, float | None]], str | None] = lambda _: None
    watches: bool = False
    estimates: bool = False
    without_delay: bool = False
    rewrites: bool = False
    reads_states: bool = True
    recomputes: bool = True
    low_precision: bool = True
    exact: bool = True
    corrector: Callable[..., Any] | None = None

    def __str__(self) -> str:
        """Its name."""
        return self.name

    __repr__ = __str__  # the same in every process, unlike that of a function


def _ahead_fault(options: Mapping[str, float | None]) -> str | None:
    a, b = options["a"], options["b"]
    if (a is None) != (b is None):
        return f"set both a and b, or none of them; got a={a}, b={b}"
    if options["motion"] and a is not None:
        return "a and b weigh gradients, but motion=1 repeats the motion of the weights; leave them out"
    return None


_RESCHEDULE = Option(
    None,
    "K, updates over which the rates of stages rise to the common one; 0 for none; if not set, five times the warm-up "
    "of the rate, or else a quarter of the run",
    "count",
    nullable=True,
)

_TABLE = (
    CorrectionSpec("none", "nothing", reads_states=False),
    CorrectionSpec(
        "pipemare",
        "rates that begin lower where delays are long (T1), backwards on estimates of what forwards read (T2); "
        "arXiv 1910.05124, sec. 3",
        rules=("newest",),
        buffers=1,
        options={
            "reschedule": _RESCHEDULE,
            "decay": Option(
                0.135,
                "D, what is left of a motion after as many updates as the delay (T2); null for none",
                "inner share",
                nullable=True,
            ),
        },
        alike=False,
        watches=True,
        estimates=True,
    ),
    CorrectionSpec(
        "spectrain", "forwards and backwards on weights predicted for one moment; 1809.02839", rules=("predicted",)
    ),
    CorrectionSpec(
        "spectrain-stash",
        "both passes on the weights predicted at the forward; the second form in SpecTrain's code",
        rules=("predicted-stash",),
    ),
    CorrectionSpec(
        "xpipe",
        "as spectrain, but the first microbatch of a batch predicts for all of it; 1911.04610",
        rules=("predicted-shared",),
        options={
            "uncorrected": Option(
                1.0,
                "1 for the paper's form of Adam's direction, which has no power t in its bias correction; 0 for Adam's",
                "switch",
            )
        },
    ),
    CorrectionSpec(
        "pipeoptim", "forwards on predicted weights, backwards on the newest; 2312.00839", rules=("predicted-forward",)
    ),
    CorrectionSpec(
        "error-feedback",
        'what a step should have been one update earlier is made up for; after 2606.30634, variant "penstock"',
        rules=("double-buffer",),
        buffers=1,
        options={"share": Option(1.0, "of the difference that is fed back", "share")},
        watches=True,
        without_delay=True,
        rewrites=True,
    ),
    CorrectionSpec(
        "2bw-ahead",
        "both passes on weights that each update predicts as many updates ahead as they are late; this project",
        rules=("double-buffer", "triple-buffer"),
        buffers=1,
        options={
            "motion": Option(
                0.0, "1: the last motion of the weights comes again (any optimizer); 0: the last gradient", "switch"
            ),
            "horizon": Option(
                None, "the number of updates to predict; null for the delay, so 1 or 2", "amount", nullable=True
            ),
            "a": Option(None, "weight of the mean of gradients; null, as b, if the last comes again", nullable=True),
            "b": Option(None, "weight of the last gradient", nullable=True),
        },
        reads_ahead=True,
        reads_states=False,
        fault=_ahead_fault,
    ),
    CorrectionSpec(
        "i-timeprest",
        "backwards between the weights of their forward and the newest, the nearer to these the more updates lie "
        'between; 2509.23241, variant "penstock"',
        rules=("blended",),
        options={
            "beta": Option(0.5, "the share of the forward's weights that is left per update, from 0 to 1", "share")
        },
    ),
)

CORRECTIONS: Mapping[str, CorrectionSpec] = MappingProxyType({row.name: row for row in _TABLE})
"""Every correction by its name."""


def find_correction(name: str | CorrectionSpec) -> CorrectionSpec:
    """Return the row of a correction, or a user's own as it is.

    Raises:
        ConfigError: there is none of that name.
    """
    if isinstance(name, CorrectionSpec):
        return name
    if name not in CORRECTIONS:
        raise ConfigError(
            f"unknown correction {name!r}.{did_you_mean(name, CORRECTIONS)} Known: {', '.join(CORRECTIONS)}"
        )
    return CORRECTIONS[name]


def correction_fault(rule: VersionRule, correction: str | CorrectionSpec) -> str | None:
    """Return why a correction does not go with a version rule; None if it does.

    Rules under which passes read derived copies need a correction, which makes these.
    """
    spec = find_correction(correction)
    rules = spec.rules
    if rules and rule.name not in rules:
        return f"correction {spec.name!r} needs version rule {' or '.join(rules)}, not {rule.name!r}"
    if spec.name == "none" and (rule.copies_forward or rule.copies_backward):
        makers = ", ".join(name for name, row in CORRECTIONS.items() if rule.name in row.rules)
        return f"rule {rule.name!r} reads weights that a correction makes; name it with --correction: {makers}"
    return None


def options_of(correction: str | CorrectionSpec, given: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the options of a correction, with the defaults where none are given.

    Raises:
        ConfigError: it has no such option, the option does not accept the value, or values do not go together.
    """
    spec = find_correction(correction)
    known = spec.options
    for name, value in given.items():
        if name not in known:
            raise ConfigError(no_option(f"correction {spec}", name, known))
        if not known[name].fits(value):
            got = "null" if value is None else value
            raise ConfigError(f"correction {spec.name!r}: {name} takes {known[name].takes}; got {got}")
    options = {name: given.get(name, option.default) for name, option in known.items()}
    if (fault := spec.fault(options)) is not None:
        raise ConfigError(f"correction {spec.name!r}: {fault}")
    return options
