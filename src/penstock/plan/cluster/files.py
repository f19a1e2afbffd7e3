"""Cluster files: presets by name, or files of a user's own, read with all that is wrong in them."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from penstock.checks import did_you_mean, in_short, in_words
from penstock.errors import ConfigError
from penstock.guarded_files import read_given
from penstock.plan.cluster.schema import FORMAT, Cluster
from penstock.yaml_file import numbers_in, parse_yaml

Part = TypeVar("Part", bound=BaseModel)

THIS_MACHINE = "this-machine"
"""The name of the machine at hand, which commands measure (`penstock.measure.this_machine`)."""
_PRESETS = "presets.yaml"
_MOST_BYTES = 1 << 20
_TEXTS = ("format", "name", "source")  # keys whose values are no numbers
_MOST_FAULTS = 8  # that a message lists


def preset_names() -> tuple[str, ...]:
    return tuple(sorted(_presets()))


@cache
def _presets() -> dict[str, Any]:
    return parse_yaml(files("penstock.plan.cluster").joinpath(_PRESETS).read_text(), _PRESETS)


def find_cluster(name: str) -> Cluster:
    """Return a preset by its name, or a cluster from a file.

    Raises:
        ConfigError: there is neither, or the file is no cluster.
    """
    presets = _presets()
    if name in presets:
        return validated(Cluster, {"format": FORMAT, "name": name, **presets[name]}, name, "cluster")
    if not Path(name).suffix and not Path(name).exists():
        known = [*sorted(presets), THIS_MACHINE]
        raise ConfigError(f"cluster must be {in_words(known)}, or a file, got {name!r:.80}.{did_you_mean(name, known)}")
    return parsed(Cluster, text_of(Path(name), "cluster"), name, "cluster")


def text_of(path: Path, what: str) -> str:
    """Read the text of a file that describes something.

    Raises:
        ConfigError: it cannot be read, is too large or no text.
    """
    try:
        return read_given(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {str(path)!r}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"cannot read the {what} {str(path)!r}: {error}") from None


def parsed(schema: type[Part], text: str, name: str, what: str) -> Part:
    """Parse a file by its schema.

    Args:
        schema: what it must be.
        text: what it holds.
        name: of the file, for messages.
        what: it is, for messages.

    Raises:
        ConfigError: it is something else; the message lists what is wrong and where.
    """
    return validated(schema, numbers_in(parse_yaml(text, name), _TEXTS), name, what)


def validated(schema: type[Part], values: object, name: str, what: str) -> Part:
    """Check values by their schema; arguments and errors as of `parsed`."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, each['loc'])) or 'the file'}: {each['msg'][:1].lower()}{each['msg'][1:]}, "
            f"got {in_short(each['input'], 60)}"
            for each in error.errors(include_url=False, include_context=False)[:_MOST_FAULTS]
        ]
        raise ConfigError(f"{name!r} is no {what}:\n" + "\n".join(faults)) from None
