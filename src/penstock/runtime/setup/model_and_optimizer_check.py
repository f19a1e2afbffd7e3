"""Checks the model, the optimizer and the scheduler that a new pipeline is given, together."""

from __future__ import annotations

from typing import Any

from penstock.errors import ConfigError
from penstock.options.parallelism import Partition
from penstock.partition.blocks import named_blocks
from penstock.weights.optim.instance_instead_of_factory import refuse_instances


def blocks_of(
    blocks: Any, optimizer: Any, lr_scheduler: Any, example: Any, stages: int, partition: Partition
) -> dict[str, Any]:
    """Return the blocks of a model by name.

    Raises:
        ConfigError: the model is a whole one without an example, or the optimizer or the scheduler exist already, as
            first scripts have them; the message shows all the lines to write, so that one attempt after it is enough.
    """
    faults, named = [], {}
    try:
        units, cut = partition.units or (), partition.cut or ()
        named = named_blocks(blocks, example, stages, units, cut, timed=partition.by == "time")
    except ConfigError as error:
        faults.append(str(error))
    try:
        refuse_instances(optimizer, lr_scheduler)
    except ConfigError as error:
        faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    return named
