"""The fastest training of a model on a cluster: every layout that the critical batch allows, at once.

Parallel pipelines are as many as the critical batch has room for: n_b = floor(b_c / (n_mu b_mu)). Depths divide the
layers, and tensor degrees are powers of two within a node. A batch below the critical one takes steps by
`penstock.plan.scale.model_shape`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.plan.cluster.schema import Cluster
from penstock.plan.scale.model_shape import ModelShape, steps_at
from penstock.plan.scale.rules_file import ScalingRules

AXES = ("data", "pipeline", "tensor")
"""How a model can be divided."""
MOST_BATCH = 1e5  # sequences
_DAY = 86400.0
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ScaledTraining:
    """What is to be trained, and on what.

    Attributes:
        shape: of the model.
        cluster: its devices.
        rules: of the analysis.
        critical: the critical batch in sequences.
        steps: with the critical batch.
        most_devices: None for no limit.
    """

    shape: ModelShape
    cluster: Cluster
    rules: ScalingRules
    critical: float
    steps: float
    most_devices: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.critical <= MOST_BATCH:
            raise ConfigError(f"the critical batch must be 1 to {MOST_BATCH:,.0f} sequences, got {self.critical:g}")
        if not 0 < self.steps < 1e30:
            raise ConfigError(f"steps must be above 0, got {self.steps:g}")

    @property
    def flops(self) -> float:
        """Operations of all steps at the critical batch."""
        return self.steps * self.critical * self.shape.sequence_flops(self.rules)


@dataclass(frozen=True)
class Rated:
    """Layouts with what they take, as arrays.

    Attributes:
        layouts: the layouts.
        parts: overheads in parts of compute.
        efficiency: share of the time that is compute.
        seconds: of the whole training.
        memory: bytes of a device by kind.
    """

    layouts: Layouts
    parts: Mapping[str, Array]
    efficiency: Array
    seconds: Array
    memory: Mapping[str, Array]

    @property
    def held(self) -> Array:
        """Bytes of a device."""
        return np.asarray(sum(self.memory.values()))

    @property
    def days(self) -> Array:
        """The whole training, in days."""
        return self.seconds / _DAY

    def at(self, place: int) -> Rated:
        parts = {name: part[place : place + 1] for name, part in self.parts.items()}
        memory = {name: part[place : place + 1] for name, part in self.memory.items()}
        one = slice(place, place + 1)
        return Rated(self.layouts.at(place), parts, self.efficiency[one], self.seconds[one], memory)


def rate(training: ScaledTraining, layouts: Layouts) -> Rated:
    """Return what layouts take."""
    shape, rules = training.shape, training.rules
    parts = overheads(shape, training.cluster, rules, layouts)
    efficiency = efficiency_of(parts)
    steps = steps_at(layouts.batch, training.critical, training.steps / 2)
    work = steps * layouts.batch * shape.sequence_flops(rules)
    seconds = work / (layouts.devices * training.cluster.rate * efficiency)
    return Rated(layouts, parts, efficiency, seconds, memory_of(shape, rules, layouts))


def allowed(training: ScaledTraining, rated: Rated) -> npt.NDArray[np.bool_]:
    """Return which layouts the rules and the number of devices allow, whatever they hold."""
    rules, of = training.rules, rated.layouts
    found = rated.efficiency >= rules.least_efficiency.value
    found &= of.batch >= rules.least_batch.value * int(training.critical + 1e-9)
    if of.layered:
        found &= of.microbatches >= of.depth
    if rules.most_exposed is not None:
        found &= exposed_of(rated.parts) <= rules.most_exposed + 1e-12
    if training.most_devices is not None:
        found &= of.devices <= training.most_devices
    return found


def layouts_of(training: ScaledTraining, axes: tuple[str, ...], *, layered: bool, sharded: bool) -> Iterator[Layouts]:
    """Yield every layout that divides a model along some axes only, those of a depth and tensor degree at once."""
    shape, most = training.shape, int(training.critical + 1e-9)
    if "data" in axes:
        pairs = [(n, b) for b in range(1, most + 1) for n in range(1, most // b + 1)]
        sequential, microbatch = (np.array(column, dtype=np.float64) for column in zip(*pairs, strict=True))
        data = most // (sequential * microbatch)
    else:
        microbatch = np.arange(1.0, most + 1)
        data, sequential = np.ones(most), most // microbatch
    depths = [d for d in range(1, shape.layers + 1) if shape.layers % d == 0] if "pipeline" in axes else [1]
    tensors = [1 << k for k in range(training.cluster.node.bit_length())] if "tensor" in axes else [1]
    for depth, tensor in product(depths, tensors):
        alike = np.ones(len(data))
        yield Layouts(data, depth * alike, tensor * alike, sequential, microbatch, layered, sharded)


def fastest(training: ScaledTraining, axes: tuple[str, ...], *, layered: bool) -> tuple[Rated | None, Rated | None]:
    """Return the fastest layout that fits, and the fastest whatever it holds; None where there is none.

    Depth-first layouts are tried with weights sharded and not, layered ones sharded. Of layouts that take as long, the
    one with the fewest devices counts, then the fewest sequential microbatches.
    """
    both: list[Rated | None] = [None, None]
    for sharded in (True,) if layered else (True, False):
        for layouts in layouts_of(training, axes, layered=layered, sharded=sharded):
            rated = rate(training, layouts)
            usable = allowed(training, rated)
            for at, places in enumerate((usable & (rated.held <= training.cluster.memory.value), usable)):
                found, best = _best(rated, np.flatnonzero(places)), both[at]
                if found is not None and (best is None or _key(found) < _key(best)):
                    both[at] = found
    return both[0], both[1]


def _best(rated: Rated, places: npt.NDArray[np.intp]) -> Rated | None:
    if not len(places):
        return None
    of, seconds = rated.layouts, rated.seconds[places]
    near = places[seconds <= seconds.min() * (1 + 1e-9)]
    order = np.lexsort((rated.held[near], of.microbatches[near], of.devices[near]))
    return rated.at(int(near[order[0]]))


def _key(rated: Rated) -> tuple[float, float, float, float]:
    """Return what decides between two layouts."""
    of = rated.layouts
    seconds = float(f"{float(rated.seconds[0]):.9g}")
    return seconds, float(of.devices[0]), float(of.microbatches[0]), float(rated.held[0])


def by_devices(training: ScaledTraining, *, layered: bool) -> list[tuple[int, float]]:
    """Return the fastest training by the number of devices that may be used: (devices, days), where it gets faster."""
    found: list[tuple[float, float]] = []
    for sharded in (True,) if layered else (True, False):
        for layouts in layouts_of(training, AXES, layered=layered, sharded=sharded):
            rated = rate(training, layouts)
            fits = allowed(training, rated) & (rated.held <= training.cluster.memory.value)
            found += _front(list(zip(layouts.devices[fits].tolist(), rated.days[fits].tolist(), strict=True)))
    return [(int(devices), days) for devices, days in _front(found)]


def _front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points whose second number is less than that of all before them."""
    front, best = [], np.inf
    for first, second in sorted(points):
        if second < best:
            front.append((first, second))
            best = second
    return front


# Layouts of a training run over devices, many at once as arrays, and what each takes in time and memory.
#
# n_b parallel pipelines of n_l ranks, each of n_a devices that share its layers; n_mu microbatches of b_mu sequences
# per pipeline and batch. *Depth-first* runs each microbatch through all layers before the next one (1F1B on consecutive
# layers); *layered* runs each layer for all microbatches, on ranks that hold every n_l-th layer (a modular pipeline).
# Traffic is counted in bytes in + out of a device. A transfer that something hides costs what it takes longer than
# that.


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
