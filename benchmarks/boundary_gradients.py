"""Measures what it costs to round the gradients between stages to bfloat16.

    python -m benchmarks.boundary_gradients      # a few minutes on one core

A small GPT is trained from the same weights on the same text twice, with `boundary_gradients` "same" and "bf16", all
stages in this process (which gives the numbers of several processes). A third run shows how far any other rounding
leads apart: nothing is rounded, but its first weights differ by one part in a million. Printed are, per seed, the
relative error of the first gradient of each stage, in the 2-norm, and the held-out losses at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.arms import Pair
from penstock import GPTConfig, Pipeline, gpt_blocks, make_schedule
from penstock.options.passes import BoundaryGradients, Precision
from penstock.train.data.corpus import load_corpus
from penstock.train.data.window_sampler import Windows

SHAPE = GPTConfig(layers=4, width=64, heads=4, context=64)
MICROBATCHES, SAMPLES, HELD_OUT = 4, 4, 64


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Factory:
    """Makes the optimizers of stages, and keeps the first gradients that each gets."""

    def __init__(self) -> None:
        self.first: list[dict[str, Tensor]] = []

    def __call__(self, named: Any) -> torch.optim.Optimizer:
        """An AdamW of named parameters."""
        named = list(named)
        optimizer, own = torch.optim.AdamW(named, lr=1e-3, weight_decay=0.1), dict[str, Tensor]()
        self.first.append(own)

        def keep(*_: object) -> None:
            for name, p in named:
                if p.grad is not None and name not in own:
                    own[name] = p.grad.clone()

        optimizer.register_step_pre_hook(keep)
        return optimizer


def train(
    how: BoundaryGradients, seed: int, arguments: argparse.Namespace, nudge: float = 0.0
) -> tuple[list[dict[str, Tensor]], float]:
    """Train once from weights that are changed by a relative `nudge`; first gradients by stage, held-out loss."""
    factory, schedule = Factory(), make_schedule(arguments.method, arguments.stages, MICROBATCHES)
    blocks = {name: block.make() for name, block in gpt_blocks(SHAPE, seed=seed).items()}
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in (p for block in blocks.values() for p in block.parameters()):
            p.mul_(1 + nudge * torch.randn_like(p))
    precision = Precision(boundary_gradients=how)
    pipeline = Pipeline(blocks, schedule, loss=loss, optimizer=factory, precision=precision, max_grad_norm=1.0)
    windows = Windows(load_corpus(), SHAPE.context, held_out=0.05, seed=seed)

    def batches() -> Iterator[list[Pair]]:
        for first in range(0, arguments.updates * MICROBATCHES, MICROBATCHES):
            yield [windows.samples((first + k) * SAMPLES, SAMPLES) for k in range(MICROBATCHES)]

    for _ in pipeline.run(batches()):
        pass
    held_out = [
        [windows.validation_samples((t * MICROBATCHES + k) * SAMPLES, SAMPLES) for k in range(MICROBATCHES)]
        for t in range(HELD_OUT)
    ]
    found = pipeline.evaluate(held_out)
    assert found is not None
    return factory.first, found[0]


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The relative error of a gradient in the 2-norm."""
    off = sum(float((found[name] - wanted[name]).double().square().sum()) for name in wanted)
    return float((off / sum(float(g.double().square().sum()) for g in wanted.values())) ** 0.5)


def main() -> None:
    """Train with and without rounding, and print how far they are apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--method", default="1f1b")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(arguments.seeds):
        (exact, before), (rounded, after) = (train(how, seed, arguments) for how in ("same", "bf16"))
        _, nudged = train("same", seed, arguments, 1e-6)
        errors = ", ".join(f"{error(a, b):.1e}" for a, b in zip(rounded, exact, strict=True))
        print(f"seed {seed}: first gradients off by {errors}", flush=True)
        print(f"    held-out loss {before:.4f}; rounded {after:.4f}; nudged {nudged:.4f}", flush=True)


if __name__ == "__main__":
    main()
