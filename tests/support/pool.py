"""Processes with a gloo group that live as long as the test session, because starting them costs seconds."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

GRACE = 5.0  # seconds that the other ranks get to finish once one has failed


class Pool:
    """Runs functions on the first n of `size` processes.

    Nothing hangs: whatever fails or takes too long ends all processes, and the next `submit` starts new ones.
    """

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def submit(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int | Sequence[int],
        fresh: bool = False,
        victims: Collection[int] = (),
        timeout: float = 60.0,
    ) -> list[Any]:
        """Run `function(group, *args)` on some ranks; returns what each returned, or raises what the first one raised.

        Args:
            function: found by its module and name.
            args: what it takes besides the group.
            ranks: how many processes, or which of them.
            fresh: make a new group, for a function that leaves messages behind.
            victims: ranks that die on purpose; the pool is over then.
            timeout: seconds for all of it.
        """
        if not self._workers:
            self._start()
        busy = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        members = list(range(ranks)) if isinstance(ranks, int) else list(ranks)
        job = pickle.dumps((function, args, members, fresh or not isinstance(ranks, int)))
        try:
            for connection in busy:
                connection.send_bytes(job)
        except OSError:  # one has died since the last job
            self.close()
            raise
        results: list[Any] = [None] * self.size
        failure: BaseException | None = None
        deadline = time.monotonic() + timeout
        while busy:
            ready = wait(list(busy), timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                failure = failure or TimeoutError(f"ranks {sorted(busy.values())} took longer than {timeout} seconds")
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = busy.pop(connection)
                results[rank], error = _answer(connection, rank)
                if error is not None and failure is None and rank not in victims:
                    failure, deadline = error, min(deadline, time.monotonic() + GRACE)
        if failure is not None:
            self.close()
            raise failure
        return [results[rank] for rank in members]

    def close(self) -> None:
        """End all processes."""
        for process, connection in self._workers:
            process.kill()
            connection.close()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["penstock.launch.preload", "penstock.cli.train", "penstock.view.progress"])
        rendezvous = os.path.join(tempfile.mkdtemp(prefix="penstock-tests-"), "store")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(rank, self.size, rendezvous, there), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))


def _answer(connection: Connection, rank: int) -> tuple[Any, BaseException | None]:
    try:
        result, error, text = pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return None, RuntimeError(f"rank {rank} died")
    if error is not None:
        error.add_note(f"on rank {rank}:\n{text}")
    return result, error


def _work(rank: int, size: int, rendezvous: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    groups = {n: dist.new_group(range(n)) for n in range(1, size + 1)}
    while True:
        try:
            function, args, members, fresh = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)  # the session is over; threads that wait for messages need not be asked
        try:
            if fresh:
                dist.barrier(groups[size])  # or the time-out of the group would begin before all have come
            group = dist.new_group(members, timeout=timedelta(seconds=3)) if fresh else groups[len(members)]
            answer = pickle.dumps((function(group, *args) if rank in members else None, None, ""))
        except BaseException as error:
            answer = pickle.dumps((None, _picklable(error), traceback.format_exc()))
        connection.send_bytes(answer)


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
