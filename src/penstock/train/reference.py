"""What each method computes, one microbatch after the other in one process: the yardstick of the runtime.

Written from the equations of the papers; it shares no code with the schedules, the weight store or the runtime.
W(t) are the weights after t batches (version t), f_t is the mean loss of batch t, opt is one step of the optimizer,
which has one state whatever the method; s of d is the stage, counted from 0.

    flush   W(t+1) = opt(W(t), grad f_t(W(t)))
            sequential, gpipe, 1f1b, eager: GPipe (Huang et al., arXiv 1811.06965); PipeDream-Flush (Narayanan et al.,
            arXiv 2006.09503, sec. 3.2); DAPPLE (Fan et al., arXiv 2007.01045). The order changes no number.
    2bw     W(t+1) = opt(W(t), grad f_t(W(max(t-1, 0))))
            2bw, 2bw-eager: PipeDream-2BW (arXiv 2006.09503, sec. 3.1 and 3.3): a delay of one on every stage, whatever
            the order.
    stash   W(t+1) = opt(W(t), grad f(W_0(v_0), ..., W_{d-1}(v_{d-1})))
            PipeDream (Harlap et al., arXiv 1806.03377): each stage runs a microbatch forward on its newest version and
            backward on the same, without vertical sync. In 1F1B the forward of the span's microbatch number g follows
            g - (d-1-s) backwards of that stage, and each m of them make a version:
            v_s(g) = floor(max(0, g - (d-1-s)) / m), counted from the span's first version.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from penstock.errors import ConfigError, DataError

Block = Callable[[Any], Any]
Loss = Callable[[Any, Any], "Tensor | tuple[Tensor, float | Tensor]"]
Factory = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]

FLUSH = ("sequential", "gpipe", "1f1b", "eager")
DOUBLE_BUFFER = ("2bw", "2bw-eager")
METHODS = (*FLUSH, *DOUBLE_BUFFER, "stash")


@dataclass
class Reference:
    """The numbers of a run.

    Attributes:
        losses: per batch, the sum of the losses over the sum of the weights; nan for a batch of weight 0.
        weights: per batch, N, the sum of the weights that the loss returned.
        versions: per version (one more than batches), the trainable parameters by canonical name.
        gradients: per batch, what the optimizer was given, by canonical name; empty where the update was skipped.
        optimizers: per stage, the state of its optimizer at the end; empty for a stage that trains nothing.
        buffers: the buffers of all modules at the end, by canonical name.
    """

    losses: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    versions: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class _Stage:
    """Blocks in a row, all versions of their weights, and the optimizer that makes the next one."""

    def __init__(self, blocks: Mapping[str, Block], factory: Factory) -> None:
        self.blocks = copy.deepcopy(dict(blocks))  # in one go, so that what blocks share stays shared
        self.names: dict[str, dict[str, str]] = {}  # block -> its own name of a parameter -> the canonical name
        self.newest: dict[str, nn.Parameter] = {}
        self.modules = {name: block for name, block in self.blocks.items() if isinstance(block, nn.Module)}
        first_name: dict[Tensor, str] = {}
        for block, module in self.modules.items():
            for own, parameter in module.named_parameters(remove_duplicate=False):
                if parameter.requires_grad:
                    name = first_name.setdefault(parameter, f"{block}.{own}")
                    self.names.setdefault(block, {})[own] = name
                    self.newest[name] = nn.Parameter(parameter.detach().clone())
        self.optimizer = factory(list(self.newest.items())) if self.newest else None
        self.rates = [group["lr"] for group in self.optimizer.param_groups] if self.optimizer else []
        self.versions = [self.copy_newest()]
        self.clear()

    def copy_newest(self) -> dict[str, Tensor]:
        """The newest weights, safe from the next update."""
        return {name: parameter.detach().clone() for name, parameter in self.newest.items()}

    def clear(self) -> None:
        """Start the gradient of a batch; it is summed in at least fp32."""
        dtypes = {name: torch.promote_types(p.dtype, torch.float32) for name, p in self.newest.items()}
        self.gradient = {name: torch.zeros_like(p, dtype=dtypes[name]) for name, p in self.newest.items()}

    def forward(self, x: Any, leaves: Mapping[str, Tensor]) -> Any:
        """Apply the blocks in a row with the weights given."""
        for name, block in self.blocks.items():
            own = {own: leaves[canonical] for own, canonical in self.names.get(name, {}).items()}
            x = functional_call(self.modules[name], own, (x,)) if own else block(x)
        return x

    def update(self, factor: float, rate: float) -> dict[str, Tensor]:
        """One optimizer step on the newest weights; returns the gradient that it was given."""
        given = {name: g if factor == 1.0 else g * factor for name, g in self.gradient.items()}
        if self.optimizer is not None:
            for name, parameter in self.newest.items():
                parameter.grad = given[name].to(parameter.dtype)
            for group, initial in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = initial * rate
            given = {name: p.grad.clone() for name, p in self.newest.items() if p.grad is not None}
            self.optimizer.step()
        return given


def train_reference(
    stages: Sequence[Mapping[str, Block]],
    loss: Loss,
    batches: Iterable[Sequence[tuple[Any, Any]]],
    *,
    method: str,
    optimizer: Factory,
    rate: Callable[[int], float] = lambda _: 1.0,
    divisor: float | None = None,
    drains: Collection[int] = (),
) -> Reference:
    """Train a copy of a model as the equations of a method say.

    Args:
        stages: the model: per stage its blocks by name, applied in a row. A parameter is called
            `block name.parameter name`; one that a stage holds several times goes by its first name.
        loss: of a microbatch, from the last stage's output and the target: sum and weight, or a sum of weight 1.
        batches: the microbatches of each batch, all batches having equally many.
        method: one of `METHODS`.
        optimizer: makes the optimizer of a stage from its named parameters.
        rate: what the initial learning rates are multiplied by, from the number of updates made before.
        divisor: the constant c that the loss is divided by before its backward; m if None.
        drains: batches before which the pipeline was drained, so that stash begins again without delay.

    Raises:
        ConfigError: unknown method.
        DataError: a batch without microbatches, or batches of different numbers of microbatches.
    """
    if method not in METHODS:
        raise ConfigError(f"no reference of method {method!r}; known: {', '.join(METHODS)}")
    nodes = [_Stage(blocks, optimizer) for blocks in stages]
    result = Reference()
    m = first = updates = 0
    for t, batch in enumerate(batches):
        m, first = m or len(batch), t if t in drains else first
        if not batch or len(batch) != m:
            raise DataError(f"batch {t} has {len(batch)} microbatches, batch 0 has {m}: give every batch equally many")
        c = float(m if divisor is None else divisor)
        results: list[tuple[float, float]] = []
        for k, (x, target) in enumerate(batch):
            reads = [_version(method, t, k, m, s, len(nodes), first) for s in range(len(nodes))]
            results.append(_microbatch(nodes, reads, loss, x, target, c))
        total, weight = (sum(numbers) for numbers in zip(*results, strict=True))
        given: dict[str, Tensor] = {}
        for node in nodes:
            if weight:  # without weight nothing was learnt: the next version is a copy and the schedule stands still
                given |= node.update(c / weight, rate(updates))
            node.versions.append(node.copy_newest())
            node.clear()
        updates += bool(weight)
        result.losses.append(total / weight if weight else math.nan)
        result.weights.append(weight)
        result.gradients.append(given)
    versions = zip(*(node.versions for node in nodes), strict=True)
    result.versions = [{name: w for stage in parts for name, w in stage.items()} for parts in versions]
    result.optimizers = [node.optimizer.state_dict() if node.optimizer else {} for node in nodes]
    modules = {name: module for node in nodes for name, module in node.modules.items()}
    result.buffers = {f"{name}.{own}": b for name, module in modules.items() for own, b in module.named_buffers()}
    return result


def _version(method: str, t: int, k: int, m: int, s: int, d: int, first: int) -> int:
    """Which weights stage s of d reads for microbatch k of batch t, in a span that began with batch `first`."""
    if method in DOUBLE_BUFFER:
        return max(t - 1, 0)
    if method == "stash":
        return first + max(0, (t - first) * m + k - (d - 1 - s)) // m
    return t


def _microbatch(
    nodes: list[_Stage], reads: list[int], loss: Loss, x: Any, target: Any, c: float
) -> tuple[float, float]:
    """Add the gradient of one microbatch, taken at the versions given; returns the sum of its loss and its weight."""
    leaves = [
        {name: w.detach().requires_grad_() for name, w in node.versions[v].items()}
        for node, v in zip(nodes, reads, strict=True)
    ]
    for node, weights in zip(nodes, leaves, strict=True):
        x = node.forward(x, weights)
    result = loss(x, target)
    sum_, weight = result if isinstance(result, tuple) else (result, 1.0)
    gradients = iter(torch.autograd.grad(sum_ / c, [w for ws in leaves for w in ws.values()], allow_unused=True))
    for node, weights in zip(nodes, leaves, strict=True):
        for name in weights:
            if (gradient := next(gradients)) is not None:  # a parameter that the loss does not see learns nothing
                node.gradient[name] += gradient
    return float(sum_.detach()), float(weight)
