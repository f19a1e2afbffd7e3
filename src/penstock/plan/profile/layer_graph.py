"""The layers of a profile as a graph with numbers: what planners compute with."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from penstock.checks import did_you_mean
from penstock.errors import ConfigError
from penstock.plan.profile.schema import BY_SIZE, LayerInput, LayerOption, Number, Numbers, Profile, ProfiledLayer

RECOMPUTE = "recompute"
"""The name of the option that a layer with measured forwards has without being profiled for it."""


@dataclass(frozen=True)
class Way:
    """One way to execute a layer: a `LayerOption` at one microbatch size, with layers as numbers."""

    name: str
    tensor: int
    seconds: float
    parameters: float
    memory: float
    memory_per_microbatch: float
    sync_in: dict[int, float] = field(default_factory=dict)
    sync_out: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GraphLayer:
    """A layer at one microbatch size; see `ProfiledLayer`.

    Attributes:
        seconds: forward and backward together; of a layer with options those of the first one on a single device.
        forward: its part of `seconds`; None if the profile does not tell them apart.
        stored: bytes that are kept from forward to backward.
        ways: how it can be executed; at least one.
        optimizer: bytes that the optimizer remembers; None if the profile does not say.
        step: seconds of an update.
        shared: bytes of `stored` that the layer before keeps as well.
        buffer: bytes of one copy of the parameters in memory, as passes read them.
        whole: bytes of one of their gradients or master weights, if passes compute in 16 bits; None if not.
        frozen: bytes of frozen parameters and module buffers.
        data: bytes of the model's own input that it reads.
        largest: bytes of its largest parameter, as of `whole`; None if the profile does not say.
        returned: bytes of the gradient that comes back for its output, as a share of those of the output.
        halves: seconds of the two halves of a backward, and bytes kept between them; None if the profile does not say.
        movable: bytes of `stored` that can be moved to the host's memory, in a stage of its own, and in addition if the
            layer before is in the same stage; None if the profile does not say.
    """

    name: str
    kind: str
    seconds: float
    output: float
    parameters: float
    ways: tuple[Way, ...]
    forward: float | None = None
    stored: float = 0.0
    optimizer: float | None = None
    step: float = 0.0
    shared: float = 0.0
    buffer: float = 0.0
    whole: float | None = None
    frozen: float = 0.0
    data: float = 0.0
    halves: tuple[float, float, float] | None = None
    largest: float | None = None
    movable: tuple[float, float] | None = None
    returned: float = 1.0

    @property
    def has_update(self) -> bool:
        """Whether a stage of this layer alone has an update: yes, unless the profile says that nothing is trained."""
        return self.parameters > 0 or self.step > 0 or self.optimizer != 0

    @property
    def tensor_degrees(self) -> frozenset[int]:
        """The tensor degrees that it has a way for."""
        return frozenset(way.tensor for way in self.ways)


class LayerEdge(NamedTuple):
    """An edge: layer `target` reads `bytes` of layer `source` per microbatch; both are numbers."""

    source: int
    target: int
    bytes: float


@dataclass(frozen=True)
class LayerGraph:
    """The layers of a model with what they cost at one microbatch size.

    Attributes:
        name: of the model.
        layers: in the order of the file; edges name them by their number.
        edges: which layer reads which; no two with the same ends.
        microbatch_size: samples of a microbatch; None if the profile does not say.
        microbatches: per batch, if the profile has an opinion.
    """

    name: str
    layers: tuple[GraphLayer, ...]
    edges: tuple[LayerEdge, ...]
    microbatch_size: int | None = None
    microbatches: int | None = None

    @cached_property
    def readers(self) -> tuple[tuple[LayerEdge, ...], ...]:
        """The edges that leave each layer."""
        found: list[list[LayerEdge]] = [[] for _ in self.layers]
        for edge in self.edges:
            found[edge.source].append(edge)
        return tuple(map(tuple, found))

    @cached_property
    def inputs(self) -> tuple[tuple[LayerEdge, ...], ...]:
        """The edges that enter each layer."""
        found: list[list[LayerEdge]] = [[] for _ in self.layers]
        for edge in self.edges:
            found[edge.target].append(edge)
        return tuple(map(tuple, found))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The layers in topological order, as near to the order of the file as possible.

        Raises:
            ConfigError: the graph has a cycle.
        """
        left = [len(edges) for edges in self.inputs]
        ready = [number for number, count in enumerate(left) if not count]
        found = []
        while ready:
            number = heapq.heappop(ready)
            found.append(number)
            for edge in self.readers[number]:
                left[edge.target] -= 1
                if not left[edge.target]:
                    heapq.heappush(ready, edge.target)
        if len(found) < len(self.layers):
            stuck = next(number for number, count in enumerate(left) if count)
            raise ConfigError(f"layers: {self.layers[stuck].name!r} is part of a cycle, or reads one; remove an input")
        return tuple(found)

    def ancestors(self, layers: Iterable[int]) -> set[int]:
        """Return all layers that these read, directly or not."""
        found, waiting = set[int](), list(layers)
        while waiting:
            for edge in self.inputs[waiting.pop()]:
                if edge.source not in found:
                    found.add(edge.source)
                    waiting.append(edge.source)
        return found

    @property
    def seconds(self) -> float:
        """Forward and backward of all layers on one device."""
        return sum(layer.seconds for layer in self.layers)


def sizes_of(profile: Profile) -> tuple[int | None, ...]:
    """Return the microbatch sizes at which a profile has numbers; None for one that it does not name."""
    return tuple(profile.microbatch_sizes) if profile.microbatch_sizes else (None,)


def layer_graph(profile: Profile, microbatch_size: int | None = None) -> LayerGraph:
    """Return the layers of a profile with their costs at one microbatch size.

    Args:
        profile: a checked profile (`read_profile`).
        microbatch_size: one of `sizes_of(profile)`; the first one if not given.

    Raises:
        ConfigError: two layers have one name, an input is no layer, a list of numbers does not have one for each
            microbatch size, the graph has a cycle, or the profile has no such microbatch size.
    """
    sizes = sizes_of(profile)
    if microbatch_size is not None and microbatch_size not in sizes:
        known = ", ".join(map(str, sizes)) if profile.microbatch_sizes else "none by name"
        raise ConfigError(f"microbatch size {microbatch_size} was not profiled; the profile has {known}")
    if list(profile.microbatch_sizes or [1]) != sorted(set(profile.microbatch_sizes or [1])):
        raise ConfigError(f"microbatch_sizes must ascend, got {profile.microbatch_sizes}")
    reader = _GraphReader(profile, sizes.index(microbatch_size) if microbatch_size is not None else 0)
    graph = LayerGraph(
        profile.name,
        tuple(reader.layer(number) for number in range(len(profile.layers))),
        tuple(LayerEdge(source, target, size) for (source, target), size in reader.edges.items()),
        sizes[reader.at],
        profile.microbatches,
    )
    _ = graph.order
    return graph


def in_topological_order(profile: Profile) -> Profile:
    """Return a profile whose layers all name their inputs with each after those that it reads, as chains must be.

    Raises:
        ConfigError: see `layer_graph`.
    """
    return profile.model_copy(update={"layers": [profile.layers[number] for number in layer_graph(profile).order]})


class _GraphReader:
    """Reads layers and edges of a profile at one of its microbatch sizes."""

    def __init__(self, profile: Profile, at: int) -> None:
        self.at, self._count = at, len(sizes_of(profile))
        self._times = profile.in_runs
        self._numbers = {layer.name: number for number, layer in enumerate(profile.layers)}
        if len(self._numbers) < len(profile.layers):
            names = [layer.name for layer in profile.layers]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"layers: two of them are named {twice!r}; give each a name of its own")
        self._layers: Sequence[ProfiledLayer] = [self._at_size(layer) for layer in profile.layers]
        self.edges: dict[tuple[int, int], float] = {}
        for number, layer in enumerate(self._layers):
            self._read_inputs(number, layer)
        self._layers = with_frozen_layers(self._layers, self.edges)

    def _at_size(self, layer: ProfiledLayer) -> ProfiledLayer:
        """Return a layer whose own numbers are those at this microbatch size."""
        lists = [key for key in layer.model_fields_set if key in BY_SIZE and isinstance(getattr(layer, key), list)]
        found = {key: self._value(getattr(layer, key), f"layer {layer.name!r}, {key}") for key in lists}
        return layer.model_copy(update=found) if found else layer

    def _value(self, value: Numbers, where: str) -> Number:
        if not isinstance(value, list):
            return float(value)
        if len(value) != self._count:
            raise ConfigError(
                f"{where} has {len(value)} numbers for {self._count} microbatch sizes; give one number, or one for "
                "each of microbatch_sizes"
            )
        return float(value[self.at])

    def _number(self, name: str, where: str) -> int:
        if name not in self._numbers:
            raise ConfigError(f"{where}: there is no layer {name!r}.{did_you_mean(name, self._numbers)}")
        return self._numbers[name]

    def _read_inputs(self, number: int, layer: ProfiledLayer) -> None:
        """Add the edges that enter a layer."""
        where = f"layer {layer.name!r}"
        given = layer.inputs
        if given is None:
            given = [self._layers[number - 1].name] if number else []
        for each in given:
            named = each if isinstance(each, LayerInput) else LayerInput(layer=each)
            source = self._number(named.layer, f"{where}, inputs")
            if source == number:
                raise ConfigError(f"{where} reads itself; remove that input")
            if (source, number) in self.edges:
                raise ConfigError(f"{where} has the input {named.layer!r} twice; leave one out")
            size = self._layers[source].output if named.bytes is None else named.bytes
            self.edges[source, number] = self._value(size, f"{where}, input {named.layer!r}")

    def layer(self, number: int) -> GraphLayer:
        layer = self._layers[number]
        where, numbers = f"layer {layer.name!r}", layer_numbers(layer)
        ways = tuple(self._way(number, option, f"{where}, option {option.name!r}") for option in layer.options)
        pairs = [(way.name, way.tensor) for way in ways]
        for name, tensor in pairs:
            if pairs.count((name, tensor)) > 1:
                raise ConfigError(f"{where} has two options {name!r} of tensor degree {tensor}; name them apart")
        output, forward = numbers("output"), None
        stored = numbers("stored", output)
        if layer.forward is not None and layer.backward is not None:
            forward = numbers("forward") * self._times.forward
            seconds = forward + numbers("backward") * self._times.backward
            ways = ways or self._plain_ways(number, layer, forward, seconds, stored)
        else:
            alone = [way for way in ways if way.tensor == 1] or list(ways)
            if not alone:
                raise ConfigError(f"{where} needs forward and backward, in seconds, or options")
            seconds = alone[0].seconds
        halves = None
        if layer.backward_input is not None and layer.backward_weight is not None:
            first, second = (numbers(key) * self._times.backward for key in ("backward_input", "backward_weight"))
            halves = first, second, numbers("late", stored)
        movable = None if layer.movable is None else (numbers("movable"), numbers("movable_with"))
        buffer = layer.parameters if layer.buffer is None else layer.buffer
        shared, data = numbers("shared"), numbers("data")
        costs = layer.parameters, ways, forward, stored, layer.optimizer, layer.step * self._times.step, shared
        more = buffer, layer.whole, layer.frozen, data, halves, layer.largest, movable
        returned = numbers("gradient", output) / output if output else 1.0
        return GraphLayer(layer.name, layer.kind, seconds, output, *costs, *more, returned)

    def _way(self, number: int, option: LayerOption, where: str) -> Way:
        syncs: list[dict[int, float]] = []
        for given, key, ends in (
            (option.sync_in, "sync_in", lambda other: (other, number)),
            (option.sync_out, "sync_out", lambda other: (number, other)),
        ):
            found = {self._number(name, f"{where}, {key}"): size for name, size in given.items()}
            for other in found:
                if ends(other) not in self.edges:
                    raise ConfigError(f"{where}, {key}: no edge joins it and {self._layers[other].name!r}")
            syncs.append(found)
        return Way(
            option.name,
            option.tensor,
            self._value(option.seconds, f"{where}, seconds"),
            option.parameters,
            option.memory,
            self._value(option.memory_per_microbatch, f"{where}, memory_per_microbatch"),
            *syncs,
        )

    def _plain_ways(
        self, number: int, layer: ProfiledLayer, forward: float, seconds: float, stored: float
    ) -> tuple[Way, ...]:
        """Return the ways of a layer without options: as it is and, where that saves memory, with recompute.

        Weights and gradients are always held, and frozen parameters. With recompute a microbatch in flight keeps the
        inputs, and the activations of the one that is run backwards are there once.
        """
        held = 2 * layer.parameters + layer.frozen
        plain = Way("plain", 1, seconds, layer.parameters, held, stored)
        inputs = sum(size for (_, target), size in self.edges.items() if target == number)
        if inputs >= stored:
            return (plain,)
        return plain, Way(RECOMPUTE, 1, seconds + forward, layer.parameters, held + stored, inputs)


# --- frozen layers ----------------------------------------------------------------------------------------------------
#
# What layers take whose parameters are frozen, from what they take trained (`trained: false`). A frozen layer has no
# gradient of its weights, no optimizer state and no update; its parameters are still there. Before the first layer that
# is trained nothing wants a gradient: layers there keep nothing for a backward and have none, and no gradient comes
# back for their output. A profile that was measured of a frozen model has these numbers as they are.


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
