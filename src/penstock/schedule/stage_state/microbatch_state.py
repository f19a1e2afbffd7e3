"""Track the microbatches between their forward and their backward on one stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.schedule.ir.schedule import Copy, Op

Piece = tuple[int, int]
"""(microbatch, slice)."""


class VersionNumber(int):
    """The number of a version or a batch, counted from the start of the span."""


class MicrobatchNumber(int):
    """The number of a microbatch, counted from the start of the span."""


class BooksError(Exception):
    """The reason why an action is invalid at its position; `stage_state` adds which action it is.

    Args:
        text: the reason, with {} in the place of every number.
        numbers: to put in there; several in one place as a sequence.
    """

    def __init__(self, text: str, *numbers: object) -> None:
        super().__init__(text, *numbers)
        self._text, self._numbers = text, numbers

    def said(self, t: int, microbatches: int) -> str:
        """Return the reason in the notation of schedules, whose numbers are relative to batch t: version t-1."""
        return self._text.format(*(_relative(number, t, microbatches) for number in self._numbers))


def _relative(number: object, t: int, microbatches: int) -> str:
    if isinstance(number, VersionNumber):
        return f"t{number - t:+d}" if number != t else "t"
    if isinstance(number, MicrobatchNumber):
        return str(number - t * microbatches)
    if isinstance(number, list | tuple):
        return ", ".join(_relative(each, t, microbatches) for each in number)
    return str(number)


class FlightFacts(NamedTuple):
    """The versions and progress of a microbatch (slice) in flight."""

    versions: tuple[int, ...]
    derive: Copy | None = None
    recomputed: int | None = None  # the version that its recompute read
    away: str | None = None  # where its activations were moved to: the name of a peer, or the host
    input_done: bool = False  # I has run, W has not


@dataclass
class Flights:
    """The microbatches in flight on a stage, in the order of their forwards."""

    held: dict[Piece, FlightFacts] = field(default_factory=dict)
    void: set[Piece] = field(default_factory=set)  # forwards that read a rejected version

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.held)

    def __getitem__(self, key: Piece) -> FlightFacts:
        flight = self.held.get(key)
        if flight is None:
            raise BooksError("has no forward in flight on this stage")
        return flight

    def begin(self, key: Piece, versions: tuple[int, ...], derive: Copy | None) -> None:
        """Record a forward that reads these versions."""
        self.held[key] = FlightFacts(versions, derive)

    def reject(self, version: int) -> None:
        """Record a rejection: forwards that read this version are void."""
        self.void |= {key for key, flight in self.held.items() if version in flight.versions}

    def redo(self, key: Piece) -> None:
        """Record a repeated forward."""
        if key not in self.void:
            raise BooksError("repeats a forward that did not read a rejected version")
        self.void.discard(key)

    def _usable(self, key: Piece) -> FlightFacts:
        if key in self.void:
            raise BooksError("needs a forward that has read a rejected version and has not been repeated")
        return self[key]

    def recompute(self, key: Piece, version: int) -> None:
        """Record a recompute that reads `version`."""
        flight = self._usable(key)
        if flight.recomputed is not None or flight.away:
            raise BooksError("has been recomputed already, or its input is offloaded")
        self.held[key] = flight._replace(recomputed=version)

    def backward(self, key: Piece, op: Op, recomputes: bool) -> FlightFacts | None:
        """Record a B, I or W; return the flight if it ends here."""
        flight = self._usable(key)
        if flight.away or (recomputes and flight.recomputed is None):
            raise BooksError("needs activations that are offloaded or not recomputed yet")
        if flight.input_done != (op is Op.W):
            raise BooksError("must follow I if it is W, and must not follow I otherwise")
        if op is Op.I:
            self.held[key] = flight._replace(input_done=True)
            return None
        return self.held.pop(key)

    def move(self, key: Piece, away: bool, place: str) -> None:
        """Record an OFFLOAD to a place (`away`), or a FETCH from there."""
        flight = self.held.get(key)
        if flight is None or (flight.away is not None) is away:
            raise BooksError("its activations are not in flight, or were already moved")
        if away and flight.recomputed is not None:
            raise BooksError("its activations have already been recomputed for the backward; offload them before that")
        if not away and flight.away != place:
            raise BooksError("its activations are not at {}, but at {}", place, flight.away)
        self.held[key] = flight._replace(away=place if away else None)

    def reader(self, version: int) -> int | None:
        """Return a microbatch in flight whose forward read `version`, or None."""
        return next((k for (k, _), flight in self.held.items() if version in flight.versions), None)

    def versions(self) -> set[int]:
        """Return all versions that forwards of microbatches in flight read."""
        return {v for flight in self.held.values() for v in flight.versions}

    def state(self, t: int, microbatches: int) -> object:
        """Return a comparable state, with numbers relative to batch t."""
        k = t * microbatches
        return sorted(
            (
                mb - k,
                piece,
                tuple(v - t for v in f.versions),
                f.derive and (f.derive.label, f.derive.first - k),
                (None if f.recomputed is None else f.recomputed - t, f[3:]),
            )
            for (mb, piece), f in self.held.items()
        )  # no forward is void at a border

    def shifted(self, batches: int, microbatches: int) -> Flights:
        """Return a copy in which everything is that many batches, and microbatches, later."""
        return Flights(
            {
                (k + microbatches, piece): flight._replace(
                    versions=tuple(v + batches for v in flight.versions),
                    derive=flight.derive and flight.derive._replace(first=flight.derive.first + microbatches),
                    recomputed=None if flight.recomputed is None else flight.recomputed + batches,
                )
                for (k, piece), flight in self.held.items()
            },
            {(k + microbatches, piece) for k, piece in self.void},
        )

    def copy(self) -> Flights:
        """Return an independent copy."""
        return Flights(dict(self.held), set(self.void))
