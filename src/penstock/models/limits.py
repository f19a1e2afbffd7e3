"""The largest numbers of the shape of a GPT; apart from the model, so that a number is checked without torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

LARGEST: Mapping[str, int] = MappingProxyType(
    {"layers": 10_000, "width": 1 << 20, "heads": 1 << 16, "context": 1 << 20, "vocabulary": 1 << 24}
)
"""The largest numbers of a shape, far above those of any model."""
