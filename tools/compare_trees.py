"""Compare this tree with an earlier commit: training to the bit, schedules, plans, bad input, old files.

    python -m tools.compare_trees START [--cases 500] [--seed 0] [--out FILE]

Both trees run the same cases in two processes (`tools/tree_results.py`): configurations of training (method x stages x
microbatches x width x sharding x precision x optimizer x recompute x ties x evaluation, of blocks and whole models)
with losses, weights, buffers, optimizer states and peaks of memory; proven and simulated schedules; plans; command
lines with defects. Then this tree goes on from the checkpoints, run folders, profiles and plans that START has left.
Prints each difference that `INTENDED` does not name; exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Case = dict[str, Any]
INTENDED: dict[str, str] = {}
"""Words of a case or of its results, such as a method that is gone, each with the decision behind it."""
WORKER = Path(__file__).with_name("tree_results.py")
ODD = ("0", "-1", "1e300", "nan", "null", "[]", "x", "", "9" * 40, "../x", "²", "F0", "--", "=", "a=b", "2,0")
COMMANDS = (
    "show 2bw --stages 2 --microbatches 2 --batches 1", "show interleaved:chunks=2 --stages 2 --microbatches 4 --text",
    "simulate zb-h1 --stages 2 --microbatches 4 --latency 0.1 --window 2", "methods --stages 2 --microbatches 2",
    "sample nowhere --prompt x --seed 1 --temperature 0.5", "train --resume nowhere --set stages=2",
    "train 1f1b --data nowhere --set lr=1", "simulate 1f1b --stages 2 --batches 2 --transfer 0.5",
    "plan --model tiny --cluster h100 --devices 4 --global-batch 16 --memory 1GiB", "verify 2bw --stages 2 --batches 2",
)  # fmt: skip
TRAINED = "stages=2 batches=4 microbatches=2 model.layers=2 model.width=16 model.heads=2 model.context=16"


def training_cases(draw: random.Random, methods: Sequence[str], count: int) -> list[Case]:
    """Return configurations of training."""
    found = []
    for number in range(count):
        width = draw.choice((1, 1, 1, 2))
        found.append(
            {
                "kind": "train", "number": number, "seed": number, "method": draw.choice(methods),
                "stages": draw.choice((1, 2, 2, 4)), "microbatches": draw.choice((2, 4, 4, 8)), "width": width,
                "layers": 8, "buffers": draw.random() < 0.2,
                "model": draw.choice(("blocks", "blocks", "whole", "tied")),
                "sharding": draw.choice((None, "optimizer", "gradients", "full")) if width > 1 else None,
                "precision": draw.choice(("fp32", "fp32", "bf16", "fp16")),
                "optimizer": draw.choice(("sgd", "adamw", "rmsprop")), "clip": draw.choice((None, 0.5)),
                "recompute": draw.choice(("none", "none", "stage", "block")),
                "ema": draw.choice((None, None, 0.9)), "evaluate": draw.random() < 0.3,
            }
        )  # fmt: skip
    return found


def refused_cases(draw: random.Random, methods: Sequence[str], count: int) -> list[Case]:
    """Return configurations in which one value was replaced by one that is wrong."""
    found = training_cases(draw, methods, count)
    for case in found:
        key = draw.choice(
            ("method", "stages", "microbatches", "width", "sharding", "precision", "clip", "recompute", "ema")
        )
        case |= {"kind": "refuse", key: draw.choice((-1, 0, 99, "x", "", [], 1.5))}
    return found


def simulated_cases(draw: random.Random, methods: Sequence[str], count: int) -> list[Case]:
    """Return schedules with costs."""
    return [
        {
            "kind": "simulate", "method": draw.choice(methods), "stages": draw.choice((1, 2, 3, 4, 8)),
            "microbatches": draw.choice((1, 2, 4, 8, 12)), "decides": draw.random() < 0.3,
            "sharding": draw.choice((None, None, "optimizer", "full")), "latency": draw.choice((0, 0.25, 1)),
            "transfer": draw.choice((0, 0.5)),
        }
        for _ in range(count)
    ]  # fmt: skip


def bad_commands(draw: random.Random, count: int) -> list[Case]:
    """Return command lines in which words were replaced, removed or repeated."""
    found = []
    for _ in range(count):
        words = draw.choice(COMMANDS).split()
        for _ in range(draw.choice((1, 1, 2))):
            place = draw.randrange(len(words))
            words[place : place + 1] = draw.choice(([], [draw.choice(ODD)], [words[place], words[place]]))
        found.append({"kind": "command", "arguments": words})
    return found


def file_cases() -> tuple[list[Case], list[Case]]:
    """Return commands that leave files, and those that go on from them."""
    profile = (
        "profile --cluster h100 --layers 8 --hidden 512 --sequence 256 --heads 8 --vocabulary 999 --out profile.yaml"
    )
    plan = "plan --profile profile.yaml --cluster h100 --devices 4 --global-batch 32 --out"
    settings = " ".join(f"--set {pair}" for pair in TRAINED.split())
    runs = ("1f1b", "2bw", "pipemare", "stash")
    first = [
        _command(profile, "profile.yaml"), _command(f"{plan} plan.yaml", "plan.yaml"),
        *(_command(f"train {run} --set out={run} {settings}", f"{run}/*/weights/*.safetensors") for run in runs),
    ]  # fmt: skip
    then = [
        _command(f"{plan} again.yaml", "again.yaml"),
        *(_command(f"train --resume {run}/* --set batches=6", f"{run}/*/weights/*.safetensors") for run in runs),
    ]
    return first, then


def _command(line: str, *files: str) -> Case:
    return {"kind": "command", "arguments": line.split(), "read": files}


@contextmanager
def tree_at(commit: str, folder: Path) -> Iterator[Path]:
    """Check a commit out into a folder."""
    tree = folder / "start"
    subprocess.run(["git", "worktree", "add", "-q", "--detach", str(tree), commit], check=True)
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], check=True)


class Worker:
    """A process that computes the results of one tree."""

    def __init__(self, tree: Path, folder: Path, cases: Sequence[Case]) -> None:
        given, self._out = folder.with_suffix(".cases"), folder.with_suffix(".results")
        given.write_text("".join(json.dumps(case) + "\n" for case in cases))
        self._out.unlink(missing_ok=True)
        environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(WORKER), str(folder), str(given), str(self._out)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)

    def results(self) -> list[dict[str, Any]]:
        """Wait for the results.

        Raises:
            RuntimeError: the process has failed.
        """
        if self._process.wait():
            raise RuntimeError(f"the process ended with {self._process.returncode}")
        return [json.loads(line) for line in self._out.read_text().splitlines()]


def difference(case: Case, old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """Return what differs, or None; texts of errors may."""
    parts = [key for key in sorted(old.keys() | new.keys()) if key != "text" and old.get(key) != new.get(key)]
    if not parts or any(word in json.dumps([case, old, new]) for word in INTENDED):
        return None
    told = "\n".join(f"    {key}: {old.get(key)} -> {new.get(key)}" for key in parts)
    said = "".join(f"\n    {name}: {one['text']}" for name, one in (("old", old), ("new", new)) if "text" in one)
    return f"{json.dumps(case)}\n{told}{said}"


def compared(cases: Sequence[Case], old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[str]:
    """Print how the results compare, and return the differences."""
    found = []
    for kind in dict.fromkeys(case["kind"] for case in cases):
        trios = [trio for trio in zip(cases, old, new, strict=True) if trio[0]["kind"] == kind]
        different = [text for trio in trios if (text := difference(*trio)) is not None]
        ends = Counter(one.get("error") or f"status {one.get('status', 0)}" for _, one, _ in trios)
        sys.stdout.write(f"{kind}: {len(trios)} cases, {len(different)} differ; {dict(ends)}\n")
        found += different
    return found


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("start", help="the commit to compare with")
    parser.add_argument("--cases", type=int, default=500, help="configurations of training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the differences into this file, too")
    arguments = parser.parse_args()
    draw, here = random.Random(arguments.seed), Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as name, tree_at(arguments.start, Path(name)) as start:
        folder = Path(name)
        names = Worker(start, folder / "names", [{"kind": "methods"}]).results()[0]["methods"]
        count = arguments.cases
        first, then = file_cases()
        training = training_cases(draw, names, count)
        cases = [
            *training, *refused_cases(draw, names, count // 3), *simulated_cases(draw, names, count // 2), *first,
            *bad_commands(draw, count // 3),
        ]  # fmt: skip
        workers = [Worker(start, folder / "old", cases), Worker(here, folder / "new", cases)]
        old, new = (worker.results() for worker in workers)
        found = compared(cases, old, new)
        saved = [case | {"kind": "resume"} for case, one in zip(training, old, strict=False) if "error" not in one]
        cases = [*saved, *then]
        subprocess.run(["cp", "-r", str(folder / "old"), str(folder / "left")], check=True)
        workers = [Worker(start, folder / "old", cases), Worker(here, folder / "left", cases)]
        old, new = (worker.results() for worker in workers)
        found += compared(cases, old, new)
    text = "".join(f"{part}\n" for part in found)
    sys.stdout.write(text)
    if arguments.out:
        arguments.out.write_text(text)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
