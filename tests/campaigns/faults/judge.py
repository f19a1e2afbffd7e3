"""One trial of a fault: a run of `penstock train` in whose midst a worker is killed or stopped, and what must follow.

A trial is a function of its seed but for the speed of the machine: the moment of the fault is a line of the run's
metrics and a delay, or a delay after a worker has been started.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from penstock.checkpoint.format import Checkpoint, checkpoints
from penstock.errors import CheckpointError
from penstock.train.export.weights_format import load_weights

BATCHES = 60
STALL = 8.0  # seconds of `timeout` where a worker is stopped; a slow machine must not stall by itself
GRACE = 45.0  # seconds from the fault, or the time-out that notices it, to the end of a job that gives up
STARTING = 90.0  # the same from a fault while workers start: a minute that the others wait, once they are there
PATIENCE = 400.0  # seconds for a whole run, restarts included
_MARK = "PENSTOCK_TRIAL"  # in the environment of all processes of a run, so that none of them hides


@dataclass(frozen=True)
class Shape:
    """What is trained.

    Attributes:
        every: batches between two checkpoints.
        patience: evaluations that may find nothing better before the run ends; None to train all batches.
    """

    method: str
    stages: int
    width: int = 1
    every: int = 4
    patience: int | None = None

    @property
    def workers(self) -> int:
        return self.stages * self.width

    @property
    def name(self) -> str:
        stops = ", patience" if self.patience is not None else ""
        return f"{self.method} {f'{self.width} x ' if self.width > 1 else ''}{self.stages}{stops}"

    @property
    def lines(self) -> int:
        """Of the metrics of a run, roughly: losses, updates, checkpoints."""
        return 2 * BATCHES + BATCHES // 4 if self.patience is None else 45

    def settings(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "stages": self.stages,
            "width": self.width,
            "batches": BATCHES,
            "microbatches": max(self.stages, 2),
            "microbatch_size": 2,
            "validation_samples": 8,
            "sample_length": 0,
            "threads": 1,
            "timeout": 120.0,
            "model": {"layers": 2, "width": 32, "heads": 2, "context": 16},
            "checkpoint": {"every": self.every, "keep": 2},
            **(self._impatient() if self.patience is not None else {}),
        }

    def _impatient(self) -> dict[str, Any]:
        """A rate that is too high, so that a run with an average ends in the midst of its batches."""
        return {
            "ema_decay": 0.9,
            "optimizer": {"lr": 0.3},
            "lr_schedule": {"warm_up": 0},
            "evaluate": {"every": 2, "samples": 4, "patience": self.patience},
        }


@dataclass(frozen=True)
class Fault:
    """What happens to a worker, and when.

    Attributes:
        rank: whose.
        number: SIGKILL or SIGSTOP.
        lines: of the metrics, after which `delay` begins; None to begin when the worker has been started.
        delay: seconds.
    """

    rank: int
    number: signal.Signals
    lines: int | None
    delay: float

    def __str__(self) -> str:
        since = "start" if self.lines is None else f"line {self.lines}"
        return f"{self.number.name} {self.rank} at {since} + {self.delay:.3f} s"


@dataclass
class Outcome:
    """What became of a run.

    Attributes:
        code: its exit code; None if it had to be killed.
        seconds: from the last fault to its end; None where no fault came in time.
        faults: how many of them came in time.
        lines: of the metrics, when the last one came.
        alive: processes that it left behind.
    """

    folder: Path
    code: int | None = None
    seconds: float | None = None
    faults: int = 0
    lines: int = 0
    alive: list[str] = field(default_factory=list)
    out: str = ""
    err: str = ""

    @property
    def report(self) -> str:
        """What it has said about its failure."""
        return self.err[max(self.err.rfind("error: "), 0) :]


def run(out: Path, settings: dict[str, Any], faults: tuple[Fault, ...] = (), resume: Path | None = None) -> Outcome:
    """Run `penstock train` with a configuration, or go on with a run folder, and let faults happen to it.

    Args:
        out: an empty folder for all that the run makes.
        settings: the configuration, `data` included.
        faults: one after another, each to workers that were started after the one before.
        resume: a run folder.
    """
    out.mkdir(parents=True)
    (out / "config.yaml").write_text(yaml.safe_dump({**settings, "out": str(out / "runs")}))
    again = ["--restart"] if resume is not None and not checkpoints(resume) else []
    what = ["--resume", str(resume), *again] if resume is not None else ["--config", str(out / "config.yaml")]
    mark, temporary = uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix="trial-"))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "RANK"))}
    environment |= {_MARK: mark, "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "penstock", "train", *what]
    with (out / "stdout").open("w") as stdout, (out / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)
        outcome = Outcome(resume or out)
        gone: set[int] = set()
        begun = last = time.monotonic()
        for fault in faults:
            if not _cause(process, out, fault, gone):
                break
            outcome.faults, outcome.lines, last = outcome.faults + 1, _lines(out), time.monotonic()
        try:
            outcome.code = process.wait(timeout=max(begun + PATIENCE - time.monotonic(), GRACE + STALL))
        except subprocess.TimeoutExpired:
            outcome.err = f"(it hangs: {_stacks(mark)})\n"
        outcome.seconds = time.monotonic() - last if outcome.faults else None
    outcome.alive = _left_behind(mark)
    outcome.alive += [f"folder {path.name}" for path in temporary.glob("penstock-*")]
    process.wait()
    shutil.rmtree(temporary, ignore_errors=True)
    outcome.folder = resume or next((out / "runs").iterdir(), out)
    outcome.out, outcome.err = (out / "stdout").read_text(), outcome.err + (out / "stderr").read_text()
    return outcome


def _cause(process: subprocess.Popen[bytes], out: Path, fault: Fault, gone: set[int]) -> bool:
    """Wait for the moment of a fault and let it happen; False if the run ends before."""
    victim = None
    while process.poll() is None:
        if victim is None:
            workers = [pid for pid in workers_of(process.pid) if pid not in gone]
            victim = workers[fault.rank] if len(workers) > fault.rank else None
        elif fault.lines is None or _lines(out) >= fault.lines:
            break
        time.sleep(0.001)
    else:
        return False
    time.sleep(fault.delay)
    gone.update(workers_of(process.pid))
    try:
        if psutil.Process(victim).status() == psutil.STATUS_ZOMBIE:
            return False
        os.kill(victim, fault.number)
    except (psutil.Error, ProcessLookupError):
        return False
    return True


def workers_of(launcher: int) -> list[int]:
    """The worker processes of a run, by rank."""
    try:
        children = psutil.Process(launcher).children()
        servers = [c for c in children if any("forkserver" in part for part in c.cmdline())]
        return sorted(worker.pid for server in servers for worker in server.children())
    except psutil.Error:
        return []


def _lines(out: Path) -> int:
    files = list(out.glob("runs/*/metrics.jsonl"))
    return files[0].read_bytes().count(b"\n") if files else 0


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _stacks(mark: str) -> str:
    return "; ".join(f"{p.pid} {p.status()} {' '.join(p.cmdline()[-1:])[:60]}" for p in _marked(mark))


def _left_behind(mark: str) -> list[str]:
    """Processes that are there a while after the end; they are killed."""
    patience = time.monotonic() + 5
    while (found := _marked(mark)) and time.monotonic() < patience:
        time.sleep(0.1)
    said = [f"process {p.pid} {' '.join(p.cmdline())[:80]}" for p in found]
    for process in found:
        process.kill()
    return said


# --- what must have become of it ------------------------------------------------------------------------------------

_AT_WORK = re.compile(r"rank \d+, stage [\d.]+, ([A-Z]+\d+|sending (activation|gradient) \d+)")
_ALONE = re.compile(r"(?!.*(waiting for|nothing moved|broke))", re.DOTALL)  # at work itself
_PEER = re.compile(r"lane (from rank \d+ to rank \d+|of ranks \d+(, \d+)+|of all stages)")
_TOGETHER = re.compile(r"rank \d+, [a-z ]+: (a peer is dead or stalled|rank [\d, ]+ did not come)")
_APART = re.compile(r"(EndedError: (starting|rank \d+, between two runs): ended by SIGTERM)|had finished")
_SILENT = "reported nothing"


def reports(line: str, silence: bool) -> bool:
    """Whether a survivor says what it was doing.

    In the pipeline that is: rank, stage, action, microbatch (or batch) and, if it waited, for whom; in a call of all
    ranks, which one.

    Args:
        line: what is told about it.
        silence: the fault came before training or after it, where a worker may be ended without a word.
    """
    in_pipeline = _AT_WORK.search(line) and (_PEER.search(line) or _ALONE.match(line))
    return bool(in_pipeline or _TOGETHER.search(line) or _APART.search(line) or (silence and _SILENT in line))


def judge_failure(shape: Shape, fault: Fault, outcome: Outcome) -> list[str]:
    """What is wrong with the end of a run that was to give up."""
    wrong = [f"left behind: {thing}" for thing in outcome.alive]
    if outcome.code is None:
        return [*wrong, "it hangs"]
    if outcome.code != 1:
        wrong.append(f"exit code {outcome.code}")
    limit = GRACE
    if fault.number == signal.SIGSTOP:
        limit += STALL if outcome.lines else STARTING
    if outcome.seconds is not None and outcome.seconds > limit:
        wrong.append(f"it took {outcome.seconds:.1f} s to end, not {limit:g}")
    report = outcome.report
    if not report.startswith(f"error: worker {fault.rank} "):
        wrong.append(f"the report does not name worker {fault.rank}: {report[:200]!r}")
    metrics = outcome.folder / "metrics.jsonl"
    silence = outcome.lines == 0 or "validation_loss" in metrics.read_text()
    for rank in set(range(shape.workers)) - {fault.rank}:
        line = re.search(rf"^  worker {rank}: (.*)$", report, re.MULTILINE)
        if line is None or not reports(line[1], silence):
            wrong.append(f"worker {rank} has not reported" + ("" if line is None else f" what it did: {line[1]}"))
    return wrong + judge_folder(outcome.folder, stalled=fault.number == signal.SIGSTOP)


def judge_restarts(shape: Shape, faults: tuple[Fault, ...], outcome: Outcome) -> list[str]:
    """What is wrong with what a run has told before its workers were started again."""
    told = outcome.err.split("a worker has failed; all workers are restarted")[1:]
    if len(told) != outcome.faults:
        return [f"{outcome.faults} faults, but the user was told {len(told)} times: {outcome.err[:300]!r}"]
    wrong = []
    for number, (fault, said) in enumerate(zip(faults, told, strict=False)):
        for rank in range(shape.workers):
            line = re.search(rf"^  worker {rank}: (.*)$", said, re.MULTILINE)
            # The second one comes as soon as workers have started again, if its line is there already.
            at_an_end = number > 0 or fault.lines is None or fault.lines >= shape.lines - 15
            if line is None or not reports(line[1], silence=rank == fault.rank or at_an_end):
                wrong.append(f"worker {rank} has not reported" + ("" if line is None else f" what it did: {line[1]}"))
    return wrong


def judge_folder(folder: Path, stalled: bool = False) -> list[str]:
    """What is wrong with the checkpoints and the metrics of a run; of a stalled one some are not completed."""
    wrong = []
    for path in checkpoints(folder):
        try:
            Checkpoint(path)
        except CheckpointError as error:
            wrong.append(str(error))
    for line in (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else ():
        try:
            said = json.loads(line)
        except ValueError:
            wrong.append(f"a broken line of metrics: {line[:80]!r}")
            continue
        if ("failure" in said and not stalled) or "damaged_checkpoint" in said:
            wrong.append(line)
    return wrong


def judge_success(undisturbed: Path, outcome: Outcome) -> list[str]:
    """What is wrong with a run that was to end as if nothing had been."""
    wrong = [f"left behind: {thing}" for thing in outcome.alive]
    if outcome.code != 0:
        said = "it hangs" if outcome.code is None else f"exit code {outcome.code}"
        return [*wrong, f"{said}: {outcome.report[:300]!r}"]
    expected, found = load_weights(undisturbed), load_weights(outcome.folder)
    if expected.keys() != found.keys():
        wrong.append("it has other tensors than the undisturbed run")
    else:
        different = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
        if different:
            wrong.append(f"{len(different)} of {len(expected)} tensors differ, the first of them {different[0]}")
    losses, others = _losses(undisturbed), _losses(outcome.folder)
    different_losses = [batch for batch, loss in others.items() if losses.get(batch) != loss]
    if different_losses:
        wrong.append(f"the losses of batches {different_losses} differ")
    return wrong + judge_folder(outcome.folder)


def _losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["batch"]: line["loss"] for line in lines if "batch" in line}
