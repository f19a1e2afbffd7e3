"""Lists of numbers, as options of the command line have them."""

from __future__ import annotations

from penstock.errors import ConfigError


def whole_numbers(option: str, text: str) -> list[int]:
    """Read numbers with commas between them.

    Raises:
        ConfigError: they are none.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 8 for part in parts) or len(parts) > 64:
        raise ConfigError(f"{option} takes whole numbers, as in 1,2,4, got {text!r:.80}")
    return [int(part) for part in parts]
