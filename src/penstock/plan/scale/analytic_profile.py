"""Profiles of transformers on devices that are not at hand: operations and bytes over what a cluster's devices do.

A layer takes as long as its operations, or as the bytes that it reads and writes in the device's own memory, whichever
is longer (a roofline). Backwards take twice as long as forwards. Passes compute in 16 bits; gradients and master
weights have 32, and Adam two moments of 32.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import ConfigError
from penstock.plan.cluster.schema import Cluster
from penstock.plan.profile.schema import Profile, ProfiledLayer, ProfiledLink
from penstock.plan.scale.model_shape import ModelShape

_HALF, _SINGLE, _MOMENTS, _TOKEN = 2.0, 4.0, 8.0, 8.0  # bytes
_PER_VALUE, _PER_SCORE = 34.0, 5.0  # bytes that a layer keeps, by arXiv 2205.05198, sec. 4.1


def analytic_profile(shape: ModelShape, cluster: Cluster, sizes: Sequence[int]) -> Profile:
    """Return the profile of a model: its embedding, its layers and its head with the loss.

    Args:
        shape: with a vocabulary.
        cluster: whose devices and links are used; a latency of links is not known.
        sizes: samples of a microbatch, ascending.

    Raises:
        ConfigError: the shape has no vocabulary.
    """
    if not shape.vocabulary:
        raise ConfigError("an analytic profile needs --vocabulary, for the embedding and the head")
    s, h, vocabulary = shape.sequence, shape.hidden, shape.vocabulary
    out = [_HALF * size * s * h for size in sizes]
    matrices = shape.layer_parameters
    kept = _PER_VALUE * s * h + _PER_SCORE * shape.heads * s * s
    work = [size * s * (2 * matrices + 4 * s * h) for size in sizes]
    layer = _layer("layer", matrices, work, [size * kept for size in sizes], out, cluster)
    movable = [size * kept - each for size, each in zip(sizes, out, strict=True)]  # all but its input
    more = {"largest": _SINGLE * max(shape.expansion, 1) * h**2, "movable": movable, "movable_with": list(out)}
    layer = layer.model_copy(update=more)
    embedding = _layer("embedding", float(vocabulary * h), [0.0] * len(sizes), list(out), out, cluster)
    logits = [2.0 * size * s * h * vocabulary for size in sizes]
    losses = [(_HALF + _SINGLE) * size * s * vocabulary for size in sizes]
    head = _layer("head", float(vocabulary * h), logits, losses, [_SINGLE] * len(sizes), cluster)
    tokens = [_TOKEN * size * s for size in sizes]
    layers = [embedding.model_copy(update={"name": "embedding", "data": tokens, "movable": 0.0})]
    layers += [layer.model_copy(update={"name": f"layers.{n}"}) for n in range(shape.layers)]
    layers.append(head.model_copy(update={"name": "head", "movable": losses}))
    speeds = (cluster.inside.value / 2, cluster.between.value / 2)  # of one direction
    return Profile(
        format="penstock profile 1",
        name=shape.name,
        source=f"analytic: {cluster.name}, {cluster.rate:.4g} operations per second",
        microbatch_sizes=list(sizes),
        links=[ProfiledLink(bandwidth=speed) for speed in speeds],
        layers=layers,
    )


def _layer(
    kind: str, parameters: float, work: list[float], kept: list[float], out: list[float], cluster: Cluster
) -> ProfiledLayer:
    """Return a layer, for each microbatch size."""
    speed = None if cluster.memory_bandwidth is None else cluster.memory_bandwidth.value
    seconds = []
    for operations, held in zip(work, kept, strict=True):
        touched = held + (_HALF * parameters if operations else 0.0)  # an embedding reads the rows that it needs
        seconds.append(max(operations / cluster.rate, 0.0 if speed is None else touched / speed))
    touched = (2 * _HALF + 2 * _SINGLE + 2 * _MOMENTS) * parameters  # weights, master, gradient and moments
    return ProfiledLayer(
        name=kind,
        kind=kind,
        forward=seconds,
        backward=[2 * each for each in seconds],
        output=out,
        stored=kept,
        parameters=_SINGLE * parameters,
        buffer=_HALF * parameters,
        whole=_SINGLE * parameters,
        optimizer=_MOMENTS * parameters,
        step=0.0 if speed is None else touched / speed,
    )
