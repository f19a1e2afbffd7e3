"""Measures what delays cost and corrections regain: losses of every asynchronous method after equally many tokens.

    python -m benchmarks.quality                       # all campaigns: many hours on one core
    python -m benchmarks.quality --only text digits    # some, one after the other
    python -m benchmarks.quality --summary             # the tables of the results so far
    python -m benchmarks.quality --only text-long --updates 1000 --seeds 1    # a long run, shorter
    python -m benchmarks.quality --only text-long --jobs 16 --set device=cuda --set cuda_graphs=true  # on a GPU
    python -m benchmarks.quality --curve text-long     # the gap to 1f1b against the number of updates

Each campaign is a `penstock compare` of 8 stages with one optimizer for all of its methods, including the synchronous
one; every method is tuned over the same three learning rates, on the first of three seeds. An interrupted campaign is
continued, in the folder of comparisons (`--out`). Finished campaigns leave results.csv and summary.csv in
`benchmarks/results/quality/`; `docs/which-method.md` draws the conclusions.
"""

from __future__ import annotations

import argparse
import csv
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.digits import digits_of
from benchmarks.throughput import RESULTS
from penstock.compare.config import ComparisonConfig, comparison_config
from penstock.compare.run import ComparisonRun, text_task
from penstock.view.comparison_page import RESULTS as ROWS, SUMMARY, write_findings
from penstock.view.comparison_progress import TerminalComparison

PUBLISHED = RESULTS / "quality"
FOLDER = Path(__file__).parents[1] / "examples" / "methods"
FILES = {
    "gap-aware": "gap_aware",
    **dict.fromkeys(("nag-pp", "nag-pp-no-stash"), "nag_pp"),
    **dict.fromkeys(("spike", "lwp", "spike-lwp"), "pipelined_backprop"),
    "ftpipe": "ftpipe",
}
"""The files of methods that stand in examples; contenders have the names of the methods."""
SHARED = ("stages=8", "batches=600", "lr_schedule.warm_up=150", "seeds=3", "tune=1")
EIGHT = ("microbatches=8", "microbatch_size=2")
MANY = ("microbatches=32", "microbatch_size=1")
"""Four microbatches per stage: 1f1b is idle 18 % of the time, the first stage is 7/32 of an update behind."""

ONE = ("microbatches=1", "microbatch_size=16")
"""The same 16 samples per update, all in one microbatch: the delay of the first stage is then 7 updates."""

HALF = ("batches=320", "lr_schedule.warm_up=80")
"""The number of updates of 1f1b in the simulated time in which methods without a bubble make 600."""

FEW = "2bw,2bw:sync=150,stash,pipemare,pipemare:sync=150,spectrain"
STALE = "2bw,2bw:sync=150,stash,stash:sync=150,newest,pipemare,pipemare:sync=150,spectrain"
LONG = "2bw,2bw-ahead,2bw-ahead:motion=1,stash,spectrain,pipemare,error-feedback"
OTHERS = "error-feedback,xpipe,pipeoptim,lwp,ftpipe,vertical-sync,spectrain-stash,timeprest:ahead=8"
LATE = "stash,newest,pipemare,pipemare:sync=150,spectrain,xpipe,pipeoptim,lwp"
FIVE_THOUSAND = ("batches=5000", "lr_schedule.warm_up=1250", "evaluate.every=100", "max_grad_norm=1.0")
ADAM = ("lr=1e-3,3e-3,1e-2",)
MUON = ("optimizer.name=muon", "lr=3e-3,1e-2,3e-2")
FAST_MUON = ("optimizer.name=muon", "lr=1e-2,3e-2,1e-1")  # on the last grid 1f1b took the highest rate
MOMENTUM = ("optimizer.name=sgd", "optimizer.nesterov=false", "optimizer.weight_decay=0", "lr=0.01,0.03,0.1")
NADAM = ("optimizer.name=nadam", "optimizer.beta1=0.99", *ADAM)


@dataclass(frozen=True)
class Campaign:
    """A comparison of several methods.

    Attributes:
        title: for the docs.
        methods: comma-separated; the first one is synchronous.
        changes: of the configuration, as after --set.
        images: whether the task is that of digits, in place of a GPT on text.
    """

    title: str
    methods: str
    changes: tuple[str, ...]
    images: bool = False

    @property
    def config(self) -> ComparisonConfig:
        """Return the configuration of the comparison."""
        return self.sized(None, None)

    def sized(self, updates: int | None, seeds: int | None, *changes: str) -> ComparisonConfig:
        """Return the configuration with other numbers of updates (a quarter of which warm up) or seeds, and changes."""
        own = [] if updates is None else [f"batches={updates}", f"lr_schedule.warm_up={updates // 4}"]
        own += [] if seeds is None else [f"seeds={seeds}"]
        own += ["model.width=16", "held_out=0.2"] if self.images else []
        names = self.methods.split(",")
        of_files = {name: {"schedule": f"{FOLDER / FILES[name]}.py:method={name}"} for name in names if name in FILES}
        rows = ",".join(name for name in names if name not in FILES)
        changes = (*SHARED, *self.changes, *own, *changes)
        return comparison_config(changes, {"methods": rows}, values={"contenders": of_files})


CAMPAIGNS = {
    "text": Campaign("GPT on text, AdamW, m = 8", f"1f1b,{FEW}", (*EIGHT, *ADAM)),
    "digits": Campaign("residual CNN on digits, AdamW, m = 8", f"1f1b,{STALE},{OTHERS}", (*EIGHT, *ADAM), images=True),
    "text-half": Campaign("GPT on text, AdamW, m = 8, 320 updates", "1f1b", (*EIGHT, *ADAM, *HALF)),
    "digits-half": Campaign(
        "residual CNN on digits, AdamW, m = 8, 320 updates", "1f1b", (*EIGHT, *ADAM, *HALF), images=True
    ),
    "text-muon": Campaign("GPT on text, Muon, m = 8", "1f1b,2bw,stash,pipemare:sync=150,spectrain", (*EIGHT, *MUON)),
    "text-muon-32": Campaign("GPT on text, Muon, m = 32", "1f1b,pipemare:sync=150", (*MANY, *FAST_MUON)),
    "digits-1-sgd": Campaign(
        "residual CNN on digits, SGD with momentum, m = 1",
        f"1f1b,{LATE},spike,spike-lwp,gap-aware",
        (*ONE, *MOMENTUM),
        images=True,
    ),
    "text-1": Campaign("GPT on text, AdamW, m = 1", f"1f1b,{LATE}", (*ONE, *ADAM)),
    "text-long": Campaign("GPT on text, AdamW, clipped, long", f"1f1b,{LONG}", (*EIGHT, *ADAM, *FIVE_THOUSAND)),
    "text-long-muon": Campaign("GPT on text, Muon, clipped, long", f"1f1b,{LONG}", (*EIGHT, *MUON, *FIVE_THOUSAND)),
    "text-1-nadam": Campaign("GPT on text, NAdam, m = 1", "1f1b,stash,newest,nag-pp,nag-pp-no-stash", (*ONE, *NADAM)),
}
"""All campaigns by the name of their folder."""


def folder_of(name: str, updates: int | None) -> str:
    """Return the name of the folder of a campaign, with another number of updates."""
    return name if updates is None else f"{name}-{updates}"


def run(
    name: str,
    out: Path,
    updates: int | None = None,
    seeds: int | None = None,
    jobs: int = 1,
    changes: Sequence[str] = (),
) -> None:
    """Train the missing runs of a campaign, and write its results, those of finished runs also when it is interrupted.

    The seeds of a folder may grow: what is there stays.
    """
    observer = TerminalComparison()
    folder, kept = out / folder_of(name, updates), PUBLISHED / folder_of(name, updates)
    campaign = CAMPAIGNS[name]
    task = digits_of if campaign.images else text_task
    comparison = ComparisonRun(campaign.sized(updates, seeds, *changes), folder, observer, task)
    try:
        comparison.run(jobs)
    finally:
        observer.close()
        write_findings(comparison.findings(), folder)
        kept.mkdir(parents=True, exist_ok=True)
        for file in (ROWS, SUMMARY):
            shutil.copy(folder / file, kept)


def curve(name: str, folder: Path = PUBLISHED) -> str:
    """Format as CSV how far the held-out loss of each method at its best rate is from the first method's, in percent.

    Mean over the seeds that both have, at every number of updates that was evaluated. The first method is at its own
    best rate.
    """
    with open(folder / name / ROWS) as file:
        rows = list(csv.DictReader(file))
    with open(folder / name / SUMMARY) as file:
        best = {row["method"]: float(row["lr"]) for row in csv.DictReader(file) if row["lr"]}
    losses: dict[str, dict[tuple[int, int], float]] = {}
    for row in rows:
        if float(row["lr"]) == best.get(row["method"]) and row["validation_loss"]:
            at = int(row["updates"]), int(row["seed"])
            losses.setdefault(row["method"], {})[at] = float(row["validation_loss"])
    base = losses[next(iter(best))]
    lines = ["method,updates,seeds,difference in percent"]
    for method, found in losses.items():
        for updates in sorted({updates for updates, _ in found}):
            ratios = [loss / base[at] for at, loss in found.items() if at[0] == updates and at in base]
            if ratios:
                lines.append(f"{method},{updates},{len(ratios)},{100 * (sum(ratios) / len(ratios) - 1):.3f}")
    return "\n".join(lines)


def table(name: str, folder: Path = PUBLISHED, title: str | None = None) -> str:
    """Format the results of a campaign as Markdown."""
    with open(folder / name / SUMMARY) as file:
        rows = list(csv.DictReader(file))
    images = any(row.get("accuracy") for row in rows)  # of earlier campaigns on digits
    what = title or CAMPAIGNS[name].title
    lines = [
        f"| {what} | rate | loss | {'accuracy | ' if images else ''}difference, % | delay | time |",
        "|---" * (7 if images else 6) + "|",
    ]
    base = next(float(row["simulated_time"]) for row in rows if row["verdict"] == "baseline")
    for row in rows:
        loss = "diverged" if not row["loss"] else f"{float(row['loss']):.4f} ± {float(row['spread'] or 'nan'):.4f}"
        lost = f" ({row['diverged']} of {row['runs']} diverged)" if row["diverged"] != "0" and row["loss"] else ""
        difference = (
            f"{float(row['difference']):+.2f} ± {float(row['difference_spread'] or 'nan'):.2f}, {row['verdict']}"
            if row["difference"]
            else row["verdict"]
        )
        accuracy = f"{float(row['accuracy']):.1%} | " if images and row["accuracy"] else "| " if images else ""
        lines.append(
            f"| {row['method']} | {float(row['lr']):g} | {loss}{lost} | {accuracy}{difference} | "
            f"{float(row['delay']):.3g} | {float(row['simulated_time']) / base:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run campaigns, or print the results so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CAMPAIGNS), choices=list(CAMPAIGNS), help="these campaigns")
    parser.add_argument("--summary", action="store_true", help="print the tables of the results so far, do not train")
    parser.add_argument("--updates", type=int, help="other than the campaign's, in a folder of their own")
    parser.add_argument("--seeds", type=int, help="other than the campaign's; more may be added later")
    parser.add_argument("--jobs", type=int, default=1, help="runs to train at a time, each in a process of its own")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the campaigns further")
    parser.add_argument("--curve", metavar="FOLDER", help="print the differences by updates, do not train")
    parser.add_argument("--out", type=Path, default=Path("comparisons/quality"), help="folder of the comparisons")
    arguments = parser.parse_args()
    if arguments.curve:
        Console(soft_wrap=True).print(curve(arguments.curve), markup=False, highlight=False)
        return
    for name in arguments.only:
        if not arguments.summary:
            arguments.out.mkdir(parents=True, exist_ok=True)
            run(name, arguments.out, arguments.updates, arguments.seeds, arguments.jobs, arguments.set)
        folder = folder_of(name, arguments.updates)
        if (PUBLISHED / folder / SUMMARY).exists():
            text = table(folder, title=CAMPAIGNS[name].title)
            Console(soft_wrap=True).print(f"\n{text}\n", markup=False, highlight=False)


if __name__ == "__main__":
    main()
