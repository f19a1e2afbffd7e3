"""Compares predicted memory with the ledger of runs in one process: `make memory`; ARGS="--runs 500" for less.

Every method on 1 to 4 ranks with several numbers of microbatches, recompute none, block and stage, fp32 and bf16, and
one pipeline, or two to four that share nothing or are sharded in every level; and each on its own: activations or
optimizer states moved to the host, snapshots taken, sequences in three slices, a moving average of the weights,
backwards in two halves, pipelines that are averaged in every way. What the runtime refuses is counted; every other run
must have exactly the peak that was predicted, on every rank.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from random import Random
from typing import Any

from penstock.errors import PenstockError
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.schedule.methods.table import METHODS
from penstock.simulate.memory.snapshots import Snapshots
from support.predicted_memory import Run, peaks_of_a_run

PARALLEL = (
    (1, None),
    (2, None),
    (2, "optimizer"),
    (2, "gradients"),
    (3, "gradients:gradients=1"),
    (2, "full"),
    (4, "full"),
    (3, "full:weights=3:gradients=1"),
)


SLICED = ("seq1f1b", "terapipe")
COMBINES = (
    Combine("average", every=2, optimizer_state="reset"),
    Combine("bmuf"),
    Combine("elastic", every=3),
    Combine("wsp", every=2, distance=1),
    Combine("wsp", distance=2, lag="record"),
)
BESIDE: tuple[dict[str, Any], ...] = (
    {"offload": "activations"},
    {"offload_optimizer": "stages"},
    {"offload_optimizer": "pieces"},
    {"snapshots": Snapshots(1, kept=True)},
    {"snapshots": Snapshots(2)},
    {"slices": 3},
    {"snapshots": Snapshots(1, kept=True), "sharding": "optimizer"},
    {"snapshots": Snapshots(2, kept=True), "sharding": "gradients"},
    {"snapshots": Snapshots(1), "sharding": "full"},
    {"ema": 0.9},
    {"ema": 0.9, "sharding": "gradients"},
    {"halved": True},
    *({"combine": combine} for combine in COMBINES),
)


def runs(methods: list[str]) -> list[Run]:
    """All combinations."""
    plain = list(itertools.product(methods, (1, 2, 3, 4), (1, 2, 4, 7), ("none", "block", "stage"), ("fp32", "bf16")))
    whole = [Run(*each, width, sharding) for each in plain for width, sharding in PARALLEL]
    return whole + [
        Run(*each, width, **beside)
        for each, width, beside in itertools.product(plain, (1, 2), BESIDE)
        if "slices" not in beside or each[0] in SLICED
    ]


def main() -> None:
    """Run the campaign; exit code 1 if a prediction is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--runs", type=int, help="so many of them, chosen at random")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    wanted, counts = runs(given.methods), Counter[str]()
    if given.runs is not None:
        wanted = Random(given.seed).sample(wanted, min(given.runs, len(wanted)))
    for run in wanted:
        try:
            predicted, found = peaks_of_a_run(run)
        except PenstockError as error:
            counts[f"refused: {type(error).__name__}"] += 1
            continue
        except Exception as error:  # the runtime must run it, or refuse it
            counts["broken"] += 1
            sys.stdout.write(f"{run}: {type(error).__name__}: {str(error).splitlines()[0]}\n")
            continue
        counts["equal" if predicted == found else "different"] += 1
        if predicted != found:
            sys.stdout.write(f"{run}: predicted {predicted}, recorded {found}\n")
    for what, count in sorted(counts.items()):
        sys.stdout.write(f"{what}: {count}\n")
    sys.exit(bool(counts["different"] or counts["broken"]))


if __name__ == "__main__":
    main()
