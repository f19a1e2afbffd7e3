"""The fastest run that fits: method, depth, width, microbatch size and recompute, rated by simulating the schedule.

For every candidate a lower bound comes first: all compute evenly divided, with fill and drain where the method
flushes. Candidates are taken in the order of their bounds, until the next bound is no better than the best plan. Each
is proven, cut where its slowest stage is fastest and every stage fits (weight versions, gradients and activations in
flight are those that the proof derives), and simulated: what one more batch takes in a long run. Other cuts are
simulated, too: all of them if they are few, otherwise those that differ by one block, as long as that helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise, product
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, ScheduleError
from penstock.plan.planners.two_bw import Sized, single_device_ways, widths
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.devices import Devices
from penstock.plan.stages.planned import Plan, PlannedStage, Rating, Skipped, StageRating
from penstock.plan.stages.two_bw_cost import bandwidths
from penstock.schedule.build import prove
from penstock.schedule.extend import extend
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.proof.check import Proof
from penstock.simulate.compiled.joint import NotCompiledError
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.predict import CompiledSpan, predict
from penstock.timeline import Bubble

Floats = npt.NDArray[np.float64]
Cuts: TypeAlias = tuple[int, ...]
"""Where stages begin, and where the last one ends."""

NAME = "simulated"
METHODS = ("1f1b", "eager", "gpipe", "2bw", "2bw-eager")
"""Methods with one stage on each rank whose backward is one pass, as profiles know it."""
_MOST_PASSES = 1 << 16  # stages x microbatches of a schedule that is proven and simulated
_BUFFERS = 2  # weights and gradients, at least
_MOST_CUTS = 256  # that are all simulated
_SPANS = (3, 5)  # batches: what two more of them take


@dataclass(frozen=True)
class Candidate:
    """A configuration before it is cut into stages.

    Attributes:
        sized: the graph at a microbatch size.
        method: a row of the method table.
        depth, width: d and w.
        recompute: of every layer, or of none.
    """

    sized: Sized
    method: str
    depth: int
    width: int
    recompute: bool

    @property
    def microbatches(self) -> int:
        """Per pipeline and batch."""
        return self.sized.microbatches // self.width

    def bound(self, slowest: float, total: float) -> float:
        """Return the seconds per sample that it takes at least, with a slowest stage and all stages of such times."""
        flushes = find_method(self.method).rule == "flush"
        batch = total + (self.microbatches - 1) * slowest if flushes else self.microbatches * slowest
        return batch / (self.sized.microbatches * self.sized.samples)

    def __str__(self) -> str:
        """Return it in words."""
        size = f", microbatch {self.sized.samples}" if self.sized.samples > 1 else ""
        again = ", recompute" if self.recompute else ""
        return f"{self.method}, depth {self.depth}, width {self.width}{size}{again}"


class _BlockChain:
    """A graph as a chain of blocks, with recompute or without: sums over the blocks between two cuts, as matrices.

    Attributes:
        blocks: how many.
        forward, seconds: of the first 0, 1, .. blocks; seconds are those of a forward, a backward and a recompute.
        times, parameters, kept: between a cut (row) and a later one (column): seconds, bytes of parameters, and bytes
            that a microbatch in flight keeps.
        once: bytes of activations that are there once, those of the block that is run again.
        crossing: bytes of the edges that cross a cut.
    """

    def __init__(self, graph: LayerGraph, recompute: bool) -> None:
        self.blocks = count = len(graph.layers)
        self.forward = _sums([layer.forward or 0.0 for layer in graph.layers])
        self.seconds = _sums([layer.seconds for layer in graph.layers]) + (self.forward if recompute else 0.0)
        stored = np.array([layer.stored for layer in graph.layers])
        inputs = np.array([sum(edge.bytes for edge in edges) for edges in graph.inputs])
        kept = _sums(np.minimum(inputs, stored) if recompute else stored)
        parameters = _sums([layer.parameters for layer in graph.layers])
        self.times, self.parameters, self.kept = (v[None, :] - v[:, None] for v in (self.seconds, parameters, kept))
        self.once = np.zeros((count + 1, count + 1))
        for first in range(count if recompute else 0):
            self.once[first, first + 1 :] = np.maximum.accumulate(stored[first:])
        self.crossing = np.zeros(count + 1)
        for edge in graph.edges:
            self.crossing[edge.source + 1 : edge.target + 1] += edge.bytes


def _sums(values: npt.ArrayLike) -> Floats:
    """Return sums of the first 0, 1, .. values."""
    return np.concatenate(([0.0], np.cumsum(values)))


def simulated_plans(
    sizes: Mapping[int, Sized], devices: Devices, optimizer_copies: float = 2.0
) -> tuple[list[Plan], list[Skipped]]:
    """Return the best plan of every method that fits, fastest first, and the classes that were skipped.

    Args:
        sizes: the graph at each microbatch size, by samples.
        devices: not all need be used.
        optimizer_copies: what the optimizer holds, in copies of the parameters; 2 for Adam.

    Raises:
        ConfigError: the profile does not tell forward and backward apart, or its layers do not stand in an order in
            which they run.
    """
    for sized in sizes.values():
        _check_chain(sized.graph)
    chains = {(s.samples, again): _BlockChain(s.graph, again) for s in sizes.values() for again in (False, True)}
    candidates = []
    for each in _candidates(sizes, devices):
        total = float(chains[each.sized.samples, each.recompute].seconds[-1])
        candidates.append((each.bound(total / each.depth, total), str(each), each))
    best, skipped, refused = dict[str, Plan](), list[Skipped](), list[Skipped]()
    proofs = dict[tuple[str, int, int], Proof]()
    for bound, name, each in sorted(candidates, key=lambda found: found[:2]):
        known = best.get(each.method)
        if known is not None and bound >= known.seconds_per_sample:
            skipped.append(Skipped(name, f"takes {bound:.4g} s per sample at least, the best plan so far " +
                                   f"{known.seconds_per_sample:.4g}"))  # fmt: skip
            continue
        chain = chains[each.sized.samples, each.recompute]
        plan = _CandidateTrial(each, chain, devices, optimizer_copies, proofs).plan(
            math.inf if known is None else known.seconds_per_sample
        )
        if isinstance(plan, Skipped):
            refused.append(plan)
        elif known is None or plan.seconds_per_sample < known.seconds_per_sample:
            best[each.method] = plan
    return sorted(best.values(), key=lambda plan: plan.seconds_per_sample), [*refused, *skipped]


def _check_chain(graph: LayerGraph) -> None:
    """Refuse what cannot be cut into consecutive blocks.

    Raises:
        ConfigError: it cannot.
    """
    unknown = next((layer.name for layer in graph.layers if layer.forward is None), None)
    if unknown is not None:
        raise ConfigError(
            f"cost 'simulated' needs forward and backward of each layer apart; layer {unknown!r} has options only"
        )
    if graph.order != tuple(range(len(graph.layers))):
        raise ConfigError("cost 'simulated' cuts consecutive layers: order the profile so that each reads earlier ones")


def _candidates(sizes: Mapping[int, Sized], devices: Devices) -> Iterator[Candidate]:
    """Return all configurations."""
    for sized in sizes.values():
        for depth in range(1, min(devices.count, len(sized.graph.layers)) + 1):
            for width in widths(devices.count // depth, 1, sized.microbatches):
                for method in METHODS if depth > 1 else METHODS[:1]:
                    yield Candidate(sized, method, depth, width, False)
                    if devices.memory is not None:
                        yield Candidate(sized, method, depth, width, True)


class _CandidateTrial:
    """One configuration: proven, cut and simulated."""

    def __init__(
        self,
        candidate: Candidate,
        chain: _BlockChain,
        devices: Devices,
        optimizer_copies: float,
        proofs: dict[tuple[str, int, int], Proof],
    ) -> None:
        self._proofs = proofs
        self._of, self._chain, self._devices, self._copies = candidate, chain, devices, optimizer_copies
        self._limit = math.inf if devices.memory is None else devices.memory
        self._best: Cuts = ()
        self._held: list[Floats] = []
        self._spans: dict[int, Callable[[list[Costs]], list[Bubble]]] = {}

    def plan(self, best: float) -> Plan | Skipped:
        """Return the plan, or why there is none that is faster than `best` seconds per sample."""
        of, name = self._of, str(self._of)
        if of.depth * of.microbatches > _MOST_PASSES:
            return Skipped(
                name, f"{of.depth} x {of.microbatches} passes are too many to prove it here ({_MOST_PASSES:,})"
            )
        chain = self._chain
        least = float(chain.parameters[0, -1] * (_BUFFERS + self._copies) + chain.kept[0, -1]) / of.depth
        too_large = Skipped(
            name, f"does not fit: at least {least:.4g} bytes per device on average, {self._limit:.4g} there"
        )
        if least > self._limit:
            return too_large
        try:
            few = min(of.microbatches, 2 * of.depth)  # as much is held with more, or more
            if few < of.microbatches and self._limit < math.inf and self._cuts(self._proven(few)) is None:
                return too_large
            proof = self._proven(of.microbatches)
        except ScheduleError as error:
            return Skipped(name, f"refused: {str(error).splitlines()[0]}")
        cuts = self._cuts(proof)
        if cuts is None:
            return too_large
        times = np.diff(self._chain.seconds[list(cuts)])
        bound = of.bound(float(times.max()), float(times.sum()))
        if bound >= best:
            return Skipped(
                name, f"its best stages take {bound:.4g} s per sample at least, the best plan so far {best:.4g}"
            )
        return self._simulated(proof, cuts)

    def _proven(self, microbatches: int) -> Proof:
        """Return the proof of the schedule with so many microbatches.

        Raises:
            ScheduleError: there is none.
        """
        key = self._of.method, self._of.depth, microbatches
        if key not in self._proofs:
            self._proofs[key] = prove(*key)
        proof = self._proofs[key]
        return extend(proof, reduces=True) if self._of.width > 1 else proof

    def _memory(self, proof: Proof, stage: int) -> Floats:
        """Return the bytes of a stage between each cut and each later one."""
        facts, chain = list(proof.stages.values())[stage], self._chain
        held = chain.parameters * (facts.buffers + self._copies)
        found: Floats = held + float(proof.activations[stage]) * chain.kept + chain.once
        return found

    def _cuts(self, proof: Proof) -> Cuts | None:
        """Return where stages begin and end, so that the slowest is fastest and all fit; None if they cannot."""
        self._held = [self._memory(proof, stage) for stage in range(self._of.depth)]
        count = self._chain.blocks
        later = np.triu(np.ones((count + 1, count + 1), dtype=bool), 1)
        reached = np.full(count + 1, np.inf)
        reached[0], trail = 0.0, []
        for memory in self._held:
            times = np.where(later & (memory <= self._limit), self._chain.times, np.inf)
            through = np.maximum(reached[:, None], times)
            trail.append(through.argmin(axis=0))
            reached = through.min(axis=0)
        if not math.isfinite(reached[-1]):
            return None
        cuts = [count]
        for from_ in reversed(trail):
            cuts.append(int(from_[cuts[-1]]))
        return tuple(reversed(cuts))

    def _trials(self, cuts: Cuts) -> Iterator[list[Cuts]]:
        """Return cuts to try, group by group: all if they are few, otherwise those with one end moved by a block."""
        count, depth = cuts[-1], self._of.depth
        if math.comb(count - 1, depth - 1) <= _MOST_CUTS:
            every = ((0, *inner, count) for inner in combinations(range(1, count), depth - 1))
            yield [each for each in every if each != cuts and self._fit(each)]
            return
        while True:
            near = []
            for at, step in product(range(1, depth), (-1, 1)):
                moved = (*self._best[:at], self._best[at] + step, *self._best[at + 1 :])
                if moved[at - 1] < moved[at] < moved[at + 1] and self._fit(moved):
                    near.append(moved)
            before = self._best
            yield near
            if self._best == before:
                return

    def _fit(self, cuts: Cuts) -> bool:
        """Return whether all stages fit."""
        return all(memory[ends] <= self._limit for memory, ends in zip(self._held, pairwise(cuts), strict=True))

    def _batch_times(self, proof: Proof, several: list[Cuts]) -> list[float]:
        """Return what one more batch of a long run takes, for each of several cuts."""
        costs = [self._costs(np.array(cuts)) for cuts in several]
        short, long = (self._span(proof, batches)(costs) for batches in _SPANS)
        return [(b.makespan - a.makespan) / (_SPANS[1] - _SPANS[0]) for a, b in zip(short, long, strict=True)]

    def _span(self, proof: Proof, batches: int) -> Callable[[list[Costs]], list[Bubble]]:
        """Return what predicts a span of so many batches, compiled once for all cuts if it can be."""
        if batches not in self._spans:
            try:
                self._spans[batches] = CompiledSpan(proof.lowered, batches, transfers=True).bubbles
            except NotCompiledError:
                self._spans[batches] = partial(predict, proof.lowered, batches=batches)
        return self._spans[batches]

    def _costs(self, cuts: npt.NDArray[np.intp]) -> Costs:
        """Return the times of stages and messages; all messages take the time of the largest."""
        of, chain = self._of, self._chain
        across, along = bandwidths(self._devices, of.width, of.depth)
        forwards, times = np.diff(chain.forward[cuts]), np.diff(chain.seconds[cuts])
        return Costs(
            tuple(StageCost(float(f), float(t - f), 0.0) for f, t in zip(forwards, times, strict=True)),
            transfer=float(chain.crossing[cuts[1:-1]].max(initial=0.0)) / along,
            collective=2 * (of.width - 1) / of.width * float(chain.parameters[cuts[:-1], cuts[1:]].max()) / across,
        )

    def _simulated(self, proof: Proof, cuts: Cuts) -> Plan:
        """Return the plan with the cut that is simulated to be fastest, and what a batch takes."""
        self._best, (batch,) = cuts, self._batch_times(proof, [cuts])
        for several in self._trials(cuts):
            if several:
                times = self._batch_times(proof, several)
                least = int(np.argmin(times))
                if times[least] < batch:
                    self._best, batch = several[least], times[least]
        return self._planned(self._best, batch)

    def _planned(self, cuts: Cuts, batch: float) -> Plan:
        """Return the plan with a cut."""
        of, chain = self._of, self._chain
        seconds = batch / of.sized.microbatches
        ways = single_device_ways(of.sized.graph, of.recompute)
        stages, ratings = [], []
        for stage, (first, last) in enumerate(pairwise(cuts)):
            layers = tuple(range(first, last))
            stages.append(PlannedStage(layers, of.width, 1, tuple(ways[n].name for n in layers) if ways else ()))
            busy = float(chain.seconds[last] - chain.seconds[first]) / of.width
            parts = {"compute": busy, "bubble": max(seconds - busy, 0.0)}
            ratings.append(StageRating(busy, parts, float(self._held[stage][first, last])))
        settings = {
            "method": of.method,
            "stages": of.depth,
            "width": of.width,
            "microbatches": of.microbatches,
            "microbatch_size": of.sized.samples,
            "recompute": "block" if of.recompute else "none",
            "balance": [last - first for first, last in pairwise(cuts)],
        }
        notes = (f"{of}: one more batch of a long run takes {batch:.4g} s",)
        return Plan(of.method, tuple(stages), Rating(NAME, seconds, tuple(ratings)), notes, of.sized.samples, settings)
