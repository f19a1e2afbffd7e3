"""Models as lists of blocks, and their partition into stages."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.checks import did_you_mean
from penstock.errors import ConfigError
from penstock.partition.replay.model_stages import UnitBlocks
from penstock.partition.replay.units import PassClock, copies_of, has_hooks
from penstock.repr_without_defaults import ShortRepr
from penstock.schedule.ir.schedule import Stage

_LOG = logging.getLogger(__name__)
_UNEVEN = 1.25  # of the slowest stage to an even share, from which on people are told
_LITTLE_MORE = 1.05  # that the slowest stage may take for fewer bytes between stages
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_PLAIN = "pass the parts of the model itself"
WRAPPERS = {
    "DistributedDataParallel": f"{_PLAIN} (model.module), and data_parallel=2 for two parallel pipelines",
    "DataParallel": f"{_PLAIN} (model.module), and data_parallel=2 for two parallel pipelines",
    "FullyShardedDataParallel": f"{_PLAIN}: its stages are sharded over the ranks already",
    "FSDPModule": f"{_PLAIN}, without fully_shard, and data_parallel=penstock.DataParallel(2, sharding='full')",
}
"""What wraps modules for other kinds of parallelism, with what to do instead."""

Blocks = nn.Module | Mapping[str, Any] | Sequence[Any]
"""A whole model; or modules, plain functions or `LazyBlock`s, by name or in sequence (with the names "0", "1", ...)."""


@dataclass(frozen=True, repr=False)
class LazyBlock(ShortRepr):
    """A block that is built only in the process that holds it, from a random seed of its own.

    So no process needs memory for the whole model, and initial weights do not depend on how it is cut.

    Attributes:
        build: a function that builds the module.
        seed: of torch's random numbers while it does.
        cost: the relative time of the block, for balancing stages; its number of parameters if None.
    """

    build: Callable[[], nn.Module]
    seed: int
    cost: float | None = None

    def make(self) -> nn.Module:
        """Build the module."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.build()


class TimedBlocks(dict[str, Any]):
    """Blocks with the input of the first one, on which they can be measured."""

    def __init__(self, named: Mapping[str, Any], example: Any) -> None:
        super().__init__(named)
        self._example = example

    @cached_property
    def seconds(self) -> list[float]:
        """Of a forward and a backward of each block."""
        made = {name: block.make() if isinstance(block, LazyBlock) else block for name, block in self.items()}
        clock = PassClock(list(self))
        with copies_of(nn.Module(), made, self._example) as (_, twins, given):

            def forward() -> Any:
                value = given
                for name, block in twins.items():
                    value = block(clock.begin(name, value))
                return value

            return clock.seconds(forward)


def named_blocks(
    blocks: Any,
    example: Any = None,
    stages: int = 2,
    units: Sequence[str] = (),
    cut: Sequence[str] = (),
    *,
    timed: bool = False,
) -> dict[str, Any]:
    """Return the blocks by name, given as `Blocks`, or as `children` or `named_children` of a module yields them.

    Args:
        blocks: of the model.
        example: inputs of a whole model, by which its layers are found; None for blocks.
        stages: into how many a whole model is to be cut, at least.
        units, cut: of a whole model, as in `penstock.options.parallelism.Partition`.
        timed: the example may also be the input of the first of several blocks, to measure them.

    Raises:
        ConfigError: there is no block, one is neither a module nor a function, or names of parameters collide; or this
            is a whole model without an example.
        CapabilityError: this is a whole model that cannot be divided.
    """
    named: dict[str, Any]
    if example is not None and timed and not isinstance(blocks, nn.Module):
        return TimedBlocks(named_blocks(blocks, units=units), example)
    if example is not None and not isinstance(blocks, nn.Module):
        raise ConfigError(
            f"example is for a whole model, which is an nn.Module, and this is a {type(blocks).__name__}; leave it out "
            "where you pass blocks"
        )
    if example is not None or is_whole_model(blocks):
        _check_whole_model(blocks, example)
        return UnitBlocks(blocks, example, stages, units, cut, timed=timed)
    if units:
        raise ConfigError("units are those of a whole model; pass the model, with example=inputs, or leave them out")
    if isinstance(blocks, nn.Module):
        named = dict(blocks._modules)  # also a module that is there twice, which named_children leaves out
    elif isinstance(blocks, Mapping):
        named = dict(blocks)
    elif isinstance(blocks, Sequence | Iterator) and not isinstance(blocks, str):
        given = list(blocks)
        pairs = bool(given) and all(isinstance(b, tuple) and len(b) == 2 and isinstance(b[0], str) for b in given)
        named = dict(given) if pairs else {str(i): block for i, block in enumerate(given)}
    else:
        raise ConfigError(f"blocks must be a list or a dict of modules, got {type(blocks).__name__}")
    if not named:
        raise ConfigError("the model has no blocks")
    for name, block in named.items():
        _check_block(name, block)
    _check_nested(named)
    return named


def is_whole_model(blocks: Any) -> bool:
    """Return whether this is a module with a forward of its own, rather than a container of blocks, or blocks."""
    return isinstance(blocks, nn.Module) and (not isinstance(blocks, _CONTAINERS) or _own_part(blocks) is not None)


def _check_whole_model(model: nn.Module, example: Any) -> None:
    """Refuse a whole model that is wrapped, compiled or lazy, has hooks, or comes without an example.

    Raises:
        ConfigError: it is, has some, or does.
    """
    check_shapes("the model", model)
    if type(model).__name__ == "OptimizedModule":  # of torch.compile
        raise ConfigError(
            f"the model is compiled as a whole; {_PLAIN}, and compile each: for block in blocks: block.compile()"
        )
    if has_hooks(model):
        raise ConfigError(
            f"{type(model).__name__} has hooks, but the code around its layers runs on every stage; put them on its "
            "layers, or pass [model], which is one block with its hooks"
        )
    if example is None:
        own = f", since it has {_own_part(model)}" if isinstance(model, _CONTAINERS) else ""
        raise ConfigError(
            f"{type(model).__name__} is a whole model{own}, and is divided by running its forward on an example. Pass "
            "the inputs of a batch, as the model takes them (a tuple by position, a dict by name):\n"
            "    penstock.Pipeline(model, ..., example=next(iter(loader))[0])  # of a loader of (inputs, targets)\n"
            "A list or dict of blocks, each of which takes what the one before returns, needs none"
        )


def _own_part(container: nn.Module) -> str | None:
    """Return what a container has that would be lost if its children were called in turn; None if nothing.

    Args:
        container: an nn.Sequential, nn.ModuleList or nn.ModuleDict, or of a class made from one.
    """
    base = nn.Sequential if isinstance(container, nn.Sequential) else nn.Module
    called = type(container).__call__ is nn.Module.__call__
    if not called or getattr(container.forward, "__func__", None) is not base.forward:
        return "a forward of its own"
    if has_hooks(container):
        return "hooks"
    state = next(iter({**container._parameters, **container._buffers}), None)
    return None if state is None else f"a parameter or buffer of its own, {state}"


def _refuse_wrapped(name: str, module: nn.Module) -> None:
    """Refuse a module that is wrapped for another kind of parallelism, as is one in it.

    Raises:
        ConfigError: it is; the message says what to do instead.
    """
    for path, inner in module.named_modules():
        for kind in type(inner).__mro__:  # fully_shard makes a class from that of the module and FSDPModule
            if kind.__name__ in WRAPPERS:
                where = f"{name}, in {path}," if path else name
                raise ConfigError(f"{where} is of type {type(inner).__name__}; {WRAPPERS[kind.__name__]}")


def check_same_blocks(blocks: Any, named: Mapping[str, Any]) -> None:
    """Make sure that a model, or a container such as an nn.Sequential, has the blocks that a pipeline was made of.

    Args:
        blocks: as given to the pipeline; lists and dicts may have changed.
        named: the blocks at that time.

    Raises:
        ConfigError: one was replaced, added or removed; or the container has got something of its own, such as a hook,
            which would not be called.
    """
    if isinstance(named, UnitBlocks):
        named.check()
    elif isinstance(blocks, nn.Module):
        _check_same_children(blocks, named)


def _check_same_children(blocks: nn.Module, named: Mapping[str, Any]) -> None:
    if (own := _own_part(blocks)) is not None:
        raise ConfigError(
            f"{type(blocks).__name__} has got {own} since the pipeline was made, but a pipeline calls its children in "
            "turn, not the model itself; put that on the first or the last block, or remove it"
        )
    for name in blocks._modules.keys() | named.keys():
        now, before = blocks._modules.get(name), named.get(name)
        if now is not before:
            what = "is new" if before is None else "is gone" if now is None else "is another"
            raise ConfigError(
                f"block {name!r} {what} since the pipeline was made, so the pipeline would train without that change; "
                "make a new Pipeline of the changed model (a checkpoint from before the change can be loaded into it "
                "if parameters have kept their names and shapes)"
            )


def check_shapes(what: str, block: Any) -> None:
    """Refuse a module with parameters that have no shape yet, or are divided already.

    Args:
        what: it is, such as "block 'a'".
        block: which.

    Raises:
        ConfigError: it has some, as modules such as LazyLinear do before their first forward; or it is wrapped for
            another kind of parallelism.
    """
    if isinstance(block, nn.Module):
        _refuse_wrapped(what, block)
    tensors = [*block.named_parameters(), *block.named_buffers()] if isinstance(block, nn.Module) else []
    for path, tensor in tensors:
        if is_lazy(tensor):
            raise ConfigError(
                f"{what}: {path} has no shape yet, as in torch's lazy modules; run the model once on a sample before "
                "the pipeline is made, or use the module with its sizes given (Linear in place of LazyLinear)"
            )


def check_values(name: str, block: nn.Module) -> None:
    """Refuse a block with parameters or buffers that have no values.

    Raises:
        ConfigError: it has some, on the device "meta".
    """
    for path, tensor in (*block.named_parameters(), *block.named_buffers()):
        if tensor.is_meta:
            raise ConfigError(
                f"block {name!r}: {path} is on the device 'meta', which holds shapes and no values; give it memory and "
                "values first (model.to_empty(device='cpu'), then its initialization or load_state_dict), or make the "
                "block where it is needed and on a device with memory: LazyBlock(lambda: ..., seed=0)"
            )


def _check_block(name: str, block: Any) -> None:
    """Refuse a block that cannot be called with the output of the one before."""
    what = f"block {name!r} is of type {type(block).__name__}"
    if isinstance(block, type):
        raise ConfigError(
            f"block {name!r} is the class {block.__name__}; pass an instance, or LazyBlock(lambda: "
            f"{block.__name__}(...), seed=0), which is made where it is needed"
        )
    if isinstance(block, nn.Parameter):
        raise ConfigError(f"{what}; blocks are the modules that hold the parameters, such as *model.children()")
    check_shapes(f"block {name!r}", block)
    if not callable(block) and not isinstance(block, LazyBlock):
        raise ConfigError(f"{what}, neither a module nor a function")
    lacks = isinstance(block, nn.Module) and getattr(block.forward, "__func__", None) is nn.Module.forward
    if lacks and not hasattr(block, "forward_slice"):
        raise ConfigError(f"{what}, which has no forward; pass what it holds, one after the other: [..., *block, ...]")


def _check_nested(named: Mapping[str, Any]) -> None:
    """Make sure that every parameter and buffer belongs to one block by its name, where names of blocks are nested.

    Raises:
        ConfigError: a block has one whose name begins like that of another block.
    """
    for inner in named:
        for outer in named:
            if not inner.startswith(f"{outer}."):
                continue
            path = inner.removeprefix(f"{outer}.")
            taken = next((own for own in _state_names(named[outer]) if own.startswith(f"{path}.")), None)
            if taken is not None:
                raise ConfigError(
                    f"{outer}.{taken} is part of block {outer!r}, but by its name of block {inner!r}; rename one of "
                    "the blocks, or leave what is a block of its own out of the other one"
                )


def _state_names(block: Any) -> list[str]:
    """Return the names of the parameters and buffers of a block; a lazy one is built without memory."""
    if isinstance(block, LazyBlock):
        with torch.device("meta"):
            block = block.build()
    if not isinstance(block, nn.Module):
        return []
    return [name for name, _ in (*block.named_parameters(remove_duplicate=False), *block.named_buffers())]


def cost_of(block: Any) -> float:
    """Return the relative cost of a block: its attribute `cost`, or its number of parameters."""
    if isinstance(block, LazyBlock) and block.cost is None:
        with torch.device("meta"):
            block = block.build()
    cost = getattr(block, "cost", None)
    if cost is None and isinstance(block, nn.Module):
        cost = sum(p.numel() for p in block.parameters())
    return float(cost or 0.0)


def check_enough(blocks: Mapping[str, Any], num_stages: int) -> None:
    """Make sure that no stage has to be empty.

    Raises:
        ConfigError: there are fewer blocks than stages.
    """
    if len(blocks) < num_stages:
        chains = (n for n, b in blocks.items() if isinstance(b, nn.Sequential) and len(b) > 1 and _own_part(b) is None)
        nested = next(chains, None)
        more = (
            "" if nested is None else f", or pass the {len(blocks[nested])} parts of {nested!r} as blocks of their own"
        )
        raise ConfigError(
            f"the model has {len(blocks)} blocks, which cannot be cut into {num_stages} stages; use fewer stages{more}"
        )


def cut_blocks(
    blocks: Mapping[str, Any],
    num_stages: int,
    balance: Sequence[int] | None = None,
    cut: Sequence[str] | None = None,
    by: str = "work",
) -> list[list[str]]:
    """Partition the blocks into consecutive, non-empty stages, and return the names of the blocks of each.

    If neither `balance` nor `cut` says how, the most expensive stage is to cost as little as can be. Among the cuts
    whose most expensive stage costs at most 5 % more, that with the fewest bytes of values between stages is taken,
    where they are known: a cut through a branch with a skip beside it has to gain something.

    Args:
        blocks: the model.
        num_stages: the number of stages.
        balance: blocks per stage.
        cut: the first block of each stage but the first; of a whole model, the path of a module.
        by: what a block costs: "work" (`cost_of`) or "time", measured on the example.

    Raises:
        ConfigError: there are fewer blocks than stages, `balance` or `cut` does not match them, or there is no example
            to measure.
    """
    check_enough(blocks, num_stages)
    names = list(blocks)
    if cut is not None:
        starts = [0, *(_place_of(blocks, name) for name in cut), len(names)]
        balance = [end - start for start, end in pairwise(starts)]
        if len(balance) != num_stages or min(balance) < 1:
            raise ConfigError(
                f"cut must name the first block of each stage but the first, in the order of the model, so "
                f"{num_stages - 1} for {num_stages} stages; got {list(cut)}"
            )
    elif balance is None:
        costs = [cost_of(block) for block in blocks.values()] if by == "work" else _seconds(blocks)
        taken = [getattr(block, "taken", 0) for block in blocks.values()]
        balance = _best_balance(costs, num_stages, taken)
        if by == "time" or not any(
            isinstance(b, LazyBlock) or getattr(b, "cost", None) is None for b in blocks.values()
        ):  # work that somebody has counted; launchers cut lazy blocks, too, as ranks do again
            _warn_if_uneven(names, costs, balance)
    elif len(balance) != num_stages or min(balance) < 1 or sum(balance) != len(names):
        raise ConfigError(
            f"partition (penstock train: balance) must hold {num_stages} positive numbers that add up to the model's "
            f"{len(names)} blocks; got {list(balance)}, {len(balance)} numbers that add up to {sum(balance)}"
        )
    ends = list(accumulate(balance))
    return [names[end - size : end] for size, end in zip(balance, ends, strict=True)]


def _seconds(blocks: Mapping[str, Any]) -> list[float]:
    if not isinstance(blocks, UnitBlocks | TimedBlocks):
        raise ConfigError("by='time' measures forward and backward on an example; pass example=inputs")
    return blocks.seconds


def _place_of(blocks: Mapping[str, Any], name: str) -> int:
    if isinstance(blocks, UnitBlocks):
        return blocks.place_of(name)
    if name not in blocks:
        raise ConfigError(f"cut: the model has no block {name!r}.{did_you_mean(name, blocks)}")
    return list(blocks).index(name)


def _warn_if_uneven(names: Sequence[str], costs: Sequence[float], balance: Sequence[int]) -> None:
    """Say so where a stage takes far longer than it would if work could be divided evenly, and why."""
    total, stages, ends = sum(costs) or 1.0, len(balance), list(accumulate(balance))
    slowest, largest = _slowest(costs, balance), costs.index(max(costs))
    if slowest <= _UNEVEN * total / stages:
        return
    at = next(at for at, end in enumerate(ends) if sum(costs[end - balance[at] : end]) == slowest)
    first, last = names[ends[at] - balance[at]], names[ends[at] - 1]
    held = f"{names[largest]!r} alone is {max(costs) / total:.0%}, and is not divided"
    if max(costs) <= _UNEVEN * total / stages:
        held = f"it has {first!r} to {last!r}, and no other cut of these layers is more even"
    even = (n for n in range(stages - 1, 1, -1) if _slowest(costs, _best_balance(costs, n)) <= _UNEVEN * total / n)
    fewer = next((f"use {n} stages, which are even" for n in even), "use fewer stages")
    _LOG.warning(
        f"stages are uneven: stage {at} has {slowest / total:.0%} of the work, and an even share is {1 / stages:.0%}; "
        f"{held}; {fewer}"
    )


def _slowest(costs: Sequence[float], balance: Sequence[int]) -> float:
    return max(sum(costs[end - size : end]) for size, end in zip(balance, accumulate(balance), strict=True))


def deal(
    blocks: Mapping[str, Any], parts: Sequence[Sequence[str]], stages: Iterable[tuple[int, Stage]]
) -> dict[int, dict[Stage, dict[str, Any]]]:
    """Distribute the blocks to the stages in this process: the given ones to the first copy of a stage, copies to
    others.

    Args:
        blocks: the model.
        parts: names of the blocks of each stage.
        stages: the stages of this process, each with the index of its pipeline.

    Returns:
        The blocks by pipeline and stage.
    """
    dealt: dict[int, dict[Stage, dict[str, Any]]] = {}
    held: set[int] = set()
    copies: dict[tuple[int, int], UnitBlocks] = {}
    for pipeline, stage in sorted(stages, key=lambda held: (held[0], held[1].direction)):
        if isinstance(blocks, UnitBlocks):  # whose stages share the model
            if stage.index in held and (pipeline, stage.direction) not in copies:
                copies[pipeline, stage.direction] = _copied(blocks)  # type: ignore[assignment]  # of the same class
            given = copies.get((pipeline, stage.direction), blocks)
            dealt.setdefault(pipeline, {})[stage] = {parts[stage.index][0]: given.stage(parts, stage.index)}
        else:
            own = {name: blocks[name] for name in parts[stage.index]}
            dealt.setdefault(pipeline, {})[stage] = _copied(own) if stage.index in held else own
        held.add(stage.index)
    return dealt


def _copied(blocks: dict[str, Any]) -> dict[str, Any]:
    """Copy blocks; attributes of their parameters, which torch does not copy, are those of the originals."""
    memo: dict[int, Any] = {}
    made = copy.deepcopy(blocks, memo)
    for parameter in (p for block in blocks.values() if isinstance(block, nn.Module) for p in block.parameters()):
        memo[id(parameter)].__dict__ = parameter.__dict__
    return made


def _best_balance(costs: Sequence[float], num_stages: int, taken: Sequence[float] = ()) -> list[int]:
    """Return the sizes of consecutive, non-empty parts with the least maximal cost, or with the fewest bytes taken by
    parts from those before at little more (dynamic program over block and part).
    """
    sizes = _least(costs, num_stages, math.inf, [0] * len(costs))
    return _least(costs, num_stages, _LITTLE_MORE * _slowest(costs, sizes), taken) if len({*taken}) > 1 else sizes


def _least(costs: Sequence[float], num_stages: int, limit: float, taken: Sequence[float]) -> list[int]:
    """Return the sizes of parts with the fewest bytes taken, then the least maximal cost, none above a limit."""
    sums = [0.0, *accumulate(costs)]
    n, none = len(costs), (math.inf, math.inf)
    best = [[none] * (n + 1) for _ in range(num_stages + 1)]
    where = [[0] * (n + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0, 0.0
    for part in range(1, num_stages + 1):
        for end in range(part, n + 1):
            for start in range(part - 1, end):
                if (cost := sums[end] - sums[start]) <= limit:
                    value = best[part - 1][start][0] + taken[start], max(best[part - 1][start][1], cost)
                    if value < best[part][end]:
                        best[part][end], where[part][end] = value, start
    sizes, end = [], n
    for part in range(num_stages, 0, -1):
        sizes.append(end - where[part][end])
        end = where[part][end]
    return sizes[::-1]
