"""Format numbers with their nouns."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Format a count, as in "1 microbatch", "2 microbatches", "2 passes" or "3 stages"."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('ch', 's')) else 's'}"
