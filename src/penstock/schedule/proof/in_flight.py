"""Microbatches between their forward and their backward on one stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.schedule.ir.schedule import Copy, Op

Piece = tuple[int, int]
"""(microbatch, slice)."""


class BooksError(Exception):
    """Why an action cannot stand where it does; `penstock.schedule.proof.stage_state` adds which action it is."""


class FlightFacts(NamedTuple):
    """What is known of a microbatch (slice) in flight."""

    versions: tuple[int, ...]
    derive: Copy | None = None
    recomputed: int | None = None  # the version that its recompute read
    away: str | None = None  # where its activations are instead: the name of a peer, or the host
    input_done: bool = False  # I has run, W is still to come


@dataclass
class Flights:
    """The microbatches in flight on a stage, in the order of their forwards."""

    held: dict[Piece, FlightFacts] = field(default_factory=dict)
    void: set[Piece] = field(default_factory=set)  # their forwards have read a version that was rejected

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.held)

    def __getitem__(self, key: Piece) -> FlightFacts:
        flight = self.held.get(key)
        if flight is None:
            raise BooksError("has no forward in flight on this stage")
        return flight

    def begin(self, key: Piece, versions: tuple[int, ...], derive: Copy | None) -> None:
        """A forward that reads these versions."""
        self.held[key] = FlightFacts(versions, derive)

    def reject(self, version: int) -> None:
        """A VALIDATE: what has read this version is void."""
        self.void |= {key for key, flight in self.held.items() if version in flight.versions}

    def redo(self, key: Piece) -> None:
        """A REDO."""
        if key not in self.void:
            raise BooksError("repeats a forward that has read no rejected version")
        self.void.discard(key)

    def _usable(self, key: Piece) -> FlightFacts:
        if key in self.void:
            raise BooksError("needs a forward that has read a rejected version and has not been repeated")
        return self[key]

    def recompute(self, key: Piece, version: int) -> None:
        """An R that reads a version."""
        flight = self._usable(key)
        if flight.recomputed is not None or flight.away:
            raise BooksError("has been recomputed already, or its input is offloaded")
        self.held[key] = flight._replace(recomputed=version)

    def backward(self, key: Piece, op: Op, recomputes: bool) -> FlightFacts | None:
        """A B, I or W; the flight if it ends here."""
        flight = self._usable(key)
        if flight.away or (recomputes and flight.recomputed is None):
            raise BooksError("needs activations that are offloaded or not recomputed yet")
        if flight.input_done != (op is Op.W):
            raise BooksError("does not fit: I comes before W, and B stands for both")
        if op is Op.I:
            self.held[key] = flight._replace(input_done=True)
            return None
        return self.held.pop(key)

    def move(self, key: Piece, away: bool, place: str) -> None:
        """An OFFLOAD (away) to a place, or a FETCH from there."""
        flight = self.held.get(key)
        if flight is None or (flight.away is not None) is away:
            raise BooksError("its activations are not in flight, or are already there")
        if away and flight.recomputed is not None:
            raise BooksError("its activations have been recomputed for a backward that is to come; offload them before")
        if not away and flight.away != place:
            raise BooksError(f"its activations are not at {place}, but at {flight.away}")
        self.held[key] = flight._replace(away=place if away else None)

    def reader(self, version: int) -> int | None:
        """A microbatch in flight whose forward read a version."""
        return next((k for (k, _), flight in self.held.items() if version in flight.versions), None)

    def versions(self) -> set[int]:
        """All versions that forwards of microbatches in flight read."""
        return {v for flight in self.held.values() for v in flight.versions}

    def state(self, t: int, microbatches: int) -> object:
        """All of it, with numbers relative to batch t."""
        k = t * microbatches
        return sorted(
            (
                mb - k,
                piece,
                tuple(v - t for v in f.versions),
                f.derive and (f.derive.label, f.derive.first - k),
                (f.recomputed is not None, (f.recomputed or t) - t, f[3:]),
            )
            for (mb, piece), f in self.held.items()
        )  # nothing is void at a border

    def copy(self) -> Flights:
        """An independent twin."""
        return Flights(dict(self.held), set(self.void))
