"""Profiles of transformers on devices that are not at hand: operations and bytes over what a cluster's devices do.

A layer takes as long as its operations, or as the bytes that it reads and writes in the device's own memory, whichever
is longer (a roofline). Backwards take twice as long as forwards: for every product of matrices one for the gradient of
its input and one for that of its weights. Attention scores have no weights, so that both are gradients of inputs.
Passes compute in the cluster's precision; gradients and master weights have 32 bits, and Adam two moments of 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.checks import check_whole
from penstock.errors import ConfigError
from penstock.plan.cluster.schema import Cluster
from penstock.plan.profile.schema import BY_FORMULAS, MOST_LAYERS, Profile, ProfiledLayer, ProfiledLink
from penstock.plan.scale.model_shape import GPT_EXPANSION, ModelShape

_HALF, _SINGLE, _MOMENTS, _TOKEN = 2.0, 4.0, 8.0, 8.0  # bytes
_PER_VALUE, _PER_SCORE = 34.0, 5.0  # bytes that a layer keeps in 16 bits, by arXiv 2205.05198, sec. 4.1


class _ForwardWork(NamedTuple):
    """Operations of the forward of a microbatch.

    Attributes:
        weights: products with weights.
        scores: those of attention scores, with none.
    """

    weights: float = 0.0
    scores: float = 0.0


def analytic_profile(shape: ModelShape, cluster: Cluster, sizes: Sequence[int]) -> Profile:
    """Return the profile of a model: its embedding, its layers and its head with the loss.

    Args:
        shape: with a vocabulary.
        cluster: whose devices and links are used; a latency of links is not known.
        sizes: samples of a microbatch, ascending.

    Raises:
        ConfigError: the shape has no vocabulary, or more layers than profiles have.
    """
    if not shape.vocabulary:
        raise ConfigError("an analytic profile needs --vocabulary, for the embedding and the head")
    check_whole("layers of an analytic profile", shape.layers, 1, MOST_LAYERS - 2)
    s, h, vocabulary, value = shape.sequence, shape.hidden, shape.vocabulary, _value_bytes(cluster)
    out = [value * size * s * h for size in sizes]
    matrices = shape.layer_parameters
    kept = (_PER_VALUE * s * h + _PER_SCORE * shape.heads * s * s) * value / _HALF
    work = [_ForwardWork(2 * size * s * matrices, 4 * size * s * s * h) for size in sizes]
    layer = _layer("layer", matrices, work, [size * kept for size in sizes], out, cluster)
    movable = [size * kept - each for size, each in zip(sizes, out, strict=True)]  # all but its input
    more = {"largest": _SINGLE * max(shape.expansion, 1) * h**2, "movable": movable, "movable_with": list(out)}
    layer = layer.model_copy(update=more)
    embedding = _layer("embedding", float(vocabulary * h), [_ForwardWork()] * len(sizes), list(out), out, cluster)
    logits = [_ForwardWork(2.0 * size * s * h * vocabulary) for size in sizes]
    losses = [(value + _SINGLE) * size * s * vocabulary for size in sizes]
    head = _layer("head", float(vocabulary * h), logits, losses, [_SINGLE] * len(sizes), cluster)
    tokens = [_TOKEN * size * s for size in sizes]
    layers = [embedding.model_copy(update={"name": "embedding", "data": tokens, "movable": 0.0})]
    layers += [layer.model_copy(update={"name": f"layers.{n}"}) for n in range(shape.layers)]
    layers.append(head.model_copy(update={"name": "head", "movable": losses}))
    speeds = (cluster.inside.value / 2, cluster.between.value / 2)  # of one direction
    return Profile(
        format="penstock profile 1",
        name=shape.name,
        source=f"{BY_FORMULAS}: {cluster.name}, {cluster.rate:.4g} operations per second in {cluster.precision}",
        microbatch_sizes=list(sizes),
        settings=_settings(shape, cluster),
        links=[ProfiledLink(bandwidth=speed) for speed in speeds],
        layers=layers,
    )


def _value_bytes(cluster: Cluster) -> float:
    """Return the bytes of a value that passes compute with."""
    return _SINGLE if cluster.precision == "fp32" else _HALF


def _settings(shape: ModelShape, cluster: Cluster) -> dict[str, Any]:
    """Return the keys of `penstock train` that say what is trained, and in which precision.

    They are none for layers that its GPT cannot have, as of another width of the MLP.
    """
    if shape.expansion != GPT_EXPANSION:
        return {}
    model = {"layers": shape.layers, "width": shape.hidden, "heads": shape.heads, "context": shape.sequence}
    return {"model": model | {"vocabulary": shape.vocabulary}, "precision": cluster.precision}


def _layer(
    kind: str, parameters: float, work: list[_ForwardWork], kept: list[float], out: list[float], cluster: Cluster
) -> ProfiledLayer:
    """Return a layer, for each microbatch size; one without work looks up rows of its weights."""
    speed = None if cluster.memory_bandwidth is None else cluster.memory_bandwidth.value
    value, seconds = _value_bytes(cluster), list[float]()
    for each, held in zip(work, kept, strict=True):
        touched = held + (value * parameters if sum(each) else 0.0)  # an embedding reads the rows that it needs
        seconds.append(max(sum(each) / cluster.rate, 0.0 if speed is None else touched / speed))
    shares = [each.weights / sum(each) / 2 if sum(each) else 1.0 for each in work]  # that gradients of weights take
    weight = [2 * each * share for each, share in zip(seconds, shares, strict=True)]
    backward = [2 * each for each in seconds]
    low = value < _SINGLE
    touched = (2 * value * low + 2 * _SINGLE + 2 * _MOMENTS) * parameters  # weights, master weights and moments
    return ProfiledLayer(
        name=kind,
        kind=kind,
        forward=seconds,
        backward=backward,
        backward_input=[whole - part for whole, part in zip(backward, weight, strict=True)],
        backward_weight=weight,
        output=out,
        stored=kept,
        parameters=_SINGLE * parameters,
        buffer=value * parameters,
        whole=_SINGLE * parameters if low else None,
        optimizer=_MOMENTS * parameters,
        step=0.0 if speed is None else touched / speed,
    )
