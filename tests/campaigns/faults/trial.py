"""Carries out one case: a run, its fault, and what is to follow; compares the end with an undisturbed run."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from campaigns.faults.acts import to_launcher
from campaigns.faults.cases import Case, Moment
from campaigns.faults.job import LOCAL, Job
from campaigns.faults.judge import Outcome, Wanted, judge_damage, judge_end, judge_same
from campaigns.faults.shapes import STALL, Shape

PATIENCE = 300.0  # seconds for a whole run, restarts included
INTERRUPT = to_launcher(signal.SIGTERM)  # before files are damaged


@dataclass
class Trials:
    """Carries out cases in a folder, each beside an undisturbed run of its shape.

    Attributes:
        undisturbed: what those end with, by shape.
    """

    folder: Path
    undisturbed: dict[Shape, Wanted] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.text = self.folder / "text.txt"
        if not self.text.exists():
            self.text.write_text("the quick brown fox jumps over the lazy dog. " * 400)

    def reference(self, shape: Shape) -> Wanted:
        """What a run to which nothing happens ends with."""
        if shape not in self.undisturbed:
            place = f"undisturbed {shape.name}"
            outcome = self._run(place, shape, None, self._config(place, shape, {}))
            if outcome.codes != [0]:
                raise RuntimeError(f"the undisturbed run of {shape.name} failed: {outcome.err}")
            self.undisturbed[shape] = Wanted.of(outcome.folder)
        return self.undisturbed[shape]

    def carry_out(self, case: Case, place: str) -> dict[str, Any]:
        """Run a case and judge it; what was found, with `wrong` as it should not be."""
        wanted, begun = self.reference(case.shape), time.monotonic()
        outcome = self.run(case, place)
        outcomes, wrong = [outcome], list[str]()
        if outcome.in_time and case.kind.damage is not None:
            wrong += [f"interrupted: {what}" for what in judge_same(None, outcome, (0,))]
            if not wrong:
                outcomes += self._after_damage(case, outcome, wanted, place, wrong)
        elif outcome.in_time:
            wrong += judge_end(case, outcome)
            if case.kind.end.then == "same":
                wrong += judge_same(wanted, outcome, case.kind.end.codes, noise=case.kind.end.noise)
            elif case.kind.end.then == "resume":
                outcomes.append(again := self._resume(place, case, outcome.folder))
                wrong += [f"resumed: {what}" for what in judge_same(wanted, again, (0,))]
        else:  # it came too late to do anything
            wrong += judge_same(wanted, outcome, (0,)) if case.kind.launcher == LOCAL else []
        if not wrong:
            for number in range(len(outcomes)):
                shutil.rmtree(self.folder / (place + "-again" * number), ignore_errors=True)
        return {
            "case": case.number, "kind": case.kind.name, "shape": case.shape.name, "rank": case.rank,
            "moment": str(case.moment), "in_time": outcome.in_time, "wrong": wrong,
            "codes": [o.codes for o in outcomes], "ended_after": outcome.seconds,
            "seconds": round(time.monotonic() - begun, 1), "printed": [o.tail for o in outcomes],
        }  # fmt: skip

    def _after_damage(
        self, case: Case, outcome: Outcome, wanted: Wanted, place: str, wrong: list[str]
    ) -> list[Outcome]:
        """Damage the files of a run that was interrupted, and resume it."""
        assert case.kind.damage is not None
        kept = (outcome.folder / "config.yaml").read_text()
        case.kind.damage(outcome.folder, random.Random(f"{case}"))
        again = self._resume(place, case, outcome.folder)
        wrong += [f"resumed: {what}" for what in judge_damage(case, again, wanted)]
        if case.kind.end.then != "restart":
            return [again]
        (outcome.folder / "config.yaml").write_text(kept)
        last = self._resume(f"{place}-again", case, outcome.folder, restart=True)
        wrong += [f"restarted: {what}" for what in judge_same(wanted, last, (0,))]
        return [again, last]

    def _resume(self, place: str, case: Case, folder: Path, restart: bool = False) -> Outcome:
        """Go on with a run by `penstock train`, whoever had started it; from the beginning if it has no checkpoint."""
        never = not list(folder.glob("checkpoints/batch-*/index.json")) and case.kind.damage is None
        arguments = ["--resume", str(folder), *(["--restart"] if restart or never else [])]
        return self._run(f"{place}-again", case.shape, None, arguments, resumed=folder)

    def run(self, case: Case, place: str, changes: dict[str, Any] | None = None) -> Outcome:
        """Run the job of a case with its fault, or what comes before the damage; with other settings, if given."""
        stalls = {"timeout": STALL} if case.kind.end.stalls else {}
        settings = {"restarts": case.kind.restarts} | stalls | (changes or {})
        return self._run(place, case.shape, case, self._config(place, case.shape, settings))

    def _config(self, place: str, shape: Shape, changes: dict[str, Any]) -> list[str]:
        """Write the configuration of a new run into an empty folder; returns the arguments that name it."""
        out = self.folder / place
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        settings = {**shape.settings(), "data": str(self.text), "out": str(out / "runs"), **changes}
        (out / "config.yaml").write_text(yaml.safe_dump(settings))
        return ["--config", str(out / "config.yaml")]

    def _run(
        self, place: str, shape: Shape, case: Case | None, arguments: list[str], resumed: Path | None = None
    ) -> Outcome:
        """Run a job to its end, in whose midst something may happen."""
        out = self.folder / place
        out.mkdir(parents=True, exist_ok=True)
        launcher, restarts = (LOCAL, 0) if case is None else (case.kind.launcher, case.kind.restarts)
        job = Job(out, launcher, arguments, shape.workers, restarts, "" if case is None else case.kind.under)
        outcome, last = Outcome(out), time.monotonic()
        try:
            if case is not None and case.kind.under:
                outcome.in_time = True
            elif case is not None and wait_for(job, case.moment, shape.workers):
                outcome.lines = job.lines
                outcome.in_time = (case.kind.act or INTERRUPT)(job, case.rank, random.Random(f"{case}"))
                last = time.monotonic()
            outcome.codes = job.wait(PATIENCE)
            outcome.seconds = round(time.monotonic() - last, 2) if outcome.in_time else None
        finally:
            outcome.left = job.clean_up()
        outcome.folder = resumed or job.folder or out
        outcome.out, outcome.err = job.printed("out"), job.printed("err")
        return outcome


def wait_for(job: Job, moment: Moment, workers: int) -> bool:
    """Wait for a moment; False if the job ends before."""
    steps: list[Callable[[], bool]] = [lambda: len(job.workers()) >= workers]
    steps += [] if moment.lines is None else [lambda: job.lines >= (moment.lines or 0)]
    steps += [lambda: job.saves] if moment.saving else []
    for step in steps:
        while not step():
            if job.over:
                return False
            time.sleep(0.002)
    time.sleep(moment.delay)
    return not job.over
