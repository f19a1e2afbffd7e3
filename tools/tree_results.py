"""Compute what `tools.compare_trees` compares, with the `penstock` that is on the path.

    PYTHONPATH=TREE/src python tools/tree_results.py FOLDER CASES RESULTS

A case is a line of JSON, and so is its result: digests of tensors and texts, numbers as hexadecimal, kinds of errors.
Checkpoints and run folders are written below FOLDER; cases of the kind "resume" read what another tree left there.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

WIDTH, CLASSES, SAMPLES = 8, 8, 8


class Layer(nn.Module):
    """x + MLP(norm(x)), with dropout, and with batch statistics as buffers if asked for."""

    def __init__(self, *, buffers: bool) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if buffers else nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.drop(self.narrow(F.gelu(self.wide(self.norm(x)))))
        return y


class Model(nn.Module):
    """Layers, a skip connection over all of them, and a head."""

    def __init__(self, layers: int, *, buffers: bool) -> None:
        super().__init__()
        self.table = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Layer(buffers=buffers) for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = first = self.table(x)
        for layer in self.layers:
            y = layer(y)
        out: Tensor = self.head(y + first)
        return out


def blocks_of(case: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the model of a case, and the arguments of `Pipeline` that belong to it."""
    torch.manual_seed(case["seed"])
    model = Model(case["layers"], buffers=case["buffers"])
    if case["model"] == "whole":
        return model, {"example": torch.zeros(2, WIDTH)}
    blocks = {
        "table": model.table,
        **{f"layers.{i}": layer for i, layer in enumerate(model.layers)},
        "head": model.head,
    }
    if case["model"] == "tied":
        return blocks, {"partition": penstock.Partition(tied={"head.weight": "table.weight"})}
    return blocks, {}


def pipeline_of(case: Mapping[str, Any]) -> penstock.Pipeline:
    """Return the pipeline of a case."""
    blocks, extra = blocks_of(case)
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9),
        "adamw": lambda named: torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1),
        "rmsprop": lambda named: torch.optim.RMSprop(named, lr=1e-3),
    }
    return penstock.Pipeline(
        blocks, case["method"], stages=case["stages"], microbatches=case["microbatches"], loss=F.cross_entropy,
        optimizer=makers[case["optimizer"]], max_grad_norm=case["clip"], precision=case["precision"],
        recompute=case["recompute"], ema_decay=case["ema"],
        data_parallel=penstock.DataParallel(case["width"], sharding=case["sharding"]), **extra,
    )  # fmt: skip


def batches_of(case: Mapping[str, Any], first: int, last: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of a case by number; each is the same in every call."""
    found = []
    for number in range(first, last):
        draw = torch.Generator().manual_seed(1000 * case["seed"] + number)
        size = SAMPLES * case["width"] * case["microbatches"] // 2
        x = torch.randn(size, WIDTH, generator=draw)
        found.append((x, torch.randint(CLASSES, (size,), generator=draw)))
    return found


def digest(value: Any) -> str:
    """Return a short digest of a text, or of tensors by name."""
    found = hashlib.sha256()
    if isinstance(value, Mapping):
        for name in sorted(value):
            tensor = value[name].detach().contiguous()
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    else:
        found.update(str(value).encode())
    return found.hexdigest()[:16]


def optimizers_of(pipeline: penstock.Pipeline) -> str:
    """Return a digest of the states of all optimizers."""
    flat = dict[str, Tensor]()
    for number, optimizer in enumerate(pipeline.optimizers().values()):
        for place, state in enumerate(optimizer.state.values()):
            flat |= {f"{number}.{place}.{key}": torch.as_tensor(value) for key, value in state.items()}
    return digest(flat)


def trained(pipeline: penstock.Pipeline, case: Mapping[str, Any], first: int, last: int) -> dict[str, Any]:
    """Train on some batches, and return what came of it."""
    held_out = batches_of(case, 900, 902)
    evaluate = penstock.Evaluating(2, held_out) if case["evaluate"] else None
    reports = list(pipeline.run(batches_of(case, first, last), evaluate=evaluate))
    after = pipeline.evaluate(held_out)
    assert after is not None
    return {
        "losses": [report.loss and report.loss.hex() for report in reports],
        "evaluation": float(after[0]).hex(),
        "weights and buffers": digest(pipeline.full_state_dict()),
        "optimizers": optimizers_of(pipeline),
        "bytes": {str(rank): peaks for rank, peaks in pipeline.peak_bytes().items()},
    }


def train(case: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Train, save a checkpoint, and go on after loading it."""
    pipeline = pipeline_of(case)
    found = {"schedule": digest(pipeline.schedule), **trained(pipeline, case, 0, 4)}
    penstock.Checkpoints(pipeline, folder / f"case-{case['number']}").save()
    return found


def resume(case: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Go on from the checkpoint that a tree has left."""
    pipeline = pipeline_of(case)
    penstock.Checkpoints(pipeline, folder / f"case-{case['number']}").load()
    return trained(pipeline, case, 4, 6)


def simulate(case: Mapping[str, Any], _: Path) -> dict[str, Any]:
    """Prove and simulate a schedule."""
    made = penstock.make_schedule(
        case["method"], case["stages"], case["microbatches"], decides=case["decides"], sharding=case["sharding"]
    )
    stages = made.schedule.num_stages
    costs = penstock.Costs(
        tuple(penstock.StageCost(1 + i % 3, 1 + i % 2, 0.5 + i % 4, 0.25) for i in range(stages)),
        latency=case["latency"], transfer=case["transfer"], collective=0.5,
    )  # fmt: skip
    played = made.simulate(costs, batches=3)
    return {
        "schedule": digest(made),
        "time": float(played.bubble.makespan).hex(),
        "events": digest([tuple(interval) for interval in played.timeline.intervals]),
        "versions": made.versions,
        "delays": made.delays,
        "activations": [str(a) for a in made.activations],
    }


def command(case: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Run a command in this process: its exit status, and whether a traceback came of it."""
    from penstock.cli import main

    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    paths = {word: str(next(folder.glob(word))) for word in case["arguments"] if word.endswith("/*")}
    sys.argv = ["penstock", *(paths.get(word, word) for word in case["arguments"])]
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        status: Any = 0
    except SystemExit as ended:
        status = ended.code or 0
    finally:
        sys.argv = before
    found: dict[str, Any] = {"status": status}
    for pattern in case.get("read", ()):
        files = sorted(folder.glob(pattern))
        found[pattern] = [
            digest(load_file(path)) if path.suffix == ".safetensors" else digest(path.read_text()) for path in files
        ]
    return found


def methods(_: Mapping[str, Any], __: Path) -> dict[str, Any]:
    """Return the names of all methods."""
    from penstock.schedule.methods.table import METHODS

    return {"methods": list(METHODS)}


KINDS = {
    "train": train, "resume": resume, "simulate": simulate, "command": command, "methods": methods, "refuse": train,
}  # fmt: skip


def main() -> None:
    """Read cases, and write a result for each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder, cases, results = (Path(argument).resolve() for argument in sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    for line in cases.read_text().splitlines():
        case = json.loads(line)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                result = KINDS[case["kind"]](case, folder)
        except Exception as error:  # its kind is the result
            result = {"error": type(error).__name__, "text": str(error)[:300]}
        with results.open("a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
