"""Compares the stages of a model with the model: its output and all gradients, on an example."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import CapabilityError
from penstock.partition.replay.placeholder import TensorSpec
from penstock.partition.replay.stage_forward import Cut, Specs, StageForward, leaves_in
from penstock.partition.replay.units import kept_as_it_is


def check_stages(model: nn.Module, specs: Specs, cut: Cut, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Make sure that the stages of a cut compute together what the model does.

    Raises:
        CapabilityError: they do not.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    weights = list(trained.values())
    with kept_as_it_is(model):
        loss = _loss(StageForward(model, specs, Cut(cut.stages, 0), None, {}, _seed).run(args, kwargs))
        wanted = [loss.detach(), *_grad([loss], weights, [torch.ones_like(loss)])]
    with kept_as_it_is(model):
        found = _through_stages(model, specs, cut, args, kwargs, weights)
    for name, one, other in zip(("its output", *trained), wanted, found, strict=True):
        if not _close(one, other):
            what = name if name == "its output" else f"the gradient of {name}"
            raise CapabilityError(
                f"{type(model).__name__} computes something else when it is divided: on the example {what} differs, so "
                "its code does something between layers that stages do not see. Pass its layers as blocks"
            )


def _through_stages(
    model: nn.Module, specs: Specs, cut: Cut, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the loss and the gradients of weights that stages find, each of which gets what the one before sent."""
    frames: list[StageForward] = []
    received: list[dict[str, Tensor]] = [{}]
    output: Any = None
    for stage in range(cut.last + 1):
        given = (list(args), dict(kwargs)) if stage == 0 else pytree.tree_map(_as_sent, (list(args), dict(kwargs)))
        frames.append(StageForward(model, specs, cut, stage, received[-1], _seed))
        output = frames[-1].run(*given)
        received.append({key: t.detach().requires_grad_(t.requires_grad) for key, t in frames[-1].sent.items()})
    loss = _loss(output)
    total: list[Tensor | None] = [None] * len(weights)
    ends, gradients = [loss], [torch.ones_like(loss)]
    for stage in reversed(range(cut.last + 1)):
        leaves = {key: leaf for key, leaf in received[stage].items() if leaf.requires_grad}
        found = _grad(ends, [*weights, *leaves.values()], gradients)
        total = [_sum(a, b) for a, b in zip(total, found, strict=False)]
        back = {key: g for key, g in zip(leaves, found[len(weights) :], strict=True) if g is not None}
        ends, gradients = [frames[stage - 1].sent[key] for key in back], list(back.values())
        if not ends:
            break
    return [loss.detach(), *total]


def _as_sent(leaf: Any) -> Any:
    return TensorSpec.of(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _seed(name: str) -> None:
    torch.manual_seed(zlib.crc32(name.encode()))


def _loss(output: Any) -> Tensor:
    """Return a number that depends on all numbers of an output that have a gradient."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in leaves_in(output):
        if leaf.requires_grad:
            factors = torch.arange(1, leaf.numel() + 1, device=leaf.device).cos().view(leaf.shape)
            total = total + (leaf.double() * factors).sum().to(total.device)
    return total


def _grad(ends: Sequence[Tensor], leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor | None]:
    if not any(end.requires_grad for end in ends) or not leaves:
        return [None] * len(leaves)
    return torch.autograd.grad(ends, leaves, gradients, allow_unused=True)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return all(tensor is None or not tensor.count_nonzero() for tensor in (one, other))
    scale = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max()) if one.numel() else 0.0
    few = torch.finfo(one.dtype).eps ** 0.5 if one.is_floating_point() else 0.0
    return torch.allclose(one, other, rtol=few, atol=few * scale, equal_nan=True)
