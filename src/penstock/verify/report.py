"""The result of a verification, and its verdict in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.train.config.schema import TrainConfig
from penstock.verify.differences import Difference


def method_and_options(config: TrainConfig) -> str:
    """Return the method of a configuration with the options of its order, as in interleaved:chunks=3."""
    return ":".join([config.row.name, *(f"{name}={value}" for name, value in config.options.items())])


@dataclass(frozen=True)
class ReportRow:
    """The comparison of one kind of numbers.

    Attributes:
        kind: see `penstock.verify.differences.KINDS`.
        reference: how far the pipeline differs from the reference.
        plain: how far plain torch differs from the reference; None where it was not run.
    """

    kind: str
    reference: Difference
    plain: Difference | None


@dataclass(frozen=True)
class Verification:
    """The result of a verification.

    Attributes:
        config: the configuration that was verified.
        batches: the number of batches trained.
        rows: one per kind of numbers.
        left_out: why there is no comparison with plain torch; None where there is one.
        error: the exception that the pipeline raised, if it did not train to the end.
    """

    config: TrainConfig
    batches: int
    rows: tuple[ReportRow, ...]
    left_out: str | None
    error: Exception | None

    @property
    def agrees(self) -> bool:
        """Whether the pipeline trains what its method says."""
        differences = [d for row in self.rows for d in (row.reference, row.plain) if d is not None]
        return self.error is None and all(d.agrees for d in differences)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        method = method_and_options(self.config)
        if self.error is not None:
            places = (note for note in getattr(self.error, "__notes__", ()) if note.startswith("raised "))
            notes = "".join(f", {note}" for note in places)
            return f"the pipeline of {method} ended with {type(self.error).__name__}{notes}: {self.error}"
        if wrong := self._first({row.kind: row.reference for row in self.rows}):
            return f"the pipeline does not train what {method} says: {wrong}"
        plain = {row.kind: row.plain for row in self.rows if row.plain is not None}
        if wrong := self._first(plain):
            return f"pipeline and reference agree on {method}, but plain torch does not: {wrong}"
        also = f", and plain torch's to {max(d.tolerance for d in plain.values()):g}" if plain else ""
        apart = max(row.reference.tolerance for row in self.rows)
        to = f" to {apart:g}" if apart else ""
        odd = sum(row.reference.odd for row in self.rows)
        but = f"; but {odd} of them are NaN, which proves nothing: choose settings that train stably" if odd else ""
        return f"the pipeline trains what {method} says: every number equals the reference's{to}{also}{but}"

    def _first(self, differences: Mapping[str, Difference]) -> str | None:
        """Describe the first batch that differs, causes before effects; None if nothing differs."""
        wrong = {kind: d.first for kind, d in differences.items() if d.first is not None}
        if not wrong:
            return None
        batch = min(place.batch for place in wrong.values())
        when = "at the end" if batch == self.batches else f"in batch {batch}"
        found = [f"{kind} ({place})" for kind, place in wrong.items() if place.batch == batch]
        return f"it differs first {when}, in {', '.join(found)}"
