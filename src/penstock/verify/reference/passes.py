"""One microbatch, forward and backward, on the weights that each stage reads for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from penstock.verify.reference.stage import ReferenceStage, Weights, to_precision

Loss = Callable[[Any, Any], "Tensor | tuple[Tensor, float | Tensor]"]


def draw_for(seed: int | None, t: int, k: int, name: str) -> None:
    """Seed the generators before block `name` runs on microbatch k of batch t; they depend on nothing else."""
    if seed is not None:
        digest = hashlib.blake2b(f"{seed}/{name}/{t}/{k}/0".encode(), digest_size=8).digest()
        for generator in (torch.default_generator, *torch.cuda.default_generators):  # torch.manual_seed takes 2 ms
            generator.manual_seed(int.from_bytes(digest, "little") // 2)


def run_microbatch(
    stages: list[ReferenceStage],
    sample: tuple[Any, Any],
    reads: list[tuple[Weights, Weights | None]],
    draw: Callable[[str], None],
    loss: Loss,
    c: float,
    scale: float,
    precision: torch.dtype | None,
    boundary: torch.dtype | None = None,
) -> tuple[float, float]:
    """Add the gradient of one microbatch to that of its part.

    Args:
        stages: the stages.
        sample: input and target.
        reads: per stage, the weights of the forward, and those of the backward if they differ.
        draw: called before each block, with its name.
        loss: (output, target) -> sum and weight, or a sum of weight 1.
        c, scale: the loss is multiplied by scale / c before its backward.
        precision: of the passes; None for that of the weights.
        boundary: what float32 gradients are rounded to between stages; None for nothing.

    Returns:
        The sum of the loss, and its weight.
    """
    leaves = [graph_leaves(forward, precision) for forward, _ in reads]
    x, target = to_precision(sample[0], precision), sample[1]
    for stage, weights, (_, others) in zip(stages, leaves, reads, strict=True):
        with nullcontext() if others is None else unguarded():
            x = stage.forward(x, weights, draw)
        if stage is not stages[-1]:
            x = rounding_gradients(x, boundary)
    draw("loss")
    sum_, weight = weighted(loss(x, target), target, x)
    for weights, (_, others) in zip(leaves, reads, strict=True):
        if others is not None:
            replace(weights, others)  # in the leaves' precision
    gradients = iter(
        torch.autograd.grad(sum_ / c * scale, [w for ws in leaves for w in ws.values()], allow_unused=True)
    )
    for stage, weights in zip(stages, leaves, strict=True):
        for name in weights:
            if (gradient := next(gradients)) is not None:  # None for a parameter that does not affect the loss
                stage.part[name] += gradient
    return float(sum_.detach()), weight


def graph_leaves(weights: Weights, precision: torch.dtype | None) -> Weights:
    """Copy weights for one graph, in the precision of the passes."""
    return {name: to_precision(w, precision).detach().clone().requires_grad_() for name, w in weights.items()}


def weighted(result: Tensor | tuple[Tensor, float | Tensor], target: Any, output: Any) -> tuple[Tensor, float]:
    """Return the sum that a loss has computed, in at least fp32, and its weight.

    A scalar is a mean over samples, or over the share of their classes that are not -100, which torch ignores.
    """
    if isinstance(result, tuple):
        sum_, weight = result
    else:
        rows = [leaf for leaf in tree_leaves([target, output]) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        weight = float(len(rows[0])) if rows else 1.0
        if rows and rows[0].dtype == torch.int64:
            weight *= float((rows[0] != -100).double().mean())
        sum_ = result * weight
    return sum_.to(torch.promote_types(sum_.dtype, torch.float32)), float(weight)


def rounding_gradients(x: Any, boundary: torch.dtype | None) -> Any:
    """Return a value between two stages such that its float32 gradients are rounded on their way back."""
    if boundary is None:
        return x

    def one(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.requires_grad and value.dtype == torch.float32):
            return value
        value = value.view_as(value)
        value.register_hook(lambda gradient: gradient.to(boundary).to(gradient.dtype))
        return value

    return tree_map(one, x)


def unguarded() -> saved_tensors_hooks:
    """Let tensors saved for the backward share memory with the originals, which may be changed.

    So a weight in a formula of the backward has whatever value its leaf holds by then; activations, and whatever the
    forward has computed from weights, keep theirs.
    """
    return saved_tensors_hooks(lambda x: x.detach(), lambda x: x)


def replace(leaves: Mapping[str, Tensor], others: Weights) -> None:
    """Overwrite the values of the leaves."""
    with torch.no_grad():
        for name, leaf in leaves.items():
            leaf.copy_(others[name])
