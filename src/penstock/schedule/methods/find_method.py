"""Methods by their names: those of the table, their aliases, those of torch, and advice for all others."""

from __future__ import annotations

from pathlib import PurePath
from types import MappingProxyType

from penstock.checks import in_words, similarity
from penstock.errors import ConfigError
from penstock.schedule.methods.method import Method
from penstock.schedule.methods.table import METHODS

_SIMILAR = 0.55
_COMBINED = " It is a way to combine parallel pipelines, under most methods: width=2 combine.kind={}."
_OPTIMIZER = " It is an optimizer, for use with most methods: optimizer.name={}."
_HINTS = MappingProxyType(
    {
        "zb-1p": " Use 'zb-auto' with as many microbatches on a rank as ranks: options limit=4 for 4 stages.",
        "zb-exact": " It is an order, whose search may take minutes: zb-auto with order zb-exact (show --order).",
        "forward-only": " It is the order of evaluations: any method with order forward-only (show --order).",
        **dict.fromkeys(("hetpipe", "wsp"), _COMBINED.format("wsp")),
        **dict.fromkeys(("average", "model-averaging", "local-sgd"), _COMBINED.format("average")),
        **dict.fromkeys(("bmuf", "block-momentum"), _COMBINED.format("bmuf")),
        **dict.fromkeys(("avgpipe", "elastic"), _COMBINED.format("elastic")),
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


def find_method(name: str) -> Method:
    """Return the row of a method, by name or alias.

    Raises:
        ConfigError: no such method; the message suggests the nearest names.
    """
    names = {alias: row for row in METHODS.values() for alias in (row.name, *row.aliases)}
    key = name.lower().replace("_", "-")
    key = _CLASSES.get(key.removeprefix("schedule"), key)
    if key in names:
        return names[key]
    near = _nearest_rows(key)
    hint = _HINTS.get(key) or _FILES.get(PurePath(name).suffix) or (f" Did you mean {in_words(near)}?" if near else "")
    raise ConfigError(f"unknown method {name!r}.{hint} `penstock methods` lists all {len(METHODS)}.")


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
