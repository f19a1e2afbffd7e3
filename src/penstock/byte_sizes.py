"""Numbers of bytes, as people read and write them."""

from __future__ import annotations

import re

from penstock.errors import ConfigError

_BINARY = ("B", "KiB", "MiB", "GiB")  # in which GPUs and torch say how much memory there is
_UNITS = {
    "": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30,
    "tib": 2.0**40, "kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8, "tbit": 1e12 / 8,
}  # fmt: skip
_LARGEST = 1e18
_SIZE = re.compile(r"(\d+\.?\d*(?:e[-+]?\d+)?|\.\d+)\s*([a-z]*)(/s)?", re.IGNORECASE)


def human_bytes(number: float, decimals: int = 1) -> str:
    """Format a number of bytes in powers of 1024, as in `1.5 MiB`.

    Args:
        number: of bytes.
        decimals: of units above the byte; two where a need is compared with a limit that it may just exceed.
    """
    value = float(number)
    for unit in _BINARY:
        if value < 1023.5:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.{decimals}f} {unit}"
        value /= 1024
    return f"{value:.{decimals}f} TiB"


def size_of(option: str, text: str) -> float:
    """Read a number of bytes with its unit.

    Raises:
        ConfigError: it is none, or more than any device has.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found or len(text) > 40 or found[2].lower() not in _UNITS:
        raise ConfigError(f"{option} takes a size such as 1.25e9, 16GiB, 12GB or 10Gbit, got {text!r:.80}")
    size = float(found[1]) * _UNITS[found[2].lower()]
    if size > _LARGEST:
        raise ConfigError(f"{option} must be at most {_LARGEST:g} bytes, got {text!r}")
    return size
