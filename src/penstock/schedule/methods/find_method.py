"""Methods by their names: those of the table, their aliases, those of torch, and advice for all others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from penstock.checks import did_you_mean, in_words, similarity
from penstock.errors import ConfigError
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.corrections import CORRECTIONS, Option, correction_fault
from penstock.schedule.methods.method import Method
from penstock.schedule.methods.table import METHODS
from penstock.schedule.orders import ORDERS

_SIMILAR = 0.55
_COMBINED = " It is a way to combine parallel pipelines, under most methods: width=2 combine.kind={}."
_OPTIMIZER = " It is an optimizer, for use with most methods: optimizer.name={}."
_EXAMPLE = " It is a file of its own in the repository: --file examples/methods/{}.py (docs/own-methods.md)."
_EXAMPLES = {
    "pipelined_backprop": ("spike", "lwp", "lwp-weights", "spike-lwp", "spike-lwp-weights"),
    "ftpipe": ("ftpipe", "ftpipe-aggregated"),
    "nag_pp": ("nag-pp", "nag-pp-no-stash"),
    "gap_aware": ("gap-aware",),
    "wpipe": ("wpipe", "2gw"),
}
_HINTS = MappingProxyType(
    {
        "zb-1p": " Use 'zb-auto' with as many microbatches on a rank as ranks: options limit=4 for 4 stages.",
        "zb-exact": " It is an order, whose search may take minutes: zb-auto with order zb-exact (show --order).",
        "forward-only": " It is the order of evaluations: any method with order forward-only (show --order).",
        **dict.fromkeys(("hetpipe", "wsp"), _COMBINED.format("wsp")),
        **dict.fromkeys(("average", "model-averaging", "local-sgd"), _COMBINED.format("average")),
        **dict.fromkeys(("bmuf", "block-momentum"), _COMBINED.format("bmuf")),
        **dict.fromkeys(("avgpipe", "elastic"), _COMBINED.format("elastic")),
        **{name: _EXAMPLE.format(file) for file, names in _EXAMPLES.items() for name in names},
        **{name: _OPTIMIZER.format(name) for name in ("basis-rotation", "muon", "nadam", "adan", "soap")},
    }
)
"""Advice for names that are options, orders or optimizers rather than methods."""
_CLASSES = MappingProxyType(
    {
        "1f1b": "1f1b",
        "gpipe": "gpipe",
        "interleaved1f1b": "interleaved",
        "loopedbfs": "breadth-first",
        "interleavedzerobubble": "zb-interleaved",
        "zbvzerobubble": "zb-v",
        "dualpipev": "dualpipe-v",
        "pipedream2bw": "2bw",
    }
)
"""What torch.distributed.pipelining calls its schedules (without "Schedule") -> the method."""
_OWN = " An order of your own goes after --file (in Python, to load_schedule)."
_CONFIGURATION = " A configuration goes after --config."
_FILES = MappingProxyType(
    {".py": _OWN, ".txt": _OWN, ".csv": _OWN, ".yaml": _CONFIGURATION, ".yml": _CONFIGURATION, ".json": _CONFIGURATION}
)
"""Advice for files in the place of a method."""


def find_method(name: str | Method) -> Method:
    """Return the row of a method, by name or alias; of a user's own, itself.

    Raises:
        ConfigError: no such method; the message suggests the nearest names. Or a user's own lacks something.
    """
    names = {alias: row for row in METHODS.values() for alias in (row.name, *row.aliases)}
    if isinstance(name, Method):
        if names.get(name.name) is not name:
            _check_own(name, names)
        return name
    key = name.lower().replace("_", "-")
    key = _CLASSES.get(key.removeprefix("schedule"), key)
    if key in names:
        return names[key]
    near = _nearest_rows(key)
    hint = _HINTS.get(key) or _FILES.get(PurePath(name).suffix) or (f" Did you mean {in_words(near)}?" if near else "")
    raise ConfigError(f"unknown method {name!r}.{hint} `penstock methods` lists all {len(METHODS)}.")


def _check_own(method: Method, names: Mapping[str, Method]) -> None:
    """Refuse a user's own method that has the name of another one, or parts that there are not.

    Raises:
        ConfigError: which.
    """
    who, spec = f"method {method.name!r}", method.spec  # which refuses a name that there is not
    if method.name in names:
        raise ConfigError(f"{who}: Penstock has a method of this name; give yours another one")
    if method.rule not in RULES:
        raise ConfigError(f"{who}: unknown version rule {method.rule!r}.{did_you_mean(method.rule, RULES)}")
    if isinstance(method.order, str) and method.order not in ORDERS:
        raise ConfigError(f"{who}: unknown order {method.order!r}.{did_you_mean(method.order, ORDERS)}")
    if not isinstance(method.order, str):
        _check_takes(f"{who}: its order", method.order, "(stages, microbatches)")
    if spec.name in CORRECTIONS and CORRECTIONS[spec.name] is not spec:
        raise ConfigError(f"{who}: Penstock has a correction {spec.name!r}; give yours another name")
    if spec.name not in CORRECTIONS:
        for name, option in spec.options.items():
            if not isinstance(option, Option):
                raise ConfigError(f"{who}: option {name!r} must be a penstock.Option, not {option!r}")
        if spec.corrector is None:
            raise ConfigError(f"{who}: its correction needs corrector=, a subclass of penstock.Corrector")
        said = f"(layout, place{''.join(f', {name}' for name in spec.options)})"
        _check_takes(f"{who}: its corrector", spec.corrector, said, *spec.options)
    if fault := correction_fault(RULES[method.rule], spec):
        raise ConfigError(f"{who}: {fault}")


def _check_takes(who: str, function: Callable[..., Any], said: str, *names: str) -> None:
    """Refuse a function of a user's own that cannot be called with two arguments and those of these names.

    Raises:
        ConfigError: it cannot.
    """
    takes = inspect.signature(function)
    try:
        takes.bind(0, 0, **dict.fromkeys(names))
    except TypeError:
        raise ConfigError(f"{who} must take {said}, but takes {takes}") from None


def _nearest_rows(key: str) -> list[str]:
    """Return the names of the three rows that are spelled most like `key`, by name or, if not quite as near, alias.

    None where not even the nearest is similar.
    """
    alike = {
        row.name: max(similarity(key, row.name), *(similarity(key, alias) - 0.01 for alias in row.aliases), 0.0)
        for row in METHODS.values()
    }
    near = sorted(alike, key=lambda name: -alike[name])[:3]
    return near if alike[near[0]] > _SIMILAR else []
