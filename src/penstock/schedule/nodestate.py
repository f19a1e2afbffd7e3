"""The weights of one node while a schedule is played: which versions live, who reads them, which buffers they take.

This is the independent half of the proof of versions: it knows the rule only as "forwards read from this source", keeps
its own books, and refuses an action that reads anything else, or something that is not born yet or already gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.ir import Action, Copy, Op, shift
from penstock.schedule.nodespec import NodeSpec
from penstock.schedule.versions import Source, Update

Piece = tuple[int, int]
"""(microbatch, slice)."""


class Flight(NamedTuple):
    """A microbatch (slice) between its forward and its backward."""

    versions: tuple[int, ...]
    derive: Copy | None = None
    recomputed: bool = False
    offloaded: bool = False
    input_done: bool = False  # I has run, W is still to come


@dataclass
class Gradient:
    """The gradient of a batch while it accumulates or waits for its STEP."""

    remaining: int
    forward: int = 0  # sum of the versions read, one per pass
    backward: int = 0
    reduced: bool = False


class Delay(NamedTuple):
    """Version at the update minus version read, mean over the passes of one batch."""

    forward: float
    backward: float


@dataclass
class NodeState:
    """One node's books. Versions, microbatches and batches are absolute, counted from the start of the span.

    Attributes:
        forwards: the position of the next forward; see `Forwards`.
        draining: the number of batches of the span, once its last period is over.
        newest_read: whether a pass has read the newest version.
        rotated: whether the last update was written over its gradient instead of over the version it started from.
    """

    spec: NodeSpec
    newest: int = 0
    versions: set[int] = field(default_factory=set)
    provisional: set[int] = field(default_factory=set)
    flights: dict[Piece, Flight] = field(default_factory=dict)
    gradients: dict[int, Gradient] = field(default_factory=dict)
    copies: dict[Copy, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # reads left, versions made of
    gathered: int | None = None
    forwards: int = 0
    newest_read: bool = False
    rotated: bool = False
    draining: int | None = None
    peak_versions: int = 0
    peak_copies: int = 0
    peak_buffers: int = 0
    delay: Delay | None = None

    def __post_init__(self) -> None:
        if not self.versions:
            self.versions = {self.spec.older, 0}
            self.forwards = self.spec.forwards.settled(0)
            self._count()

    def copy(self) -> NodeState:
        """An independent twin."""
        return replace(
            self,
            versions=set(self.versions),
            provisional=set(self.provisional),
            flights=dict(self.flights),
            gradients={b: replace(g) for b, g in self.gradients.items()},
            copies=dict(self.copies),
        )

    def state(self, t: int) -> object:
        """The books with all numbers relative to batch t."""
        if not self.spec.share:
            return None
        k = t * self.spec.microbatches
        flights = sorted(
            (mb - k, piece, tuple(v - t for v in f.versions), f.derive and (f.derive.label, f.derive.first - k), f[2:])
            for (mb, piece), f in self.flights.items()
        )
        gradients = sorted(
            (b - t, g.remaining, g.forward - t * (self.spec.share - g.remaining), g.reduced)
            for b, g in self.gradients.items()
        )
        copies = sorted((c.label, c.first - k, n, [v - t for v in made]) for c, (n, made) in self.copies.items())
        versions = sorted(v - t for v in self.versions), sorted(v - t for v in self.provisional), self.newest - t
        gathered = None if self.gathered is None else self.gathered - t
        place = self.forwards - t * len(self.spec.forwards.period)
        return versions, flights, gradients, copies, gathered, place, self.newest_read

    def drain(self, batches: int) -> None:
        """Begin the epilogue of a span of `batches` batches."""
        self.draining = batches
        self.forwards = self.spec.forwards.settled(0, batches)

    # --- passes -----------------------------------------------------------------------------------------------------

    def apply(self, action: Action, t: int, admitted: dict[int, int]) -> None:
        """Play one action of the period (or epilogue) of batch t.

        Args:
            action: any action of this node, with relative numbers.
            t: the batch they are relative to.
            admitted: the version that the first cut read for each microbatch; extended by the first cut's forwards.

        Raises:
            ScheduleError: the action breaks the version rule or the life of a version, activation or gradient.
        """
        op, reads = action.op, action.reads
        if op is Op.F or op is Op.B or op is Op.I or op is Op.W or op is Op.R:
            if not self.spec.share:
                return  # evaluation or frozen weights: one version for ever, and nothing left behind
            self._pass(action, t, admitted)
            if reads is not None and reads.derive is not None:
                self._use_copy(Copy(reads.derive.label, reads.derive.first + t * self.spec.microbatches))
        else:
            self._manage(action, t)
        self._drop_dead()
        self._count()

    def _pass(self, action: Action, t: int, admitted: dict[int, int]) -> None:
        op, _, unit, reads, *_ = action
        if reads is None:
            raise self._error(action, t, "names no version of the weights")
        spec, m = self.spec, self.spec.microbatches
        versions = tuple([max(v + t, spec.older) for v in reads.versions])
        derive = reads.derive and Copy(reads.derive.label, reads.derive.first + t * m)
        piece = unit.slice[0] if unit.slice else 0
        source = spec.rule.forward if op is Op.F else spec.rule.recompute if op is Op.R else spec.rule.backward
        for k in range(unit.first + t * m, unit.first + t * m + unit.count):
            key = (k, piece)
            if op is not Op.F and key not in self.flights:
                raise self._error(action, t, "has no forward in flight on this node")
            self._check_rule(action, t, source, key, (versions, derive), admitted)
            if op is Op.F:
                self.flights[key] = Flight(versions, derive)
                if spec.admits and source is Source.ADMISSION:
                    admitted[k] = versions[0]
            elif op is Op.R:
                self._recompute(action, t, key)
            else:
                self._backward(action, t, key, versions)
        self._check_life(action, t, versions, derive)
        if op is Op.F:
            self.forwards = spec.forwards.settled(self.forwards + 1, self.draining)

    def _check_rule(
        self,
        action: Action,
        t: int,
        source: Source,
        key: Piece,
        reads: tuple[tuple[int, ...], Copy | None],
        admitted: dict[int, int],
    ) -> None:
        """A pass must read what the rule names."""
        if source is Source.FORWARD:
            if reads != self.flights[key][:2]:
                wanted = ",".join(map(str, self.flights[key].versions))
                raise self._error(action, t, f"must read version {wanted}, as its forward did")
            return
        if source is Source.COPY:
            if reads[1] is None:
                raise self._error(action, t, "must read a copy that a PREDICT made")
            return
        batch = key[0] // self.spec.microbatches
        if source is Source.BATCH:
            wanted_version = batch
        elif source is Source.PREVIOUS:
            wanted_version = max(batch - 1, self.spec.older)
        elif source is Source.NEWEST or self.spec.admits:
            wanted_version = self.newest
        else:
            if key[0] not in admitted:
                raise self._error(action, t, "runs before its microbatch was admitted by the first trained cut")
            wanted_version = admitted[key[0]]
        if reads != ((wanted_version,), None):
            raise self._error(action, t, f"must read version {wanted_version}")

    def _check_life(self, action: Action, t: int, versions: tuple[int, ...], derive: Copy | None) -> None:
        """What is read must be alive."""
        if derive is not None:
            if derive not in self.copies:
                text = f"reads copy {derive.label}{derive.first}, which no PREDICT has made or which is already dropped"
                raise self._error(action, t, text)
            if self.copies[derive][1] != versions:
                raise self._error(action, t, f"copy {derive.label}{derive.first} was made of other versions")
            return
        for version in versions:
            if version not in self.versions:
                why = "is not born yet" if version > self.newest else "no longer exists"
                raise self._error(action, t, f"reads version {version}, which {why}")
            if version in self.provisional and action.op is not Op.F:
                raise self._error(action, t, f"reads version {version} before VALIDATE has decided it")
        if self.spec.sharded and versions != (self.gathered,):
            raise self._error(action, t, f"reads version {versions[0]}, which is not gathered")
        if self.newest in versions:
            self.newest_read = True

    def _recompute(self, action: Action, t: int, key: Piece) -> None:
        if self.flights[key].recomputed or self.flights[key].offloaded:
            raise self._error(action, t, "has been recomputed already, or its input is offloaded")
        self.flights[key] = self.flights[key]._replace(recomputed=True)

    def _backward(self, action: Action, t: int, key: Piece, versions: tuple[int, ...]) -> None:
        flight = self.flights[key]
        if flight.offloaded or (self.spec.recomputed and not flight.recomputed):
            raise self._error(action, t, "needs activations that are offloaded or not recomputed yet")
        if flight.input_done != (action.op is Op.W):
            raise self._error(action, t, "does not fit: I comes before W, and B stands for both")
        if action.op is Op.I:
            self.flights[key] = flight._replace(input_done=True)
            return
        batch = key[0] // self.spec.microbatches
        if batch not in self.gradients:
            self._allocate(action, t, batch)
        gradient = self.gradients[batch]
        gradient.remaining -= 1
        gradient.forward += flight.versions[0]
        gradient.backward += versions[0]
        del self.flights[key]

    # --- updates and the rest ---------------------------------------------------------------------------------------

    def _manage(self, action: Action, t: int) -> None:
        op, batch = action.op, action.unit.first + t
        if op is Op.STEP:
            self._step(action, t, batch)
        elif op is Op.REDUCE:
            self._complete_gradient(action, t, batch).reduced = True
        elif op is Op.VALIDATE:
            if batch + 1 not in self.provisional:
                raise self._error(action, t, f"version {batch + 1} is not provisional")
            self.provisional.discard(batch + 1)
        elif op is Op.PREDICT:
            self._predict(action, t)
        elif op is Op.AVERAGE:
            if self.newest_read or batch >= self.newest:
                raise self._error(action, t, "must stand between a STEP and the next read of what it bore")
        elif op is Op.GATHER:
            if self.gathered is not None or action.reads is None:
                raise self._error(action, t, "names no version, or another one is still gathered")
            self.gathered = max(action.reads.versions[0] + t, self.spec.older)
            self._check_life(action, t, (self.gathered,), None)
        elif op is Op.RELEASE:
            if self.gathered is None:
                raise self._error(action, t, "nothing is gathered")
            self.gathered = None
        elif op in (Op.OFFLOAD, Op.FETCH):
            self._move(action, t)

    def _complete_gradient(self, action: Action, t: int, batch: int) -> Gradient:
        gradient = self.gradients.get(batch)
        left = self.spec.share if gradient is None else gradient.remaining
        if gradient is None or left:
            raise self._error(action, t, f"stands before {left} of batch {batch}'s backwards on this node")
        return gradient

    def _step(self, action: Action, t: int, batch: int) -> None:
        gradient, rule = self._complete_gradient(action, t, batch), self.spec.rule
        if self.spec.shared and not gradient.reduced:
            raise self._error(action, t, "needs the REDUCE of its batch first")
        if self.newest != batch or batch in self.provisional:
            raise self._error(action, t, f"starts from version {batch}, but the newest valid one is another")
        reader = None
        if rule.pins:
            reader = next((k for (k, _), flight in self.flights.items() if batch in flight.versions), None)
        if rule.update is Update.IN_PLACE and reader is not None:
            raise self._error(action, t, f"overwrites version {batch}, which microbatch {reader} in flight still reads")
        free = rule.update is Update.COPY_ON_WRITE and reader is None and self._oldest_read() > batch
        self.rotated = not (rule.update is Update.IN_PLACE or free)
        if not self.rotated:
            self.versions.discard(batch)
        del self.gradients[batch]
        self.newest = batch + 1
        self.newest_read = False
        self.versions.add(self.newest)
        if rule.provisional:
            self.provisional.add(self.newest)
        if self.draining is None:
            self.delay = Delay(*(batch - total / self.spec.share for total in (gradient.forward, gradient.backward)))

    def _predict(self, action: Action, t: int) -> None:
        reads, spec = action.reads, self.spec
        if reads is None or reads.derive is None:
            raise self._error(action, t, "must bear a copy of its own, as in PREDICT0^t~p0")
        copy = Copy(reads.derive.label, reads.derive.first + t * spec.microbatches)
        uses = spec.copy_uses.get(Copy(copy.label, copy.first % spec.microbatches), 0)
        if not uses or copy in self.copies:
            raise self._error(action, t, "bears a copy that nobody reads or that exists already")
        versions = tuple(max(v + t, spec.older) for v in reads.versions)
        self._check_life(action, t, versions, None)
        self._check_prediction(action, t, versions)
        self.copies[copy] = uses, versions
        self.peak_copies = max(self.peak_copies, len(self.copies))

    def _check_prediction(self, action: Action, t: int, versions: tuple[int, ...]) -> None:
        """A copy is made of the newest version, or blends it with the one that its microbatch's forward read."""
        wanted: tuple[int, ...] = (self.newest,)
        if self.spec.rule.keeps_forward:
            piece = action.unit.slice[0] if action.unit.slice else 0
            flight = self.flights.get((action.unit.first + t * self.spec.microbatches, piece))
            if flight is None:
                raise self._error(action, t, "has no forward in flight on this node")
            wanted = (*flight.versions, self.newest)
        if versions != wanted:
            text = ",".join(map(str, wanted))
            raise self._error(action, t, f"must be made of version {text}, not {','.join(map(str, versions))}")

    def _use_copy(self, copy: Copy) -> None:
        left, versions = self.copies.pop(copy)
        if left > 1:
            self.copies[copy] = left - 1, versions

    def _move(self, action: Action, t: int) -> None:
        first = action.unit.first + t * self.spec.microbatches
        for k in range(first, first + action.unit.count):
            key = (k, action.unit.slice[0] if action.unit.slice else 0)
            flight, away = self.flights.get(key), action.op is Op.OFFLOAD
            if flight is None or flight.offloaded == away:
                raise self._error(action, t, "its activations are not in flight, or are already there")
            self.flights[key] = flight._replace(offloaded=away)

    # --- buffers ----------------------------------------------------------------------------------------------------

    def _oldest_read(self) -> int:
        """The oldest version that a forward to come reads; later spans read the last `bases` ones."""
        oldest = self.spec.forwards.oldest(self.forwards, self.draining)
        if oldest is not None:
            oldest = max(oldest, self.spec.older)
            if self.draining is None:
                return oldest
        last = self.newest + 1 if self.draining is None else self.draining
        return min(last - self.spec.rule.bases + 1, last if oldest is None else oldest)

    def _drop_dead(self) -> None:
        """Forget versions that no forward to come, no backward in flight and no update will read."""
        floor = min(self.newest, self._oldest_read(), *(v - 1 for v in self.provisional))
        if min(self.versions) < floor:
            held = {v for f in self.flights.values() for v in f.versions} if self.spec.rule.pins else set()
            self.versions = {v for v in self.versions if v >= floor or v in held}

    def _allocate(self, action: Action, t: int, batch: int) -> None:
        """Take a buffer for a new gradient."""
        used, limit = len(self.versions) + len(self.gradients), self.spec.rule.buffers
        if limit is not None and used >= limit:
            raise self._error(
                action,
                t,
                f"needs a buffer for the gradient of batch {batch}, but all {limit} are in use: versions "
                f"{sorted(self.versions)}, gradients of batches {sorted(self.gradients)}. One would be overwritten too "
                "early; more microbatches per batch help",
            )
        self.gradients[batch] = Gradient(self.spec.share)
        self._count()

    def _count(self) -> None:
        self.peak_versions = max(self.peak_versions, len(self.versions))
        self.peak_buffers = max(self.peak_buffers, len(self.versions) + len(self.gradients))

    def _error(self, action: Action, t: int, what: str) -> ScheduleError:
        absolute = shift(action, t, self.spec.microbatches, self.spec.older) or action
        return ScheduleError(f"{absolute} on rank {self.spec.node.rank}, rule {self.spec.rule.name!r}: {what}")
