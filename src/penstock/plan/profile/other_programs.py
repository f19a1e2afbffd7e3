"""Profiles as the programs of PipeDream and of Piper have them.

PipeDream's profiler (msr-fiddle/pipedream, `profiler/`, `graph/graph.py`) writes a line per layer, `node1 --
Conv2d(..) -- forward_compute_time=.., backward_compute_time=.., activation_size=.., parameter_size=..`, with times in
milliseconds and sizes in bytes; `activation_size` may be a list, `[a; b]`, which adds up. Then a line per edge, `node1
-- node2`, that begins with a tab.

Piper (msr-fiddle/piper, `README.md`) reads JSON with several options for every layer. `nodes` have `TMPCs`: for each
tensor degree a list of options with `timePerSample` (seconds, forward and backward), `parameterSize`, `memoryUsageA`
(bytes per sample in flight), `memoryUsageB` (bytes always held) and `syncTimeFw` and `syncTimeBw` (bytes that an edge
between two stages costs in addition). `edges` have `communicationCost` in bytes. The limits in the file (devices,
memory, bandwidth) are options of the planners here and are left out.
"""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.checks import did_you_mean, in_short
from penstock.errors import ConfigError
from penstock.guarded_files import parse_json
from penstock.plan.profile.layer_graph import in_topological_order
from penstock.plan.profile.schema import MOST_LAYERS, LayerInput, LayerOption, Number, Profile, ProfiledLayer

# --- PipeDream --------------------------------------------------------------------------------------------------------

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


# --- Piper ------------------------------------------------------------------------------------------------------------

_Degree = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}$")]
_Id = Annotated[int, Field(ge=-(1 << 62), le=1 << 62)]


class _Loose(BaseModel):
    """Other keys are left out: published files have more of them."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _Tmpc(_Loose):
    """One way to execute a node on some number of devices."""

    id: Annotated[str, Field(min_length=1, max_length=200)]
    timePerSample: Number  # noqa: N815 - as in the file
    parameterSize: Number  # noqa: N815
    memoryUsageA: Number  # noqa: N815
    memoryUsageB: Number  # noqa: N815
    syncTimeFw: dict[str, Number]  # noqa: N815
    syncTimeBw: dict[str, Number]  # noqa: N815


class _Node(_Loose):
    """A layer."""

    id: _Id
    name: Annotated[str, Field(max_length=2_000)] = ""
    TMPCs: Annotated[dict[_Degree, Annotated[list[_Tmpc], Field(max_length=64)]], Field(min_length=1, max_length=64)]


class _Edge(_Loose):
    """Who reads whom."""

    sourceId: _Id  # noqa: N815
    destId: _Id  # noqa: N815
    communicationCost: Number  # noqa: N815


class _PiperFile(_Loose):
    """The whole file."""

    mbsInBatch: Annotated[int, Field(ge=1, le=1 << 20)] | None = None  # noqa: N815
    nodes: Annotated[list[_Node], Field(min_length=1, max_length=MOST_LAYERS)]
    edges: list[_Edge]


def from_piper(text: str, name: str = "model") -> Profile:
    """Return an input of Piper as a profile; layers are named by their ids, `kind` is the name in the file.

    Layers come after those that they read.

    Args:
        text: JSON.
        name: of the model.

    Raises:
        ConfigError: it is no such file; the message says what is wrong and where.
    """
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"a Piper profile is JSON: {error}") from None
    try:
        found = _PiperFile.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"no Piper profile: {where}: {first['msg']}, got {in_short(first['input'], 60)}") from None
    inputs: dict[int, list[str | LayerInput]] = {node.id: [] for node in found.nodes}
    outputs = dict.fromkeys(inputs, 0.0)
    if len(inputs) < len(found.nodes):
        raise ConfigError("nodes: two of them have one id")
    for edge in found.edges:
        for end in (edge.sourceId, edge.destId):
            if end not in inputs:
                raise ConfigError(f"edges: {edge.sourceId} -> {edge.destId}: there is no node {end}")
        inputs[edge.destId].append(LayerInput(layer=str(edge.sourceId), bytes=edge.communicationCost))
        outputs[edge.sourceId] = max(outputs[edge.sourceId], edge.communicationCost)
    layers = [_layer(node, inputs[node.id], outputs[node.id]) for node in found.nodes]
    profile = Profile(
        format="penstock profile 1",
        name=name[:200] or "model",
        source="piper",
        microbatches=found.mbsInBatch,
        layers=layers,
    )
    return in_topological_order(profile)


def _layer(node: _Node, inputs: list[str | LayerInput], output: float) -> ProfiledLayer:
    """Return a node as a layer."""
    options = [
        LayerOption(
            name=each.id,
            tensor=int(degree),
            seconds=each.timePerSample,
            parameters=each.parameterSize,
            memory=each.memoryUsageB,
            memory_per_microbatch=each.memoryUsageA,
            **{
                key: {end: size for end, size in sizes.items() if size}
                for key, sizes in (("sync_in", each.syncTimeFw), ("sync_out", each.syncTimeBw))
                if any(sizes.values())
            },
        )
        for degree, several in node.TMPCs.items()
        for each in several
    ]
    if not options:
        raise ConfigError(f"node {node.id}: TMPCs: there is no way to execute it")
    alone = [option for option in options if option.tensor == 1] or options
    return ProfiledLayer(
        name=str(node.id), kind=node.name, inputs=inputs, output=output, parameters=alone[0].parameters, options=options
    )
