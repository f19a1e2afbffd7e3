"""How ranks wait: a process with one rank blocks, a process with all ranks runs another one.

Executors are generators that yield a `Wait` where they need a message that is not there
(`penstock.runtime.execute.executor`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from penstock.comm.core.gloo_threads import GlooThreads
from penstock.comm.core.ticket import Polling, Wait
from penstock.errors import TransportError
from penstock.runtime.rank.batch_reports import Report

Run = Iterator[Wait | Report]


def drive_one(
    run: Run, timeout: float, polling: Polling, gloo: GlooThreads, failed: Callable[[], str]
) -> Iterator[Report]:
    """Run the only rank of this process.

    Args:
        run: its executor at work.
        timeout: seconds after which a missing message is an error.
        polling: for how long it looks before it sleeps.
        gloo: gloo's threads of this process.
        failed: asked now and then why a peer has failed.

    Raises:
        TransportError: a message did not come.
    """
    try:
        gloo.give_way()
        for event in run:
            if isinstance(event, Wait):
                gloo.follow()
                event.ticket.wait(timeout, event.what, polling, failed)
            else:
                gloo.restore()  # while the caller works
                yield event
                gloo.give_way()
    finally:
        gloo.restore()


def drive_all(runs: Sequence[Run], reporting: Collection[int]) -> Iterator[Report]:
    """Run all ranks in turns, each until it has to wait.

    Args:
        runs: the executors at work.
        reporting: the places of those whose reports are passed on.

    Raises:
        TransportError: every rank waits for another one.
    """
    blocked: dict[int, Wait | None] = dict.fromkeys(range(len(runs)))
    while blocked:
        moved = False
        for rank in list(blocked):
            wait = blocked[rank]
            if wait is not None and not wait.ticket.done:
                continue
            moved = True
            for event in runs[rank]:
                if isinstance(event, Wait):
                    blocked[rank] = event
                    break
                if rank in reporting:
                    yield event
            else:
                del blocked[rank]
        if not moved:
            stuck = "; ".join(f"{wait.what} on {wait.ticket.where}" for wait in blocked.values() if wait)
            raise TransportError(f"no rank can go on: {stuck}")
