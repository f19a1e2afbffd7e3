"""Workers that are killed or stopped at random moments, in many seeded trials: `make faults`.

    PYTHONPATH=tests python -m campaigns.faults                    # 60 trials, about half an hour on two cores
    PYTHONPATH=tests python -m campaigns.faults --trials 4 --seed 7

In 50 trials workers are killed, in ten more one is stopped. Every other trial with kills, and those with stops, have no
restarts: the job must end in time with a report of every worker, leave no process and no broken checkpoint behind, and
`penstock train --resume` must end with the weights of an undisturbed run, bit for bit. The others have restarts; they
must tell the reports, and end with those weights by themselves.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from campaigns.trial import (
    STALL,
    Fault,
    Outcome,
    Shape,
    judge_failure,
    judge_restarts,
    judge_success,
    run,
)

SHAPES = (
    Shape("2bw", 2),
    Shape("1f1b", 3),
    Shape("stash", 2, every=5),
    Shape("2bw", 3, every=3),
    Shape("2bw", 2, width=2),
    Shape("1f1b", 2),
    Shape("2bw", 2, patience=2),
)
KILLS = 50  # the trials after those are of workers that are stopped
STARTING = 6.0  # seconds in which a worker starts, roughly
RESUMED = 2  # one of so many failed runs is resumed
DRAWS = 3  # a trial whose run ends before its fault is drawn again, so often


@dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
        restarts: of the job; 0 if it is to give up.
    """

    number: int
    shape: Shape
    faults: tuple[Fault, ...]
    restarts: int


def draw(number: int, seed: int, again: int = 0) -> Trial:
    """The trial of a number."""
    dice = random.Random(f"{seed}/{number}/{again}")
    shape = dice.choice(SHAPES)
    stalled = number >= KILLS
    restarts = 0 if stalled or number % 2 == 0 else 2
    count = 2 if restarts and dice.random() < 0.3 else 1
    faults = tuple(_draw_fault(dice, shape, signal.SIGSTOP if stalled else signal.SIGKILL) for _ in range(count))
    return Trial(number, shape, faults, restarts)


def _draw_fault(dice: random.Random, shape: Shape, number: signal.Signals) -> Fault:
    rank, when = dice.randrange(shape.workers), dice.random()
    if when < 0.15:
        return Fault(rank, number, None, dice.uniform(0, STARTING))
    if when < 0.85:
        return Fault(rank, number, dice.randint(1, shape.lines - 1), dice.uniform(0, 0.05))
    return Fault(rank, number, shape.lines - 10, dice.uniform(0, 1.0))


class Campaign:
    """All trials of one call, in a folder."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder, self._console = folder, console
        self._undisturbed: dict[Shape, Path] = {}
        self._text = folder / "text.txt"
        self._text.write_text("the quick brown fox jumps over the lazy dog. " * 400)

    def carry_out(self, trial: Trial, place: str) -> tuple[Outcome, dict[str, Any]]:
        """Run a trial and judge it."""
        undisturbed = self.undisturbed(trial.shape)
        settings = self._settings(trial.shape) | {"restarts": trial.restarts}
        if any(fault.number == signal.SIGSTOP for fault in trial.faults):
            settings["timeout"] = STALL
        outcome = run(self._folder / place, settings, trial.faults)
        resumed = False
        if not outcome.faults or trial.restarts:
            wrong = judge_success(undisturbed, outcome) + judge_restarts(trial.shape, trial.faults, outcome)
        else:
            wrong = judge_failure(trial.shape, trial.faults[0], outcome)
            if trial.number // 2 % RESUMED == 0:
                resumed = True
                again = run(self._folder / f"{place}-resumed", settings, resume=outcome.folder)
                wrong += [f"resumed: {what}" for what in judge_success(undisturbed, again)]
        said = {key: value for key, value in asdict(outcome).items() if key != "folder"}
        faults = [str(fault) for fault in trial.faults]
        return outcome, {
            "trial": trial.number, "shape": trial.shape.name, "faults": faults, "restarts": trial.restarts,
            "resumed": resumed, "wrong": wrong, "outcome": said,
        }  # fmt: skip

    def undisturbed(self, shape: Shape) -> Path:
        """The run folder of a run to which nothing happened."""
        if shape not in self._undisturbed:
            outcome = run(self._folder / f"undisturbed {shape.name}", self._settings(shape))
            if outcome.code != 0:
                raise RuntimeError(f"the undisturbed run of {shape.name} failed: {outcome.err}")
            self._undisturbed[shape] = outcome.folder
        return self._undisturbed[shape]

    def _settings(self, shape: Shape) -> dict[str, Any]:
        return {**shape.settings(), "data": str(self._text)}


def tabulate(found: list[dict[str, Any]]) -> Table:
    """One line per trial."""
    table = Table("trial", "run", "what happened", "restarts", "exit", "ended after", "verdict")
    for row in found:
        seconds, wrong = row["outcome"]["seconds"], row["wrong"]
        verdict = "[red]" + "; ".join(wrong).replace("[", r"\[") if wrong else "[green]as it should"
        if not row["outcome"]["faults"]:
            verdict += " (over before)"
        elif row["resumed"] and not wrong:
            verdict += ", resumed too"
        table.add_row(
            str(row["trial"]),
            row["shape"],
            "\n".join(row["faults"]),
            str(row["restarts"]),
            str(row["outcome"]["code"]),
            "" if seconds is None else f"{seconds:.1f} s",
            verdict,
        )
    return table


def main() -> None:
    """Carry out a campaign; exit code 1 if a trial ended as it should not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the trials to carry out")
    parser.add_argument("--out", type=Path, help="write the raw outcome of every trial to this JSON file")
    parser.add_argument("--keep", type=Path, help="do everything in this folder, and leave it there")
    arguments = parser.parse_args()
    console, found = Console(), []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-faults-") as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        campaign = Campaign(folder, console)
        for number in arguments.only or range(arguments.trials):
            for again in range(DRAWS):
                trial = draw(number, arguments.seed, again)
                outcome, row = campaign.carry_out(trial, f"trial {number}.{again}")
                if outcome.faults or row["wrong"]:
                    break
            found.append(row)
            verdict = "; ".join(row["wrong"]) or "as it should"
            line = f"{number}: {trial.shape.name}, {', '.join(row['faults'])}, restarts {trial.restarts}: {verdict}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(found, indent=1))
    console.print(tabulate(found))
    bad = sum(bool(row["wrong"]) for row in found)
    console.print(f"{bad} of {len(found)} trials ended as they should not; {time.monotonic() - begun:.0f} s")
    idle = sum(not row["outcome"]["faults"] for row in found)
    if idle > len(found) // 10:
        console.print(f"in {idle} trials no fault came in time: too many to say anything")
    sys.exit(1 if bad or idle > len(found) // 10 else 0)


if __name__ == "__main__":
    main()
