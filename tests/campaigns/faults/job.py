"""A job of `penstock train` as the campaign of faults starts it: its processes, its progress, what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil

LOCAL, HOSTS, RANKS = "penstock train", "two torchruns", "a process per rank"
_PLANTED = Path(__file__).parent / "planted"
_MARK = "PENSTOCK_TRIAL"  # in the environment of all processes of a job, so that none of them hides
_CACHE = "torchinductor_"  # which torch makes when it is imported, and keeps for the next time
_LEAVES = 5.0  # seconds that processes may take to go when a job has ended
_FAMILIES = (
    "TORCHELASTIC",
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "MASTER_",
)  # variables of a job that this process may be in


class Job:
    """The processes of one job.

    Args:
        out: an empty folder for what it prints; its run folder is in `out/runs` unless it resumes another one.
        launcher: LOCAL, HOSTS (two torchruns, each for half of the ranks) or RANKS (as srun starts them).
        arguments: of `penstock train`.
        workers: how many.
        restarts: of torchrun; the other launchers do not take it.
        under: what a shell does before it becomes the launcher.

    Attributes:
        launchers: the processes that were started here.
    """

    def __init__(
        self, out: Path, launcher: str, arguments: list[str], workers: int, restarts: int = 0, under: str = ""
    ) -> None:
        self.out, self.launcher, self._workers, self._under = out, launcher, workers, under
        self._mark, self.temporary = uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix="trial-"))
        self._streams = contextlib.ExitStack()
        train = ["-m", "penstock", "train", *arguments]
        if launcher == LOCAL:
            commands = [(train, {})]
        elif launcher == HOSTS:
            meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{_free_port()}", "--rdzv-id", "pair"]
            each = ["--nnodes", "2", "--nproc-per-node", str(workers // 2), "--max-restarts", str(restarts), *meet]
            commands = [(["-m", "torch.distributed.run", *each, *train], {"GLOO_SOCKET_IFNAME": "lo"})] * 2
        else:
            place = {"WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
            commands = [(train, place | {"RANK": str(rank)}) for rank in range(workers)]
        self.launchers = [self._start(number, *command) for number, command in enumerate(commands)]

    def _start(self, number: int, arguments: list[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_FAMILIES)}
        own = [os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        path = os.pathsep.join([str(_PLANTED), *own])  # also from another working folder
        environment |= {"PYTHONPATH": path, "PENSTOCK_PLANTED": str(self.temporary)}
        environment |= {_MARK: self._mark, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", **variables}
        out, err = (self._streams.enter_context((self.out / f"{name}{number}").open("w")) for name in ("out", "err"))
        shell = ["sh", "-c", f'{self._under}; exec "$@"', "sh"] if self._under else []
        return subprocess.Popen([*shell, sys.executable, *arguments], stdout=out, stderr=err, env=environment)

    @property
    def over(self) -> bool:
        """Whether a process that was started here has ended."""
        return any(process.poll() is not None for process in self.launchers)

    def workers(self) -> list[int]:
        """The worker processes by rank; fewer than all of them while they start."""
        if self.launcher == LOCAL:
            return workers_of(self.launchers[0].pid)
        if self.launcher == RANKS:
            return [process.pid for process in self.launchers]
        by_rank = {}
        for agent in self.launchers:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(agent.pid).children():
                    by_rank[int(child.environ().get("RANK", "-1"))] = child.pid
        return [by_rank[rank] for rank in sorted(by_rank) if rank >= 0]

    def helper(self, word: str) -> int | None:
        """The process of the launcher whose command line has a word: its fork server, its resource tracker."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.launchers[0].pid).children():
                if any(word in part for part in child.cmdline()):
                    return child.pid
        return None

    def everybody(self) -> list[int]:
        """All its processes."""
        return [process.pid for process in self._marked()]

    @property
    def folder(self) -> Path | None:
        """Its new run folder, once it is there."""
        return next((self.out / "runs").glob("*/"), None)

    @property
    def lines(self) -> int:
        """Of its metrics."""
        try:
            return 0 if self.folder is None else (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    @property
    def saves(self) -> bool:
        """Whether it is writing a checkpoint."""
        return self.folder is not None and any((self.folder / "checkpoints").glob(".[!.]*"))

    def wait(self, seconds: float) -> list[int | None]:
        """The exit codes of what was started here; None where it had to be killed after so many seconds."""
        deadline, codes = time.monotonic() + seconds, []
        for process in self.launchers:
            try:
                codes.append(process.wait(timeout=max(deadline - time.monotonic(), 0.1)))
            except subprocess.TimeoutExpired:
                codes.append(None)
        return codes

    def clean_up(self) -> list[str]:
        """Kill what is left of the job and remove its temporary files; returns what was left."""
        patience = time.monotonic() + _LEAVES
        while (found := self._marked()) and time.monotonic() < patience:
            time.sleep(0.1)
        said = [f"process {p.pid} ({p.status()}) {' '.join(p.cmdline())[-80:]}" for p in found]
        for process in found:
            process.kill()
        for process in self.launchers:
            process.wait()
        said += [f"temporary {path.name}" for path in self.temporary.iterdir() if not path.name.startswith(_CACHE)]
        shutil.rmtree(self.temporary, ignore_errors=True)
        self._streams.close()
        return said

    def printed(self, stream: str) -> str:
        """What its processes have printed, one after the other."""
        return "".join((self.out / f"{stream}{n}").read_text(errors="replace") for n in range(len(self.launchers)))

    def _marked(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def workers_of(launcher: int) -> list[int]:
    """The worker processes of a `penstock train`, by rank."""
    try:
        children = psutil.Process(launcher).children()
        servers = [c for c in children if any("forkserver" in part for part in c.cmdline())]
        return sorted(worker.pid for server in servers for worker in server.children())
    except psutil.Error:
        return []


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
