"""Whether a pipeline is at rest, is running, or is broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import PenstockError, TransportError


class Lifecycle:
    """Whether a pipeline is at rest, is running, or is broken.

    Attributes:
        running: a run or an evaluation is in progress.
        abandoned: the next run whose loop is left drops its batches in flight, instead of finishing them.
        broken: why nothing can go on any more; None if nothing has broken.
    """

    def __init__(self) -> None:
        self.running = self.abandoned = False
        self.broken: BaseException | None = None

    @property
    def at_rest(self) -> bool:
        """Whether no run is in progress and none has broken."""
        return self.broken is None and not self.running

    def check_idle(self, instead: str = "") -> None:
        """Raise where a run is in progress or has broken.

        Args:
            instead: what to write within a run, for the message.

        Raises:
            PenstockError: it is or has.
        """
        if self.broken is not None:
            why = f"{type(self.broken).__name__}: {self.broken}".rstrip(": ").splitlines()[0]
            raise PenstockError(
                f"the pipeline broke in an earlier run and cannot go on ({why:.120}); make a new one, and load its "
                "last checkpoint"
            ) from self.broken
        if self.running:
            raise PenstockError(
                "a run or an evaluation of this pipeline is under way; end it first: go on to its end, leave its loop "
                f"with break, or call close() on what run() returned{instead and f'. {instead}'}"
            )

    @contextmanager
    def together(self) -> Iterator[None]:
        """A call that all ranks make before or after a span; without one of them nothing can go on any more."""
        try:
            yield
        except TransportError as error:
            self.broken = error
            raise
