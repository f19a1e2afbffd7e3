"""Every plan that the simulated search may choose from, rated one by one: its bounds and its cuts are not used.

A plan is a method at a depth and a width with a microbatch size, a level of sharding, optimizer states on the device or
away, the devices of its stages, cuts, and which ranks recompute, or offload activations: where some may, each rank
does the first of keeping, offloading and recomputing with which it fits. Its schedule is proven, its span predicted,
and its memory predicted from the bytes of its layers.
"""

import itertools
import math
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from penstock.errors import CapabilityError, ConfigError, ScheduleError
from penstock.plan.candidates.planned_methods import PLANNED, USUAL, ActivationMemory
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import bandwidths
from penstock.schedule.add_options import extend
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.schedule import Op
from penstock.schedule.machine.lane_state import HostCopies
from penstock.schedule.machine.shared_machine import SharedCores
from penstock.schedule.methods.table import METHODS
from penstock.schedule.proof.check import check
from penstock.simulate.compiled_span import CompiledSpan
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.memory.held import HeldKind
from penstock.simulate.memory.memory_simulation import most_held
from penstock.simulate.memory.predicted import MemoryOptions, peak_of
from penstock.simulate.memory.stage_sizes import StageBytes
from penstock.simulate.play import predict
from penstock.simulate.sharding_traffic import Network

LEVELS = ("none", "optimizer", "gradients", "full")
BATCHES = 6  # of a run whose memory is predicted
KEPT, OFFLOADED, RECOMPUTED = ActivationMemory
SCRATCH = 4 << 20  # bytes of gradients that move at once


@dataclass(frozen=True)
class Case:
    """What is to be planned: the graph at each microbatch size, samples of a batch, devices, methods."""

    graphs: dict[int, LayerGraph]
    samples: int
    devices: Devices
    methods: tuple[str, ...]
    decides: bool = True
    optimizer_copies: float = 2.0


class Kind(NamedTuple):
    """A plan before it is cut."""

    name: str
    size: int
    m: int
    depth: int
    width: int
    level: str
    decides: bool
    away: bool = False
    offloads: bool = False

    @property
    def shards(self):
        return 1 if self.level == "none" else self.width

    @property
    def schedule(self):
        """The arguments of `proof_of`."""
        return self.name, self.depth, self.m, self.width > 1, self.level, self.decides

    def __str__(self):
        """As the search calls it."""
        size = f", microbatch {self.size}" if self.size > 1 else ""
        shards = "" if self.level == "none" else f", sharded {self.level}"
        return f"{self.name}, depth {self.depth}, width {self.width}{size}{shards}" + (
            ", optimizer on the host" * self.away + ", activations on the host" * self.offloads
        )


class Rated(NamedTuple):
    """A plan: seconds per sample, bytes of each rank."""

    seconds: float
    kind: Kind
    cuts: tuple[int, ...]
    activations: tuple[ActivationMemory, ...]
    place: tuple[tuple[float, float], ...]
    held: tuple[float, ...]


@cache
def proof_of(name, depth, m, parallel, level, decides, offloaded=()):
    """The proof of a schedule; None if there is none."""
    row, _, options = name.partition(":")
    given = {"chunks": int(options.partition("=")[2])} if options else {}
    if METHODS[row].sharding not in ("none", level):
        return None
    try:
        plain = check(ScheduleRequest(row, depth, m, options=given, sharding="none").schedule)
        return extend(plain, decides=decides or parallel, reduces=parallel, sharding=level, offloads=offloaded)
    except (ScheduleError, ConfigError, CapabilityError):
        return None


def kinds_of(case, wanted):
    """All kinds of plans that are wanted and have a schedule."""
    each = range(1, case.devices.count + 1)
    for name, size, depth, width in itertools.product(case.methods, case.graphs, each, each):
        m, rest = divmod(case.samples, size * width)
        if rest or m < 1 or depth * width > case.devices.count:
            continue
        for level in LEVELS if width > 1 else ("none",):
            kind = Kind(name, size, m, depth, width, level, case.decides)
            if not wanted(kind):
                continue
            proof = proof_of(*kind.schedule)
            if proof is None or proof.schedule.num_stages > len(case.graphs[size].layers):
                continue
            kinds = kind, kind._replace(away=True), kind._replace(offloads=True)
            yield from (each for each in kinds if wanted(each))


def looked_into(case, skipped):
    """Whether a search may choose a kind of plan, as its list of what it skipped says."""
    limited = case.devices.memory is not None
    said = ("does not fit", "s per sample")  # which every plan is held against
    left_out = {each.what for each in skipped if not any(words in each.bound for words in said)}
    left_out |= {each.what for each in skipped if "too many passes" in each.bound}

    def wanted(kind):
        full = kind.name.startswith(("layered", "2bw-layered"))
        known = all(layer.movable is not None for graph in case.graphs.values() for layer in graph.layers)
        to_the_host = limited and case.devices.host is not None and kind.name in USUAL and not case.devices.kinds
        return not (
            kind.name in left_out
            or str(kind) in left_out
            or (kind.level != "none" and not limited)
            or (kind.level == "full") != full
            or (kind.level == "gradients" and PLANNED[kind.name].chunks > 1)
            or (kind.depth == 1 and not full and kind.name not in USUAL)
            or ((kind.away or kind.offloads) and not to_the_host)
            or (kind.offloads and not known)
        )

    return wanted


def places_of(devices, depth, width):
    """The slowest speed and the least memory of each rank, for all ways to give replicas a device."""
    limit = math.inf if devices.memory is None else devices.memory
    if not devices.kinds:
        return [((1.0, limit),) * depth]
    each = [(kind.speed, kind.memory or limit) for kind in devices.kinds for _ in range(kind.count)]
    chosen = set(itertools.permutations(each, depth * width))
    return sorted({
        tuple(tuple(map(min, zip(*row[at : at + width], strict=True))) for at in range(0, depth * width, width))
        for row in chosen
    })  # fmt: skip


class StageNumbers(NamedTuple):
    """What the layers of a stage add up to."""

    forward: float
    backward: float
    halves: tuple[float, float]
    step: float
    parameters: float
    optimizer: float
    crossing: float  # the cut at its end
    movable: float
    updated: bool  # not all of them are frozen


@dataclass
class EveryPlan:
    """All plans of one kind, rated.

    Args:
        case: what is planned.
        kind: of its plans.
    """

    case: Case
    kind: Kind
    _bytes: dict = field(default_factory=dict)

    def __post_init__(self):
        """Read what the schedule says."""
        self._places = places_of(self.case.devices, self.kind.depth, self.kind.width)
        self.proof = proof_of(*self.kind.schedule)
        schedule = self.proof.schedule
        self.graph, self.devices = self.case.graphs[self.kind.size], self.case.devices
        self.ranks = [stage.rank for stage in sorted(schedule.stages, key=lambda stage: stage.index)]
        self.halved = Op.I in schedule.operations
        self.correction = METHODS[self.kind.name.partition(":")[0]].correction
        self.low = any(layer.whole is not None for layer in self.graph.layers)

    def plans(self):
        """All that fit, with what a batch of a long run takes.

        Five batches less three of some methods may take less than two batches of the busiest rank, which a long run
        does not. With three versions of the weights what repeats may be three batches long, and begins later.
        """
        stages, blocks = len(self.ranks), len(self.graph.layers)
        limited, found = self.devices.memory is not None, []
        for inner in itertools.combinations(range(1, blocks), stages - 1):
            cuts = (0, *inner, blocks)
            for chosen in self._choices(cuts):
                held = tuple(self.held(rank, cuts, each) for rank, each in enumerate(chosen)) if limited else ()
                for place in self._places:
                    if all(most <= limit for most, (_, limit) in zip(held, place, strict=limited)):
                        found.append((cuts, chosen, place, held))
        yield from self.timed(found)

    def _choices(self, cuts):
        """What ranks may do with their activations."""
        if self.devices.memory is None:
            return [(KEPT,) * self.kind.depth]
        if not self.kind.offloads:
            return itertools.product((KEPT, RECOMPUTED), repeat=self.kind.depth)
        made = copies_of(proof_of(*self._key((OFFLOADED,) * self.kind.depth)).schedule)

        def fits(rank, does):
            there = movable_of(self.graph.layers[cuts[rank] : cuts[rank + 1]]) * made[rank][1] * (does is OFFLOADED)
            room = there <= (self.devices.host_memory or math.inf)
            return room and self.held(rank, cuts, does) <= self.devices.memory

        first = (next((a for a in (KEPT, OFFLOADED) if fits(r, a)), RECOMPUTED) for r in range(self.kind.depth))
        return [tuple(first)]

    def timed(self, plans):
        """Some plans with their times."""
        costs = [self.costs(cuts, chosen, place) for cuts, chosen, place, _ in plans]
        several = list(zip(costs, (self._key(chosen) for _, chosen, _, _ in plans), strict=True))
        fewer, more = (6, 12) if METHODS[self.kind.name.partition(":")[0]].rule == "triple-buffer" else (3, 5)
        spans = [self.spans(several, batches) for batches in (fewer, more)]
        for (cuts, chosen, place, held), of, a, b in zip(plans, costs, *spans, strict=True):
            busy = [0.0] * self.kind.depth
            for rank, each in zip(self.ranks, of.stages, strict=True):
                passes = each.forward + each.backward_input + each.backward_weight
                busy[rank] += self.kind.m * passes + each.step
            if self.kind.offloads:
                made = copies_of(proof_of(*self._key(chosen)).schedule)
                busy += [each.copy * count for each, (count, _) in zip(of.stages, made, strict=True)]
            batch = (b.makespan - a.makespan) / (more - fewer)
            if self.kind.offloads:
                late = not_gone(proof_of(*self._key(chosen)).lowered, of)
                moved = [movable_of(self.graph.layers[first:last]) for first, last in itertools.pairwise(cuts)]
                held = tuple(each + more * size for each, more, size in zip(held, late, moved, strict=True))
                there = max(size * most for size, (_, most) in zip(moved, made, strict=True))
                if max(held) > self.devices.memory or there > (self.devices.host_memory or math.inf):
                    continue
            yield Rated(max(batch, *busy) / self.case.samples, self.kind, cuts, chosen, place, held)

    def _key(self, chosen):
        """The arguments of `proof_of` where ranks do this with their activations."""
        return *self.kind.schedule, tuple(s for s, rank in enumerate(self.ranks) if chosen[rank] is OFFLOADED)

    def spans(self, several, batches):
        """What so many batches take; ranks that share cores are played."""
        found = {}
        for key in {key for _, key in several}:
            own = [n for n, (_, each) in enumerate(several) if each == key]
            costs = [several[n][0] for n in own]
            if self.devices.cores is not None:
                bubbles = predict(proof_of(*key).lowered, costs, batches)
            else:
                bubbles = span_of(key, batches).bubbles(costs)
            found |= dict(zip(own, bubbles, strict=True))
        return [found[n] for n in range(len(several))]

    def numbers(self, first, last):
        """What the layers from one cut to another add up to."""
        part, copies = self.graph.layers[first:last], self.case.optimizer_copies
        return StageNumbers(
            sum(layer.forward for layer in part),
            sum(layer.seconds - layer.forward for layer in part),
            tuple(sum(layer.halves[n] for layer in part) for n in (0, 1)) if self.halved else (0.0, 0.0),
            sum(layer.step for layer in part),
            sum(layer.parameters for layer in part),
            sum(copies * whole_of(layer) if layer.optimizer is None else layer.optimizer for layer in part),
            sum(edge.bytes for edge in self.graph.edges if edge.source < last <= edge.target),
            movable_of(part),
            not all(layer.parameters == layer.step == layer.optimizer == 0 for layer in part),
        )

    def costs(self, cuts, chosen, place):
        """What passes, updates, messages and sums take."""
        kind, ranks = self.kind, self.ranks
        stages = [self.numbers(*pair) for pair in itertools.pairwise(cuts)]
        across, along = bandwidths(self.devices, kind.width, kind.depth)
        sent = [a.crossing for a, r, s in zip(stages, ranks, ranks[1:], strict=False) if r != s]
        largest, parameters = max(sent, default=0.0), max(each.parameters for each in stages)
        found = []
        for rank, each in zip(ranks, stages, strict=True):
            first, second = each.halves if self.halved else (each.backward, 0.0)
            forward, slow = each.forward, 1 / place[rank][0]
            step = each.step + (2 * each.optimizer / self.devices.host if kind.away else 0.0)
            between = self.devices.between
            found.append(
                StageCost(
                    forward * slow + between,
                    (first + forward * (chosen[rank] is RECOMPUTED)) * slow + between,
                    second * slow + between * self.halved,
                    (step / kind.shards + self.devices.update * each.updated) * slow,
                    each.movable / self.devices.host if kind.offloads else None,
                )
            )
        # Around a ring: width - 1 steps of a gather, twice as many of a sum.
        rings = (kind.width - 1) * self.devices.latency
        gathered = (kind.width - 1) / kind.width * max(parameters, 1e-30)
        whole = gathered / (rings + gathered / across) if kind.width > 1 else across
        network = Network(self.proof.schedule, kind.width, whole, max(parameters, 1e-30), 1, 1)
        return Costs(
            tuple(found),
            latency=self.devices.latency if kind.width * kind.depth > 1 else 0.0,  # one process decides alone
            transfer=largest / along,
            collective=2 * (rings + (kind.width - 1) / kind.width * parameters / across),
            network=None if kind.level == "none" else network,
            cores=None if self.devices.cores is None else SharedCores(self.devices.cores / kind.width),
        )

    def held(self, rank, cuts, does):
        """The most bytes of a rank, which does something with its activations, whatever others do."""
        own = [stage for stage, r in enumerate(self.ranks) if r == rank]
        key = rank, tuple((cuts[stage], cuts[stage + 1]) for stage in own), does
        if key not in self._bytes:
            again = does is RECOMPUTED
            options = MemoryOptions(
                low_precision=self.low, blockwise=again, correction=self.correction, batches=BATCHES
            )
            sizes = {stage: self.sizes(cuts[stage], cuts[stage + 1], stage) for stage in own}
            part = (0, rank)
            alone = *self.kind.schedule, tuple(own) if does is OFFLOADED else ()
            held = combinations_of(alone, again, self.low)[part]
            self._bytes[key] = peak_of(self.proof, part, held, sizes, options)
        return self._bytes[key]

    def sizes(self, first, last, stage):
        """The bytes of a stage, as layers have them."""
        kind, layers = self.kind, self.graph.layers[first:last]
        inputs = [
            layer.data + sum(edge.bytes for edge in self.graph.edges if edge.target == n)
            for n, layer in enumerate(layers, first)
        ]
        ends = [[edge for edge in self.graph.edges if edge.source < cut <= edge.target] for cut in (first, last)]
        back = sum(edge.bytes * self.graph.layers[edge.source].returned for edge in ends[0])
        graph = sum(layer.stored for layer in layers) - sum(layer.shared for layer in layers[1:])
        forward = max(sum(inputs[:n]) + layer.stored for n, layer in enumerate(layers))
        backward = max(sum(inputs[: n + 1]) + layer.stored for n, layer in enumerate(layers))
        late = sum(layer.halves[2] for layer in layers) if self.halved else 0
        passes = {
            HeldKind.GRAPH: graph,
            HeldKind.LEFT: graph - movable_of(layers),
            HeldKind.HALVED: graph,
            HeldKind.SAVED: sum(inputs),
            HeldKind.FORWARD: forward,
            HeldKind.FORWARD_HALVED: forward,
            HeldKind.BACKWARD: backward,
            HeldKind.BACKWARD_HALVED: max(backward, late),
            HeldKind.LATE: late,
        }
        buffer, whole = sum(layer.buffer for layer in layers), sum(map(whole_of, layers))
        states = [
            self.case.optimizer_copies * whole_of(layer) if layer.optimizer is None else layer.optimizer
            for layer in layers
        ]
        optimizer = sum(states) / kind.shards
        if kind.away:
            largest = max(
                state
                * (1.0 if not whole_of(layer) or layer.largest is None else min(layer.largest / whole_of(layer), 1))
                for state, layer in zip(states, layers, strict=True)
            )
            optimizer = min(optimizer, 3 * (largest + 2 * SCRATCH))
        scratch = min(whole, max(SCRATCH, *map(whole_of, layers))) / kind.shards
        if self.correction == "2bw-ahead":
            scratch = 0  # by the last gradient, which takes no room
        w = kind.width
        rows, low = whole / w, buffer / w
        frozen = sum(layer.frozen for layer in layers)
        return StageBytes(
            buffer, whole, (optimizer,) * w, frozen, (scratch,) * w, (rows,) * w, (low,) * w, passes,
            sum(edge.bytes for edge in ends[1]), {stage - 1: back},
        )  # fmt: skip


@cache
def span_of(key, batches):
    """So many batches of a schedule as `proof_of` has it, compiled."""
    return CompiledSpan(proof_of(*key).lowered, batches, transfers=True)


@cache
def combinations_of(key, again, low):
    """What ranks of pipelines in step hold at the moments that count, under a schedule as `proof_of` has it.

    Ranks of 2bw-eager drift apart for many batches; as many messages are taken to be held as can be under way.
    """
    lowered = proof_of(*key).lowered
    found = most_held(lowered, BATCHES, 1, again, low, on_device=True)
    if key[0] != "2bw-eager":
        return found
    drifted = {}
    for part, each in found.items():
        messages = {
            what: lowered.window for c in each for what, _ in c if what.kind in (HeldKind.OUTPUT, HeldKind.GRADIENT)
        }
        drifted[part] = tuple(frozenset((dict(c) | messages).items()) for c in each)
    return drifted


def copies_of(schedule, batches=5):
    """How many copies each rank makes in a batch, and of how many microbatches activations are away at a time."""
    found = []
    for program in schedule.programs:
        made, away = [0], [0]
        for n, action in itertools.product(range(batches), program.period):
            if action.op in (Op.OFFLOAD, Op.FETCH) and action.unit.first >= -n * schedule.microbatches:
                made.append(n)
                away.append(away[-1] + (1 if action.op is Op.OFFLOAD else -1))
        found.append((made.count(batches - 1), max(away)))
    return found


class CopiesNoted(HostCopies):
    """Copies to the host's memory and back, with when they are issued and when they end, by rank."""

    def __init__(self, ranks):
        super().__init__(ranks)
        self.noted = [[] for _ in range(ranks)]

    def issue(self, rank, action, t, microbatches, now, duration):
        start, end = super().issue(rank, action, t, microbatches, now, duration)
        self.noted[rank].append((action.op, now, end))
        return start, end


def not_gone(lowered, costs, batches=5):
    """How many activations more each rank has on its device, at most, than if copies to the host took no time."""
    here = [0] * lowered.schedule.ranks
    free, timed = [[0] for _ in here], [[0] for _ in here]

    def note(rank, action, _t, _start, _end):
        change = {Op.F: 1, Op.B: -1, Op.FETCH: 1, Op.OFFLOAD: -1}.get(action.op, 0)
        before, here[rank] = here[rank], here[rank] + change
        if action.op in (Op.FETCH, Op.OFFLOAD):
            now = copies.noted[rank][-1][1]
            leaving = sum(op is Op.OFFLOAD and end > now for op, _, end in copies.noted[rank][:-1])
            most = max(before, here[rank])
            free[rank].append(most)
            timed[rank].append(most + leaving)

    machine = costs.machine(lowered, note)
    machine._host_copies = copies = CopiesNoted(lowered.schedule.ranks)
    machine.play(batches)
    return [max(most) - max(least) for most, least in zip(timed, free, strict=True)]


def movable_of(layers):
    """The bytes of activations of a stage that can be moved to the host's memory."""
    return sum((layer.movable or (0, 0))[0] + (n > 0) * (layer.movable or (0, 0))[1] for n, layer in enumerate(layers))


def whole_of(layer):
    """The bytes of one gradient of a layer."""
    return layer.buffer if layer.whole is None else layer.whole
