"""Tracks how workers end: collects their reports, kills those that hang, and makes the error that the user sees.

A worker that fails reports its error in the file that torch elastic asks for; one that finishes leaves a mark. When a
worker breaks its connections its peers fail, too, and elastic may see them first. So the root cause is the first error
that is neither a transport error nor an ordered exit; if there is none, the worker that reported nothing is blamed. If
all have reported, and the first one was ended by a signal, that signal came from outside the job.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from penstock.errors import WorkerError
from penstock.launch.signals import end_with_parent, take_default
from penstock.train.setup.machine_memory import may_lack_memory

_BEGUN, _DONE = "begun", "done"  # kinds of marks
_SAID_ALL = ("ConfigError", "DataError", "CheckpointError", "EndedError")  # errors whose message needs no traceback
_CONSEQUENCES = ("TransportError", "EndedError")
_FROM_OUTSIDE, _FOR_OTHERS = ", which came from outside the job", ", because another worker has failed"
_REPORT = 1 << 14  # bytes that a worker's report may take
_GRACE = 10.0  # seconds after the last report or death until workers that have not exited are killed


class _Report(NamedTuple):
    """A worker's report of its failure."""

    seconds: float  # a whole number
    written: float  # when its file was, which tells reports of one second apart
    rank: int
    message: str
    trace: str

    @property
    def is_ended(self) -> bool:
        """Whether a signal has ended the worker."""
        return self.message.startswith("EndedError")


def work(function: Callable[..., None], folder: str, *arguments: Any) -> None:
    """Run a function as a worker: leave a mark before it starts and another one when it has returned."""
    start, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    mark = f"{start}-{rank}-{os.getpid()}-{os.getpgrp()}"
    try:
        (Path(folder) / f"{_BEGUN}-{mark}").touch()
        take_default()
        end_with_parent()
        function(*arguments)
    except BaseException as error:
        _check_room(Path(folder) / f"report-{mark}", f"worker {rank}: {type(error).__name__}: {error}")
        raise
    with suppress(OSError):  # on a full disk it would have failed for that alone
        (Path(folder) / f"{_DONE}-{mark}").touch()


def _check_room(path: Path, error: str) -> None:
    """End this worker if its error cannot be written into a file, and print it instead, in a line.

    Raises:
        SystemExit: it cannot, as the disk is full, say; torch would print tracebacks of that.
    """
    try:
        path.write_bytes(bytes(_REPORT))
        path.unlink()
    except OSError as full:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        sys.stderr.write(f"{' '.join(error.split())} (no report of it can be written: {full.strerror or full})\n")
        sys.exit(1)


class WorkerExits:
    """Watches how the workers of a job end, over all restarts by elastic.

    Args:
        folder: for the workers' marks and reports.
        workers: the number of workers.
        timeout: seconds for all workers to finish after the first has.

    Attributes:
        errors: the folder where elastic lets workers write their errors.
    """

    def __init__(self, folder: Path, workers: int, timeout: float) -> None:
        self._folder, self._ranks, self._timeout = folder, set(range(workers)), timeout
        self.errors = folder / "errors"
        self._start = -1  # the number of elastic's last restart
        self._seen, self._since = (0, 0), 0.0
        self._killed: float | None = None  # when the workers of the last start were first killed
        self._still: list[int] = []  # those of them that were stopped or dead, so could not have ended by themselves
        self._late: set[int] = set()  # the others of them
        self._dead: set[int] = set()  # those that had died before

    def look(self) -> None:
        """Kill workers that hang: elastic waits long after a failure, and for ever after some have finished."""
        self._notice_start()
        done = self._marks(_DONE)
        failed = self._reports().keys() | self._died()
        seen = len(failed), len(done)
        if seen != self._seen:
            self._seen, self._since, self._killed = seen, time.monotonic(), None
        elif any(seen) and time.monotonic() - self._since > (_GRACE if failed else self._timeout):
            self.kill(spared=set() if done.keys() == self._ranks else done.keys())

    def _notice_start(self) -> None:
        """Look whether elastic has started all workers again: everything is about the last start from then on."""
        start = max((int(path.name.removeprefix("attempt_")) for path in self.errors.glob("*/attempt_*")), default=-1)
        if start <= self._start:
            return
        if self._start >= 0:
            said = self._lines(self._ranks)
            logging.getLogger(__name__).warning("a worker has failed; all workers are restarted%s", said)
        self._start, self._seen, self._killed = start, (0, 0), None

    def kill(self, spared: Collection[int] = ()) -> None:
        """Kill the workers of the last start, except the given ranks."""
        self._notice_start()
        begun = self._marks(_BEGUN)
        if self._killed is None:
            self._killed = time.monotonic()
            self._still = sorted(rank for rank, (process, _) in begun.items() if _state(process) in "TtZX")
            self._late = begun.keys() - set(self._still)
        for rank, (process, group) in begun.items():
            with suppress(ProcessLookupError):
                if rank not in spared and os.getpgid(process) == group:  # else the process id has been reused
                    os.kill(process, signal.SIGKILL)

    def explain(self, error: ChildFailedError) -> WorkerError:
        """Make the error for the user: which worker failed and why, and what every other worker reported."""
        self._notice_start()
        seen, failure = error.get_first_failure()
        reports = self._reports()
        causes = [report for report in reports.values() if not report.message.startswith(_CONSEQUENCES)]
        silent = sorted(self._ranks - reports.keys() - self._marks(_DONE).keys())
        ended, trace = self._ended_from_outside(), ""
        if ended is not None:
            rank, what = ended, f"failed: {reports[ended].message}{_FROM_OUTSIDE}"
        elif causes or (seen in reports and not silent):
            cause = min(causes) if causes else reports[seen]
            rank, code = cause.rank, failure.exitcode if cause.rank == seen else 1
            what = f"failed with exit code {code}: {cause.message}"
            trace = "" if cause.message.startswith(_SAID_ALL) or may_lack_memory(cause.message) else cause.trace
        elif seen in reports or self._killed is not None:
            rank, *others = silent if seen in reports else [seen]
            numbers = ", ".join(map(str, others))
            it = f"or {numbers} is stalled or dead: they" if others else "is stalled or dead: it"
            what = f"{it} reported nothing"
        else:
            said = failure.message if failure.exitcode < 0 else "it could not report why; see what it has printed"
            rank, what = seen, f"failed with exit code {failure.exitcode}: {said}"
        message = reports[rank].message if rank in reports else ""
        return WorkerError(f"worker {rank} {what}{self._lines(self._ranks - {rank}, message)}", trace)

    def explain_stuck(self) -> WorkerError | None:
        """Make the error for the user if elastic hangs after all workers have finished; None if it does not.

        When workers have read each other's results, elastic wakes those that wait and waits until each has woken: for
        ever, if one has died or been stopped meanwhile. So it hangs if those that did not exit have been killed.
        """
        if self._killed is None or time.monotonic() - self._killed < _GRACE or self._marks(_DONE).keys() != self._ranks:
            return None
        if not self._still:
            return WorkerError("all workers finished, but not all of them exited; they were killed", "")
        rank, *_ = self._still
        what = "is stalled or dead: it had finished, but did not exit"
        return WorkerError(f"worker {rank} {what}{self._lines(self._ranks - {rank})}", "")

    def _died(self) -> set[int]:
        """Return the workers that are dead and have not finished, except those that this object has killed."""
        if self._killed is None:
            running = self._marks(_BEGUN).items()
            self._dead = {rank for rank, (process, _) in running if _state(process) in "ZX"} - self._marks(_DONE).keys()
        return self._dead

    def _ended_from_outside(self) -> int | None:
        """Return the worker that a signal from outside the job has ended; None if the cause is another one.

        Elastic signals workers only after one has failed, so such a worker reports before all others, and none of the
        others has died without a report. One that came too late to report was killed by this object.
        """
        reports = self._reports()
        silent = self._ranks - reports.keys() - self._marks(_DONE).keys() - self._late
        if not reports or silent or any(not r.message.startswith(_CONSEQUENCES) for r in reports.values()):
            return None
        first = min(reports.values())
        return first.rank if first.is_ended else None

    def _lines(self, ranks: set[int], cause: str = "") -> str:
        """Return a line for each of the given workers, or a single one if all reported the cause itself."""
        said = dict.fromkeys(sorted(ranks), "reported nothing: it died, was still starting, or did not respond")
        said |= dict.fromkeys(ranks & self._marks(_DONE).keys(), "had finished")
        ended = self._ended_from_outside()
        for rank, report in self._reports().items():
            if rank in ranks:
                why = (_FROM_OUTSIDE if rank == ended else _FOR_OTHERS) if report.is_ended else ""
                said[rank] = report.message + why
        if said and set(said.values()) == {cause}:
            return "\n  all other workers: the same"
        return "".join(f"\n  worker {rank}: {text}" for rank, text in said.items())

    def _marks(self, kind: str) -> dict[int, tuple[int, int]]:
        """Return (process id, process group) by rank of the workers that have left a mark."""
        names = [path.name.split("-") for path in self._folder.glob(f"{kind}-{self._start}-*")]
        return {int(rank): (int(process), int(group)) for _, _, rank, process, group in names}

    def _reports(self) -> dict[int, _Report]:
        """Return the reports of failed workers by rank."""
        reports = {}
        for path in self.errors.glob(f"*/attempt_{self._start}/*/error.json"):
            try:
                message: Any = json.loads(path.read_text())["message"]
                written = path.stat().st_mtime
            except ValueError:  # still being written
                continue
            extra, rank = message["extraInfo"], int(path.parent.name)
            trace = str(extra["py_callstack"])
            reports[rank] = _Report(float(extra["timestamp"]), written, rank, str(message["message"]), trace)
        return reports


def _state(process: int) -> str:
    """Return the letter of a process's state as in `ps`; X if it is gone, and R where there is no /proc.

    T and t are stopped processes, Z and X dead ones.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X" if Path("/proc/self/stat").exists() else "R"
