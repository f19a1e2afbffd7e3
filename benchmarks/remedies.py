"""What remedies for a delay of one update do to the loss of a GPT on text, whether Penstock offers them or not.

    python -m benchmarks.remedies                           # all, 600 updates, two seeds: about an hour
    python -m benchmarks.remedies --only repeat --lr 1e-3 3e-3 --updates 2000
    python -m benchmarks.remedies --summary FILE

A remedy says after every update where the next batch but one is computed. This is a plain loop around AdamW's
equations, with the model, the samples, the learning rates and the clipping of `penstock compare`. Where Penstock has a
method, `tests/test_remedies.py` compares it with that, and others with `benchmarks.stability` on a quadratic.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.throughput import RESULTS, open_raw, read_raw
from penstock.compare.config import ComparisonConfig, comparison_config
from penstock.compare.run import text_task
from penstock.train.config.schema import TrainConfig
from penstock.train.prepare.prepare_run import Task
from penstock.train.setup.lr_schedule import rate_schedule

SYNCHRONOUS = "synchronous"
_EPS = 1e-8
_SHARED = ("model.layers=8", "microbatches=1", "microbatch_size=16", "stages=1", "max_grad_norm=1.0")


@dataclass
class Kept:
    """What is known after an update; tensors hold all parameters, one after the other.

    Attributes:
        w, m, v, g: weights, moments, and the last gradient, clipped.
        before: weights before the last update.
        step: the last update's step, with decay.
        motion: mean of the last updates (PipeMare's delta).
        read, backward: where the next batch is computed; its backward may be elsewhere.
        waiting: where the one after that is.
        betas: of AdamW.
        updates: their number.
        rate: learning rate of the next update.
        progress: which part of the run has been made.
    """

    w: Tensor
    m: Tensor
    v: Tensor
    g: Tensor
    before: Tensor
    step: Tensor
    motion: Tensor
    read: Tensor
    backward: Tensor
    waiting: Tensor
    betas: tuple[float, float]
    updates: int = 0
    rate: float = 0.0
    progress: float = 0.0

    @classmethod
    def of(cls, w: Tensor, betas: tuple[float, float]) -> Kept:
        """Return what is known before the first update; every tensor is replaced later, none is written into."""
        zero = torch.zeros_like(w)
        return cls(w, zero, zero, zero, w, zero, zero, w, w, w, betas)

    def over_root(self, a: float, b: float) -> Tensor:
        """Return a m + b g over the root of the second moment."""
        return (a * self.m + b * self.g) / (torch.sqrt(self.v / (1 - self.betas[1] ** self.updates)) + _EPS)

    def bias(self, more: int = 0) -> float:
        """Return what a mean of so many equal gradients is shorter by."""
        return 1.0 - self.betas[0] ** (self.updates + more)


Direction = Callable[[Kept], Tensor]
"""What is kept -> a step, in units of the learning rate."""
Point = Callable[[Kept], Tensor]
"""What is kept -> where passes read."""


def adam(kept: Kept) -> Tensor:
    """Adam's direction."""
    return kept.over_root(1.0 / kept.bias(), 0.0)


def adam_again(kept: Kept) -> Tensor:
    """Adam's direction if the last gradient came again, over the same root."""
    beta = kept.betas[0]
    return kept.over_root(beta / kept.bias(1), (1.0 - beta) / kept.bias(1))


def spike(kept: Kept) -> Tensor:
    """Spike compensation for a delay of one: as much of the last gradient as comes twice late (NAdam's, for SGD)."""
    beta = kept.betas[0]
    return kept.over_root(beta / kept.bias(1), (1.0 - beta) / kept.bias())


def weights(kept: Kept) -> Tensor:
    """Predict nothing."""
    return kept.w


def weights_before(kept: Kept) -> Tensor:
    """The weights from which the next batch's forwards were predicted."""
    return kept.before


def mean_again(kept: Kept) -> Tensor:
    """The mean of gradients once more, as XPipe and SpecTrain."""
    return kept.w - kept.rate * adam(kept)


def repeat(kept: Kept) -> Tensor:
    """The last gradient once more: `2bw-ahead`."""
    return kept.w - kept.rate * adam_again(kept)


def repeat_less_and_less(kept: Kept) -> Tensor:
    """The same with a horizon that falls from one to zero over the run."""
    return kept.w - (1.0 - kept.progress) * kept.rate * adam_again(kept)


def repeat_with_error(kept: Kept) -> Tensor:
    """The same, and what the last prediction was short by."""
    return repeat(kept) + (kept.w - kept.read)


def motion(share: float) -> Point:
    """The last motion once more, or a multiple of it: `2bw-ahead:motion=1`."""
    return lambda kept: kept.w + share * (kept.w - kept.before)


def discrepancy(kept: Kept) -> Tensor:
    """PipeMare's estimate of the weights that a forward read, one update before the newest ones (T2)."""
    return kept.w - kept.motion


@dataclass(frozen=True)
class Remedy:
    """A way to train with a delay of one update.

    Attributes:
        title: for the table.
        reads: after an update, where the next batch but one is computed.
        backward: after an update, where the next batch's backwards are; where its forwards are if None.
        direction: of an update.
        feeds_back: whether an update adds how much its step is more than the one before.
        from_read: whether the weights at which the gradient was taken are stepped.
        momentum: beta1 in place of AdamW's.
        late: False for the synchronous run.
    """

    title: str
    reads: Point = weights
    backward: Point | None = None
    direction: Direction = adam
    feeds_back: bool = False
    from_read: bool = False
    momentum: float | None = None
    late: bool = True


REMEDIES: Mapping[str, Remedy] = {
    SYNCHRONOUS: Remedy("no delay (`1f1b`)", late=False),
    "none": Remedy("no remedy (`2bw`)"),
    "repeat": Remedy("the last gradient once more (`2bw-ahead`)", reads=repeat),
    "mean": Remedy("the mean of gradients once more (XPipe, SpecTrain)", reads=mean_again),
    "motion": Remedy("the last motion once more (`motion=1`)", reads=motion(1.0)),
    "motion-1.5": Remedy("1.5 times the last motion", reads=motion(1.5)),
    "repeat-forward": Remedy("the last gradient, in forwards only", reads=repeat, backward=weights_before),
    "repeat-falling": Remedy("the last gradient, with a horizon that falls to zero", reads=repeat_less_and_less),
    "repeat-error": Remedy("the last gradient, and the last error of the prediction", reads=repeat_with_error),
    "repeat-step-read": Remedy("the last gradient, stepping the predicted weights", reads=repeat, from_read=True),
    "error-feedback": Remedy("`error-feedback`", feeds_back=True),
    "discrepancy": Remedy("PipeMare's T2 in place of a second version", backward=discrepancy),
    "spike": Remedy("spike compensation, NAdam's step", direction=spike),
    "nag-pp": Remedy("the same with a momentum of 0.99 (`nag-pp`)", direction=spike, momentum=0.99),
}


class Model:
    """A model whose parameters are parts of one tensor, so that they can be taken from another one in backwards.

    Attributes:
        flat: that tensor.
        parameters: by name.

    Args:
        task: that it is the model of.
        config: of the run.
    """

    def __init__(self, task: Task, config: TrainConfig) -> None:
        model, self._samples = task(config)
        self._loss, made = model.loss, {name: block.make() for name, block in model.blocks.items()}
        self._blocks = list(made.values())
        self.parameters = {f"{block}.{name}": p for block, each in made.items() for name, p in each.named_parameters()}
        self.flat = torch.cat([p.detach().flatten() for p in self.parameters.values()])
        for name, part in self.parts(self.flat).items():
            self.parameters[name].data = part

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """Return what a tensor like `flat` has for each parameter."""
        parts = flat.split([p.numel() for p in self.parameters.values()])
        return {name: part.view_as(p) for (name, p), part in zip(self.parameters.items(), parts, strict=True)}

    def decays(self, rate: float) -> Tensor:
        """Return the weight decay of every parameter: matrices have some."""
        return torch.cat([torch.full((p.numel(),), rate if p.ndim >= 2 else 0.0) for p in self.parameters.values()])

    def gradient(self, forward: Tensor, backward: Tensor, first: int, count: int) -> Tensor:
        """Return the gradient of samples, with the forward at one point and the backward at another."""
        self.flat.copy_(forward)
        inputs, target = self._samples.samples(first, count)
        here = self.flat.untyped_storage().data_ptr()

        def pack(saved: Tensor) -> Any:
            if saved.untyped_storage().data_ptr() != here:
                return saved
            return saved.size(), saved.stride(), saved.storage_offset()

        def unpack(saved: Any) -> Tensor:
            return saved if isinstance(saved, Tensor) else torch.as_strided(backward, *saved)

        with saved_tensors_hooks(pack, unpack):
            for block in self._blocks:
                inputs = block(inputs)
            loss, units = self._loss(inputs, target)
            found = torch.autograd.grad(loss / units, list(self.parameters.values()))
        return torch.cat([g.flatten() for g in found])

    @torch.no_grad()
    def held_out(self, weights: Tensor, samples: int, size: int) -> float:
        """Return the loss on held-out samples, so many at a time."""
        self.flat.copy_(weights)
        total, units = 0.0, 0.0
        for first in range(0, samples, size):
            inputs, target = self._samples.validation_samples(first, size)
            for block in self._blocks:
                inputs = block(inputs)
            loss, count = self._loss(inputs, target)
            total, units = total + float(loss), units + count
        return total / units


def trained(
    config: ComparisonConfig, task: Task, remedy: Remedy, seed: int, rate: float
) -> Iterator[tuple[int, float]]:
    """Train one run; yields numbers of updates with the held-out loss after them."""
    model = Model(task, config.run("1f1b", seed, rate))
    section, factor = config.optimizer, rate_schedule(config.lr_schedule, config.batches)
    rates = [rate * factor(update) for update in range(config.batches)] + [rate * factor(config.batches - 1)]
    kept = Kept.of(model.flat.clone(), (remedy.momentum or section.beta1, section.beta2))
    decays, size = model.decays(section.weight_decay), config.microbatches * config.microbatch_size
    for batch in range(config.batches):
        g = clipped(model.gradient(kept.read, kept.backward, batch * size, size), config.max_grad_norm)
        update(kept, remedy, g, rates[batch], decays)
        kept.rate, kept.progress = rates[batch + 1], kept.updates / config.batches
        look_ahead(kept, remedy)
        if kept.updates % config.evaluate.every == 0 or kept.updates == config.batches:
            yield kept.updates, model.held_out(kept.w, config.evaluate.samples, size)


def update(kept: Kept, remedy: Remedy, g: Tensor, rate: float, decays: Tensor | float) -> None:
    """Make an update, as AdamW does."""
    beta1, beta2 = kept.betas
    kept.updates, kept.g = kept.updates + 1, g
    kept.m = beta1 * kept.m + (1 - beta1) * g
    kept.v = beta2 * kept.v + (1 - beta2) * g * g
    start, last = kept.read if remedy.from_read else kept.w, kept.step
    kept.step = rate * (decays * start + remedy.direction(kept))
    more = kept.step - last if remedy.feeds_back and kept.updates > 1 else 0.0
    kept.before, kept.w = kept.w, start - kept.step - more
    share = math.exp(-2.0)  # PipeMare's D, for a delay of one
    kept.motion = share * kept.motion + (1 - share) * (kept.w - kept.before)


def look_ahead(kept: Kept, remedy: Remedy) -> None:
    """Say where the next batches are computed, after an update."""
    kept.read = kept.waiting if remedy.late else kept.w
    kept.waiting = remedy.reads(kept)
    kept.backward = remedy.backward(kept) if remedy.backward else kept.read


def clipped(g: Tensor, largest: float | None) -> Tensor:
    """Return a gradient whose norm is at most `largest`."""
    return g if largest is None else g * min(1.0, largest / (float(g.norm()) + 1e-6))


def settings(updates: int, *changes: str) -> ComparisonConfig:
    """Return the configuration of runs."""
    own = (f"batches={updates}", f"lr_schedule.warm_up={updates // 4}", "evaluate.every=100")
    return comparison_config([*_SHARED, *own, *changes], {"methods": "1f1b"})


def table(rows: list[dict[str, Any]]) -> str:
    """Return losses at the end as Markdown: of the synchronous run at each rate, and how far others are above it."""
    ends = {(row["remedy"], row["lr"], row["seed"]): row["losses"][-1][1] for row in rows}
    rates = sorted({rate for _, rate, _ in ends})
    lines = [
        "| a delay of one | " + " | ".join(f"rate {rate:g}" for rate in rates) + " |",
        "|---" * (1 + len(rates)) + "|",
    ]
    for name, remedy in REMEDIES.items():
        cells = [_cell(ends, name, rate) for rate in rates]
        if any(cells):
            lines.append(f"| {remedy.title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(ends: Mapping[tuple[str, float, int], float], name: str, rate: float) -> str:
    seeds = [seed for n, r, seed in ends if (n, r) == (name, rate)]
    if name == SYNCHRONOUS:
        return f"{fmean(ends[name, rate, seed] for seed in seeds):.3f}" if seeds else ""
    gaps = [
        100 * (ends[name, rate, seed] / ends[SYNCHRONOUS, rate, seed] - 1)
        for seed in sorted(seeds)
        if (SYNCHRONOUS, rate, seed) in ends
    ]
    each = f" ({', '.join(f'{gap:+.1f}' for gap in gaps)})" if len(gaps) > 1 else ""
    return f"{fmean(gaps):+.1f} %{each}" if gaps else ""


def main() -> None:
    """Train all, or print the summary of an earlier file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(REMEDIES), default=list(REMEDIES))
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-3])
    parser.add_argument("--summary", type=Path, help="print the table of a file of raw data")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out = arguments.summary or open_raw("remedies", arguments.out)
    if arguments.summary is None:
        config = settings(arguments.updates)
        task = text_task(config, arguments.out)
        runs = [(n, r, s) for s in range(arguments.seeds) for r in arguments.lr for n in arguments.only]
        for name, rate, seed in runs:
            losses = list(trained(config, task, REMEDIES[name], seed, rate))
            with out.open("a") as file:
                file.write(json.dumps({"remedy": name, "lr": rate, "seed": seed, "losses": losses}) + "\n")
    Console(soft_wrap=True).print(table(read_raw(out)), markup=False, highlight=False)


if __name__ == "__main__":
    main()
