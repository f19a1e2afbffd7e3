"""One microbatch whose forwards are recomputed before its backward, on weights of that moment (PipeMare's recompute).

The first run keeps only inputs: of each block, or of the first stage of each segment. The second run starts from them,
on other weights; inside a segment a stage gets the output of the previous stage's second run. The backward goes through
the second graph: it uses its activations and, wherever a formula of the backward contains a weight, the backward's
weights. The loss is recomputed with the last block, so its gradient is taken at the second output. The reported loss is
that of the first run.

Both runs draw the same random numbers and see the same module buffers; only the first one changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from penstock.verify.reference.passes import Loss, graph_leaves, replace, rounding_gradients, unguarded, weighted
from penstock.verify.reference.stage import ReferenceStage, Weights, to_precision

Piece = list[tuple[int, str]]
"""Consecutive blocks that share one kept input: stage and name of each."""


def recompute_units(stages: Sequence[ReferenceStage], how: str, sizes: Sequence[int]) -> list[Piece]:
    """Divide the blocks into the units of recompute: single blocks, or segments of the given numbers of stages."""
    blocks = [[(s, name) for name in stage.blocks] for s, stage in enumerate(stages)]
    if how == "block":
        return [[block] for held in blocks for block in held]
    remaining = iter(blocks)
    return [list(chain(*islice(remaining, size))) for size in sizes]


def run_again(
    stages: list[ReferenceStage],
    sample: tuple[Any, Any],
    reads: list[tuple[Weights, Weights | None]],
    again: list[Weights],
    pieces: list[Piece],
    draw: Callable[[str], None],
    loss: Loss,
    c: float,
    scale: float,
    precision: torch.dtype | None,
    boundary: torch.dtype | None = None,
) -> tuple[float, float]:
    """Run a microbatch as `run_microbatch` does, with recompute.

    Args:
        stages, sample, reads, draw, loss, c, scale, precision, boundary: see `run_microbatch`.
        again: per stage, the weights of the second run.
        pieces: the units of recompute, from the first stage to the last.

    Returns:
        The sum of the loss in the first run, and its weight.
    """
    x, target = to_precision(sample[0], precision), sample[1]
    inputs, buffers = _first_run(stages, x, [graph_leaves(w, precision) for w, _ in reads], pieces, draw)
    leaves = [graph_leaves(w, precision) for w in again]
    outputs = _second_run(stages, inputs, leaves, pieces, buffers, draw, boundary)
    draw("loss")
    output = inputs.pop()
    reported, weight = weighted(loss(output, target), target, output)
    end = _differentiable(outputs[-1])
    draw("loss")
    sum_, _ = weighted(loss(end, target), target, end)
    seed = sum_ / c * scale
    slopes = _slopes([seed], [torch.ones_like(seed)], _tensors(end))
    for weights, (forward, others) in zip(leaves, reads, strict=True):
        replace(weights, forward if others is None else others)
    for piece, x, y in reversed(list(zip(pieces, inputs, outputs, strict=True))):
        held = sorted({s for s, _ in piece})
        wanted = [(stages[s].part, name, leaf) for s in held for name, leaf in leaves[s].items()]
        before = _tensors(x)
        found = _slopes(_tensors(y), slopes, [*before, *(leaf for _, _, leaf in wanted)])
        slopes = found[: len(before)]
        for (part, name, _), gradient in zip(wanted, found[len(before) :], strict=True):
            if gradient is not None:
                part[name] += gradient
    return float(reported.detach()), weight


def _first_run(
    stages: list[ReferenceStage],
    x: Any,
    leaves: list[dict[str, Tensor]],
    pieces: list[Piece],
    draw: Callable[[str], None],
) -> tuple[list[Any], dict[str, dict[str, Tensor]]]:
    """Return the input of every piece and the output, detached; and the buffers of each block before the run."""
    inputs, buffers = [x], dict[str, dict[str, Tensor]]()
    for piece in pieces:
        for s, name in piece:
            buffers[name] = {own: buffer.clone() for own, buffer in _buffers(stages[s], name).items()}
            x = stages[s].apply(name, x, leaves[s], draw)
        x = _differentiable(x)
        inputs.append(x)
    return inputs, buffers


def _second_run(
    stages: list[ReferenceStage],
    inputs: list[Any],
    leaves: list[dict[str, Tensor]],
    pieces: list[Piece],
    buffers: Mapping[str, Mapping[str, Tensor]],
    draw: Callable[[str], None],
    boundary: torch.dtype | None,
) -> list[Any]:
    outputs = []
    for piece, x in zip(pieces, inputs[:-1], strict=True):
        for s, name in piece:
            with unguarded(), _as_then(stages[s], name, buffers[name]):
                x = stages[s].apply(name, x, leaves[s], draw)
            if stages[s] is not stages[-1] and name == list(stages[s].blocks)[-1]:
                x = rounding_gradients(x, boundary)
        outputs.append(x)
    return outputs


def _differentiable(x: Any) -> Any:
    """Detach a value so that its gradient can be computed."""

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().requires_grad_(value.is_floating_point())

    return tree_map(one, x)


def _tensors(x: Any) -> list[Tensor]:
    return [value for value in tree_leaves(x) if isinstance(value, Tensor)]


def _slopes(ys: list[Tensor], slopes: Sequence[Tensor | None], xs: list[Tensor]) -> list[Tensor | None]:
    """Return the gradients by xs from those by ys; None where there is none."""
    known = [(y, slope) for y, slope in zip(ys, slopes, strict=True) if y.requires_grad and slope is not None]
    asked = [x for x in xs if x.requires_grad]
    if not known or not asked:
        return [None] * len(xs)
    outputs, gradients = zip(*known, strict=True)
    found = iter(torch.autograd.grad(outputs, asked, gradients, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in xs]


def _buffers(stage: ReferenceStage, name: str) -> dict[str, Tensor]:
    return dict(stage.modules[name].named_buffers()) if name in stage.modules else {}


@contextmanager
def _as_then(stage: ReferenceStage, name: str, then: Mapping[str, Tensor]) -> Iterator[None]:
    """Give a block copies of these buffers, and its own ones back afterwards."""
    now = _buffers(stage, name)
    _put(stage, name, {own: b.clone() for own, b in then.items()})
    try:
        yield
    finally:
        _put(stage, name, now)


def _put(stage: ReferenceStage, name: str, buffers: Mapping[str, Tensor]) -> None:
    for own, buffer in buffers.items():
        path, _, last = own.rpartition(".")
        stage.modules[name].get_submodule(path)._buffers[last] = buffer
