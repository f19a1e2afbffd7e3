"""Profiles as PipeDream's profiler writes them (msr-fiddle/pipedream, `profiler/`, `graph/graph.py`).

A line per layer, `node1 -- Conv2d(..) -- forward_compute_time=.., backward_compute_time=.., activation_size=..,
parameter_size=..`, with times in milliseconds and sizes in bytes; `activation_size` may be a list, `[a; b]`, which
adds up. Then a line per edge, `node1 -- node2`, that begins with a tab.
"""

from __future__ import annotations

import math
import re

from penstock.checks import did_you_mean, in_short
from penstock.errors import ConfigError
from penstock.plan.profile.layer_graph import in_topological_order
from penstock.plan.profile.schema import MOST_LAYERS, Profile, ProfiledLayer

_KEYS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_COSTS = re.compile(", ".join(rf"{key}=([^,]*)" for key in _KEYS))
_MS = 1e-3


def from_pipedream(text: str, name: str = "model") -> Profile:
    """Return a profile of PipeDream as one of ours; a layer's `kind` is the module that it is.

    Layers come after those that they read, which they do not in all files.

    Args:
        text: of a `*.graph.txt`.
        name: of the model.

    Raises:
        ConfigError: it is no such file; the message names the line, or a layer of a cycle.
    """
    layers: dict[str, ProfiledLayer] = {}
    inputs: dict[str, list[str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        parts = [part.strip() for part in line.strip().split(" -- ")]
        where = f"line {number}"
        if len(parts) == 2:
            _read_edge(parts[0], parts[1], inputs, where)
            continue
        layer = _read_layer(parts, line, where)
        if layer.name in inputs:
            raise ConfigError(f"{where}: layer {layer.name!r} stands in the file twice, or after its edges")
        layers[layer.name], inputs[layer.name] = layer, []
        if len(layers) > MOST_LAYERS:
            raise ConfigError(f"{where}: a profile may have {MOST_LAYERS:,} layers at most")
    if not layers:
        raise ConfigError(
            "no line is a layer, `NAME -- KIND -- forward_compute_time=.., ...`; is it a PipeDream profile?"
        )
    profile = Profile(
        format="penstock profile 1",
        name=name[:200] or "model",
        source="pipedream",
        layers=[layer.model_copy(update={"inputs": inputs[layer.name]}) for layer in layers.values()],
    )
    return in_topological_order(profile)


def _read_layer(parts: list[str], line: str, where: str) -> ProfiledLayer:
    """Read the line of a layer; a fourth part, the stage that a plan gave it, is left out."""
    if len(parts) not in (3, 4):
        raise ConfigError(f"{where}: neither a layer nor an edge `NAME -- NAME`: {in_short(line.strip(), 80)}")
    found = _COSTS.fullmatch(parts[2])
    if not found:
        raise ConfigError(
            f"{where}: the costs must be {', '.join(f'{key}=..' for key in _KEYS)}; got {in_short(parts[2], 80)}"
        )
    forward, backward, output, parameters = (
        _value(text, f"{where}, {key}") for key, text in zip(_KEYS, found.groups(), strict=True)
    )
    if not parts[0] or len(parts[0]) > 200:
        raise ConfigError(f"{where}: the name of a layer has 1 to 200 characters")
    return ProfiledLayer(
        name=parts[0],
        kind=parts[1][:2_000],
        forward=forward * _MS,
        backward=backward * _MS,
        output=output,
        parameters=parameters,
    )


def _read_edge(source: str, target: str, inputs: dict[str, list[str]], where: str) -> None:
    """Add an edge to the inputs of its target."""
    for end in (source, target):
        if end not in inputs:
            raise ConfigError(f"{where}: no layer above is named {in_short(end, 60)}.{did_you_mean(end, inputs)}")
    if source not in inputs[target]:  # a layer that reads another one twice has one edge
        inputs[target].append(source)


def _value(text: str, where: str) -> float:
    """Return a number, or the sum of a list `[a; b]`."""
    inner = text[1:-1].split(";") if text.startswith("[") and text.endswith("]") else [text]
    try:
        total = sum(float(part) for part in inner)
    except ValueError:
        raise ConfigError(f"{where} must be a number, or numbers as [a; b], got {in_short(text, 60)}") from None
    if not math.isfinite(total) or not 0 <= total <= 1e30:
        raise ConfigError(f"{where} must be from 0 to 1e30, got {in_short(text, 60)}")
    return total
