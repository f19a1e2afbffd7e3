"""Ordinary training in plain torch: one model, one optimizer, no pipeline.

Synchronous methods must agree with it up to the rounding of float32. Nothing here knows about stages or versions.
Training amplifies small differences, tenfold in ten batches if the learning rate is high. To keep what remains at
rounding level for any number of batches, each batch starts from given weights, which the previous batch must have
reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from penstock.verify.differences import KINDS, Record, Value
from penstock.weights.optim.optimizer_factory import OptimizerFactory


def train_plain(
    blocks: Mapping[str, nn.Module],
    loss: Callable[[Any, Any], tuple[Tensor, float]],
    batches: Iterable[Sequence[tuple[Tensor, Tensor]]],
    optimizer: OptimizerFactory,
    rate: Callable[[int], float],
    clip: float | None,
    begin: Sequence[Mapping[str, Tensor]],
) -> Record:
    """Train blocks in place.

    Args:
        blocks: the model by name; a shared parameter is one object.
        loss: microbatch -> sum over its targets, and their number.
        batches: the microbatches of each batch, whose loss is the mean over all targets.
        optimizer: makes the one optimizer from all parameters.
        rate: number of the update -> factor on the learning rates.
        clip: the largest norm of a gradient.
        begin: the weights that each batch starts from, by name; not used for the first one.
    """
    model = nn.Sequential(*blocks.values())
    everything = {f"{b}.{own}": p for b, m in blocks.items() for own, p in m.named_parameters(remove_duplicate=False)}
    parameters = {name: everything[name] for name in begin[0]}
    stepper = optimizer([(name, p) for name, p in _once(everything).items()])
    scheduler = LambdaLR(stepper, rate)
    record: dict[str, dict[tuple[int, str], Value]] = {kind: {} for kind in KINDS}
    end = 0
    for t, batch in enumerate(batches):
        end = t + 1
        with torch.no_grad():
            for name, w in begin[t].items() if t else ():
                parameters[name].copy_(w)
        targets = sum(target.numel() for _, target in batch)
        total = 0.0
        for tokens, target in batch:
            sum_, _ = loss(model(tokens), target)
            (sum_ / targets).backward()  # type: ignore[no-untyped-call]
            total += sum_.item()
        norm = clip_grad_norm_(model.parameters(), math.inf if clip is None else clip).item()
        skipped = clip is not None and not math.isfinite(norm)  # as in every method that computes the norm
        if not skipped:
            record["gradients"] |= {(t, name): _copy(p.grad) for name, p in parameters.items()}
            stepper.step()
            scheduler.step()
            record["weights"] |= {(t, name): _copy(p) for name, p in parameters.items()}
        stepper.zero_grad()
        record["losses"] |= {(t, "loss"): total / targets, (t, "loss weight"): float(targets)}
        record["decisions"] |= {(t, "norm"): norm, (t, "loss scale"): 1.0, (t, "skipped"): float(skipped)}
    for name, p in parameters.items():
        record["optimizer state"] |= {(end, f"{key} of {name}"): value for key, value in stepper.state[p].items()}
    state = {f"{b}.{own}": value for b, m in blocks.items() for own, value in m.state_dict().items()}
    record["final state"] |= {(end, n): value for n, value in state.items() if n in parameters or n not in everything}
    return record


def _once(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return each parameter under its first name only."""
    first = {p: name for name, p in reversed(list(parameters.items()))}
    return {name: p for name, p in parameters.items() if first[p] == name}


def _copy(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach().clone()
