"""Whether a configuration does in a batch what its plan has predicted, after changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NOT_PLANNED = frozenset(
    {
        "batches", "seed", "held_out", "validation_samples", "prompt", "sample_length", "out", "restarts", "timeout",
        "lr_schedule", "checkpoint", "evaluate", "predicted",
    }
)  # fmt: skip
"""Keys with which a batch takes as long as with any other value of them."""
_TOKENS = (".npy", ".bin")
"""Endings of data whose vocabulary is its own; the others are read byte by byte."""


def is_as_planned(values: Mapping[str, Any], planned: Mapping[str, Any]) -> bool:
    """Return whether a batch is what was planned.

    Args:
        values: of a configuration, after changes.
        planned: before them, as a plan has them.
    """
    return _counted(values) == _counted(planned)


def _counted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that decide what a batch takes."""
    optimizer, data = values.get("optimizer"), str(values.get("data"))
    if isinstance(optimizer, Mapping):
        optimizer = {key: value for key, value in optimizer.items() if key != "lr"}
    found = {key: value for key, value in values.items() if key not in _NOT_PLANNED}
    return found | {"optimizer": optimizer or None, "data": data if data.endswith(_TOKENS) else None}
