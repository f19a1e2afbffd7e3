"""Kinds of what a device holds, in the words of the runtime's ledger.

Buffers of the size of the parameters change their roles all the time: a version becomes idle, then a gradient, and in
the end the next version. What the ledger calls weights, gradients, summed gradients and idle buffers is one kind here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from penstock.simulate.memory.held import HeldKind

BUFFERS = "weights and gradients"
MASTERS = "master weights"
ACTIVATIONS = "activations"
FROZEN = "frozen parameters and buffers"
GATHERED = "gathered weights"
BETWEEN_RUNS = "weights between runs"
OPTIMIZER = "optimizer"
MESSAGES = "messages"

KINDS = (BUFFERS, MASTERS, GATHERED, BETWEEN_RUNS, OPTIMIZER, ACTIVATIONS, MESSAGES, FROZEN)
"""In the order in which they are shown."""

_NAMED: Mapping[HeldKind, str] = MappingProxyType({
    HeldKind.OUTPUT: MESSAGES,
    HeldKind.GRADIENT: MESSAGES,
    HeldKind.OPTIMIZER: OPTIMIZER,
    HeldKind.SCRATCH: OPTIMIZER,  # as the ledger has it
    HeldKind.WHOLE: BETWEEN_RUNS,
    HeldKind.GATHERED: GATHERED,
    HeldKind.FULL_GRADIENT: BUFFERS,
    HeldKind.SUM: BUFFERS,
    HeldKind.OLDER: BUFFERS,
})  # fmt: skip  # all others are of passes


def ledger_kind(held: HeldKind) -> str:
    """Return the kind of something that comes and goes."""
    return _NAMED.get(held, ACTIVATIONS)
