"""How evenly whole models are cut into stages: by numbers of parameters, by counted work, and by measured time.

    python -m benchmarks.balance                  # the table: slowest stage over an even share
    python -m benchmarks.balance --throughput     # two stages in two processes: by parameters against by work

Of the units of a model at 2 and 4 stages: `parameters` cuts by numbers of parameters, `work` as `Pipeline` does, both
in counted work; `best` is the best cut of these units, `finest` that of the smallest units that the model can have. The
cut by time is made of one measurement, and held against another one, with the best cut of that; both are in seconds of
the processor, of one thread, so that others on the machine do not lengthen them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, multiprocessing, nn
from torch.nn import functional as F

import penstock
from benchmarks.machine import free_port, join, leave
from benchmarks.throughput import RESULTS, open_raw, read_raw
from penstock import Partition, Pipeline
from penstock.partition.blocks import cut_blocks
from penstock.partition.replay import units
from penstock.partition.replay.model_stages import UnitBlocks

Made = tuple[nn.Module, Any]
CLASSES, FINEST = 1000, 1000


class DenseLayer(nn.Module):
    """Of a DenseNet: takes all outputs of the layers before."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.narrow = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, 4 * growth, 1, bias=False)
        )
        self.wide = nn.Sequential(
            nn.BatchNorm2d(4 * growth), nn.ReLU(inplace=True), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        )

    def forward(self, before: list[Tensor]) -> Tensor:
        """Return the new channels."""
        found: Tensor = self.wide(self.narrow(torch.cat(before, 1)))
        return found


class DenseBlock(nn.Module):
    """Of a DenseNet: a model inside a model."""

    def __init__(self, layers: int, width: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DenseLayer(width + i * growth, growth) for i in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        """Return all channels."""
        outputs = [x]
        for layer in self.layers:
            outputs.append(layer(outputs))
        return torch.cat(outputs, 1)


def densenet() -> nn.Module:
    """DenseNet-121, as torchvision has it."""
    width, parts = 64, [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    for layers in (6, 12, 24, 16):
        parts.append(DenseBlock(layers, width, 32))
        width += layers * 32
        if layers != 16:
            halved = nn.Conv2d(width, width // 2, 1, bias=False)
            parts.append(nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(inplace=True), halved, nn.AvgPool2d(2)))
            width //= 2
    parts += [nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(nn.Sequential(*parts), nn.Linear(width, CLASSES))


def vgg() -> nn.Module:
    """VGG-16, as torchvision has it."""
    layers, before = list[nn.Module](), 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if width:
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]
        else:
            layers.append(nn.MaxPool2d(2))
        before = width or before
    head = [
        nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True),
        nn.Dropout(), nn.Linear(4096, CLASSES),
    ]  # fmt: skip
    return nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Sequential(*head))


def _resnet(depths: Sequence[int], kind: str, widths: Sequence[int]) -> nn.Module:
    config = hf.ResNetConfig(depths=depths, layer_type=kind, hidden_sizes=widths, num_labels=CLASSES)
    return hf.ResNetForImageClassification(config)


def _images(model: nn.Module, size: int, *, named: bool = True) -> Made:
    images = torch.randn(2, 3, size, size)
    return model, {"pixel_values": images} if named else images


def gpt() -> nn.Module:
    """A GPT whose output layer, of GPT-2's vocabulary, is most of the work."""
    config = hf.GPT2Config(n_layer=4, n_embd=256, n_head=4, n_positions=128)
    config.use_cache = False
    return hf.GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[int], Made]] = {
    "ResNet-18": lambda size: _images(_resnet((2, 2, 2, 2), "basic", (64, 128, 256, 512)), size),
    "ResNet-50": lambda size: _images(_resnet((3, 4, 6, 3), "bottleneck", (256, 512, 1024, 2048)), size),
    "EfficientNet-B0": lambda size: _images(
        hf.EfficientNetForImageClassification(
            hf.EfficientNetConfig(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, num_labels=CLASSES)
        ),
        size,
    ),
    "Swin-T": lambda size: _images(
        hf.SwinForImageClassification(hf.SwinConfig(image_size=size, num_labels=CLASSES)), size
    ),
    "DenseNet-121": lambda size: _images(densenet(), size, named=False),
    "VGG-16": lambda size: _images(vgg(), size, named=False),
    "ViT-B/16": lambda size: _images(
        hf.ViTForImageClassification(hf.ViTConfig(image_size=size, num_labels=CLASSES)), size
    ),
    "GPT, vocabulary 50,257": lambda _: (gpt(), {"input_ids": torch.randint(50257, (1, 128))}),
}


def share(costs: Sequence[float], sizes: Sequence[int]) -> float:
    """Return the slowest stage over an even share."""
    ends = list(accumulate(sizes))
    parts = [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    return max(parts) / sum(costs) * len(sizes)


class Costed:
    """A block of which nothing is known but its cost."""

    def __init__(self, cost: float) -> None:
        self.cost = cost


def best(costs: Sequence[float], stages: int) -> list[int]:
    """Return the best cut of blocks with some costs."""
    return [len(part) for part in cut_blocks({str(i): Costed(cost) for i, cost in enumerate(costs)}, stages)]


def parameters(blocks: UnitBlocks) -> list[float]:
    """Return the costs of blocks by which models were cut before."""
    return [float(sum(p.numel() for p in block.parameters())) for block in blocks.values()]


def rows(name: str, counted: int, measured: int) -> Iterator[dict[str, Any]]:
    """Yield what a table says of a model.

    Args:
        name: of the model.
        counted: pixels of the images whose work is counted.
        measured: of those that are measured.
    """
    with torch.device("meta"):
        model, _ = MODELS[name](counted)
    _, example = MODELS[name](counted)
    finest = [block.cost for block in UnitBlocks(model, example, FINEST).values()]
    for stages in (2, 4):
        blocks = UnitBlocks(model, example, stages)
        work = [block.cost for block in blocks.values()]
        found = {
            "parameters": share(work, best(parameters(blocks), stages)),
            "work": share(work, [len(part) for part in cut_blocks(blocks, stages)]),
            "best": share(work, best(work, stages)),
            "finest": share(finest, best(finest, stages)),
        }
        blocks = UnitBlocks(*MODELS[name](measured), stages, timed=True)
        cuts = {
            "by time": [len(part) for part in cut_blocks(blocks, stages, by="time")],
            "by work": [len(part) for part in cut_blocks(blocks, stages)],
            "by parameters": best(parameters(blocks), stages),
        }
        del blocks.seconds
        again = blocks.seconds
        found |= {cut: share(again, sizes) for cut, sizes in cuts.items()}
        found["best by time"] = share(again, best(again, stages))
        yield {"model": name, "stages": stages, "seconds": sum(again), **found}


COLUMNS = ("parameters", "work", "best", "finest", "by parameters", "by work", "by time", "best by time")


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [f"| model | stages | {' | '.join(COLUMNS)} |", f"|---|---|{'---|' * len(COLUMNS)}"]
    for row in found:
        lines.append(f"| {row['model']} | {row['stages']} | {' | '.join(f'{row[key]:.2f}' for key in COLUMNS)} |")
    return "\n".join(lines)


# --- throughput -------------------------------------------------------------------------------------------------------


def work(rank: int, port: int, out: Path, rounds: int) -> None:
    """Train two stages of two models in one of two processes, cut by parameters and by work in turns."""
    torch.set_num_threads(1)
    join(rank, port, 2)
    for name, size, samples in (("ResNet-50", 64, 8), ("GPT, vocabulary 50,257", 0, 4)):
        pipelines = {cut: _pipeline(name, size, cut) for cut in ("parameters", "work")}
        _, example = MODELS[name](size)
        (key, value), *_ = example.items()
        inputs = {key: value[:1].repeat(samples, *(1 for _ in value.shape[1:]))}
        targets = torch.randint(CLASSES, (samples, *((128,) if key == "input_ids" else ())))
        for round_ in range(rounds + 1):
            for cut, pipeline in pipelines.items():
                dist.barrier()
                begun = time.perf_counter()
                list(pipeline.run([(inputs, targets)] * 3))
                dist.barrier()
                if rank == 0 and round_:
                    row = {
                        "model": name,
                        "cut": cut,
                        "round": round_,
                        "rate": 3 * samples / (time.perf_counter() - begun),
                    }
                    with out.open("a") as raw:
                        raw.write(json.dumps(row) + "\n")
    leave()


def _pipeline(name: str, size: int, cut: str) -> Pipeline:
    torch.manual_seed(0)
    model, example = MODELS[name](size)
    blocks = UnitBlocks(model, example, 2)
    sizes = best(parameters(blocks), 2) if cut == "parameters" else None
    return Pipeline(
        model, "1f1b", stages=2, microbatches=4, example=example, group=dist.group.WORLD,
        partition=Partition(balance=sizes),
        loss=lambda output, target: F.cross_entropy(output.logits.flatten(0, -2), target.flatten()),
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
    )  # fmt: skip


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--throughput", action="store_true", help="train in two processes")
    parser.add_argument("--rounds", type=int, default=5, help="of throughput")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--pixels", type=int, nargs=2, default=(224, 64), help="of images counted, and measured")
    arguments = parser.parse_args()
    out = open_raw("balance", arguments.out)
    if arguments.throughput:
        multiprocessing.spawn(work, (free_port(), out, arguments.rounds), nprocs=2)
        rates: dict[tuple[str, str], list[float]] = {}
        for row in read_raw(out):
            if "rate" in row:
                rates.setdefault((row["model"], row["cut"]), []).append(row["rate"])
        for (model, cut), found in rates.items():
            print(f"{model}, cut by {cut}: {statistics.median(found):.2f} samples/s, median of {len(found)}")
        return
    torch.set_num_threads(1)
    penstock.keep_freed_memory()
    units.perf_counter = time.process_time
    for name in arguments.models:
        for row in rows(name, *arguments.pixels):
            with out.open("a") as raw:
                raw.write(json.dumps(row) + "\n")
    print(table([row for row in read_raw(out) if "stages" in row]))


if __name__ == "__main__":
    main()
