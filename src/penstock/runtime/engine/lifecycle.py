"""Whether a pipeline is at rest, is running, or is broken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from penstock.comm.collective.control_plane import DifferentCallsError
from penstock.errors import PenstockError, TransportError
from penstock.runtime.execute.peer_failures import PeerFailures

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Lifecycle:
    """Whether a pipeline is at rest, is running, or is broken.

    Attributes:
        running: a span is in progress.
        abandoned: the next run whose loop is left drops its batches in flight, instead of finishing them.
        broken: why nothing can go on any more; None if nothing has broken.
        advice: what is lost then, and how to go on.

    Args:
        peers: what ranks leave for each other.
    """

    def __init__(self, peers: PeerFailures) -> None:
        self._peers = peers
        self.advice = "make a new one, and load its last checkpoint"
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
                    f"the pipeline broke in an earlier run and cannot go on ({why:.300}); {self.advice}"
                ) from self.broken
            yield
        finally:
            self._taken.release()

    @contextmanager
    def together(self) -> Iterator[None]:
        """A call that all ranks make before or after a span; without one of them nothing can go on any more."""
        try:
            yield
        except DifferentCallsError:  # all ranks raise it, and have begun nothing
            raise
        except TransportError as error:
            self._peers.leave(error)
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


_LOAD = "penstock.Checkpoints(pipeline, folder).load()"


def left_behind(
    batches: Sequence[int], versions: Mapping[int, Sequence[str]], *, whole: bool, half: bool, alone: bool
) -> str:
    """Say what an error in training has left, and how to go on.

    Args:
        batches: that were under way here.
        versions: version -> the stages here that have it, and their ranks.
        whole: the weights are all here.
        half: the error came from an update.
        alone: all ranks are in this process.
    """
    lost = "no batch was under way here"
    if batches:
        several = len(batches) > 1
        lost = f"batches {batches[0]} to {batches[-1]} were" if several else f"batch {batches[0]} was"
        lost += " under way and will not be finished"
    known = " and ".join(f"{number} ({', '.join(names)})" for number, names in sorted(versions.items()))
    kind = "one version" if len(versions) == 1 else "different versions"
    weights = f"the weights here are whole, of {kind}: {known}"
    if not whole:
        return (
            f"{lost}; the weights here are not whole, so only a checkpoint has them: begin again with a new model, "
            f"make a new Pipeline, and load the last one into it: {_LOAD}"
        )
    if half:
        weights += "; but the update to the newest has failed, and what it has done to its stage remains"
    if alone:
        return (
            f"{lost}; {weights}. Make a new Pipeline of the same model or blocks, which have these weights: it begins "
            f"with them, and with new optimizers. Or load the last checkpoint into it, which has both: {_LOAD}"
        )
    return (
        f"{lost}; {weights}. Start all processes again, and load the last checkpoint: {_LOAD}. Without one, save these "
        "weights on every rank, torch.save(pipeline.state_dict(), f'rank{rank}.pt'), and load those of all ranks into "
        "the new pipeline: pipeline.load_state_dict({**torch.load('rank0.pt'), **torch.load('rank1.pt'), ...})"
    )
