"""Parameters that stages share, such as an input and an output embedding.

Every stage has its own copy. The copies start equal and get the same summed gradient and the same optimizer step, so
they stay equal. In the global norm they count once, with the first of their stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.errors import ConfigError
from penstock.partition.blocks import LazyBlock
from penstock.partition.parameter_names import block_of, modules_in, prefix_of
from penstock.partition.replay.model_stages import blocks_in_stage

UNTIED = (
    "were one parameter when the pipeline was made and no longer are (as after load_state_dict(assign=True)); make "
    "them one again: the same Parameter in both places; or make a new Pipeline of the changed model, which begins with "
    "its present weights, and with optimizers that are new (a checkpoint from before the change does not fit it)"
)
"""What is said of two parameters, by name."""


@dataclass(frozen=True)
class Tie:
    """Parameters that are shared by the same stages.

    Attributes:
        stages: the stages in order; the first one counts in the norm.
        names: per stage, the names of the parameters there, in the same order.
    """

    stages: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]

    def names_at(self, index: int) -> tuple[str, ...]:
        """Return the names of the parameters at a stage."""
        return self.names[self.stages.index(index)]


def find_ties(
    blocks: Mapping[str, Any], parts: Sequence[Sequence[str]], tied: Mapping[str, str]
) -> tuple[list[Tie], dict[str, str]]:
    """Find the parameters that stages share: those that are one object, and those that the user ties.

    Args:
        blocks: the model.
        parts: names of the blocks of each stage.
        tied: name of a parameter -> name of the parameter it is tied to.

    Returns:
        The ties between stages, and the entries of `tied` within one stage.

    Raises:
        ConfigError: `tied` names a parameter that belongs to no block, or ties one to itself.
    """
    itself = next((name for name, owner in tied.items() if name == owner), None)
    if itself is not None:
        raise ConfigError(f"tied: {itself} is tied to itself; name the other parameter that it is the same as")
    stages, alias = _first_names(blocks, parts)
    for name in (*tied, *tied.values()):
        stages.setdefault(name, _stage_of(name, blocks, parts))
    places: dict[str, dict[int, str]] = defaultdict(dict)  # first name of a parameter -> stage -> its name there
    inside: dict[str, str] = {}
    for name in sorted(stages, key=lambda n: (stages[n], n in tied)):
        here = places[_root(name, tied, alias)].setdefault(stages[name], name)
        if here != name and name in tied:
            inside[name] = here
    grouped: dict[tuple[int, ...], list[list[str]]] = defaultdict(list)
    for names in places.values():
        if len(names) > 1:
            group = tuple(sorted(names))
            grouped[group].append([names[index] for index in group])
    return [Tie(group, tuple(zip(*found, strict=True))) for group, found in sorted(grouped.items())], inside


class KnownSharing:
    """Notices that blocks of several stages have come to share parameters since a pipeline was made, or have ceased to.

    Args:
        blocks: the model.
        parts: names of the blocks of each stage.
    """

    def __init__(self, blocks: Mapping[str, Any], parts: Sequence[Sequence[str]]) -> None:
        self._blocks, self._parts = blocks, parts
        self._known = self._shared()

    def check(self) -> None:
        """Make sure that they share the same ones.

        Raises:
            ConfigError: they share more, as after ``head.weight = embedding.weight``, or fewer.
        """
        now = self._shared()
        for name, (other, trained) in (self._known | now).items():
            if trained and name not in self._known:
                raise ConfigError(
                    f"{name} has become one parameter with {other}, of another stage, since the pipeline was made, "
                    "which would go on training two; make a new Pipeline of the changed model (a checkpoint from "
                    "before the change can be loaded into it)"
                )
            if trained and name not in now:
                raise ConfigError(f"{name} and {other}, of another stage, {UNTIED}")

    def _shared(self) -> dict[str, tuple[str, bool]]:
        """Return the names of parameters that stand in an earlier stage, too: their names there, and if trained."""
        found: dict[str, tuple[str, bool]] = {}
        first: dict[int, tuple[int, str]] = {}
        for index, part in enumerate(self._parts):
            for prefix in part:
                block = self._blocks[prefix]
                for path, parameter in block.named_parameters() if isinstance(block, nn.Module) else ():
                    key = f"{prefix_of(prefix, block)}{path}"
                    stage, name = first.setdefault(id(parameter), (index, key))
                    if stage != index:
                        found[key] = name, parameter.requires_grad
        return found


def _first_names(blocks: Mapping[str, Any], parts: Sequence[Sequence[str]]) -> tuple[dict[str, int], dict[str, str]]:
    """Return the stage of every trained parameter, and for further names of one object the first.

    Raises:
        ConfigError: stages share a module, but each needs its own weights in it.
    """
    stages: dict[str, int] = {}
    alias: dict[str, str] = {}
    first: dict[int, str] = {}
    homes: dict[int, int] = {}
    held = [blocks_in_stage(blocks, part) for part in parts]  # all alive at once, so that no two have one identity
    for index, own in enumerate(held):
        for prefix, block in own.items():
            for path, module in modules_in(prefix, block):
                for key, parameter in module._parameters.items():
                    if parameter is None or not parameter.requires_grad:
                        continue
                    if homes.setdefault(id(module), index) != index:
                        raise ConfigError(
                            f"{path.strip('.')}, a {type(module).__name__} with trained parameters, is one module in "
                            f"stages {homes[id(module)]} and {index}; give each stage a module of its own that holds "
                            "the same parameter, as in head.weight = embedding.weight"
                        )
                    name = f"{path}{key}"
                    stages[name] = index
                    alias[name] = first.setdefault(id(parameter), name)
    return stages, alias


def _root(name: str, tied: Mapping[str, str], alias: Mapping[str, str]) -> str:
    """Return the name that represents all names of one parameter.

    Raises:
        ConfigError: the names form a cycle.
    """
    seen = {name}
    while True:
        following = tied.get(name, alias.get(name, name))
        if following == name:
            return name
        if following in seen:
            raise ConfigError(f"tied: {name!r} is tied to itself, by way of {following!r}; remove one of the entries")
        seen.add(following)
        name = following


def _stage_of(name: str, blocks: Mapping[str, Any], parts: Sequence[Sequence[str]]) -> int:
    """Return the stage of the block that a parameter belongs to."""
    block = block_of(name, blocks)
    if block is not None and isinstance(blocks[block], nn.Module | LazyBlock):
        return next(index for index, part in enumerate(parts) if block in part)
    raise ConfigError(f"tied: {name!r} is not a parameter of any block; blocks: {', '.join(blocks)}")


def share_inside(modules: Mapping[str, Any], tied: Mapping[str, str], blocks: Mapping[str, Any]) -> None:
    """Replace tied parameters of one stage by one object.

    Args:
        modules: the blocks of the stage, built.
        tied: name of a parameter -> name of the parameter it is tied to; those of other stages are ignored.
        blocks: all of the model.

    Raises:
        ConfigError: a block has no such parameter, or their shapes differ.
    """
    for name, owner in tied.items():
        home, other_home = block_of(name, blocks), block_of(owner, blocks)
        if home is not None and other_home is not None and {home, other_home} <= modules.keys():
            module, key = _place(name, home, modules)
            other, other_key = _place(owner, other_home, modules)
            mine, theirs = getattr(module, key), getattr(other, other_key)
            if mine.shape != theirs.shape:
                raise ConfigError(
                    f"tied: {name} has shape {tuple(mine.shape)}, {owner} has {tuple(theirs.shape)}; tied parameters "
                    "must have the same shape"
                )
            setattr(module, key, theirs)


def _place(name: str, prefix: str, modules: Mapping[str, Any]) -> tuple[nn.Module, str]:
    """Return the module within a block that holds a parameter, and its name there."""
    path, _, key = name.removeprefix(prefix_of(prefix, modules[prefix])).rpartition(".")
    try:
        module: nn.Module = modules[prefix].get_submodule(path)
        module.get_parameter(key)
    except AttributeError:
        raise ConfigError(f"tied: block {prefix!r} has no parameter {name!r}") from None
    return module, key
