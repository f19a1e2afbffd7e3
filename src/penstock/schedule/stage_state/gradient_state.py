"""Track the gradients of one stage: from the first backward of a batch to its STEP, with the collectives between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from penstock.schedule.ir.schedule import Op
from penstock.schedule.stage_state.microbatch_state import BooksError, VersionNumber


@dataclass
class Gradient:
    """The gradient of a batch while it accumulates or waits for its STEP."""

    remaining: int
    forward: int = 0  # sum of the versions read, one per pass
    backward: int = 0
    recompute: int = 0
    joined: tuple[Op, ...] = ()  # collectives already done


@dataclass
class Gradients:
    """The gradients of a stage, by batch.

    Attributes:
        share: the backwards that a complete gradient has.
        collectives: what a complete one takes part in before its STEP, in order.
        held: those that are there.
    """

    share: int
    collectives: tuple[Op, ...]
    held: dict[int, Gradient] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.held)

    def __iter__(self) -> Iterator[int]:
        return iter(self.held)

    def begin(self, batch: int) -> None:
        """Record that the gradient of a batch begins to accumulate."""
        self.held[batch] = Gradient(self.share)

    def add(self, batch: int, forward: int, backward: int, recomputed: int) -> None:
        """Record a backward, with the versions that it and its forward, and a recompute, have read."""
        gradient = self.held[batch]
        gradient.remaining -= 1
        gradient.forward += forward
        gradient.backward += backward
        gradient.recompute += recomputed

    def accumulates(self, batch: int) -> bool:
        """Return whether backwards of a batch have run, and others are still to come."""
        return batch in self.held and self.held[batch].remaining > 0

    def join(self, op: Op, batch: int) -> None:
        """Record that the gradient of a batch takes part in a collective."""
        gradient = self.ready_for(op, batch)
        if op in gradient.joined:
            raise BooksError("comes a second time for batch {}; once is enough", VersionNumber(batch))
        gradient.joined += (op,)

    def ready_for(self, op: Op, batch: int) -> Gradient:
        """Return the complete gradient of a batch, after all collectives that come before an operation."""
        gradient = self.held.get(batch)
        left = self.share if gradient is None else gradient.remaining
        if gradient is None or left:
            raise BooksError("comes before {} of batch {}'s backwards on this stage", left, VersionNumber(batch))
        for earlier in self.collectives:
            if earlier is op:
                break
            if earlier not in gradient.joined:
                raise BooksError("needs the {} of its batch first", earlier)
        return gradient

    def remove(self, batch: int) -> None:
        """Record that the gradient of a batch is used up."""
        del self.held[batch]

    def state(self, t: int) -> object:
        """Return a comparable state, with numbers relative to batch t."""
        return sorted(
            (b - t, g.remaining, g.forward - t * (self.share - g.remaining), g.joined) for b, g in self.held.items()
        )

    def shifted(self, batches: int) -> Gradients:
        """Return a copy in which everything is that many batches later."""
        found = {}
        for batch, gradient in self.held.items():
            later = batches * (self.share - gradient.remaining)
            sums = gradient.forward + later, gradient.backward + later, gradient.recompute + later
            found[batch + batches] = Gradient(gradient.remaining, *sums, gradient.joined)
        return Gradients(self.share, self.collectives, found)

    def copy(self) -> Gradients:
        """Return an independent copy."""
        return Gradients(self.share, self.collectives, {b: replace(g) for b, g in self.held.items()})
