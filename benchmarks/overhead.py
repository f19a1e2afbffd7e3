"""What the engine itself costs: its time over that of the same passes without it, or in torch's engine.

    python -m benchmarks.overhead                      # all three parts
    python -m benchmarks.overhead --part a --rounds 21
    python -m benchmarks.overhead --profile            # where Python spends the time of part a

    part a  all ranks in one process, d = 4, m = 16, stages of one `Linear(4, 4)`: Penstock / the same passes as a plain
            loop in torch
    part b  two processes over gloo, m = 16, the same stages: Penstock / torch.distributed.pipelining
    part c  the same with m = 8 and the stages of `benchmarks.throughput`, for every order of `benchmarks.orders`

Ratios are those of times, so lower is better, and taken within a round; the arms of a part take turns within a round,
as in `benchmarks.throughput`. A pass is the forward or the backward of one microbatch at one stage; a backward in two
halves counts once. Bounds are those of a 95 % interval for the median. Raw data go to `benchmarks/results/`.

Another version of Penstock is measured with its `src` in PYTHONPATH: only the public API is used.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import multiprocessing

from benchmarks.arms import MICROBATCH, SHAPE, STAGES, Data, Maker, PenstockArm, TorchArm
from benchmarks.machine import free_port
from benchmarks.orders import MAKERS, PAIRS
from benchmarks.profile_engine import print_profile
from benchmarks.throughput import RESULTS, interval, measure, open_raw, read_raw
from benchmarks.tiny import TINY, InProcessArm, PlainArm, stages_of, tiny_data


class Part(NamedTuple):
    """One of the comparisons.

    Attributes:
        title: what is divided by what.
        other: what Penstock is compared with.
        pairs: method -> the arms of Penstock and of the other one.
        makers: of the arms.
        make_data: what they train on.
        processes: that it takes.
        per_pass: times are told per pass; else per batch.
        microbatches: m.
        count: microbatches per arm and round.
        turn: microbatches that an arm runs at a time.
    """

    title: str
    other: str
    pairs: Mapping[str, tuple[str, str]]
    makers: Mapping[str, Maker]
    make_data: Callable[[], Data]
    processes: int
    per_pass: bool
    microbatches: int
    count: int
    turn: int


def _tiny_penstock(method: str, m: int, data: Data) -> PenstockArm:
    return PenstockArm(method, m, data, task=TINY)


def _tiny_torch(name: str, m: int, data: Data) -> TorchArm:
    return TorchArm(name, m, data, task=TINY)


def random_tokens() -> Data:
    """As many tokens as the text of `benchmarks.throughput` has, which a GPT takes as long for."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, MICROBATCH, SHAPE.context)
    pairs = [torch.randint(SHAPE.vocabulary, shape, generator=generator) for _ in range(64)]
    return Data([(x, y) for x, y in pairs])


IN_PROCESS = ("1f1b", "interleaved", "zb-h1", "2bw")
TINY_PAIRS = ("1f1b", "interleaved", "zb-v")
PARTS = {
    "a": Part(
        "time of Penstock in one process / time of a plain loop",
        "plain loop",
        {method: (f"penstock {method}", f"plain {method}") for method in IN_PROCESS},
        {
            **{f"penstock {method}": partial(InProcessArm, method) for method in IN_PROCESS},
            **{f"plain {method}": partial(PlainArm, method) for method in IN_PROCESS},
        },
        tiny_data,
        processes=1,
        per_pass=True,
        microbatches=16,
        count=320,
        turn=160,
    ),
    "b": Part(
        "time of Penstock / time of torch.distributed.pipelining, tiny stages",
        "torch",
        {method: (f"penstock {method}", f"torch {PAIRS[method]}") for method in TINY_PAIRS},
        {
            **{f"penstock {method}": partial(_tiny_penstock, method) for method in TINY_PAIRS},
            **{f"torch {PAIRS[method]}": partial(_tiny_torch, PAIRS[method]) for method in TINY_PAIRS},
        },
        tiny_data,
        processes=STAGES,
        per_pass=False,
        microbatches=16,
        count=1280,
        turn=640,
    ),
    "c": Part(
        "time of Penstock / time of torch.distributed.pipelining, a GPT",
        "torch",
        {method: (f"penstock {method}", f"torch {name}") for method, name in PAIRS.items()},
        {name: maker for name, maker in MAKERS.items() if name != "ceiling"},
        random_tokens,
        processes=STAGES,
        per_pass=False,
        microbatches=8,
        count=64,
        turn=16,
    ),
}


def run_part(name: str, arguments: argparse.Namespace, out: Path) -> None:
    """Measure the methods that were asked for, in processes of their own."""
    part = PARTS[name]
    arms = [arm for method, pair in part.pairs.items() if method in arguments.methods for arm in pair]
    if not arms:
        return
    settings = argparse.Namespace(
        arms=arms,
        rounds=arguments.rounds,
        microbatches=[arguments.microbatches or part.microbatches],
        count=arguments.count or part.count,
        slice=arguments.slice or part.turn,
    )
    work = partial(measure, makers=part.makers, make_data=part.make_data, ranks=part.processes, part=name)
    multiprocessing.spawn(work, (free_port(), settings, str(out)), nprocs=part.processes)


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Per part and order the median ratio and times of the rounds, as Markdown."""
    for name in sorted({row["part"] for row in rows}):
        part, here = PARTS[name], [row for row in rows if row["part"] == name]
        unit = "us per pass" if part.per_pass else "ms per batch"
        print(f"\npart {name}: {part.title}, m = {here[0]['m']}, {len(here)} rounds; medians (95 % interval)\n")
        print(f"| order | ratio | Penstock, {unit} | {part.other}, {unit} |")
        print("|---|---|---|---|")
        for method, (ours, other) in part.pairs.items():
            if ours in here[0]["seconds"]:
                ratio = _cell([row["seconds"][ours] / row["seconds"][other] for row in here], 3)
                times = [_cell([_time(part, method, row, arm) for row in here], 1) for arm in (ours, other)]
                print(f"| {method} | {ratio} | {' | '.join(times)} |")


def _time(part: Part, method: str, row: dict[str, Any], arm: str) -> float:
    """Of an arm in a round: microseconds per pass, or milliseconds per batch."""
    if part.per_pass:
        return 1e6 * float(row["seconds"][arm]) / (2 * stages_of(method, row["m"]) * row["microbatches"])
    return 1e3 * float(row["seconds"][arm]) * row["m"] / row["microbatches"]


def _cell(values: list[float], digits: int) -> str:
    median, low, high = interval(values)
    return f"{median:.{digits}f} ({low:.{digits}f}, {high:.{digits}f})"


def main() -> None:
    """Run the parts, or the profile of the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods = list(dict.fromkeys(method for part in PARTS.values() for method in part.pairs))
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=list(PARTS), help="which parts")
    parser.add_argument("--methods", nargs="+", default=methods, choices=methods, help="which orders of them")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--microbatches", type=int, help="m; each part has its own if not given")
    parser.add_argument("--count", type=int, help="microbatches per arm and round; so has each part")
    parser.add_argument("--slice", type=int, help="microbatches that an arm runs at a time; so has each part")
    parser.add_argument(
        "--profile", action="store_true", help="profile part a instead, in --rounds spans of --count microbatches"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    arguments = parser.parse_args()
    if arguments.profile:
        m, count = arguments.microbatches or PARTS["a"].microbatches, arguments.count or PARTS["a"].count
        for method in PARTS["a"].pairs:
            if method in arguments.methods:
                print_profile(method, m, max(count // m, 1), arguments.rounds)
        return
    out = open_raw("overhead", arguments.out)
    for name in arguments.part:
        run_part(name, arguments, out)
    print_summary(read_raw(out))


if __name__ == "__main__":
    main()
