"""Measures what passes take whose backward comes in two halves (I and W), beside whole ones.

    python -m benchmarks.halves      # a minute

Both kinds run the same layers in this process, in turns and in random order, without messages. The models are those of
`benchmarks.links`, of which one has few parameters per token and the other many; the layers are those of a stage of
zb-v on two ranks. Ratios are taken within rounds. Raw data go to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.arms import make_optimizer, mean_loss
from benchmarks.machine import command_line, describe_machine
from benchmarks.predicted.configurations import ALL_MODELS
from benchmarks.throughput import RESULTS, interval
from penstock import gpt_blocks, keep_freed_memory
from penstock.measure.stage_trial import BlockInput, BlockPlace, StageTrial, Training, Trial
from penstock.options.all_options import PipelineOptions

STAGES = 4  # of zb-v on two ranks
WARM_UP = 5


def trials_of(model: str) -> tuple[dict[str, StageTrial], BlockInput]:
    """Return one stage of a model with whole backwards and one with halves, and what both are given."""
    shape, samples = ALL_MODELS[model].shape, ALL_MODELS[model].samples
    blocks = gpt_blocks(shape, seed=0)
    names = list(blocks)[1 : 1 + shape.layers // STAGES]
    training = Training(mean_loss, make_optimizer, PipelineOptions())
    trials = {
        kind: StageTrial({name: blocks[name] for name in names}, BlockPlace(False, False), training, halved=halved)
        for kind, halved in (("whole", False), ("halves", True))
    }
    return trials, BlockInput(torch.randn(samples, shape.context, shape.width), (True,))


def measure(model: str, rounds: int) -> list[dict[str, Any]]:
    """Return the seconds of forward, first half (or whole backward) and second half of both kinds, per round."""
    trials, given = trials_of(model)
    kinds, rows = list(trials), []
    for round_ in range(-WARM_UP, rounds):
        random.shuffle(kinds)
        found: dict[str, Trial] = {kind: trials[kind].run(given) for kind in kinds}
        if round_ >= 0:
            seconds = {kind: [trial.forward, trial.first, trial.second] for kind, trial in found.items()}
            rows.append({"round": round_, "model": model, **seconds})
    return rows


def line(model: str, rows: list[dict[str, Any]]) -> str:
    """Return the medians of a model as a row of a Markdown table."""
    (forward, backward, _), (split, first, second) = (
        [1e3 * median(row[kind][i] for row in rows) for i in range(3)] for kind in ("whole", "halves")
    )
    forwards = interval([row["halves"][0] / row["whole"][0] for row in rows])
    backwards = interval([sum(row["halves"][1:]) / row["whole"][1] for row in rows])
    ratios = ("{:.3f} ({:.3f}, {:.3f})".format(*bounds) for bounds in (forwards, backwards))
    times = " | ".join(f"{each:.2f}" for each in (forward, split, backward, first, second))
    return f"| {model} | {times} | {' | '.join(ratios)} |"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="microbatches of each kind")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    random.seed(0)
    rows = {model: measure(model, arguments.rounds) for model in ("few", "many")}
    header = {"machine": describe_machine(), "command": command_line("halves")}
    lines = [header, *(row for found in rows.values() for row in found)]
    raw = arguments.out / f"halves-{time.strftime('%Y-%m-%d-%H%M%S')}.jsonl"
    raw.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    print("ms; ratios of halves to whole passes: median (95 % interval) of the rounds\n")
    print("| parameters | F | F with halves | B | I | W | F / F | (I + W) / B |\n|---" + "|---" * 7 + "|")
    for model, found in rows.items():
        print(line(model, found))


if __name__ == "__main__":
    main()
