"""The proof of a schedule, before anything runs.

`check` shows three things: every batch gets every pass exactly once (coverage); nobody waits for ever on the machine
model of `penstock.schedule.lower`; and every pass reads the version its rule names, alive and in a buffer of its own.

The second and third hold for spans of any length by induction. The schedule is played batch by batch; what is under
way at a border (messages; microbatches, versions and gradients), written relative to the border's batch, is its state.
All ranks run the same period again, so once a state repeats, everything after it repeats, too. (Only once every action
exists and nothing is read that lies before the span: the first periods are not the same yet.) From every border up
to there a twin drains the pipeline and must end clean: that covers spans of every length. Messages and versions are
played apart, because the books of a node depend on the order of its rank's program alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from math import lcm

from penstock.errors import ScheduleError
from penstock.schedule.collection import no_collection
from penstock.schedule.coverage import check_coverage
from penstock.schedule.ir import Action, Kind, Node, Op, Program, Schedule, passes
from penstock.schedule.lower import lower
from penstock.schedule.lowered import LOOKAHEAD, WINDOW, Lowered, present
from penstock.schedule.machine import Machine
from penstock.schedule.nodespec import node_specs
from penstock.schedule.nodestate import Delay, NodeState
from penstock.schedule.ops import OPS, PASSES
from penstock.schedule.versions import RULES

_LIMIT = 8
"""Batches beyond twice the transient by which every state must have repeated: what was in flight then is long gone."""


@dataclass(frozen=True)
class NodeFacts:
    """What the proof found out about a node.

    Attributes:
        versions: weight versions alive at once, at most.
        copies: derived copies alive at once, at most.
        buffers: parameter-sized buffers needed for versions and gradients together.
        delay: updates between the version read and the version updated, mean over a batch, in the steady state.
    """

    versions: int
    copies: int
    buffers: int
    delay: Delay


@dataclass(frozen=True)
class Proof:
    """A schedule that has been checked, with what was derived on the way.

    Attributes:
        nodes: facts per node.
        activations: per rank, the most activations in flight, in units of one microbatch on the rank's whole share.
        steady_from: the batch from which on everything repeats.
    """

    lowered: Lowered
    nodes: dict[Node, NodeFacts]
    activations: tuple[Fraction, ...]
    steady_from: int

    @property
    def schedule(self) -> Schedule:
        """The schedule that was checked."""
        return self.lowered.schedule

    def versions_on(self, rank: int) -> int:
        """Weight versions alive at once on a rank, the most over its nodes."""
        return max((self.nodes[n].versions for n in self.schedule.on_rank(rank)), default=0)


@no_collection
def check(schedule: Schedule, lookahead: int = LOOKAHEAD, window: int = WINDOW) -> Proof:
    """Prove a schedule.

    Args:
        schedule: what to prove.
        lookahead: actions by which a RECV may be posted ahead.
        window: outstanding messages per lane and side.

    Raises:
        ScheduleError: with the action at fault and why.
    """
    if schedule.rule not in RULES:
        raise ScheduleError(f"{schedule.name}: unknown rule {schedule.rule!r}; known: {', '.join(RULES)}")
    check_coverage(schedule)
    lowered = lower(schedule, lookahead, window)
    _prove_progress(lowered)
    books = _Books(schedule, older=0)
    steady_from = books.prove()
    if RULES[schedule.rule].bases == 2:
        other = _Books(schedule, older=-1)  # a span that continues an earlier one
        other.prove()
        books.absorb(other)
    facts = {
        node: NodeFacts(s.peak_versions, s.peak_copies, s.peak_buffers, s.delay or Delay(0.0, 0.0))
        for node, s in books.states.items()
    }
    activations = tuple(Fraction(peak, books.scale) for peak in books.peak)
    return Proof(lowered, facts, activations, steady_from)


def _transient(schedule: Schedule) -> int:
    """The first batch in whose period nothing lies before the span: no unit, and no version that is read."""
    latest = 0
    for program in schedule.programs:
        for action in program.period:
            for p in passes(action):
                size = 1 if p.unit.kind is Kind.BATCH else schedule.microbatches
                latest = max(latest, -(p.unit.first // size))
                if p.reads is not None:
                    latest = max(latest, -min(p.reads.versions))
    return latest


def _prove_progress(lowered: Lowered) -> None:
    """Play the messages: in no span, however long, does a rank wait for ever."""
    machine, transient = Machine(lowered), _transient(lowered.schedule)
    machine.play_period(-1, more=True)
    before = machine.state(0)
    for t in range(_LIMIT + 2 * transient):
        twin = machine.copy()
        twin.play_period(t, more=False)
        twin.play_epilogue(t + 1)
        if not any(program.epilogue for program in lowered.programs):
            return  # no message crosses a border, and RECVs that are posted early only help
        machine.play_period(t, more=True)
        state = machine.state(t + 1)
        if state == before and t >= transient:
            return
        before = state
    raise ScheduleError(f"{lowered.schedule.name}: after {t + 1} batches the messages under way still change")


class _Books:
    """The books of every node, and the activations on every rank."""

    def __init__(self, schedule: Schedule, older: int) -> None:
        self.schedule = schedule
        self.programs = [Program(*(tuple(map(_always, part)) for part in p)) for p in schedule.programs]
        self.states = {spec.node: NodeState(spec) for spec in node_specs(schedule, older)}
        self.admitted: dict[int, int] = {}
        self.held = [0] * schedule.ranks
        self.peak = [0] * schedule.ranks
        self.scale, self.weight = activation_weights(schedule)
        self.memory = {op: OPS[op].memory for op in (*PASSES, Op.OFFLOAD, Op.FETCH)}
        # Versions are tagged on the rank that admits microbatches, so it is played first.
        admitting = next((s.node.rank for s in (n.spec for n in self.states.values()) if s.admits), 0)
        self.ranks = sorted(range(schedule.ranks), key=lambda rank: rank != admitting)

    def prove(self) -> int:
        """Play until the state at a border repeats; the batch from which it does."""
        before, transient = self._state(0), _transient(self.schedule)
        for t in range(_LIMIT + 2 * transient):
            self._play(t, epilogue=False)
            twin = self._twin()
            twin.drain(t + 1)
            self.absorb(twin)
            state = self._state(t + 1)
            if state == before and t >= transient:
                return t
            before = state
        raise ScheduleError(f"{self.schedule.name}: after {t + 1} batches the state at a batch border still changes")

    def _play(self, t: int, epilogue: bool) -> None:
        m = self.schedule.microbatches
        for rank in self.ranks:
            for action in self.programs[rank][epilogue]:
                exist = [p for p in action.parts or (action,) if present(p, t, m)]
                for p in exist:
                    self.states[p.node].apply(p, t, self.admitted)
                self._count_activations(rank, exist)

    def _count_activations(self, rank: int, together: Sequence[Action]) -> None:
        """What actions that run together take at their start, and free at their end."""
        freed_later = 0
        for action in together:
            change = self.memory.get(action.op)
            if change is not None:
                taken, freed = change(action, self.schedule)
                piece = action.unit.slice[1] if action.unit.slice else 1
                amount = self.weight[action.node] * action.unit.count // piece
                self.held[rank] += taken * amount
                freed_later += freed * amount
        self.peak[rank] = max(self.peak[rank], self.held[rank])
        self.held[rank] += freed_later

    def _state(self, t: int) -> object:
        """What is under way at the border before batch t."""
        k = t * self.schedule.microbatches
        flying = {mb for s in self.states.values() for mb, _ in s.flights}
        self.admitted = {mb: v for mb, v in self.admitted.items() if mb in flying}
        return [s.state(t) for s in self.states.values()], sorted((mb - k, v - t) for mb, v in self.admitted.items())

    def _twin(self) -> _Books:
        """Independent books in the same state."""
        twin = copy.copy(self)
        twin.states = {node: state.copy() for node, state in self.states.items()}
        twin.admitted, twin.held, twin.peak = dict(self.admitted), list(self.held), list(self.peak)
        return twin

    def drain(self, batches: int) -> None:
        """Play the epilogue of a span of `batches` batches; afterwards nothing may be left."""
        for state in self.states.values():
            state.drain(batches)
        self._play(batches, epilogue=True)
        for node, state in self.states.items():
            left = {
                "microbatches in flight": sorted({k for k, _ in state.flights}),
                "gradients of batches": sorted(state.gradients),
                "derived copies": sorted(state.copies),
                "provisional versions": sorted(state.provisional),
                "gathered weights of version": [] if state.gathered is None else [state.gathered],
            }
            for what, items in left.items():
                if items:
                    where = f"after draining {batches} batches, rank {node.rank}"
                    raise ScheduleError(f"{self.schedule.name}: {where} still has {what} {items}")

    def absorb(self, other: _Books) -> None:
        """Take over the peaks of others."""
        for node, state in self.states.items():
            twin = other.states[node]
            state.peak_versions = max(state.peak_versions, twin.peak_versions)
            state.peak_copies = max(state.peak_copies, twin.peak_copies)
            state.peak_buffers = max(state.peak_buffers, twin.peak_buffers)
            state.delay = state.delay or twin.delay
        self.peak = [max(a, b) for a, b in zip(self.peak, other.peak, strict=True)]


def _always(action: Action) -> Action:
    """An AVERAGE as if it stood in every period: it changes nothing, and must be in its place wherever it stands."""
    return action._replace(unit=action.unit._replace(every=1)) if action.unit.every > 1 else action


def activation_weights(schedule: Schedule) -> tuple[int, dict[Node, int]]:
    """Integer weights of one microbatch on each node, and the weight of one on a rank's whole share."""
    chunks = {
        node: sum(n.replica == node.replica and n.rank == node.rank for n in schedule.nodes) for node in schedule.nodes
    }
    scale = reduce(lcm, chunks.values(), 1) * schedule.slices
    return scale, {node: scale // count for node, count in chunks.items()}
