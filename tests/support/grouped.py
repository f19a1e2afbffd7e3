"""Arguments of `Pipeline`, from options by their own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from penstock.options.parallelism import DataParallel, Microbatches, Partition
from penstock.options.passes import Precision, Recompute, Staleness
from penstock.options.run import Device, Group

GROUPS = {
    "data_parallel": DataParallel,
    "precision": Precision,
    "recompute": Recompute,
    "staleness": Staleness,
    "partition": Partition,
    "microbatches": Microbatches,
    "group": Group,
    "device": Device,
}


def grouped(values: Mapping[str, Any]) -> dict[str, Any]:
    """Put the options that belong to groups into these; everything else stays as it is."""
    rest = dict(values)
    groups = {}
    for name, group in GROUPS.items():
        own = {field.name: rest.pop(field.name) for field in fields(group) if field.name in rest}
        if own:
            groups[name] = group(**own)
    return rest | groups
