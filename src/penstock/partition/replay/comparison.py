"""Compares the stages of a model with the model: output, gradients, buffers and numbers on modules."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import CapabilityError
from penstock.partition.replay.placeholder import TensorSpec
from penstock.partition.replay.specs import Specs, leaves_in
from penstock.partition.replay.stage_forward import Cut, StageForward
from penstock.partition.replay.state import FrameState, nodes_of
from penstock.partition.replay.units import copies_of, modules_around, others_of


def check_stages(
    model: nn.Module, specs: Specs, cut: Cut, changed: set[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Make sure that the stages of a cut compute together what the model does, in the mode that it is in.

    Batches run one after the other: the example, one of the same shapes with other values, and one with sequences that
    are shorter by one, where an argument has whole numbers by sample and place. They show nothing from where the model
    refuses one, or a stage does, as a run would. On meta, where nothing has values, the example alone shows shapes, and
    which parameters get gradients.

    Raises:
        CapabilityError: they do not.
    """
    batches = [(list(args), dict(kwargs))]
    if not any(p.is_meta for p in model.parameters()):
        batches.append(pytree.tree_map_only(Tensor, _with_other_values, batches[0]))
        batches += _shorter(batches[1])
    with copies_of(model, batches) as (twin, given):
        state = _state_of(twin, specs, [None], changed)
        wanted, _ = _results(twin, given, partial(_whole, twin, specs.on(twin), Cut(cut.stages, 0), state))
    with copies_of(model, batches) as (twin, given):
        state = _state_of(twin, specs, range(cut.last + 1), changed)
        found, error = _results(twin, given, partial(_through_stages, twin, specs.on(twin), cut, state))
    if changed and isinstance(error, CapabilityError) and len(found) < len(wanted):
        raise error
    for number, (one, other) in enumerate(zip(wanted, found, strict=False)):
        name = next((name for name in (*one, *other) if not _alike(one.get(name), other.get(name))), None)
        if name is not None:
            on = ("on the example", "with other values than the example's", "with a shorter sequence")[number]
            raise CapabilityError(
                f"{type(model).__name__} computes something else when it is divided: {on} {name} differs, so its code "
                "does something between layers that stages do not see. Pass its layers as blocks"
            )


def _with_other_values(leaf: Tensor) -> Tensor:
    """Return a tensor with the numbers of another in other places, which are smaller in floating point."""
    rolled = leaf.detach().flatten().roll(1).view(leaf.shape)
    return (rolled * 0.75 if leaf.is_floating_point() else rolled).requires_grad_(leaf.requires_grad)


def _shorter(batch: Any) -> list[Any]:
    """Return a batch whose sequences are shorter by one; nothing where nobody can tell which dimension is theirs."""
    tokens = (leaf for leaf in leaves_in(batch) if not leaf.is_floating_point() and leaf.dim() > 1)
    length = next((leaf.shape[1] for leaf in tokens), 1)

    def cut(leaf: Tensor) -> Tensor:
        sizes = [size - (size == length and place > 0) for place, size in enumerate(leaf.shape)]
        return leaf.detach()[tuple(map(slice, sizes))].clone().requires_grad_(leaf.requires_grad)

    return [pytree.tree_map_only(Tensor, cut, batch)] if length > 1 else []


def _results(
    model: nn.Module, batches: Sequence[Any], run: Callable[..., Any]
) -> tuple[list[dict[str, Any]], Exception | None]:
    """Return for each batch, by name, loss, gradients, output, and what the model then has as buffers and numbers; and
    the error that has ended this.
    """
    trained, found = {name: p for name, p in model.named_parameters() if p.requires_grad}, list[dict[str, Any]]()
    for args, kwargs in batches:
        try:
            (loss, *gradients), output = run(args, kwargs, list(trained.values()))
        except Exception as error:  # whatever code says to other values
            if found:
                return found, error
            raise
        leaves = pytree.tree_leaves(output)
        results = {"its output": loss, "the number of its outputs": len(leaves)}
        results |= {f"the gradient of {name}": g for name, g in zip(trained, gradients, strict=True)}
        results |= {f"output {at}": _kept(leaf) for at, leaf in enumerate(leaves)}
        results |= {f"the buffer {name}": _kept(buffer) for name, buffer in model.named_buffers()}
        for path, module in model.named_modules():
            numbers = (key for key, value in vars(module).items() if isinstance(value, int | float))
            results |= {f"{path}.{key}".removeprefix("."): vars(module)[key] for key in numbers}
        found.append(results)
    return found, None


def _kept(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _state_of(twin: nn.Module, specs: Specs, stages: Iterable[int | None], changed: set[str]) -> FrameState:
    own = specs.on(twin).units
    state = FrameState(modules_around(twin, own.values()), others_of(twin), changed)
    for stage in stages:
        state.add_stage(stage)
    return state


def _whole(
    model: nn.Module, specs: Specs, cut: Cut, state: FrameState, args: Sequence[Any], kwargs: Mapping[str, Any],
    weights: Sequence[Tensor],
) -> tuple[list[Tensor | None], Any]:  # fmt: skip
    forward = StageForward(model, specs, cut, None, {}, _seed)
    with state.of(None, forward):
        output = forward.run(args, kwargs)
    loss = _loss(output)
    return [loss.detach(), *_grad([loss], weights, [torch.ones_like(loss)])], output


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor | None) and isinstance(other, Tensor | None):
        return _close(one, other)
    return type(one) is type(other) and (not isinstance(one, int | float | str) or one == other or one != one)


def _through_stages(
    model: nn.Module, specs: Specs, cut: Cut, state: FrameState, args: Sequence[Any], kwargs: Mapping[str, Any],
    weights: Sequence[Tensor],
) -> tuple[list[Tensor | None], Any]:  # fmt: skip
    """Return the loss and the gradients of weights that stages find, each of which gets what the one before sent; and
    the output.
    """
    frames: list[StageForward] = []
    received: list[dict[str, Any]] = [{}]
    output: Any = None
    for stage in range(cut.last + 1):
        given: Any = (list(args), dict(kwargs)) if stage == 0 else pytree.tree_map(_as_sent, (list(args), dict(kwargs)))
        frames.append(StageForward(model, specs, cut, stage, received[-1], _seed))
        foreign = {path: unit for path, unit in specs.units.items() if cut.stages[path] != stage}
        others = [
            (f"{path}.{inner}".rstrip("."), m) for path, unit in foreign.items() for inner, m in unit.named_modules()
        ]
        before = nodes_of(others)
        with state.of(stage, frames[-1]):
            output = frames[-1].run(*given)
        after = nodes_of(others)
        pairs = [(node, after[key]) for key, node in before.items() if key in after]
        name = next((node.name_of(key) for node, now in pairs for key in node.changes(now)), None)
        if name is not None:
            raise CapabilityError(
                f"a layer of stage {stage} changes {name} of a layer of another stage, which may be in another "
                "process; let it return that"
            )
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
    if one.is_meta or other.is_meta or one.shape != other.shape or one.dtype != other.dtype:
        return one.shape == other.shape and one.dtype == other.dtype
    scale = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max()) if one.numel() else 0.0
    few = torch.finfo(one.dtype).eps ** 0.5 if one.is_floating_point() else 0.0
    return torch.allclose(one, other, rtol=few, atol=few * scale, equal_nan=True)
