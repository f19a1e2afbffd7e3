"""The weights of one stage while a schedule is played: live versions, their readers, and the buffers they occupy.

This is the independent half of the proof of versions: it knows the rule only as "forwards read from this source",
tracks versions itself, and rejects an action that reads another version, or one that does not exist yet or any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.ir.op_table import SWAPS
from penstock.schedule.ir.schedule import Action, Copy, Op, Stage, Unit, format_action
from penstock.schedule.ir.version_rules import Source, Update
from penstock.schedule.stage_state.gradient_state import Gradients
from penstock.schedule.stage_state.live_versions import LiveVersions, version_numbers
from penstock.schedule.stage_state.microbatch_state import BooksError, Flights, MicrobatchNumber, Piece, VersionNumber
from penstock.schedule.stage_state.shard_state import ShardState
from penstock.schedule.stage_state.stage_constants import StageSpec
from penstock.schedule.transforms.batch_ops import COLLECTIVES


class Delay(NamedTuple):
    """Version at the update minus version read, mean over the passes of one batch."""

    forward: float
    backward: float


@dataclass
class StageState:
    """The state of one stage. Versions, microbatches and batches are counted from the start of the span.

    Attributes:
        rotated: True if the last update was written over its gradient instead of over the version it started from.
        swapped_in: the batch for whose update the optimizer state has come from the host; None while it is there.
        rejecting: True if the next VALIDATE rejects its version.
    """

    spec: StageSpec
    versions: LiveVersions = field(init=False)
    flights: Flights = field(default_factory=Flights)
    gradients: Gradients = field(init=False)
    copies: Copies = field(init=False)
    shards: ShardState = field(init=False)
    held: set[tuple[Stage | None, Unit]] = field(default_factory=set)  # activations held for other ranks
    rotated: bool = False
    swapped_in: int | None = None
    rejecting: bool = False
    peak_versions: int = 0
    peak_gradients: int = 0
    peak_buffers: int = 0
    delay: Delay | None = None
    recompute_delay: float | None = None

    def __post_init__(self) -> None:
        self.gradients = Gradients(self.spec.share, self.spec.collectives)
        self.copies = Copies(self.spec.copy_uses, self.spec.microbatches)
        self.shards = ShardState(self.spec.sharding)
        self.versions = LiveVersions(self.spec)
        self._count()

    def copy(self) -> StageState:
        """Return an independent copy."""
        twin = replace(self, flights=self.flights.copy(), held=set(self.held))
        twin.versions, twin.gradients = self.versions.copy(), self.gradients.copy()
        twin.copies, twin.shards = self.copies.copy(), self.shards.copy()
        return twin

    def shifted(self, batches: int) -> StageState:
        """Return a copy in which everything is `batches` batches later: a state that repeats, that many periods on."""
        twin, k = self.copy(), batches * self.spec.microbatches
        twin.versions = self.versions.shifted(batches)
        twin.flights, twin.copies = self.flights.shifted(batches, k), self.copies.shifted(batches, k)
        twin.gradients = self.gradients.shifted(batches)
        twin.shards = self.shards.shifted(batches)
        twin.held = {(peer, unit._replace(first=unit.first + k)) for peer, unit in self.held}
        twin.swapped_in = None if self.swapped_in is None else self.swapped_in + batches
        return twin

    def state(self, t: int) -> object:
        """Return a comparable state, with numbers relative to batch t."""
        if not self.spec.share:
            return None
        flights, copies = self.flights.state(t, self.spec.microbatches), self.copies.state(t)
        held = sorted((peer, unit.first - t * self.spec.microbatches, unit.slice) for peer, unit in self.held)
        swapped = None if self.swapped_in is None else self.swapped_in - t
        gradients, shards = self.gradients.state(t), self.shards.state(t)
        return self.versions.state(t), flights, gradients, copies, shards, held, swapped

    def drain(self, batches: int) -> None:
        """Begin the epilogue of a span of `batches` batches."""
        self.versions.drain(batches)

    # --- passes -----------------------------------------------------------------------------------------------------

    def apply(self, action: Action, t: int, admitted: dict[int, int]) -> None:
        """Play one action of the period (or epilogue) of batch t.

        Args:
            action: any action of this stage, with relative numbers.
            t: the batch they are relative to.
            admitted: the version that the first stage read for each microbatch; extended by the first stage's forwards.

        Raises:
            ScheduleError: the action breaks the version rule or the life of a version, activation or gradient.
        """
        op = action.op
        try:
            if op is Op.F or op is Op.B or op is Op.I or op is Op.W or op is Op.R:
                if not self.spec.share:
                    return  # evaluation or frozen weights: there is one version, and no state
                self._pass(action, t, admitted)
            elif op is Op.REDO:
                self.flights.redo((action.unit.first + t * self.spec.microbatches, 0))
            else:
                self._manage(action, t)
        except BooksError as error:
            what = format_action(action, relative=True, stage=not self.spec.alone)
            reason = error.said(t, self.spec.microbatches)
            where = f"rule {self.spec.rule.name!r}, found in batch {t}"
            raise ScheduleError(f"rank {self.spec.stage.rank}, {what}: {reason} ({where})") from None
        if len(self.versions) > 1:  # the newest is never dropped
            self.versions.drop_dead(self.flights)
        if op is Op.STEP:
            self._count()

    def _pass(self, action: Action, t: int, admitted: dict[int, int]) -> None:
        op, _, (first, count, piece_of, *_), reads, *_ = action
        if reads is None:
            raise BooksError("names no version of the weights")
        spec, m = self.spec, self.spec.microbatches
        first, piece, named = first + t * m, piece_of[0] if piece_of else 0, reads.versions
        if t:
            named = tuple([v + t for v in named])
        versions = named if min(named) >= spec.older else tuple([max(v, spec.older) for v in named])
        derive = reads.derive and Copy(reads.derive.label, reads.derive.first + t * m)
        source = spec.rule.forward if op is Op.F else spec.rule.recompute if op is Op.R else spec.rule.backward
        for k in range(first, first + count):
            key = (k, piece)
            if op is not Op.F:
                _ = self.flights[key]
            check_rule(source, key, versions, derive, first, self.versions, self.flights, admitted)
            if op is Op.F:
                self.flights.begin(key, versions, derive)
                if spec.admits and source is Source.ADMISSION:
                    admitted[k] = versions[0]
            elif op is Op.R:
                self.flights.recompute(key, versions[0])
        if derive is not None:
            self.copies.read(derive, versions)
        else:
            self.versions.read(op, versions, self.shards, named)
        if op is not Op.F and op is not Op.R:
            for k in range(first, first + count):
                self._backward(op, (k, piece), versions)
        if op is Op.F:
            self.versions.forward()

    def _backward(self, op: Op, key: Piece, versions: tuple[int, ...]) -> None:
        flight = self.flights.backward(key, op, self.spec.recomputed)
        batch = key[0] // self.spec.microbatches
        if batch not in self.gradients:  # from the first I on, as not every weight gradient can be deferred
            self._allocate(batch)
        self.shards.add(batch)
        if flight is None:
            return
        self.gradients.add(batch, flight.versions[0], versions[0], flight.recomputed or 0)

    # --- updates and the rest ---------------------------------------------------------------------------------------

    def _manage(self, action: Action, t: int) -> None:
        op, batch = action.op, action.unit.first + t
        if op is Op.STEP:
            self._step(batch)
        elif op in COLLECTIVES:
            self._join(op, batch)
        elif op in SWAPS:
            self._swap(op, batch)
        elif op is Op.VALIDATE:
            self.versions.accept(batch + 1)
            if self.rejecting:
                self.flights.reject(batch + 1)
            self.gradients.remove(batch)
        elif op is Op.PREDICT:
            self._predict(action, t)
        elif op is Op.AVERAGE:
            if self.versions.newest_read or batch >= self.versions.newest:
                raise BooksError("must come between a STEP and the first read of its new version")
        elif op in (Op.GATHER, Op.RELEASE):
            if action.reads is None:
                raise BooksError("names no version, as in {}[t]^t", op)
            version = action.reads.versions[0] + t
            if op is Op.RELEASE:
                self.shards.release(version)
            else:
                self.versions.read(op, (max(version, self.spec.older),), self.shards)
                self.shards.gather(version)
        elif op in (Op.OFFLOAD, Op.FETCH):
            piece = action.unit.slice[0] if action.unit.slice else 0
            for k in action.unit.microbatches:
                place = "the host" if action.peer is None else f"stage {action.peer.name}"
                self.flights.move((k + t * self.spec.microbatches, piece), op is Op.OFFLOAD, place)
        elif op in (Op.HOLD, Op.RETURN):
            held = (action.peer, action.unit._replace(first=action.unit.first + t * self.spec.microbatches))
            if (held in self.held) is (op is Op.HOLD):
                raise BooksError(
                    f"{'already holds' if op is Op.HOLD else 'does not hold'} these activations of its peer"
                )
            self.held ^= {held}

    def _join(self, op: Op, batch: int) -> None:
        """Let the gradient of a batch take part in a collective."""
        if op is Op.REDUCE and self.shards.level.splits_gradients and batch in self.gradients:
            self.shards.reduce(batch)
            if self.gradients.accumulates(batch):
                return  # a part of the sum, to which the next REDUCE adds
        self.gradients.join(op, batch)

    def _swap(self, op: Op, batch: int) -> None:
        """Move the optimizer state from the host for an update, or back behind it."""
        if op is Op.SWAPIN and self.swapped_in is not None:
            raise BooksError("its optimizer state is here already, for batch {}", VersionNumber(self.swapped_in))
        if op is Op.SWAPOUT and (self.swapped_in != batch or self.versions.newest <= batch):
            raise BooksError("must come behind the STEP of its batch, and that behind a SWAPIN")
        self.swapped_in = batch if op is Op.SWAPIN else None

    def _step(self, batch: int) -> None:
        if self.spec.swaps and self.swapped_in != batch:
            raise BooksError("its optimizer state is in the memory of the host; there must be a SWAPIN before")
        gradient, rule = self.gradients.ready_for(Op.STEP, batch), self.spec.rule
        if self.versions.newest != batch or batch in self.versions.provisional:
            raise BooksError("starts from version {}, which is not the newest valid version", VersionNumber(batch))
        reader = self.flights.reader(batch) if rule.pins else None
        if rule.update is Update.IN_PLACE and reader is not None:
            raise BooksError(
                "overwrites version {}, which microbatch {} in flight still reads",
                VersionNumber(batch),
                MicrobatchNumber(reader),
            )
        free = rule.update is Update.COPY_ON_WRITE and reader is None and self.versions.oldest_read() > batch
        in_place = rule.update is Update.IN_PLACE or free
        self.shards.step(batch, in_place)
        self.versions.make(batch, in_place)
        self.rotated = rule.update is Update.ROTATE or (rule.update is Update.COPY_ON_WRITE and not free)
        if not rule.provisional:  # otherwise the gradient stays, as the update may have to be repeated
            self.gradients.remove(batch)
        if self.versions.draining is None:
            self.delay = Delay(*(batch - total / self.spec.share for total in (gradient.forward, gradient.backward)))
            if self.spec.recomputed:
                self.recompute_delay = batch - gradient.recompute / self.spec.share

    def _predict(self, action: Action, t: int) -> None:
        """Make a copy of the newest version, or a blend of it with the version that the microbatch's forward read."""
        reads, spec = action.reads, self.spec
        if reads is None or reads.derive is None:
            raise BooksError("must make a copy of its own, as in PREDICT0^t~p0")
        versions = tuple(max(v + t, spec.older) for v in reads.versions)
        copy = Copy(reads.derive.label, reads.derive.first + t * spec.microbatches)
        self.copies.create(copy, versions)
        self.versions.read(action.op, versions, self.shards)
        wanted: tuple[int, ...] = (self.versions.newest,)
        if spec.rule.keeps_forward:
            piece = action.unit.slice[0] if action.unit.slice else 0
            wanted = (*self.flights[action.unit.first + t * spec.microbatches, piece].versions, self.versions.newest)
        if versions != wanted:
            raise BooksError("must be made of version {}, not {}", version_numbers(wanted), version_numbers(versions))

    # --- buffers ----------------------------------------------------------------------------------------------------

    def _allocate(self, batch: int) -> None:
        """Allocate a buffer for a new gradient."""
        used, limit = len(self.versions) + len(self.gradients), self.spec.rule.buffers
        if limit is not None and used >= limit:
            raise BooksError(
                "needs a buffer for the gradient of batch {}, but all {} are in use: versions {}, gradients of batches "
                "{}. One would be overwritten too early; use more microbatches per batch",
                VersionNumber(batch),
                limit,
                version_numbers(sorted(self.versions.alive)),
                version_numbers(sorted(self.gradients)),
            )
        self.gradients.begin(batch)
        self._count()

    def _count(self) -> None:
        self.peak_versions = max(self.peak_versions, len(self.versions))
        self.peak_gradients = max(self.peak_gradients, len(self.gradients))
        self.peak_buffers = max(self.peak_buffers, len(self.versions) + len(self.gradients))


@dataclass
class Copies:
    """The derived weight copies of a stage.

    Attributes:
        uses: reads of each copy per period, by label and microbatch modulo m.
        alive: remaining reads of each copy, and the versions it was made of.
        peak: the most copies alive at once.
    """

    uses: Mapping[Copy, int]
    microbatches: int
    alive: dict[Copy, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    peak: int = 0

    def __iter__(self) -> Iterator[Copy]:
        return iter(self.alive)

    def create(self, copy: Copy, versions: tuple[int, ...]) -> None:
        """Record that a PREDICT makes a copy of these versions."""
        uses = self.uses.get(Copy(copy.label, copy.first % self.microbatches), 0)
        if not uses or copy in self.alive:
            raise BooksError("makes a copy that no pass reads or that already exists")
        self.alive[copy] = uses, versions
        self.peak = max(self.peak, len(self.alive))

    def read(self, copy: Copy, versions: tuple[int, ...]) -> None:
        """Record that a pass reads a copy, and check that it was made of these versions."""
        if copy not in self.alive:
            raise BooksError(
                "reads copy {}{}, which no PREDICT has made or which was already dropped",
                copy.label,
                MicrobatchNumber(copy.first),
            )
        left, made = self.alive[copy]
        if made != versions:
            raise BooksError("copy {}{} was made of other versions", copy.label, MicrobatchNumber(copy.first))
        if left > 1:
            self.alive[copy] = left - 1, made
        else:
            del self.alive[copy]

    def state(self, t: int) -> object:
        """Return a comparable state, with numbers relative to batch t."""
        k = t * self.microbatches
        return sorted((c.label, c.first - k, n, [v - t for v in made]) for c, (n, made) in self.alive.items())

    def shifted(self, batches: int, microbatches: int) -> Copies:
        """Return a copy in which everything is that many batches, and microbatches, later."""
        alive = {
            copy._replace(first=copy.first + microbatches): (left, tuple(v + batches for v in made))
            for copy, (left, made) in self.alive.items()
        }
        return Copies(self.uses, self.microbatches, alive, self.peak)

    def copy(self) -> Copies:
        """Return an independent copy."""
        return Copies(self.uses, self.microbatches, dict(self.alive), self.peak)


def check_rule(
    source: Source,
    key: Piece,
    versions: tuple[int, ...],
    derive: Copy | None,
    first: int,
    live: LiveVersions,
    flights: Flights,
    admitted: dict[int, int],
) -> None:
    """Check what one pass reads.

    Args:
        source: what the rule names.
        key: the microbatch, and the slice of it.
        versions: that are read.
        derive: the copy that is read, if it is one.
        first: the first microbatch of the pass.
        live: the versions of the stage.
        flights: its microbatches in flight.
        admitted: the version that the first stage read for each microbatch.

    Raises:
        BooksError: it is another version or copy.
    """
    spec = live.spec
    if source is Source.FORWARD:
        flight = flights[key]
        if (versions, derive) != flight[:2]:
            raise BooksError("must read version {}, as its forward did", version_numbers(flight.versions))
        return
    if source is Source.COPY:
        _check_copy(key, versions, derive, first, live, flights)
        return
    batch = key[0] // spec.microbatches
    if source is Source.BATCH:
        wanted = max(batch - spec.rule.delay, spec.older)
    elif source is Source.NEWEST or spec.admits:
        wanted = live.newest
    else:
        if key[0] not in admitted:
            raise BooksError("runs before its microbatch was admitted by the first trained stage")
        wanted = admitted[key[0]]
    if versions != (wanted,) or derive is not None:
        raise BooksError("must read version {}, not {}", VersionNumber(wanted), version_numbers(versions))


def _check_copy(
    key: Piece, versions: tuple[int, ...], derive: Copy | None, first: int, live: LiveVersions, flights: Flights
) -> None:
    """Check that a pass reads a copy that was made for its batch, or for its microbatch."""
    spec = live.spec
    if derive is None:
        raise BooksError("must read a copy that a PREDICT made")
    own = derive.first // spec.microbatches == key[0] // spec.microbatches
    if spec.rule.keeps_forward:
        own = derive.first == first
        if versions[:-1] != flights[key].versions:
            raise BooksError(
                "blends version {}, but the forward of microbatch {} read another one",
                VersionNumber(versions[0]),
                MicrobatchNumber(key[0]),
            )
    if not own:
        whose = "microbatch" if spec.rule.keeps_forward else "batch"
        raise BooksError(
            "reads copy {}{}, which was made for another {}", derive.label, MicrobatchNumber(derive.first), whose
        )
