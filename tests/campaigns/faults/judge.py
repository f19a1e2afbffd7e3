"""Judges what has become of a run: exit codes, words, processes and files that are left, checkpoints, weights."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

import penstock
from campaigns.faults.cases import Case
from campaigns.faults.job import HOSTS, LOCAL, RANKS
from campaigns.faults.shapes import STALL
from penstock.checkpoint.format import Checkpoint, checkpoints
from penstock.errors import CheckpointError
from penstock.train.export.weights_folder import load_weights

GRACE = 60.0  # seconds from the fault, or the time-out that notices it, to the end of a job that gives up
STARTING = 90.0  # the same from a fault while workers start: a minute that the others wait, once they are there
_TORCHRUN = 40.0  # torchrun gives workers 30 seconds to end


_PLACES = (
    (sys.prefix, "ENVIRONMENT"),
    (sys.base_prefix, "PYTHON"),
    (str(Path(penstock.__file__).parents[2]), "PROJECT"),
    (tempfile.gettempdir(), "TEMPORARY"),
)
"""Folders in tracebacks, and what stands for them in records."""


@dataclass
class Outcome:
    """What became of a run.

    Attributes:
        codes: the exit codes of what was started; None where it had to be killed.
        seconds: from the fault to the end; None where none came in time.
        in_time: whether the fault came in time.
        lines: of the metrics, when it came.
        left: processes and temporary files that it left behind.
    """

    folder: Path
    codes: list[int | None] = field(default_factory=list)
    seconds: float | None = None
    in_time: bool = False
    lines: int = 0
    left: list[str] = field(default_factory=list)
    out: str = ""
    err: str = ""

    @property
    def report(self) -> str:
        """What it has said about its failure."""
        return self.err[max(self.err.rfind("error: "), 0) :]

    @property
    def tail(self) -> str:
        """The end of what it has said, for the record: without the places of this machine."""
        said, length = (self.report, 1500) if "error: " in self.err else (self.err, 600)
        for place, name in _PLACES:
            said = said.replace(place, name)
        return said[-length:]


@dataclass
class Wanted:
    """What a run to which nothing happened ends with: its weights by name, its losses by batch."""

    weights: dict[str, torch.Tensor]
    losses: dict[int, float]

    @classmethod
    def of(cls, folder: Path) -> Wanted:
        """What a run folder has."""
        return cls(load_weights(folder), _losses(folder))


_AT_WORK = re.compile(r"rank \d+, stage [\d.]+, ([A-Z]+e?\d+|sending (activation|gradient) \d+)")
_ALONE = re.compile(r"(?!.*(waiting for|nothing moved|broke))", re.DOTALL)  # at work itself
_PEER = re.compile(r"lane (from rank \d+ to rank \d+|of ranks \d+(, \d+)+|of all stages)")
_TOGETHER = re.compile(r"rank \d+, [a-zA-Z ]+: (a peer is dead or stalled|rank [\d, ]+ did not come)")
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


def judge_end(case: Case, outcome: Outcome) -> list[str]:
    """What is wrong with the end of a run to which something happened."""
    end, wrong = case.kind.end, judge_left(outcome, case.kind.unclean, case.kind.launcher)
    if None in outcome.codes:
        return [*wrong, f"it hangs: exit codes {outcome.codes}"]
    ending = case.moment.when == "ending"
    if ending and set(outcome.codes) == {0}:
        return wrong  # it came when nothing was left to do
    if not set(outcome.codes) <= set(end.codes):
        wrong.append(f"exit codes {outcome.codes}, not {end.codes}: {outcome.err[-300:]!r}")
    limit = GRACE + (_TORCHRUN if case.kind.launcher == HOSTS else 0)
    limit += (STALL if outcome.lines else STARTING) if end.stalls else 0
    if end.then != "same" and outcome.seconds is not None and outcome.seconds > limit:
        wrong.append(f"it took {outcome.seconds:.1f} s to end, not {limit:g}")
    fault = {"{rank}": str(case.rank), "{folder}": re.escape(outcome.folder.name)}
    says = re.sub(r"\{rank\}|\{folder\}", lambda found: fault[found[0]], end.says)
    early = not outcome.lines or ending  # a worker is still to say who it is, or has nothing left to do
    if says and not re.search(says, outcome.out + outcome.err) and not (early and case.kind.restarts):
        wrong.append(f"it does not say {says!r}: {outcome.report[:300]!r}")
    if (end.survivors or case.kind.under) and "Traceback" in outcome.err:
        wrong.append("it prints a traceback")
    wrong += _judge_survivors(case, outcome) if end.survivors else []
    stands = outcome.folder.exists() and not case.kind.name.startswith("disk")
    return wrong + (judge_folder(outcome.folder, stalled=end.stalls) if stands else [])


def _judge_survivors(case: Case, outcome: Outcome) -> list[str]:
    """What is wrong with what the report says of the workers that did not fail."""
    wrong, metrics = [], outcome.folder / "metrics.jsonl"
    silence = outcome.lines == 0 or not metrics.exists() or "validation_loss" in metrics.read_text()
    same = "all other workers: the same" in outcome.report
    for rank in set(range(case.shape.workers)) - {case.rank}:
        line = re.search(rf"^  worker {rank}: (.*)$", outcome.report, re.MULTILINE)
        if not same and (line is None or not reports(line[1], silence)):
            wrong.append(f"worker {rank} has not reported" + ("" if line is None else f" what it did: {line[1]}"))
    return wrong


def judge_left(outcome: Outcome, unclean: bool, launcher: str = LOCAL) -> list[str]:
    """What is left behind: no process may be, and no temporary file, unless its launcher died or leaves some itself."""
    own = "temporary penstock-" if launcher in (HOSTS, RANKS) else "temporary "  # torchrun leaves folders of its own
    wrong = [
        f"left behind: {it}"
        for it in outcome.left
        if not it.startswith("temporary ") or (not unclean and it.startswith(own))
    ]
    if not unclean and outcome.folder.exists():
        wrong += [f"left behind: {path.name}" for path in outcome.folder.glob(".workers-*")]
    return wrong


def judge_damage(case: Case, outcome: Outcome, wanted: Wanted) -> list[str]:
    """What is wrong with a run that was resumed after its files had been damaged."""
    end = case.kind.end
    if end.then == "same":
        wrong = judge_same(wanted, outcome, end.codes, damaged=True)
        if end.says and not re.search(end.says, outcome.out + outcome.err):
            wrong.append(f"it does not say {end.says!r}: {(outcome.out + outcome.err)[-300:]!r}")
        return wrong
    wrong = judge_left(outcome, unclean=False)
    if not set(outcome.codes) <= set(end.codes):
        wrong.append(f"exit codes {outcome.codes}, not {end.codes}: {outcome.err[-300:]!r}")
    if not re.search(end.refused, outcome.err) or "Traceback" in outcome.err:
        wrong.append(f"it does not say {end.refused!r}: {outcome.err[-300:]!r}")
    return wrong


def judge_folder(folder: Path, stalled: bool = False, damaged: bool = False) -> list[str]:
    """What is wrong with the checkpoints and the metrics of a run.

    Args:
        stalled: some checkpoints were not completed.
        damaged: files of it were damaged.
    """
    wrong = []
    for path in checkpoints(folder):
        try:
            Checkpoint(path)
        except CheckpointError as error:
            wrong += [] if damaged else [str(error)]
    text = (folder / "metrics.jsonl").read_text(errors="replace") if (folder / "metrics.jsonl").exists() else ""
    for line in () if damaged else text.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            wrong.append(f"a broken line of metrics: {line[:80]!r}")
            continue
        if ("failure" in said and not stalled) or "damaged_checkpoint" in said:
            wrong.append(line)
    return wrong


def judge_same(
    wanted: Wanted | None, outcome: Outcome, codes: tuple[int, ...], damaged: bool = False, noise: str = ""
) -> list[str]:
    """What is wrong with a run that was to end as if nothing had been.

    Args:
        wanted: what it must end with; None if it is not to end.
        noise: a regular expression of tracebacks that other programs may print.
    """
    wrong = judge_left(outcome, unclean=False, launcher=HOSTS if len(outcome.codes) > 1 else LOCAL)
    if not outcome.codes or not set(outcome.codes) <= set(codes):
        said = "it hangs" if None in outcome.codes else f"exit codes {outcome.codes}, not {codes}"
        return [*wrong, f"{said}: {outcome.report[:500]!r}"]
    if wanted is None:
        return wrong
    said = re.sub(noise, "", outcome.err) if noise else outcome.err
    if "Traceback" in said and len(outcome.codes) == 1:  # torchrun prints one of its own
        wrong.append(f"it prints a traceback: {said[-300:]!r}")
    expected, end = wanted.weights, Wanted.of(outcome.folder)
    found = end.weights
    different = [name for name, tensor in expected.items() if name not in found or not torch.equal(tensor, found[name])]
    if different or expected.keys() != found.keys():
        wrong.append(f"{len(different)} of {len(expected)} tensors differ, such as {different[:1]}")
    different_losses = [batch for batch, loss in end.losses.items() if wanted.losses.get(batch) != loss]
    if different_losses:
        wrong.append(f"the losses of batches {different_losses} differ")
    parts = [path for path in outcome.folder.glob("**/*.part") if path.is_file()]
    wrong += [f"left behind: {path.name}" for path in parts]
    return wrong + judge_folder(outcome.folder, stalled=True, damaged=damaged)


def _losses(folder: Path) -> dict[int, float]:
    found = {}
    path = folder / "metrics.jsonl"
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict) and "batch" in said:
            found[said["batch"]] = said["loss"]
    return found
