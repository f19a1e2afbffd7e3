"""How workers end: what they leave behind, which of them have to be ended, and what the user is told.

A worker that fails leaves its error where torch elastic has told it to; one that has done its part leaves a mark. A
worker that breaks its connections makes its peers fail, too, and elastic may see them first: the cause is what is
neither about transport nor about an end; if nobody says such a thing, it is the one that has said nothing.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from penstock.errors import WorkerError
from penstock.launch.parent_death import end_with_parent

_BEGUN, _DONE = "begun", "done"  # marks of workers
_SAID_ALL = ("ConfigError", "DataError", "CheckpointError")  # messages that need no traceback
_CONSEQUENCES = ("TransportError", "EndedError")
_GRACE = 10.0  # seconds without another report, after which those that have not ended are killed


class _Report(NamedTuple):
    """What a worker has said about its failure."""

    seconds: float
    rank: int
    message: str
    trace: str


def work(function: Callable[..., None], folder: str, *arguments: Any) -> None:
    """Be a worker: leave a mark, run a function, and leave another mark when it has returned."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C may reach the workers of a terminal, too; the launcher asks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    start, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    mark = f"{start}-{rank}-{os.getpid()}-{os.getpgrp()}"
    (Path(folder) / f"{_BEGUN}-{mark}").touch()
    function(*arguments)
    (Path(folder) / f"{_DONE}-{mark}").touch()


class Ends:
    """Those of the workers of a job, which elastic may start several times.

    Args:
        folder: for what they leave behind.
        workers: how many.
        timeout: seconds within which all have done their part when one has.

    Attributes:
        errors: the folder that elastic is to have them leave their errors in.
    """

    def __init__(self, folder: Path, workers: int, timeout: float) -> None:
        self._folder, self._ranks, self._timeout = folder, set(range(workers)), timeout
        self.errors = folder / "errors"
        self._seen, self._since = (-1, 0, 0), 0.0
        self._killed: float | None = None  # when the last start's workers were first killed
        self._still: list[int] = []  # those of them that could not have ended by themselves any more

    def look(self) -> None:
        """See whether workers have to be ended: elastic waits long after a failure, and for ever after a good end."""
        start = self._last_start()
        reports, done = self._reports(start), self._marks(_DONE, start)
        seen = start, len(reports), len(done)
        if seen != self._seen:
            if start > self._seen[0] >= 0:
                said = self._lines(start - 1, self._ranks)
                logging.getLogger(__name__).warning("a worker has failed, and all are started again%s", said)
            self._seen, self._since, self._killed = seen, time.monotonic(), None
        elif any(seen[1:]) and time.monotonic() - self._since > (_GRACE if reports else self._timeout):
            self.kill(spared=set() if done.keys() == self._ranks else done.keys())

    @property
    def is_stuck(self) -> bool:
        """Whether elastic does not notice that all have done their part, and that who had not ended was killed.

        It wakes all that wait for it to have read their results, and waits until each has woken: for ever, if one has
        died or been stopped in between.
        """
        if self._killed is None or time.monotonic() - self._killed < _GRACE:
            return False
        return self._marks(_DONE, self._last_start()).keys() == self._ranks

    def kill(self, spared: Collection[int] = ()) -> None:
        """Kill the workers of the last start, but for some ranks."""
        begun = self._marks(_BEGUN, self._last_start())
        if self._killed is None:
            self._killed = time.monotonic()
            self._still = sorted(rank for rank, (process, _) in begun.items() if _is_still(process))
        for rank, (process, group) in begun.items():
            with suppress(ProcessLookupError):
                if rank not in spared and os.getpgid(process) == group:  # else its number has gone to another process
                    os.kill(process, signal.SIGKILL)

    def explain(self, error: ChildFailedError) -> WorkerError:
        """What the user must know: who has failed and why, and what every other worker was doing."""
        found, failure = error.get_first_failure()
        start = self._last_start()
        reports, done = self._reports(start), self._marks(_DONE, start)
        causes = [report for report in reports.values() if not report.message.startswith(_CONSEQUENCES)]
        silent = self._ranks - reports.keys() - done.keys()
        if causes or (found in reports and not silent):
            _, rank, message, trace = min(causes) if causes else reports[found]
            what = f"failed with exit code {failure.exitcode if rank == found else 1}: {message}"
            trace = "" if message.startswith(_SAID_ALL) else trace
        else:
            rank, trace = min(silent) if found in reports else found, ""
            what = f"failed with exit code {failure.exitcode}: {failure.message}"
            if rank != found and len(silent) > 1:
                what = f"or {', '.join(map(str, sorted(silent - {rank})))} is stalled or dead: they have said nothing"
            elif rank != found or self._killed is not None:
                what = "is stalled or dead: it has said nothing"
        cause = reports[rank].message if rank in reports else ""
        return WorkerError(f"worker {rank} {what}{self._lines(start, self._ranks - {rank}, cause)}", trace)

    def explain_stuck(self) -> WorkerError:
        """The same where `is_stuck`: whom elastic has waited for."""
        start = self._last_start()
        if not self._still:
            return WorkerError("all workers have done their part, but not all have ended; they were killed", "")
        rank, *_ = self._still
        what = "is stalled or dead: it had done its part, but did not end"
        return WorkerError(f"worker {rank} {what}{self._lines(start, self._ranks - {rank})}", "")

    def _lines(self, start: int, ranks: set[int], cause: str = "") -> str:
        """A line for each of some workers, or one if all have said what the cause is."""
        said = dict.fromkeys(sorted(ranks), "has said nothing: it died, was starting, or did not react")
        said |= dict.fromkeys(ranks & self._marks(_DONE, start).keys(), "had done its part")
        said |= {rank: report.message for rank, report in self._reports(start).items() if rank in ranks}
        if said and set(said.values()) == {cause}:
            return "\n  all other workers: the same"
        return "".join(f"\n  worker {rank}: {text}" for rank, text in said.items())

    def _last_start(self) -> int:
        """How often elastic has started all workers again; -1 before it has started them."""
        return max((int(path.name.removeprefix("attempt_")) for path in self.errors.glob("*/attempt_*")), default=-1)

    def _marks(self, what: str, start: int) -> dict[int, tuple[int, int]]:
        """Process and process group of those that have begun, or done their part, by rank."""
        names = [path.name.split("-") for path in self._folder.glob(f"{what}-{start}-*")]
        return {int(rank): (int(process), int(group)) for _, _, rank, process, group in names}

    def _reports(self, start: int) -> dict[int, _Report]:
        """What those have said that have failed, by rank."""
        found = {}
        for path in self.errors.glob(f"*/attempt_{start}/*/error.json"):
            try:
                message: Any = json.loads(path.read_text())["message"]
            except ValueError:  # it is being written
                continue
            extra, rank = message["extraInfo"], int(path.parent.name)
            found[rank] = _Report(float(extra["timestamp"]), rank, str(message["message"]), str(extra["py_callstack"]))
        return found


def _is_still(process: int) -> bool:
    """Whether a process is stopped or dead, where the system tells."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return Path("/proc/self/stat").exists()  # it is gone, or nothing is known of any process
    return state in "TtZX"
