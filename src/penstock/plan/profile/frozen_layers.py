"""What layers of a profile take whose parameters are frozen, from what they take trained (`trained: false`).

A frozen layer has no gradient of its weights, no optimizer state and no update; its parameters are still there. Before
the first layer that is trained nothing wants a gradient: layers there keep nothing for a backward and have none, and no
gradient comes back for their output. A profile that was measured of a frozen model has these numbers as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.plan.profile.schema import ProfiledLayer

_HALF = 0.5  # of a backward that the profile does not halve: products with weights take as long for both gradients


def layer_numbers(layer: ProfiledLayer) -> Callable[..., float]:
    """Return what reads the numbers of a layer by key, those of one microbatch size; a given one where it has none."""

    def read(key: str, otherwise: float = 0.0) -> float:
        found = getattr(layer, key)
        assert not isinstance(found, list), "numbers are those of one microbatch size"
        return otherwise if found is None else float(found)

    return read


def with_frozen_layers(
    layers: Sequence[ProfiledLayer], edges: Collection[tuple[int, int]]
) -> tuple[ProfiledLayer, ...]:
    """Return layers with what those take that are frozen.

    Args:
        layers: of a profile, with the numbers of one microbatch size.
        edges: which of them reads which, as (source, target).

    Raises:
        ConfigError: a frozen layer has options instead of forward and backward.
    """
    if all(layer.trained for layer in layers):
        return tuple(layers)
    before = _before_training(layers, edges)
    behind = {target for source, target in edges if source in before}
    found = []
    for number, layer in enumerate(layers):
        changes = dict[str, Any]()
        if number in behind - before:  # nobody else keeps its input, which can be moved once it is no message
            changes["shared"], numbers = 0.0, layer_numbers(layer)
            if layer.movable is not None:
                changes["movable_with"] = numbers("movable_with") + numbers("shared")
        if not layer.trained:
            changes |= _frozen(layer) | (_without_backward(layer) if number in before else {})
        found.append(layer.model_copy(update=changes))
    return tuple(found)


def _before_training(layers: Sequence[ProfiledLayer], edges: Collection[tuple[int, int]]) -> set[int]:
    """Return the frozen layers that read only such layers, or nothing."""
    sources: dict[int, list[int]] = {number: [] for number in range(len(layers))}
    for source, target in edges:
        sources[target].append(source)
    found, count = {number for number, layer in enumerate(layers) if not layer.trained}, -1
    while count != len(found):
        count = len(found)
        found = {number for number in found if found.issuperset(sources[number])}
    return found


def _frozen(layer: ProfiledLayer) -> dict[str, Any]:
    """Return what changes of a layer that is frozen, wherever it stands."""
    if layer.options:
        raise ConfigError(
            f"layer {layer.name!r}: `trained: false` is for layers with forward and backward, as it does not say what "
            "options take without gradients of weights; give options of the frozen layer, and leave it out"
        )
    kept = layer.parameters if layer.whole is None else layer.whole + (layer.buffer or 0.0)
    gone: list[str] = ["parameters", "buffer", "optimizer", "step", *(["whole"] if layer.whole is not None else [])]
    changes: dict[str, Any] = dict.fromkeys(gone, 0.0) | {"frozen": layer.frozen + kept, "largest": None}
    if layer.backward_input is not None and layer.backward_weight is not None:
        return changes | {"backward": layer.backward_input, "backward_weight": 0.0, "late": 0.0}
    return changes | {"backward": None if layer.backward is None else layer_numbers(layer)("backward") * _HALF}


def _without_backward(layer: ProfiledLayer) -> dict[str, Any]:
    """Return what changes, too, of a frozen layer before which nothing is trained."""
    always = ("backward", "stored", "shared", "gradient")
    known = ("backward_input", "backward_weight", "late", "movable", "movable_with")
    return dict.fromkeys(always, 0.0) | {key: 0.0 for key in known if getattr(layer, key) is not None}
