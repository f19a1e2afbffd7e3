"""Numbers of bytes for people, in the binary units in which GPUs and torch say how much memory there is."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB")


def human_bytes(number: float, decimals: int = 1) -> str:
    """Format a number of bytes in powers of 1024, as in `1.5 MiB`.

    Args:
        number: of bytes.
        decimals: of units above the byte; two where a need is compared with a limit that it may just exceed.
    """
    value = float(number)
    for unit in _UNITS:
        if value < 1023.5:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.{decimals}f} {unit}"
        value /= 1024
    return f"{value:.{decimals}f} TiB"
