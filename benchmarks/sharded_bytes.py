"""What sharded parallel pipelines send: bytes per batch and rank, counted by the kernel.

    python -m benchmarks.sharded_bytes               # minutes, also on a busy machine; needs root on Linux

Arms and hosts are those of `benchmarks.sharded_links`. Expected bytes are those of messages between stages, of
(w - 1) / w of the weights for every gather, and of (w - 1) / w of the gradients for every reduction, 2 (w - 1) / w of
them where they are replicated. At the end of a run weights are made whole, so the bytes of a batch are those of a run
less those of a shorter one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.network.arms import MODELS, PARALLEL, SHARDED, Case
from benchmarks.network.hosts import why_not
from benchmarks.network.sharded_arms import CHUNKS, WIDTH
from benchmarks.network.sharded_rounds import measure
from benchmarks.throughput import RESULTS, open_raw, read_raw
from penstock import make_schedule
from penstock.schedule.ir.schedule import Op
from penstock.simulate.sharding_traffic import Network as Traffic


def expected(method: str, case: Case) -> list[float]:
    """Return the bytes that each rank of a pipeline has to send for a batch."""
    model, depth = MODELS[case.model], case.hosts // WIDTH
    schedule = make_schedule(method, depth, case.m, options={"chunks": CHUNKS}).schedule
    sizes = [sum(p.numel() for p in part.parameters()) for part in model.task.stages(schedule.num_stages)]
    found = []
    for rank, program in enumerate(schedule.programs):
        total = 0.0
        for action in program.period:
            traffic = Traffic(schedule, WIDTH, parameters=sizes[action.stage.index])
            total += traffic.sent(action)
            if method == "breadth-first" and action.op is Op.STEP:  # sums of replicas are no actions of the order
                total += 2 * (WIDTH - 1) / WIDTH * 4 * sizes[action.stage.index]
            if action.op in (Op.F, Op.B):
                other = action.stage.index + (1 if action.op is Op.F else -1)
                crosses = 0 <= other < schedule.num_stages and schedule.stage_at[other, 0].rank != rank
                total += model.message * action.unit.count * crosses
        found.append(total)
    return found


def print_bytes(rows: Sequence[dict[str, Any]], cases: Sequence[Case]) -> None:
    """Print what ranks send per batch beside what is expected, as Markdown."""
    print("\n| arm | m | sent by each rank of a pipeline, MB per batch | expected | sent / expected |")
    print("|---|---|---|---|---|")
    for case in cases:
        for arm in case.arms:
            here = [row for row in rows if row["case"] == case.name and row["arm"] == arm]
            sent = [_per_batch(here, case.m, rank) for rank in range(case.hosts // WIDTH)]
            method = next((m for m in PARALLEL if arm == f"penstock {m} x 2"), None)
            cells = [", ".join(f"{x / 1e6:.2f}" for x in sent), "", ""]
            if method is not None:
                wanted = expected(method, case)
                cells[1] = ", ".join(f"{x / 1e6:.2f}" for x in wanted)
                cells[2] = ", ".join(f"{a / b:.3f}" for a, b in zip(sent, wanted, strict=True))
            print(f"| {arm} | {case.m} | {' | '.join(cells)} |")


def _per_batch(rows: Sequence[dict[str, Any]], m: int, rank: int) -> float:
    """Return the bytes that a rank sends for another batch of a run."""
    counts = sorted({row["microbatches"] // m for row in rows})
    least, most = (
        statistics.median(row["ranks"][rank]["sent"] for row in rows if row["microbatches"] == count * m)
        for count in (counts[0], counts[-1])
    )
    return float(most - least) / (counts[-1] - counts[0])


def main() -> None:
    """Count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs=2, default=[1, 4], help="of the two runs of a turn")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    arguments = parser.parse_args()
    if reason := why_not():
        sys.exit(f"skipped: {reason}")
    out = open_raw("sharded_bytes", arguments.out)
    measure(SHARDED, ["1 Gbit/s"], arguments.batches, 1, out)
    print_bytes(read_raw(out), SHARDED)


if __name__ == "__main__":
    main()
