"""Layouts of a training run over devices, many at once as arrays, and what each takes in time and memory.

n_b parallel pipelines of n_l ranks, each of n_a devices that share its layers; n_mu microbatches of b_mu sequences per
pipeline and batch. *Depth-first* runs each microbatch through all layers before the next one (1F1B on consecutive
layers); *layered* runs each layer for all microbatches, on ranks that hold every n_l-th layer (a modular pipeline).
Traffic is counted in bytes in + out of a device. A transfer that something hides costs what it takes longer than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.plan.cluster.schema import Cluster
from penstock.plan.scale.model_shape import ModelShape
from penstock.plan.scale.rules_file import ScalingRules

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Layouts:
    """Layouts as arrays of equal length.

    Attributes:
        data, depth, tensor: n_b, n_l and n_a.
        microbatches, microbatch: n_mu and b_mu.
        layered: layered and modular, or depth-first.
        sharded: weights, gradients and optimizer states are divided over the parallel pipelines.
    """

    data: Array
    depth: Array
    tensor: Array
    microbatches: Array
    microbatch: Array
    layered: bool
    sharded: bool

    @property
    def devices(self) -> Array:
        return self.data * self.depth * self.tensor

    @property
    def batch(self) -> Array:
        return self.data * self.microbatches * self.microbatch

    def at(self, place: int) -> Layouts:
        one = slice(place, place + 1)
        return replace(
            self,
            data=self.data[one],
            depth=self.depth[one],
            tensor=self.tensor[one],
            microbatches=self.microbatches[one],
            microbatch=self.microbatch[one],
        )


def one_layout(
    data: int, depth: int, tensor: int, microbatches: int, microbatch: int, *, layered: bool, sharded: bool
) -> Layouts:
    n_b, n_l, n_a, n_mu, b_mu = (np.array([float(each)]) for each in (data, depth, tensor, microbatches, microbatch))
    return Layouts(n_b, n_l, n_a, n_mu, b_mu, layered, sharded)


class Transfer(NamedTuple):
    """A kind of traffic of all layouts.

    Attributes:
        link: one of `penstock.plan.cluster.schema.LINKS`.
        intensity: operations per byte, of the work that hides it; infinite where there is none.
        share: of the time of compute that this work takes.
    """

    link: str
    intensity: Array
    share: Array | float


def transfers(shape: ModelShape, rules: ScalingRules, of: Layouts) -> dict[str, Transfer]:
    """Return all traffic, by name.

    A gather of weights is hidden by the forwards of the layer, a gather with the sum of gradients by its backwards: of
    all microbatches if layered, of one otherwise. A sum of gradients that are not sharded is hidden by the backwards of
    all microbatches, or of the last one.
    """
    tokens = of.microbatch * shape.sequence
    window = tokens * (of.microbatches if of.layered else 1.0)
    once = 1.0 if of.layered else 1.0 / of.microbatches
    forward, again = rules.forward.value, rules.backward.value + rules.recompute.value
    gather, reduce = 2 * rules.weight.value, 2 * rules.gradient.value
    none = np.where(of.data > 1, 1.0, np.inf)
    found = {}
    if of.sharded:
        found["gather, forward"] = Transfer("between", none * forward * window / gather, forward / rules.work)
        found["gather and sum, backward"] = Transfer(
            "between", none * again * window / (gather + reduce), again / rules.work
        )
    else:
        found["sum of gradients"] = Transfer("between", none * again * window / (2 * reduce), once * again / rules.work)
    layers = np.ones_like(of.depth) if of.layered else shape.layers / of.depth
    crossing = 4 * rules.number.value  # in and out, forward and backward
    along = rules.work * (4 + 2 * shape.expansion) * shape.hidden * layers / crossing / of.tensor
    found["messages"] = Transfer("between", np.where(of.depth > 1, along, np.inf), 1.0)
    reduces = rules.tensor_all_reduces.value * 4 * rules.number.value  # a ring, in and out
    with np.errstate(divide="ignore"):
        shared = rules.work * (4 + 2 * shape.expansion) * shape.hidden / reduces / (of.tensor - 1)
    found["shared layers"] = Transfer("inside", shared, 1.0)
    return found


def offloads(shape: ModelShape, rules: ScalingRules, of: Layouts) -> dict[str, Transfer]:
    """Return the traffic if checkpoints, or weights and optimizer states, were kept on the host."""
    checkpoints = rules.work * (4 + 2 * shape.expansion) * shape.hidden / (2 * rules.number.value)
    window = of.microbatch * shape.sequence * (of.microbatches if of.layered else 1.0)
    per_parameter = 2 * (rules.weight.value + rules.gradient.value)
    state = rules.work * window * (of.data if of.sharded else 1.0) / per_parameter
    return {
        "offload of checkpoints": Transfer("host", np.full_like(of.data, checkpoints), 1.0),
        "offload of state": Transfer("host", state, 1.0),
    }


def overheads(shape: ModelShape, cluster: Cluster, rules: ScalingRules, of: Layouts) -> dict[str, Array]:
    """Return what is added to the time of compute, in parts of it: bubble, traffic that is exposed, shared layers."""
    chunks = shape.layers / of.depth if of.layered else np.ones_like(of.depth)
    starved = of.depth * (chunks - 1) + of.microbatches + of.depth - 1
    bubble = np.where(
        of.microbatches >= of.depth,
        (of.depth - 1) / (of.microbatches * chunks),
        starved / (of.microbatches * chunks) - 1,
    )
    found = {"bubble": bubble}
    for name, transfer in transfers(shape, rules, of).items():
        slow, fast = (cluster.threshold(each) or np.inf for each in (transfer.link, "inside"))
        ratio = np.where(of.devices > cluster.node, slow, fast) / transfer.intensity
        hidden = 1.0 if name != "shared layers" else 0.0
        found[name] = np.maximum(0.0, ratio - hidden) * transfer.share
    return found


def efficiency_of(parts: Mapping[str, Array]) -> Array:
    """Return the share of the time that is compute: overheads of sharing layers multiply the others."""
    others: Any = sum(part for name, part in parts.items() if name != "shared layers")
    return np.asarray(1.0 / ((1.0 + others) * (1.0 + parts["shared layers"])))


def exposed_of(parts: Mapping[str, Array]) -> Array:
    """Return the traffic of parallel pipelines and of messages that nothing hides, in parts of compute."""
    return np.asarray(sum(part for name, part in parts.items() if name not in ("bubble", "shared layers")))


def memory_of(shape: ModelShape, rules: ScalingRules, of: Layouts) -> dict[str, Array]:
    """Return the bytes of a device: state, buffers, checkpoints, and the activations of one layer."""
    holders = of.depth * of.tensor
    state = rules.state.value * shape.parameters / holders
    if of.sharded:
        state = state / of.data
        buffers = rules.layer_buffers.value * rules.weight.value * shape.layer_parameters / of.tensor
    else:
        buffers = (rules.weight.value + rules.gradient.value) * shape.parameters / holders
    flight = of.microbatches if of.layered else np.minimum(of.depth, of.microbatches)
    split = of.tensor if rules.split_checkpoints else 1.0
    checkpoint = rules.number.value * shape.sequence * shape.hidden / split
    values = rules.activations_per_value.value * shape.sequence * shape.hidden
    scores = rules.activations_per_score.value * shape.heads * shape.sequence**2
    return {
        "state": np.asarray(state),
        "buffers": np.asarray(buffers),
        "checkpoints": np.asarray(checkpoint * of.microbatch * flight * shape.layers / of.depth),
        "activations": np.asarray(of.microbatch * (values + scores) / of.tensor),
    }
