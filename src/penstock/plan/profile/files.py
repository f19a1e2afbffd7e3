"""Profile files: read with all that is wrong in them, and written for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from penstock.checks import did_you_mean, in_short
from penstock.errors import ConfigError
from penstock.guarded_files import parse_json, read_given
from penstock.plan.profile.schema import LayerInput, LayerOption, Profile, ProfiledLayer, ProfiledLink
from penstock.yaml_file import numbers_in, parse_yaml

_MOST_BYTES = 1 << 25
_MOST_FAULTS = 8  # that a message lists
_NUMERIC = frozenset(
    {
        "forward", "backward", "backward_input", "backward_weight", "output", "stored", "shared", "late", "data",
        "gradient", "parameters", "buffer", "whole", "frozen", "optimizer", "largest", "step", "seconds", "memory",
        "memory_per_microbatch", "bytes", "latency", "bandwidth",
    }
)  # fmt: skip


def read_profile(path: Path) -> Profile:
    """Read a profile file.

    Raises:
        ConfigError: it cannot be read, or is no profile; the message lists what is wrong and where.
    """
    return parse_profile(read_profile_text(path), str(path))


def read_profile_text(path: Path) -> str:
    """Read the text of a profile, ours or published.

    Raises:
        ConfigError: it cannot be read, is too large or no text.
    """
    try:
        return read_given(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the profile {str(path)!r}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"cannot read the profile {str(path)!r}: {error}") from None


def parse_profile(text: str, name: str) -> Profile:
    """Parse a profile in YAML (or JSON).

    Args:
        text: what the file holds.
        name: of the file, for messages.

    Raises:
        ConfigError: it is no profile; the message lists what is wrong and where.
    """
    values = _json_or_yaml(text, name)
    if values.get("format") != "penstock profile 1":
        got = f"got {in_short(values['format'], 60)}" if "format" in values else "the key is missing"
        raise ConfigError(
            f"{name!r} is no profile: `format` must be 'penstock profile 1', {got}; a published profile is converted "
            "with penstock profile --from"
        )
    _read_numbers(values)
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        faults = [_fault(each) for each in error.errors(include_url=False, include_context=False)]
        more = f"\n... and {len(faults) - _MOST_FAULTS} more" if len(faults) > _MOST_FAULTS else ""
        raise ConfigError(f"{name!r} is no profile:\n" + "\n".join(faults[:_MOST_FAULTS]) + more) from None
    except RecursionError:
        raise ConfigError(f"{name!r} is no profile: it is nested too deep") from None


def _json_or_yaml(text: str, name: str) -> dict[str, Any]:
    """Parse keys and values; JSON, which is YAML too, much faster."""
    if text.lstrip().startswith("{"):
        try:
            found = parse_json(text)
        except ValueError:
            found = None
        if isinstance(found, dict):
            return found
    try:
        return parse_yaml(text, name)
    except ConfigError as error:
        if "forward_compute_time=" in text:
            raise ConfigError(
                f"{name!r} is a profile of PipeDream; convert it: penstock profile --from pipedream"
            ) from None
        raise error


def _read_numbers(value: Any) -> None:
    """Replace numbers that YAML reads as text, such as 1e-3, where the schema has numbers."""
    if isinstance(value, list):
        for each in value:
            _read_numbers(each)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key == "settings":
                continue
            if key in _NUMERIC or (key in ("sync_in", "sync_out") and isinstance(inner, dict)):
                value[key] = numbers_in(inner)
            else:
                _read_numbers(inner)


def _fault(error: Any) -> str:
    """Return one line about what pydantic found."""
    where = ".".join(str(part) for part in error["loc"] if not (isinstance(part, str) and "[" in part))
    if error["type"] == "extra_forbidden":
        known = sorted(
            {
                key
                for model in (Profile, ProfiledLink, ProfiledLayer, LayerOption, LayerInput)
                for key in model.model_fields
            }
        )
        return f"{where}: no such key.{did_you_mean(error['loc'][-1], known)}"
    if error["type"] == "missing":
        return f"{where}: it is missing"
    return f"{where}: {error['msg'][:1].lower()}{error['msg'][1:]}, got {in_short(error['input'], 60)}"


def profile_text(profile: Profile) -> str:
    """Return a profile as YAML: a layer a block, an option or an input a line."""
    values = profile.model_dump(exclude_unset=True, exclude_none=True)
    return yaml.dump(
        values, Dumper=_ProfileDumper, sort_keys=False, width=10_000, default_flow_style=None, allow_unicode=True
    )


class _ProfileDumper(yaml.SafeDumper):
    """Writes whole numbers of bytes without a point, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        """Write every value where it stands."""
        return True


def _write_float(dumper: _ProfileDumper, value: float) -> yaml.Node:
    """Write a float so that YAML reads the same one."""
    if value == int(value) and abs(value) < 1e15:
        return dumper.represent_int(int(value))
    text = repr(value)
    if "e" in text:
        mantissa, _, exponent = text.partition("e")
        text = (
            f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent if exponent[0] in '+-' else '+' + exponent}"
        )
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_ProfileDumper.add_representer(float, _write_float)
