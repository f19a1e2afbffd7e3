"""Checks that passes read the version of the weights that their rule names."""

from __future__ import annotations

from penstock.schedule.ir.schedule import Copy
from penstock.schedule.ir.version_rules import Source
from penstock.schedule.stage_state.live_versions import LiveVersions, version_numbers
from penstock.schedule.stage_state.microbatch_state import BooksError, Flights, MicrobatchNumber, Piece, VersionNumber


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
