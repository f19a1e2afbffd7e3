"""The options that must be alike on all ranks, as texts that ranks can compare.

Every option counts but those in `_MAY_DIFFER`, so that a new one is compared unless it is listed there. Where several
values mean the same, such as 1 and 1.0, or a loss scale that comes with fp16, they have one text.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from penstock.checks import is_number
from penstock.options.all_options import PipelineOptions
from penstock.partition.emulated_delays import BlockDelays
from penstock.partition.tied import Tie
from penstock.schedule.ir.sharding import Sharding

_MAY_DIFFER = frozenset({"timeout", "device", "cuda_graphs", "waits", "compile"})
"""What concerns one process alone."""

_COMPARED_ELSEWHERE = frozenset({"microbatches", "in_flight", "balance"})
"""What is part of the schedule, or of the blocks of each stage."""

_LONGEST = 160  # characters of a text


def common_options(
    options: PipelineOptions,
    ties: Sequence[Tie],
    delays: BlockDelays,
    backward_delays: BlockDelays | None,
    sharding: Sharding,
) -> dict[str, str]:
    """Return the options that must be alike on all ranks: name -> text, of limited length.

    Args:
        options: of the pipeline.
        ties: parameters that stages share, which stand for `tied`.
        delays: of every block, whatever they were given as.
        backward_delays: the same in backwards; None where they are those of forwards.
        sharding: what the options add to the schedule.
    """
    values: dict[str, Any] = {}
    for group in fields(options):
        present = getattr(options, group.name)
        values |= {option.name: getattr(present, option.name) for option in fields(present)}
    resolved = {
        "loss_scale": options.precision.scaling,
        "tied": [tie.names for tie in ties],
        "delays": _by_block(delays),
        "backward_delays": _by_block(backward_delays or delays),
        "sharding": str(sharding),
        "mesh": _sizes(options.data_parallel.mesh),
        "lr_scheduler": None if options.update.lr_scheduler is None else "given",  # functions cannot be compared
    }
    left_out = _MAY_DIFFER | _COMPARED_ELSEWHERE
    return {name: _short(_text(value)) for name, value in (values | resolved).items() if name not in left_out}


def differing_options(
    mine: Mapping[str, Mapping[str, str]], others: Mapping[str, Mapping[str, str]]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options that differ, with the values of this rank, and with those of the other one.

    Args:
        mine: what `common_options` returned here, by the name of the plan.
        others: the same of the other rank.
    """
    for plan, here in mine.items():
        there = others.get(plan, here)
        names = [name for name in here if here[name] != there[name]]
        if names:
            return {name: here[name] for name in names}, {name: there[name] for name in names}
    return {}, {}


def _sizes(mesh: DeviceMesh | None) -> dict[str, int] | None:
    """The dimensions of a mesh, whose ranks are those of the group, in the same order; None if there is none."""
    return None if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def _by_block(delays: BlockDelays) -> Any:
    """One number where all blocks have the same delay, else that of each block."""
    numbers = list(delays.by_block.values())
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _text(value: Any) -> str:
    """A value as text, the same in every process: without functions, addresses and the types of numbers."""
    if is_number(value) and not isinstance(value, int):
        number = float(value)
        return repr(int(number) if number.is_integer() else number)
    if is_dataclass(value):
        return f"{type(value).__name__}({_fields(value)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_text(key)}: {_text(each)}' for key, each in value.items()))}}}"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return f"{type(value).__name__}({', '.join(f'{name}={_text(each)}' for name, each in value._asdict().items())})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    shown: Any = type(value).__repr__
    return type(value).__name__ if shown is object.__repr__ else repr(value)  # that of object says an address


def _fields(value: Any) -> str:
    """The fields of a dataclass that do not have their default."""
    found = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
    shown = {name: each for name, (each, usual) in found.items() if usual is MISSING or _text(each) != _text(usual)}
    return ", ".join(f"{name}={_text(each)}" for name, each in shown.items() if not callable(each))


def _short(text: str) -> str:
    """A long text is cut, with a checksum of the whole."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... (checksum {zlib.crc32(text.encode()):08x})"
