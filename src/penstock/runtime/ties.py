"""Parameters that stages share, such as an input and an output embedding.

Every stage has a copy of its own. The copies begin equal, are given the same summed gradient, and are stepped alike; so
they stay equal. In the global norm they count once, with the stage that comes first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.errors import ConfigError
from penstock.runtime.blocks import LazyBlock


@dataclass(frozen=True)
class Tie:
    """Parameters that the same cuts share.

    Attributes:
        cuts: in their order; the first one counts in the norm.
        names: per cut, what the parameters are called there, in one order.
    """

    cuts: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]

    def names_at(self, cut: int) -> tuple[str, ...]:
        """What the parameters are called at a cut."""
        return self.names[self.cuts.index(cut)]


def find_ties(
    blocks: Mapping[str, Any], parts: Sequence[Sequence[str]], tied: Mapping[str, str]
) -> tuple[list[Tie], dict[str, str]]:
    """What stages share: parameters that are one object, and those that the user says are one.

    Args:
        blocks: the model.
        parts: names of the blocks of each cut.
        tied: name of a parameter -> name of the one it is the same as.

    Returns:
        What different stages share, and of `tied` what lies within one stage.

    Raises:
        ConfigError: `tied` names a parameter of no block.
    """
    where: dict[str, dict[int, str]] = {}  # first name -> cut -> name there
    first_name: dict[int, str] = {}
    for cut, part in enumerate(parts):
        for prefix in part:
            block = blocks[prefix]
            if not isinstance(block, nn.Module):
                continue
            for name, parameter in block.named_parameters(prefix=prefix):
                if parameter.requires_grad:
                    where.setdefault(first_name.setdefault(id(parameter), name), {}).setdefault(cut, name)
    inside: dict[str, str] = {}
    for name, owner in tied.items():
        here, there = (_cut_of(n, blocks, parts) for n in (name, owner))
        if here == there:
            inside[name] = owner
        else:
            where.setdefault(owner, {there: owner}).setdefault(here, name)
    grouped: dict[tuple[int, ...], list[list[str]]] = defaultdict(list)
    for places in where.values():
        if len(places) > 1:
            cuts = tuple(sorted(places))
            grouped[cuts].append([places[cut] for cut in cuts])
    return [Tie(cuts, tuple(zip(*names, strict=True))) for cuts, names in sorted(grouped.items())], inside


def _cut_of(name: str, blocks: Mapping[str, Any], parts: Sequence[Sequence[str]]) -> int:
    """The cut of the block that a parameter belongs to."""
    for cut, part in enumerate(parts):
        for prefix in part:
            if name.startswith(f"{prefix}.") and isinstance(blocks[prefix], nn.Module | LazyBlock):
                return cut
    raise ConfigError(f"tied: there is no block that {name!r} could be a parameter of; blocks: {', '.join(blocks)}")


def share_inside(modules: Mapping[str, Any], tied: Mapping[str, str]) -> None:
    """Make parameters of one stage one object.

    Args:
        modules: the blocks of the stage, made.
        tied: name of a parameter -> name of the one it is the same as; those of other stages are left out.

    Raises:
        ConfigError: a block has no such parameter, or their shapes differ.
    """
    for name, owner in tied.items():
        if any(name.startswith(f"{prefix}.") for prefix in modules):
            module, key = _place(name, modules)
            other, other_key = _place(owner, modules)
            mine, theirs = getattr(module, key), getattr(other, other_key)
            if mine.shape != theirs.shape:
                raise ConfigError(
                    f"tied: {name} has shape {tuple(mine.shape)}, {owner} has {tuple(theirs.shape)}; what is one "
                    "parameter has one shape"
                )
            setattr(module, key, theirs)


def _place(name: str, modules: Mapping[str, Any]) -> tuple[nn.Module, str]:
    """The module that holds a parameter, and its name there."""
    prefix = next(p for p in modules if name.startswith(f"{p}."))
    path, _, key = name.removeprefix(f"{prefix}.").rpartition(".")
    try:
        module: nn.Module = modules[prefix].get_submodule(path)
        module.get_parameter(key)
    except AttributeError:
        raise ConfigError(f"tied: block {prefix!r} has no parameter {name!r}") from None
    return module, key
