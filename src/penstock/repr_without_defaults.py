"""Short texts of values for people, with what differs from the defaults only."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any


def changed_fields(value: Any) -> str:
    """Return a dataclass as text, with those fields that do not have their default."""
    shown = []
    for field in fields(value):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        present = getattr(value, field.name)
        if default is MISSING or (present is not default and present != default):
            shown.append(f"{field.name}={present!r}")
    return f"{type(value).__name__}({', '.join(shown)})"


class ShortRepr:
    """A dataclass that shows only what is not as usual; it is given no repr of its own (`repr=False`)."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the fields that do not have their default."""
        return changed_fields(self)
