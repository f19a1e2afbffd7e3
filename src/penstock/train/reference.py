"""What each method computes, one microbatch after the other in one process: the yardstick of the runtime.

Written from the equations of the papers; it shares no code with the schedules, the weight store or the runtime.
W(t) are the weights after t batches (version t), f_t is the mean loss of batch t, opt is one step of the optimizer,
which has one state whatever the method; s of d is the stage, counted from 0.

    flush   W(t+1) = opt(W(t), grad f_t(W(t)))
            GPipe (Huang et al., arXiv 1811.06965); PipeDream-Flush (Narayanan et al., arXiv 2006.09503, sec. 3.2);
            DAPPLE (Fan et al., arXiv 2007.01045); and all that only run the same passes in another order, on more cuts
            or in two directions (`parts`). The order changes no number. Slices of sequences come to the same sums in
            parts, which changes the last bits.
    2bw     W(t+1) = opt(W(t), grad f_t(W(max(t-1, 0))))
            2bw, 2bw-eager: PipeDream-2BW (arXiv 2006.09503, sec. 3.1 and 3.3): a delay of one on every stage, whatever
            the order.
    stash   W(t+1) = opt(W(t), grad f(W_0(v_0), ..., W_{d-1}(v_{d-1})))
            PipeDream (Harlap et al., arXiv 1806.03377): each stage runs a microbatch forward on its newest version and
            backward on the same, without vertical sync. In 1F1B the forward of the span's microbatch number g follows
            g - (d-1-s) backwards of that stage, and each m of them make a version:
            v_s(g) = floor(max(0, g - (d-1-s)) / m), counted from the span's first version.
    vertical-sync
            The same, but every stage reads what the first one read: v_0(g).

What concerns all stages is decided once per batch, on the gradient of all stages together (Megatron-LM, GPipe and
others do so after a flush; nothing in it needs one):

    clipping        grad f_t times min(1, clip / (norm + 1e-6)), where norm is the Euclidean norm of grad f_t
                    (torch.nn.utils.clip_grad_norm_).
    loss scaling    grad f_t is computed of S_t f_t and divided by S_t; if it is not finite, W(t+1) = W(t) and opt is
                    not called (Micikevicius et al., arXiv 1710.03740). S_t depends on the batches whose update is made
                    before the last stage begins batch t: all up to t-1, with double-buffered weights up to t-2. A
                    batch that overflows lowers the scale unless it has been lowered since; `interval` finite batches
                    in a row under the present scale raise it.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from penstock.errors import ConfigError, DataError

Block = Callable[[Any], Any]
Loss = Callable[[Any, Any], "Tensor | tuple[Tensor, float | Tensor]"]
Factory = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]

FLUSH = (
    "sequential", "gpipe", "1f1b", "eager", "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-h2-post",
    "zb-interleaved", "zb-auto", "zb-auto-post", "zb-v", "v-half", "v-min", "hanayo", "chimera", "dualpipe",
    "dualpipe-v", "bitpipe", "bpipe", "seq1f1b", "terapipe",
)  # fmt: skip
DOUBLE_BUFFER = ("2bw", "2bw-eager")
METHODS = (*FLUSH, *DOUBLE_BUFFER, "stash", "vertical-sync")


@dataclass
class Reference:
    """The numbers of a run.

    Attributes:
        losses: per batch, the sum of the losses over the sum of the weights; nan for a batch of weight 0.
        weights: per batch, N, the sum of the weights that the loss returned.
        versions: per version (one more than batches), the trainable parameters by canonical name.
        gradients: per batch, what the optimizer was given, by canonical name; empty where the update was skipped.
        norms: per batch, the norm of grad f_t before clipping; only where something is decided by it.
        scales: per batch, S_t.
        optimizers: per stage, the state of its optimizer at the end; empty for a stage that trains nothing.
        buffers: the persistent buffers of all modules at the end, by canonical name.
    """

    losses: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    versions: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class Scaling(NamedTuple):
    """How the loss scale changes: by `growth` after `interval` finite batches, by `backoff` after an overflow."""

    initial: float
    growth: float
    backoff: float
    interval: int


class _Scale:
    """The loss scale, which learns from the batches one after the other."""

    def __init__(self, scaling: Scaling | None) -> None:
        self.scaling, self.now = scaling, 1.0 if scaling is None else scaling.initial
        self.calm = self.heard = 0
        self.votes: list[bool | None] = []  # per batch, whether it overflowed; None if it had no weight
        self.used: list[float] = []

    def at(self, known: int) -> float:
        """S of the next batch, from the first `known` batches."""
        for used, overflow in zip(self.used[self.heard : known], self.votes[self.heard : known], strict=True):
            if self.scaling is None or overflow is None:
                continue
            if overflow and used <= self.now:
                self.now, self.calm = self.now * self.scaling.backoff, 0
            elif not overflow and used == self.now:
                self.calm += 1
                if self.calm == self.scaling.interval:
                    self.now, self.calm = self.now * self.scaling.growth, 0
        self.heard = known
        self.used.append(self.now)
        return self.now


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
        self.parts: list[dict[str, Tensor]] = []
        self.clear()

    def cast_frozen(self, precision: torch.dtype | None) -> None:
        """What is not trained is cast once."""
        for module in self.modules.values():
            for parameter in module.parameters():
                if not parameter.requires_grad:
                    parameter.data = _cast(parameter.data, precision)

    def copy_newest(self) -> dict[str, Tensor]:
        """The newest weights, safe from the next update."""
        return {name: parameter.detach().clone() for name, parameter in self.newest.items()}

    def clear(self) -> None:
        """Start the gradient of a pipeline's part of a batch; it is summed in at least fp32."""
        dtypes = {name: torch.promote_types(p.dtype, torch.float32) for name, p in self.newest.items()}
        self.part = {name: torch.zeros_like(p, dtype=dtypes[name]) for name, p in self.newest.items()}

    def add_parts(self) -> None:
        """The gradient of the batch: the sum of the parts, added in their order."""
        self.gradient = {name: reduce(torch.add, [part[name] for part in self.parts]) for name in self.newest}
        self.parts.clear()

    def forward(self, x: Any, leaves: Mapping[str, Tensor], draw: Callable[[str], None]) -> Any:
        """Apply the blocks in a row with the weights given; `draw` is called before each."""
        for name, block in self.blocks.items():
            draw(name)
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
    clip: float | None = None,
    scaling: Scaling | None = None,
    seed: int | None = None,
    parts: Sequence[Sequence[int]] | None = None,
    tied: Mapping[str, str] = MappingProxyType({}),
    precision: torch.dtype | None = None,
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
        clip: the largest norm of a gradient.
        scaling: of the loss.
        seed: of the random numbers of blocks; torch's generator goes on by itself if None.
        parts: the microbatches of each of parallel pipelines (or of the directions of one); each sums its gradients in
            the order given, and the sums are added in theirs. One with all of them if None.
        precision: what passes compute in: weights are cast to it, updates are made in their own precision.
        tied: name of a parameter -> name of the one, on a stage before, that it is the same as.

    Raises:
        ConfigError: unknown method.
        DataError: batches of different numbers of microbatches.
    """
    if method not in METHODS:
        raise ConfigError(f"no reference of method {method!r}; known: {', '.join(METHODS)}")
    nodes = [_Stage(blocks, optimizer) for blocks in stages]
    _equal_copies(nodes, tied)
    for node in nodes:
        node.cast_frozen(precision)
    run = _Run(nodes, loss, method, rate, divisor, drains, clip, _Scale(scaling), seed, parts, tied, precision)
    for t, batch in enumerate(batches):
        run.train(t, batch)
    return _with_end(run.result, nodes)


@dataclass
class _Run:
    """A run under way; the attributes are the arguments of `train_reference`."""

    nodes: list[_Stage]
    loss: Loss
    method: str
    rate: Callable[[int], float]
    divisor: float | None
    drains: Collection[int]
    clip: float | None
    scale: _Scale
    seed: int | None
    parts: Sequence[Sequence[int]] | None
    tied: Mapping[str, str]
    precision: torch.dtype | None
    result: Reference = field(default_factory=Reference)
    size: int = 0  # of a batch, in microbatches
    first: int = 0  # batch of the span
    updates: int = 0

    def train(self, t: int, batch: Sequence[tuple[Any, Any]]) -> None:
        """Batch t."""
        self.size, self.first = self.size or len(batch), t if t in self.drains else self.first
        if not batch or len(batch) != self.size:
            raise DataError(
                f"batch {t} has {len(batch)} microbatches, batch 0 has {self.size}: give every batch equally many"
            )
        c = float(self.size if self.divisor is None else self.divisor)
        s = self.scale.at(known=max(t - (self.method in DOUBLE_BUFFER), 0))
        total, weight = self.accumulate(t, batch, c, s)
        for node in self.nodes:
            node.add_parts()
        _tie_gradients(self.nodes, self.tied)
        votes = self.scale.scaling is not None or (self.parts is not None and len(self.parts) > 1)
        factor, norm = _factor(self.nodes, c, weight, s, self.clip, votes, self.tied)
        self.scale.votes.append(not factor if weight else None)
        result = self.result
        result.gradients.append(_bear_versions(self.nodes, factor, self.rate(self.updates)))
        self.updates += bool(factor)  # the rate stands still where no update is made
        result.norms.append(norm)
        result.scales.append(s)
        result.losses.append(total / weight if weight else math.nan)
        result.weights.append(weight)

    def accumulate(self, t: int, batch: Sequence[tuple[Any, Any]], c: float, s: float) -> tuple[float, float]:
        """The gradients of batch t, times s / c; returns the sum of its losses and of their weights."""
        results, d = [], len(self.nodes)
        for part in self.parts or [range(self.size)]:
            for place, k in enumerate(part):
                reads = [_version(self.method, t, place, len(part), i, d, self.first) for i in range(d)]
                draw = partial(_draw, self.seed, t, k)
                results.append(_microbatch(self.nodes, batch[k], reads, draw, self.loss, c, s, self.precision))
            _end_part(self.nodes)
        total, weight = (sum(numbers) for numbers in zip(*results, strict=True))
        return total, weight


def _draw(seed: int | None, t: int, k: int, name: str) -> None:
    """Before block `name` runs on microbatch k of batch t: random numbers depend on nothing else."""
    if seed is not None:
        digest = hashlib.blake2b(f"{seed}/{name}/{t}/{k}/0".encode(), digest_size=8).digest()
        for generator in (torch.default_generator, *torch.cuda.default_generators):  # torch.manual_seed takes 2 ms
            generator.manual_seed(int.from_bytes(digest, "little") // 2)


def _cast(value: Any, precision: torch.dtype | None) -> Any:
    """Every tensor in float32, if that is too precise."""
    if precision is None:
        return value
    return tree_map(lambda x: x.to(precision) if isinstance(x, Tensor) and x.dtype == torch.float32 else x, value)


def _equal_copies(nodes: list[_Stage], tied: Mapping[str, str]) -> None:
    """Begin with one value for what is one parameter."""
    everything = {name: (node, parameter) for node in nodes for name, parameter in node.newest.items()}
    for name, owner in tied.items():
        node, copy_ = everything[name]
        copy_.data.copy_(everything[owner][1].data)
        node.versions[0][name] = copy_.detach().clone()


def _tie_gradients(nodes: list[_Stage], tied: Mapping[str, str]) -> None:
    """All copies of a parameter get the sum of their gradients, the first stage's first."""
    holder = {name: node for node in nodes for name in node.gradient}
    for owner in dict.fromkeys(tied.values()):
        names = [owner, *(name for name in holder if tied.get(name) == owner)]
        total = reduce(torch.add, [holder[name].gradient[name] for name in names])
        for name in names:
            holder[name].gradient[name] = total


def _end_part(nodes: list[_Stage]) -> None:
    """A pipeline has seen its part of the batch: add its gradient to that of the pipelines before it."""
    for node in nodes:
        node.parts.append(node.part)
        node.clear()


def _bear_versions(nodes: list[_Stage], factor: float, rate: float) -> dict[str, Tensor]:
    """Step every stage, or copy its weights if there is nothing to learn; returns what the optimizers were given."""
    given: dict[str, Tensor] = {}
    for node in nodes:
        if factor:
            given |= node.update(factor, rate)
        node.versions.append(node.copy_newest())
    return given


def _with_end(result: Reference, nodes: list[_Stage]) -> Reference:
    """Add what is known when the run is over."""
    versions = zip(*(node.versions for node in nodes), strict=True)
    result.versions = [{name: w for stage in parts for name, w in stage.items()} for parts in versions]
    result.optimizers = [node.optimizer.state_dict() if node.optimizer else {} for node in nodes]
    modules = {name: module for node in nodes for name, module in node.modules.items()}
    for name, module in modules.items():
        saved = module.state_dict().keys()
        result.buffers |= {f"{name}.{own}": b for own, b in module.named_buffers() if own in saved}
    return result


def _version(method: str, t: int, k: int, m: int, s: int, d: int, first: int) -> int:
    """Which weights stage s of d reads for microbatch k of batch t, in a span that began with batch `first`."""
    if method in DOUBLE_BUFFER:
        return max(t - 1, 0)
    if method == "stash":
        return first + max(0, (t - first) * m + k - (d - 1 - s)) // m
    if method == "vertical-sync":
        return first + max(0, (t - first) * m + k - (d - 1)) // m
    return t


def _factor(
    nodes: list[_Stage],
    c: float,
    weight: float,
    scale: float,
    clip: float | None,
    votes: bool,
    tied: Collection[str],
) -> tuple[float, float]:
    """What the sum of gradients is multiplied by (0: no update), and the norm of the gradient of the mean loss."""
    if not weight:
        return 0.0, math.nan
    mean = c / (weight * scale)
    if clip is None and not votes:
        return mean, math.nan
    gradients = {name: g for node in nodes for name, g in node.gradient.items() if name not in tied}
    norms = [float(torch.linalg.vector_norm(g)) for g in gradients.values()]
    norm = math.sqrt(math.fsum(n * n for n in norms)) * mean
    if not math.isfinite(norm):
        return 0.0, norm
    return mean * (1.0 if clip is None else min(1.0, clip / (norm + 1e-6))), norm


def _microbatch(
    nodes: list[_Stage],
    sample: tuple[Any, Any],
    reads: list[int],
    draw: Callable[[str], None],
    loss: Loss,
    c: float,
    scale: float,
    precision: torch.dtype | None,
) -> tuple[float, float]:
    """Add the gradient of one microbatch, taken at the versions given; returns the sum of its loss and its weight."""
    leaves = [
        {name: _cast(w, precision).detach().requires_grad_() for name, w in node.versions[v].items()}
        for node, v in zip(nodes, reads, strict=True)
    ]
    x, target = _cast(sample[0], precision), sample[1]
    for node, weights in zip(nodes, leaves, strict=True):
        x = node.forward(x, weights, draw)
    draw("loss")
    result = loss(x, target)
    sum_, weight = result if isinstance(result, tuple) else (result, 1.0)
    sum_ = sum_.to(torch.promote_types(sum_.dtype, torch.float32))
    gradients = iter(
        torch.autograd.grad(sum_ / c * scale, [w for ws in leaves for w in ws.values()], allow_unused=True)
    )
    for node, weights in zip(nodes, leaves, strict=True):
        for name in weights:
            if (gradient := next(gradients)) is not None:  # a parameter that the loss does not see learns nothing
                node.part[name] += gradient
    return float(sum_.detach()), float(weight)
