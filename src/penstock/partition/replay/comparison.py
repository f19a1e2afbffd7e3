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
from penstock.partition.replay.units import copies_of


def check_stages(model: nn.Module, specs: Specs, cut: Cut, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Make sure that the stages of a cut compute together what the model does.

    Raises:
        CapabilityError: they do not.
    """
    with copies_of(model, args, kwargs) as (twin, given, named):
        trained = {name: p for name, p in twin.named_parameters() if p.requires_grad}
        output = StageForward(twin, _on(twin, specs), Cut(cut.stages, 0), None, {}, _seed).run(given, named)
        loss = _loss(output)
        wanted = [loss.detach(), *_grad([loss], list(trained.values()), [torch.ones_like(loss)])]
        plain = _plain(output)
    with copies_of(model, args, kwargs) as (twin, given, named):
        weights = [p for p in twin.parameters() if p.requires_grad]
        found, output = _through_stages(twin, _on(twin, specs), cut, given, named, weights)
        same = _plain(output)
    differing = next((name for name, a, b in zip(("", *trained), wanted, found, strict=True) if not _close(a, b)), None)
    if differing is None and (len(plain) != len(same) or not all(map(_alike, plain, same))):
        differing = ""
    if differing is not None:
        what = f"the gradient of {differing}" if differing else "its output"
        raise CapabilityError(
            f"{type(model).__name__} computes something else when it is divided: on the example {what} differs, so its "
            "code does something between layers that stages do not see. Pass its layers as blocks"
        )


def _on(twin: nn.Module, specs: Specs) -> Specs:
    return Specs({path: twin.get_submodule(path) for path in specs.units}, written=specs.written, untold=specs.untold)


def _plain(output: Any) -> list[Any]:
    """Return the leaves of an output, without graphs."""
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(output)]


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _close(one, other)
    return type(one) is type(other) and (not isinstance(one, int | float | str) or one == other)


def _through_stages(
    model: nn.Module, specs: Specs, cut: Cut, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Sequence[Tensor]
) -> tuple[list[Tensor | None], Any]:
    """Return the loss and the gradients of weights that stages find, each of which gets what the one before sent; and
    the output.
    """
    frames: list[StageForward] = []
    received: list[dict[str, Any]] = [{}]
    output: Any = None
    for stage in range(cut.last + 1):
        given: Any = (list(args), dict(kwargs)) if stage == 0 else pytree.tree_map(_as_sent, (list(args), dict(kwargs)))
        frames.append(StageForward(model, specs, cut, stage, received[-1], _seed))
        output = frames[-1].run(*given)
        received.append({
            key: t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t
            for key, t in frames[-1].sent.items()
        })  # fmt: skip
    loss = _loss(output)
    total: list[Tensor | None] = [None] * len(weights)
    ends, gradients = [loss], [torch.ones_like(loss)]
    for stage in reversed(range(cut.last + 1)):
        leaves = {key: leaf for key, leaf in received[stage].items() if isinstance(leaf, Tensor) and leaf.requires_grad}
        found = _grad(ends, [*weights, *leaves.values()], gradients)
        total = [_sum(a, b) for a, b in zip(total, found, strict=False)]
        back = {key: g for key, g in zip(leaves, found[len(weights) :], strict=True) if g is not None}
        ends, gradients = [frames[stage - 1].sent[key] for key in back], list(back.values())
        if not ends:
            break
    return [loss.detach(), *total], output


def _as_sent(leaf: Any) -> Any:
    return TensorSpec.of(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _seed(name: str) -> None:
    torch.manual_seed(zlib.crc32(name.encode()))


def _loss(output: Any) -> Tensor:
    """Return a number that depends on all numbers of an output that have a gradient."""
    total = None
    for leaf in leaves_in(output):
        if leaf.requires_grad:
            factors = torch.arange(1, leaf.numel() + 1, device=leaf.device).cos().view(leaf.shape)
            found = (leaf.double() * factors).sum()
            total = found if total is None else total + found.to(total.device)
    return torch.zeros(()) if total is None else total


def _grad(ends: Sequence[Tensor], leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor | None]:
    if not any(end.requires_grad for end in ends) or not leaves:
        return [None] * len(leaves)
    return torch.autograd.grad(ends, leaves, gradients, allow_unused=True)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return all(tensor is None or (not tensor.is_meta and not tensor.count_nonzero()) for tensor in (one, other))
    if one.is_meta or other.is_meta:
        return one.shape == other.shape
    scale = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max()) if one.numel() else 0.0
    few = torch.finfo(one.dtype).eps ** 0.5 if one.is_floating_point() else 0.0
    return torch.allclose(one, other, rtol=few, atol=few * scale, equal_nan=True)
