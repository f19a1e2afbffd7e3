"""Profiles for people: what layers cost, layers alike in one row, and the whole model at each microbatch size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.byte_sizes import human_bytes
from penstock.cli.plans.terminal_width_table import FittedTable
from penstock.plan.profile.layer_graph import GraphLayer, layer_graph, sizes_of
from penstock.plan.profile.schema import BY_FORMULAS, UNRESOLVED, Profile, ProfiledLink
from penstock.view.plurals import counted

_LEAST_NEEDED = ("ways", "optimizer", "output", "update ms", "kept", "parameters")
_LESS = 0.9  # of the time of fewer samples; more need not take longer where overhead decides
_FORWARD, _BACKWARD, _BOTH = "forward ms", "backward ms", "both ms"


def profile_tables(profile: Profile, width: int) -> Group:
    """Return what `penstock profile` prints.

    Args:
        profile: any, measured or published.
        width: of the terminal in characters; columns that do not fit are left out.
    """
    sizes = sizes_of(profile)
    graphs = [layer_graph(profile, size).layers for size in sizes]
    parts: list[RenderableType] = [Text(f"{profile.name}: {counted(len(graphs[-1]), 'layer')}{_said_of(profile)}")]
    samples = "" if sizes[-1] is None else f" of {counted(sizes[-1], 'sample')}"
    title = f"layers, for each microbatch{samples}; kept: from forward to backward"
    parts += [Text(), *FittedTable(title, _filled(_rows(graphs[-1])), _LEAST_NEEDED).fitted(width), Text()]
    whole = [
        {"samples per microbatch": "not said" if size is None else str(size)} | _whole(layers, size)
        for size, layers in zip(sizes, graphs, strict=True)
    ]
    parts += [*FittedTable("the whole model", _filled(whole), _LEAST_NEEDED).fitted(width)]
    parts += [part for said in _said_of_noise(sizes, graphs) for part in (Text(), Text(said))]
    links = list(map(_said_of_link, profile.links))
    if links:
        parts += [Text(), Text(f"A message takes {', between the next units '.join(links)}.")]
    if profile.cores is not None:
        parts.append(Text(f"At most {profile.cores:g} ranks of its machine work at full speed at once."))
    if profile.update:
        parts.append(Text(f"The update of a stage takes {profile.update * 1e3:.3g} ms besides those of its layers."))
    if (more := profile.calibration) is not None:
        parts.append(
            Text(
                f"In runs ({', '.join(more.runs)}) forwards take {more.forward:.3g} times as long, backwards "
                f"{more.backward:.3g}, updates {more.step:.3g}, and {more.between * 1e3:.3g} ms lie between two passes."
            )
        )
    if profile.settings:
        said = " ".join(f"--set {key}={value}" for key, value in _flat(profile.settings))
        taken = "" if profile.tensor_parallel > 1 else ", which plans take over"
        how = "Made for" if profile.source.startswith(BY_FORMULAS) else "Measured with"
        parts.append(Text(f"{how} {said}{taken}."))
    return Group(*parts)


def _said_of_noise(sizes: Sequence[int | None], graphs: Sequence[Sequence[GraphLayer]]) -> Iterator[str]:
    """Yield what cannot be: that more samples take less."""
    seconds = [sum(layer.seconds for layer in layers) for layers in graphs]
    for (few, many), (first, second) in zip(pairwise(sizes), pairwise(seconds), strict=True):
        if second < _LESS * first:
            yield (
                f"A microbatch of {many} takes less than one of {few}, so other work slowed the machine down: "
                "measure again when it is quiet, or for longer (--seconds)."
            )


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings as `--set` takes them."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _said_of_link(link: ProfiledLink) -> str:
    if link.bandwidth >= UNRESOLVED:
        return f"{link.latency * 1e6:.4g} us (its bytes are lost in the noise: measure again, or give plan --bandwidth)"
    return f"{link.latency * 1e6:.4g} us + bytes / ({link.bandwidth / 1e9:.4g} GB/s)"


def _said_of(profile: Profile) -> str:
    return f", {profile.source}" if profile.source else ""


def _rows(layers: Sequence[GraphLayer]) -> list[dict[str, str]]:
    """Return a row for each run of layers that cost the same."""
    runs = list[list[GraphLayer]]()
    for layer in layers:
        if runs and _costs(runs[-1][-1]) == _costs(layer):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [{"layers": _name(run)} | _costs(run[0]) for run in runs]


def _name(run: Sequence[GraphLayer]) -> str:
    return run[0].name if len(run) == 1 else f"{run[0].name} .. {run[-1].name} ({len(run)}, each)"


def _costs(layer: GraphLayer) -> dict[str, str]:
    """Return what a layer costs, by heading; what the profile does not say is left empty."""
    ways = "" if layer.forward is not None else ", ".join(dict.fromkeys(way.name for way in layer.ways))
    return {
        **_times(layer.forward, layer.seconds),
        "update ms": _milliseconds(layer.step) if layer.step else "",
        "parameters": _size(layer.parameters),
        "optimizer": "" if layer.optimizer is None else _size(layer.optimizer),
        "output": _size(layer.output),
        "kept": _size(layer.stored),
        "ways": ways,
    }


def _whole(layers: Sequence[GraphLayer], samples: int | None) -> dict[str, str]:
    """Return what all layers take together, by heading."""
    apart = all(layer.forward is not None for layer in layers)
    seconds = sum(layer.seconds for layer in layers)
    step = sum(layer.step for layer in layers)
    return {
        **_times(sum(layer.forward or 0.0 for layer in layers) if apart else None, seconds),
        "ms per sample": "" if samples is None else _milliseconds(seconds / samples),
        "update ms": _milliseconds(step) if step else "",
        "parameters": _size(sum(layer.parameters for layer in layers)),
        "kept": _size(sum(layer.stored - layer.shared for layer in layers)),
    }


def _times(forward: float | None, seconds: float) -> dict[str, str]:
    if forward is None:
        return {_FORWARD: "", _BACKWARD: "", _BOTH: _milliseconds(seconds)}
    return {_FORWARD: _milliseconds(forward), _BACKWARD: _milliseconds(seconds - forward), _BOTH: ""}


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 1e4 else f"{value:.4g}"


def _size(number: float) -> str:
    return human_bytes(number) if number else "0"


def _filled(rows: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """Return the columns that say anything."""
    return dict(_columns(rows))


def _columns(rows: Sequence[dict[str, str]]) -> Iterator[tuple[str, list[str]]]:
    for heading in rows[0]:
        cells = [row[heading] for row in rows]
        if any(cell not in ("", "0") for cell in cells):
            yield heading, cells
