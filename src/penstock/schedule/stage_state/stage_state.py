"""The weights of one stage while a schedule is played: live versions, their readers, and the buffers they occupy.

This is the independent half of the proof of versions: it knows the rule only as "forwards read from this source",
tracks versions itself, and rejects an action that reads another version, or one that does not exist yet or any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.ir.op_table import SWAPS
from penstock.schedule.ir.schedule import Action, Copy, Op, Stage, Unit, format_action
from penstock.schedule.ir.version_rules import Source, Update
from penstock.schedule.stage_state.derived_weight_copies import Copies
from penstock.schedule.stage_state.gradient_state import Gradients
from penstock.schedule.stage_state.microbatch_state import BooksError, Flights, MicrobatchNumber, Piece, VersionNumber
from penstock.schedule.stage_state.shard_state import ShardState
from penstock.schedule.stage_state.stage_constants import StageSpec
from penstock.schedule.transforms.batch_ops import COLLECTIVES


class Delay(NamedTuple):
    """Version at the update minus version read, mean over the passes of one batch."""

    forward: float
    backward: float


def _versions(numbers: Iterable[int]) -> tuple[VersionNumber, ...]:
    return tuple(map(VersionNumber, numbers))


@dataclass
class StageState:
    """The state of one stage. Versions, microbatches and batches are counted from the start of the span.

    Attributes:
        forwards: the position of the next forward; see `Forwards`.
        draining: the number of batches of the span, once its last period is over.
        newest_read: True if a pass has read the newest version.
        rotated: True if the last update was written over its gradient instead of over the version it started from.
        swapped_in: the batch for whose update the optimizer state has come from the host; None while it is there.
        rejecting: True if the next VALIDATE rejects its version.
    """

    spec: StageSpec
    newest: int = 0
    versions: set[int] = field(default_factory=set)
    provisional: set[int] = field(default_factory=set)
    flights: Flights = field(default_factory=Flights)
    gradients: Gradients = field(init=False)
    copies: Copies = field(init=False)
    shards: ShardState = field(init=False)
    held: set[tuple[Stage | None, Unit]] = field(default_factory=set)  # activations held for other ranks
    forwards: int = 0
    newest_read: bool = False
    rotated: bool = False
    draining: int | None = None
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
        if not self.versions:
            self.versions = {self.spec.older, 0}
            self.forwards = self.spec.forwards.settled(0)
            self._count()

    def copy(self) -> StageState:
        """Return an independent copy."""
        twin = replace(
            self,
            versions=set(self.versions),
            provisional=set(self.provisional),
            flights=self.flights.copy(),
            held=set(self.held),
        )
        twin.gradients, twin.copies, twin.shards = self.gradients.copy(), self.copies.copy(), self.shards.copy()
        return twin

    def shifted(self, batches: int) -> StageState:
        """Return a copy in which everything is `batches` batches later: a state that repeats, that many periods on."""
        twin, k = self.copy(), batches * self.spec.microbatches
        twin.newest += batches
        twin.versions = {v + batches for v in self.versions}
        twin.provisional = {v + batches for v in self.provisional}
        twin.flights, twin.copies = self.flights.shifted(batches, k), self.copies.shifted(batches, k)
        twin.gradients = self.gradients.shifted(batches)
        twin.shards = self.shards.shifted(batches)
        twin.held = {(peer, unit._replace(first=unit.first + k)) for peer, unit in self.held}
        twin.swapped_in = None if self.swapped_in is None else self.swapped_in + batches
        twin.forwards += batches * len(self.spec.forwards.period)
        return twin

    def state(self, t: int) -> object:
        """Return a comparable state, with numbers relative to batch t."""
        if not self.spec.share:
            return None
        flights, copies = self.flights.state(t, self.spec.microbatches), self.copies.state(t)
        versions = sorted(v - t for v in self.versions), sorted(v - t for v in self.provisional), self.newest - t
        place = self.forwards - t * len(self.spec.forwards.period)
        held = sorted((peer, unit.first - t * self.spec.microbatches, unit.slice) for peer, unit in self.held)
        swapped = None if self.swapped_in is None else self.swapped_in - t
        rest = held, place, self.newest_read, swapped
        return versions, flights, self.gradients.state(t), copies, self.shards.state(t), *rest

    def drain(self, batches: int) -> None:
        """Begin the epilogue of a span of `batches` batches."""
        self.draining = batches
        self.forwards = self.spec.forwards.settled(0, batches)

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
            self._drop_dead()
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
            self._check_rule(source, key, versions, derive, admitted, first)
            if op is Op.F:
                self.flights.begin(key, versions, derive)
                if spec.admits and source is Source.ADMISSION:
                    admitted[k] = versions[0]
            elif op is Op.R:
                self.flights.recompute(key, versions[0])
        if derive is not None:
            self.copies.read(derive, versions)
        else:
            self._check_life(op, versions, named)
        if op is not Op.F and op is not Op.R:
            for k in range(first, first + count):
                self._backward(op, (k, piece), versions)
        if op is Op.F:
            self.forwards = spec.forwards.settled(self.forwards + 1, self.draining)

    def _check_rule(
        self,
        source: Source,
        key: Piece,
        versions: tuple[int, ...],
        derive: Copy | None,
        admitted: dict[int, int],
        first: int,
    ) -> None:
        """Check that a pass on microbatches from `first` on reads the version that the rule names."""
        spec = self.spec
        batch = key[0] // spec.microbatches
        if source is Source.FORWARD:
            flight = self.flights[key]
            if (versions, derive) != flight[:2]:
                raise BooksError("must read version {}, as its forward did", _versions(flight.versions))
            return
        if source is Source.COPY:
            if derive is None:
                raise BooksError("must read a copy that a PREDICT made")
            own = derive.first // spec.microbatches == batch
            if spec.rule.keeps_forward:
                own = derive.first == first
                if versions[:-1] != self.flights[key].versions:
                    raise BooksError(
                        "blends version {}, but the forward of microbatch {} read another one",
                        VersionNumber(versions[0]),
                        MicrobatchNumber(key[0]),
                    )
            if not own:
                whose = "microbatch" if spec.rule.keeps_forward else "batch"
                raise BooksError(
                    "reads copy {}{}, which was made for another {}",
                    derive.label,
                    MicrobatchNumber(derive.first),
                    whose,
                )
            return
        if source is Source.BATCH:
            wanted = batch
        elif source is Source.PREVIOUS:
            wanted = max(batch - 1, spec.older)
        elif source is Source.NEWEST or spec.admits:
            wanted = self.newest
        else:
            if key[0] not in admitted:
                raise BooksError("runs before its microbatch was admitted by the first trained stage")
            wanted = admitted[key[0]]
        if versions != (wanted,) or derive is not None:
            raise BooksError("must read version {}, not {}", VersionNumber(wanted), _versions(versions))

    def _check_life(self, op: Op, versions: tuple[int, ...], named: tuple[int, ...] | None = None) -> None:
        """Check that the versions that are read exist.

        Args:
            op: that reads them.
            versions: their numbers.
            named: the numbers before those older than the span are taken for one: what is gathered is known by these.
        """
        for version in versions:
            if version not in self.versions:
                why = "does not exist yet" if version > self.newest else "no longer exists"
                raise BooksError("reads version {}, which {}", VersionNumber(version), why)
            if version in self.provisional and op is not Op.F:
                raise BooksError("reads version {} before VALIDATE accepts it", VersionNumber(version))
        if op is not Op.GATHER:
            for version in named or versions:
                self.shards.read(version)
        if self.newest in versions:
            self.newest_read = True

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
            if batch + 1 not in self.provisional:
                raise BooksError("version {} is not provisional", VersionNumber(batch + 1))
            self.provisional.discard(batch + 1)
            if self.rejecting:
                self.flights.reject(batch + 1)
            self.gradients.remove(batch)
        elif op is Op.PREDICT:
            self._predict(action, t)
        elif op is Op.AVERAGE:
            if self.newest_read or batch >= self.newest:
                raise BooksError("must come between a STEP and the first read of its new version")
        elif op in (Op.GATHER, Op.RELEASE):
            if action.reads is None:
                raise BooksError("names no version, as in {}[t]^t", op)
            version = action.reads.versions[0] + t
            if op is Op.RELEASE:
                self.shards.release(version)
            else:
                self._check_life(op, (max(version, self.spec.older),))
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
        if op is Op.SWAPOUT and (self.swapped_in != batch or self.newest <= batch):
            raise BooksError("must come behind the STEP of its batch, and that behind a SWAPIN")
        self.swapped_in = batch if op is Op.SWAPIN else None

    def _step(self, batch: int) -> None:
        if self.spec.swaps and self.swapped_in != batch:
            raise BooksError("its optimizer state is in the memory of the host; there must be a SWAPIN before")
        gradient, rule = self.gradients.ready_for(Op.STEP, batch), self.spec.rule
        if self.newest != batch or batch in self.provisional:
            raise BooksError("starts from version {}, which is not the newest valid version", VersionNumber(batch))
        reader = self.flights.reader(batch) if rule.pins else None
        if rule.update is Update.IN_PLACE and reader is not None:
            raise BooksError(
                "overwrites version {}, which microbatch {} in flight still reads",
                VersionNumber(batch),
                MicrobatchNumber(reader),
            )
        free = rule.update is Update.COPY_ON_WRITE and reader is None and self._oldest_read() > batch
        in_place = rule.update is Update.IN_PLACE or free
        self.shards.step(batch, in_place)
        if in_place:
            self.versions.discard(batch)
        self.rotated = rule.update is Update.ROTATE or (rule.update is Update.COPY_ON_WRITE and not free)
        if not rule.provisional:  # otherwise the gradient stays, as the update may have to be repeated
            self.gradients.remove(batch)
        self.newest = batch + 1
        self.newest_read = False
        self.versions.add(self.newest)
        if rule.provisional:
            self.provisional.add(self.newest)
        if self.draining is None:
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
        self._check_life(action.op, versions)
        wanted: tuple[int, ...] = (self.newest,)
        if spec.rule.keeps_forward:
            piece = action.unit.slice[0] if action.unit.slice else 0
            wanted = (*self.flights[action.unit.first + t * spec.microbatches, piece].versions, self.newest)
        if versions != wanted:
            raise BooksError("must be made of version {}, not {}", _versions(wanted), _versions(versions))

    # --- buffers ----------------------------------------------------------------------------------------------------

    def _oldest_read(self) -> int:
        """Return the oldest version that future forwards read; later spans read the last `bases` ones."""
        oldest = self.spec.forwards.oldest(self.forwards, self.draining)
        if oldest is not None:
            oldest = max(oldest, self.spec.older)
            if self.draining is None:
                return oldest
        last = self.newest + 1 if self.draining is None else self.draining
        return min(last - self.spec.rule.bases + 1, last if oldest is None else oldest)

    def _drop_dead(self) -> None:
        """Drop versions that no future forward, no backward in flight and no update will read."""
        floor = min(self.newest, self._oldest_read(), *(v - 1 for v in self.provisional))
        if min(self.versions) < floor:
            held = self.flights.versions() if self.spec.rule.pins else set()
            self.versions = {v for v in self.versions if v >= floor or v in held}

    def _allocate(self, batch: int) -> None:
        """Allocate a buffer for a new gradient."""
        used, limit = len(self.versions) + len(self.gradients), self.spec.rule.buffers
        if limit is not None and used >= limit:
            raise BooksError(
                "needs a buffer for the gradient of batch {}, but all {} are in use: versions {}, gradients of batches "
                "{}. One would be overwritten too early; use more microbatches per batch",
                *(VersionNumber(batch), limit, _versions(sorted(self.versions)), _versions(sorted(self.gradients))),
            )
        self.gradients.begin(batch)
        self._count()

    def _count(self) -> None:
        self.peak_versions = max(self.peak_versions, len(self.versions))
        self.peak_gradients = max(self.peak_gradients, len(self.gradients))
        self.peak_buffers = max(self.peak_buffers, len(self.versions) + len(self.gradients))
