"""The public API: every exported name, with its signature and public members, as listed in public_api.txt.

`python tests/test_public_api.py` writes the list anew; a change of the list is a change for users.
"""

import dataclasses
import inspect
import re
from pathlib import Path

import penstock

LIST = Path(__file__).parent / "public_api.txt"


def signature(value):
    try:
        return re.sub(" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return ""


def members(value):
    """The public members of a class and of our base classes: methods with signatures, properties, fields."""
    if issubclass(value, BaseException):
        return
    fields = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    fields += getattr(value, "_fields", ())
    ours = [base for base in value.__mro__ if base.__module__.startswith("penstock.")]
    for name in sorted({*fields, *(n for base in ours for n in vars(base) if not n.startswith("_"))}):
        member = inspect.getattr_static(value, name, None)
        if isinstance(member, (classmethod, staticmethod)):
            member = member.__func__
        yield f"    .{name}{signature(member) if inspect.isfunction(member) else ''}"


def listed():
    """The public API as text, one line a name or member."""
    for name in sorted(penstock.__all__):
        value = getattr(penstock, name)
        yield f"{name}{'' if inspect.isclass(value) and issubclass(value, BaseException) else signature(value)}"
        if inspect.isclass(value):
            yield from members(value)


def test_the_public_api_is_the_one_that_is_listed():
    assert LIST.read_text().splitlines() == list(listed())


if __name__ == "__main__":
    LIST.write_text("\n".join(listed()) + "\n")
