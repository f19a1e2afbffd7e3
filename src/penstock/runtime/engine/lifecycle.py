"""Whether a pipeline is at rest, is running, or is broken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from penstock.errors import PenstockError, TransportError

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Lifecycle:
    """Whether a pipeline is at rest, is running, or is broken.

    Attributes:
        running: a span is in progress.
        abandoned: the next run whose loop is left drops its batches in flight, instead of finishing them.
        broken: why nothing can go on any more; None if nothing has broken.
    """

    def __init__(self) -> None:
        self.running = self.abandoned = False
        self.broken: BaseException | None = None
        self._taken = threading.Lock()  # by a run, or by a call that is none of a run

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
        with self.exclusive(instead):
            pass

    @contextmanager
    def exclusive(self, instead: str = "") -> Iterator[None]:
        """A run, or a call between two runs; any other one is refused meanwhile, from whatever thread it comes.

        Args:
            instead: as of `check_idle`.

        Raises:
            PenstockError: another one is in progress, or a run has broken.
        """
        if not self._taken.acquire(blocking=False):
            raise PenstockError(
                "a run or an evaluation of this pipeline is under way; end it first: go on to its end, leave its loop "
                f"with break, or call close() on what run() returned{instead and f'. {instead}'}"
            )
        try:
            if self.broken is not None:
                why = f"{type(self.broken).__name__}: {self.broken}".rstrip(": ").splitlines()[0]
                raise PenstockError(
                    f"the pipeline broke in an earlier run and cannot go on ({why:.120}); make a new one, and load its "
                    "last checkpoint"
                ) from self.broken
            yield
        finally:
            self._taken.release()

    @contextmanager
    def together(self) -> Iterator[None]:
        """A call that all ranks make before or after a span; without one of them nothing can go on any more."""
        try:
            yield
        except TransportError as error:
            self.broken = error
            raise


def between_runs(instead: str = "") -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a function, whose first argument is a pipeline, have it `exclusive`ly.

    Args:
        instead: as of `Lifecycle.check_idle`.
    """

    def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def call(*arguments: _P.args, **named: _P.kwargs) -> _R:
            pipeline: Any = arguments[0]
            with pipeline._spans.life.exclusive(instead):
                return function(*arguments, **named)

        return call

    return decorated
