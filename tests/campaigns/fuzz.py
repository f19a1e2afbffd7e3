"""Gives random malformed inputs to everything that reads one: `make fuzz`; ARGS="--inputs 2000 --seed 7" for less.

Configurations, schedules as text and as torch's CSV, indexes of checkpoints and weights (behind a valid digest, and
not), what checkpoints hold (loaded and trained on), command lines, values of every option that takes a name, outputs in
all states, and surroundings that lack something, in this process. Each input is a valid one in which parts were
replaced, removed, repeated or nested. Allowed is an error that `penstock.errors` has, or none; everything else is a
finding, and so is an input that takes longer than ten seconds. `--out FILE` keeps the counts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter, UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

import penstock
from penstock.checkpoint.format import Checkpoint, checkpoint_folder
from penstock.checkpoint.index import INDEX, write_index
from penstock.cli import main
from penstock.errors import PenstockError, WorkerError
from penstock.options.parallelism import Microbatches
from penstock.runtime.data.microbatches import in_pairs, microbatches_of
from penstock.schedule.add_options import extend
from penstock.schedule.text_parser import parse_schedule
from penstock.schedule.torch_csv import from_torch_csv
from penstock.train.config.load import validate_config, with_method_options
from penstock.train.config.schema import TrainConfig
from penstock.train.config.written_config import as_yaml
from penstock.train.export.sample import load_model
from penstock.yaml_file import parse_yaml
from support.options import ODD_NAMES, WORK, options_with_text, with_option
from support.schedules import make_schedule
from support.time_limit import TooLongError, time_limit

LIMIT = 10.0  # seconds an input may take
LEAST = 10  # examples of a round: the first of them is always the simplest one
ROUNDS = 20  # of a reader, at most, until it has had its share of the inputs
ODD = (
    "0", "-1", "1", "7", "1e300", "1e-320", "nan", "9" * 30, "9" * 5000, "0x" + "f" * 5000, "null", "true", "[]", "{}",
    "[" * 5000, "{a: " * 3000, "{1: 2}", "&a [*a]", "\x00", "\x1b[2J", "\udcff", "\ud800", "²", "٣", "2020-99-99", "",
    "!!python/object:os.system x", "999999", "F0", "B0", "STEP[t]", "^t-999", "@0", "%999", ":1/9", "..9", "~p0", ",",
    "\n", "#", "[F0+B0]", "../x", "/dev/zero", "1:2:3", "é",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 10**30, 1e300, float("nan"), "", "x", "\ud800", [], [1], {}, {"a": 1}, [[]], "0" * 64,
)  # fmt: skip
PARTS = st.sampled_from(
    (
        *VALUES, object(), torch.ones(4), torch.ones(2, 4), torch.ones(()), torch.ones(0, 4), torch.ones(4, 0).numpy(),
        torch.ones(()).numpy(), penstock.Whole(torch.ones(3)), [1, "a", None, 2.0], torch.ones(4).to_sparse(),
        UserDict(a=torch.ones(4)),
    )
)  # fmt: skip
BATCH = {"x": torch.ones(4, 2), "deep": {"ids": [1, 2, 3, 4], "t": torch.ones(4)}, "labels": torch.ones(4)}
TWO_BATCHES = [(torch.ones(4, 2), torch.zeros(4, 2))] * 2


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def closed() -> io.StringIO:
    """A stream that was closed."""
    stream = io.StringIO()
    stream.close()
    return stream


OUTPUTS: dict[str, Callable[[], Any]] = {
    "there": io.StringIO, "full": Full, "closed": closed, "none": lambda: None,
    "ASCII": lambda: io.TextIOWrapper(io.BytesIO(), "ascii"),
}  # fmt: skip
"""States of standard output and error."""
pieces = st.sampled_from(ODD) | st.text(max_size=8)
places = st.integers(0, 10**9)
edits = st.lists(st.tuples(st.sampled_from(["replace", "remove", "repeat", "insert", "swap"]), places, places, pieces),
                 min_size=1, max_size=4)  # fmt: skip


def edited(text: str, changes: list[tuple[str, int, int, str]], cut: str) -> str:
    """A text in which some of its words were changed; `cut` is what is between words."""
    words = text.split(cut)
    for how, one, other, piece in changes:
        at, to = one % len(words), other % len(words)
        match how:
            case "replace":
                words[at] = piece
            case "remove":
                del words[at]
            case "repeat":
                words[at:at] = words[at : at + 1 + other % 5]
            case "insert":
                words.insert(at, piece)
            case _:
                words[at], words[to] = words[to], words[at]
        words = words or [""]
    return cut.join(words)


def changed(value: Any, where: list[int], other: Any) -> Any:
    """A nested value in which the part at the end of a path was replaced."""
    if not where or not isinstance(value, dict) or not value:
        return other
    key = sorted(value)[where[0] % len(value)]
    return value | {key: changed(value[key], where[1:], other)}


def commands() -> tuple[str, ...]:
    """Valid command lines that start no process."""
    return (
        "show 2bw --stages 2 --microbatches 2 --batches 1", "show interleaved:chunks=2 --stages 2 --segments auto",
        "simulate zb-h1 --stages 2 --microbatches 4 --latency 0.1 --window 2", "methods --stages 2 --microbatches 2",
        "sample nowhere --prompt x --seed 1 --temperature 0.5", "compare 1f1b --lr 1e-3 --keys",
        "train --resume nowhere --set stages=2", "train 1f1b --data nowhere --set lr=1",
        "show --file nowhere.py --text",
        "simulate 1f1b --per-stage nowhere --batches 2",
        "plan --profile nowhere --devices 4x2 --bandwidth 12GB,1GB --memory 1GiB", "profile --from piper nowhere",
        "show 2bw --stages 2 --svg nowhere",
    )  # fmt: skip


class Findings:
    """What is wrong, counted by where it happens."""

    def __init__(self) -> None:
        self.tried, self.found = Counter[str](), Counter[str]()
        self.examples: dict[str, str] = {}
        self.longest = 0.0  # seconds that an input has taken

    def attempt(self, what: str, call: Callable[[], Any], given: object) -> None:
        """Give one input to a reader."""
        self.tried[what] += 1
        begun = time.monotonic()
        try:
            with (
                time_limit(LIMIT),
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                call()
        except PenstockError:
            return
        except (Exception, TooLongError) as error:
            ours = [f for f in traceback.extract_tb(error.__traceback__) if "/src/penstock/" in f.filename]
            where = f"{ours[-1].filename.rpartition('/penstock/')[2]}:{ours[-1].lineno}" if ours else "?"
            said = f"{what}: {type(error).__name__} in {where}"
            self.found[said] += 1
            self.examples.setdefault(said, f"{given!a:.300} -> {str(error)!a:.200}")
        finally:
            self.longest = max(self.longest, time.monotonic() - begun)

    def summary(self) -> dict[str, Any]:
        """What was tried and found, for a file of results."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return {
            "inputs": dict(self.tried), "findings": dict(self.found), "examples": self.examples,
            "longest_seconds": round(self.longest, 3), "peak_bytes": peak,
        }  # fmt: skip


def run_command(arguments: list[str]) -> None:
    """Run a command in this process; its exit code must be a documented one."""
    before, sys.argv = sys.argv, ["penstock", *arguments]
    try:
        main()
    except SystemExit as ended:
        if ended.code not in (None, 0, 1, 2, 3):
            raise AssertionError(f"exit code {ended.code}") from None
    finally:
        sys.argv = before


def saved(folder: Path) -> dict[str, Any]:
    """Save a checkpoint after two batches; returns the content of its index."""
    pipeline = tiny_pipeline()
    list(pipeline.run(TWO_BATCHES))
    penstock.Checkpoints(pipeline, folder).save()
    index = json.loads((checkpoint_folder(folder, 2) / INDEX).read_text())
    return {key: value for key, value in index.items() if key not in ("schema", "sha256")}


def train_on(folder: Path) -> None:
    """Load the checkpoint of a folder, and train on."""
    pipeline = tiny_pipeline()
    penstock.Checkpoints(pipeline, folder).load()
    list(pipeline.run(TWO_BATCHES))


def tiny_pipeline() -> penstock.Pipeline:
    """Make a pipeline of two small stages, whose checkpoints have two versions of the weights."""
    torch.manual_seed(0)
    return penstock.Pipeline(
        [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], "2bw", stages=2, microbatches=2, max_grad_norm=1.0,
        loss=torch.nn.functional.mse_loss, optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
    )  # fmt: skip


def run_in(line: str, folder_is_gone: bool, files: int, interface: str) -> None:
    """Run a command in this process, which may open so many files, in a folder of its own, which may be gone."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    variables = mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": interface} if interface else {})
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place), variables:
        if folder_is_gone:
            os.rmdir(place)
            os.mkdir(f"{place}-")  # what is removed in the end is another one
            os.rename(f"{place}-", place)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
            run_command(line.split())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def readers(folder: Path, findings: Findings) -> dict[str, tuple[Callable[..., None], dict[str, Any]]]:
    """Every reader with what it is given, by name; each tries one input."""
    config = as_yaml(TrainConfig())
    schedules = [str(make_schedule(name, 2, 4)) for name in ("1f1b", "2bw", "zb-h1", "interleaved")]
    table = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    index = {
        "facts": {"batch": 4, "values": {}}, "extra": {}, "tensors": {"weights/a.w": "s"}, "text": True,
        "files": {"s": {"bytes": 0, "sha256": "0" * 64}},
        "model": {"layers": 2, "width": 16, "heads": 2, "context": 8, "vocabulary": 256},
    }  # fmt: skip
    (folder / "weights").mkdir()

    def configuration(changes: Any, cut: str) -> None:
        text = edited(config, changes, cut)
        read = lambda: validate_config(with_method_options(parse_yaml(text, "config.yaml")))  # noqa: E731
        findings.attempt("configuration", read, text)

    def schedule(number: int, changes: Any, cut: str) -> None:
        text = edited(schedules[number], changes, cut)
        findings.attempt("schedule", lambda: extend(parse_schedule(text)), text)

    def csv(changes: Any, cut: str) -> None:
        text = edited(table, changes, cut)
        findings.attempt("torch CSV", lambda: extend(from_torch_csv(text)), text)

    def indexes(where: list[int], other: Any, schema: int) -> None:
        content = changed(index, where, other)
        if isinstance(content, dict):
            write_index(folder / "weights", schema, content)
            what, read = ("weights", load_model) if schema == 3 else ("checkpoint", Checkpoint)
            findings.attempt(what, lambda: read(folder if schema == 3 else folder / "weights"), content)

    def batch(where: list[int], other: Any, dims: Any) -> None:
        given = in_pairs(changed(BATCH, where, other))
        findings.attempt(
            "batch", lambda: microbatches_of(given, 2, 0, Microbatches(dims=dims).dims), (where, other, dims)
        )

    whole = saved(folder / "saved")

    def content(where: list[int], other: Any) -> None:
        changes = changed(whole, where, other)
        if isinstance(changes, dict):
            write_index(checkpoint_folder(folder / "saved", 2), 1, changes)
            findings.attempt("content of a checkpoint", lambda: train_on(folder / "saved"), (where, other))

    def raw(changes: Any, cut: str) -> None:
        text = edited(json.dumps({"schema": 1, "sha256": "0" * 64, **index}), changes, cut)
        (folder / "weights" / INDEX).write_text(text, errors="surrogatepass")
        findings.attempt("raw index", lambda: Checkpoint(folder / "weights"), text)

    def command(line: str, changes: Any) -> None:
        arguments = edited(line, changes, " ").split(" ")
        findings.attempt("command", lambda: run_command(arguments), arguments)

    def option(taken: tuple[str, str], value: str) -> None:
        arguments = with_option(*taken, value)
        with contextlib.ExitStack() as stack:
            for long in WORK:
                stack.enter_context(mock.patch(long, side_effect=SystemExit(0)))
            findings.attempt("option", lambda: run_command(arguments), arguments)

    def output(line: str, out: str, err: str) -> None:
        def call() -> None:
            with contextlib.redirect_stdout(OUTPUTS[out]()), contextlib.redirect_stderr(OUTPUTS[err]()):
                run_command(line.split())

        findings.attempt("output", call, (line, out, err))

    lines = {"changes": edits, "cut": st.sampled_from(["\n", " ", ":"])}
    return {
        "configuration": (configuration, lines),
        "schedule": (schedule, {"number": st.integers(0, 3), **lines}),
        "torch CSV": (csv, {"changes": edits, "cut": st.sampled_from(["\n", ",", "0"])}),
        "index": (
            indexes,
            {
                "where": st.lists(places, max_size=3),
                "other": st.sampled_from(VALUES) | st.recursive(st.sampled_from(VALUES), st.lists, max_leaves=4),
                "schema": st.sampled_from([1, 3]),
            },
        ),
        "content of a checkpoint": (
            content,
            {"where": st.lists(places, min_size=1, max_size=4), "other": st.sampled_from(VALUES)},
        ),
        "batch": (
            batch,
            {
                "where": st.lists(places, max_size=3),
                "other": PARTS
                | st.recursive(PARTS, st.lists, max_leaves=4)
                | st.dictionaries(st.text(max_size=3), PARTS),
                "dims": st.sampled_from([0, 1, {"x": None}, {"inputs": 1, "labels": 0}, {"targets": None}, {"": 0}]),
            },
        ),
        "raw index": (raw, {"changes": edits, "cut": st.sampled_from([" ", '"', "0"])}),
        "command": (command, {"line": st.sampled_from(commands()), "changes": edits}),
        "option": (
            option,
            {
                "taken": st.sampled_from(options_with_text()),
                "value": st.sampled_from((*ODD, *ODD_NAMES.values())) | st.text(max_size=300),
            },
        ),
        "surroundings": (
            lambda **given: findings.attempt("surroundings", lambda: run_in(**given), given),
            {
                "line": st.sampled_from((*commands(), "train 1f1b --set out=runs")),
                "folder_is_gone": st.booleans(),
                "files": st.sampled_from([8, 24, 36, 64, 1024]),
                "interface": st.sampled_from(["", "lo", "nope0", "lo,nope0", "\x1b[2J", "x" * 300]),
            },
        ),
        "output": (
            output,
            {
                "line": st.sampled_from(commands()),
                "out": st.sampled_from(list(OUTPUTS)),
                "err": st.sampled_from(list(OUTPUTS)),
            },
        ),
    }


def fuzz(inputs: int, start: int) -> Findings:
    """Try so many inputs, shared out among all readers."""
    findings = Findings()
    no_processes = mock.patch(
        "penstock.launch.launch.launch_local", side_effect=WorkerError("no process is started", "")
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), no_processes:
        found = readers(Path(folder), findings)
        for function, strategies in found.values():
            goal = findings.tried.total() + -(-inputs // len(found))
            for again in range(ROUNDS):  # an input may be none, and a round may end early
                missing = max(goal - findings.tried.total(), LEAST)
                options = settings(
                    max_examples=missing, database=None, deadline=None, phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )  # fmt: skip
                seed(start + again * 10**6)(options(given(**strategies)(function)))()
                if findings.tried.total() >= goal:
                    break
    return findings


def report(findings: Findings) -> str:
    """What was found, most frequent first, each with an example."""
    lines = [f"{findings.tried.total()} inputs, {findings.found.total()} findings at {len(findings.found)} places"]
    return "\n".join(
        [*lines, *(f"{n} x {what}\n    {findings.examples[what]}" for what, n in findings.found.most_common())]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append what was tried and found to this file, as a line of JSON")
    arguments = parser.parse_args()
    outcome = fuzz(arguments.inputs, arguments.seed)
    if arguments.out:
        with arguments.out.open("a") as file:
            file.write(json.dumps({"seed": arguments.seed, **outcome.summary()}) + "\n")
    sys.stdout.write(report(outcome) + "\n")
    sys.exit(bool(outcome.found))
