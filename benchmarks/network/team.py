"""The ranks that train together, one on each host, as the benchmark sees them."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.network.hosts import INTERFACE, LOOPBACK, Network
from benchmarks.network.worker import Place

ROOT = Path(__file__).parents[2]
_FIRST_PORT = 29500
PATIENCE = 300.0
"""Seconds after which a turn is taken for hung."""


class Team:
    """Processes inside the network, from `__enter__` to `__exit__`.

    Args:
        network: whose hosts they are on.
        ranks: one on each of the first hosts; or all on the loopback.
        alone: whether it is the loopback.
        module: what each of them runs.
    """

    def __init__(self, network: Network, ranks: int, alone: bool, module: str = "benchmarks.network.worker") -> None:
        self.network, self.ranks, self.alone, self._module = network, ranks, alone, module
        self._workers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Team:
        """Start the processes; they meet while others start."""
        try:
            for rank in range(self.ranks):
                self._workers.append(self._start(rank))
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End them, whatever they do."""
        self._kill()

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Let all ranks do the same, and return their answers.

        Raises:
            RuntimeError: one has failed, has ended or takes too long.
        """
        for worker in self._workers:
            assert worker.stdin is not None
            try:
                worker.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
                worker.stdin.flush()
            except BrokenPipeError:
                pass  # told below
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + PATIENCE
        with selectors.DefaultSelector() as selector:
            for rank, worker in enumerate(self._workers):
                assert worker.stdout is not None
                selector.register(worker.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self.ranks:
                ready = selector.select(max(deadline - time.monotonic(), 0.0))
                if not ready:
                    late = sorted(set(range(self.ranks)) - answers.keys())
                    raise RuntimeError(f"no answer in {PATIENCE:.0f} s from ranks {late} to {do} {arguments}")
                for key, _ in ready:
                    answers[key.data] = self._answer(key.data, f"{do} {arguments}")
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(self.ranks)]

    def _answer(self, rank: int, asked: str) -> dict[str, Any]:
        worker = self._workers[rank]
        assert worker.stdout is not None
        line = worker.stdout.readline()
        if not line:
            raise RuntimeError(f"rank {rank} has ended with {worker.wait(10)} at {asked}; its message is above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"rank {rank} has failed at {asked}:\n{answer['error']}")
        return answer

    def _start(self, rank: int) -> subprocess.Popen[str]:
        interface = LOOPBACK if self.alone else INTERFACE
        address = "127.0.0.1" if self.alone else self.network.address(0)
        place = Place(rank, self.ranks, address, _FIRST_PORT + self.ranks, interface, os.getpid())
        command = [sys.executable, "-m", self._module, json.dumps(place._asdict())]
        return subprocess.Popen(
            self.network.inside(LOOPBACK if self.alone else rank, *command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            # A namespace has no names of hosts, which torch would warn of.
            env={**os.environ, "GLOO_SOCKET_IFNAME": interface, "TORCH_CPP_LOG_LEVEL": "ERROR"},
            start_new_session=True,  # Ctrl-C is for the benchmark, which ends them
        )

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.communicate()
        self._workers.clear()
