"""What the simulated search never tries, and why: its list of what was skipped begins with it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from penstock.plan.candidates.block_chain import BlockChain
from penstock.plan.candidates.device_choice import MOST_CHOICES, MOST_ORDERS
from penstock.plan.candidates.planned_methods import METHODS, PLANNED, PlannedMethod
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import Skipped

_NEVER = Skipped(
    "other methods and options",
    "this search does not know them: methods and numbers of chunks that --methods does not take, orders on a V for "
    "given times (v-auto), tensor parallelism, stages with replicas of their own; others than the usual methods on "
    "a single rank; divided weights but of layered and 2bw-layered; divided gradients of ranks with several stages; "
    "activations and optimizer states on the host at once; activations on the host of ranks that have room for them, "
    "beside ranks that recompute though they could move theirs, or of others than the usual methods",
)
_WHOLE = Skipped("divided state", "what parallel pipelines may divide is tried under a limit (--memory) only")
_ACTIVATIONS = "activations on the host"
_ON_THE_HOST = f"optimizer states or {_ACTIVATIONS}"
_OTHER_PLACES = Skipped(
    "other places of stages",
    "no device is left out for one that is no faster and has no more memory; replicas of a stage are of one kind where "
    f"that can be; of more than {MOST_ORDERS} orders along a pipeline those with equal devices side by side are tried, "
    f"and of more than {MOST_CHOICES} choices of devices for a depth and a width those with the fastest",
)


def never_tried(devices: Devices, chains: Collection[BlockChain], asked: Collection[str]) -> Iterator[Skipped]:
    """Yield the classes of configurations that are not tried, whatever their times are.

    Args:
        devices: to plan for.
        chains: of blocks, one for each size of microbatches.
        asked: methods that are asked for by name.
    """
    yield _NEVER
    if devices.memory is None:
        yield _WHOLE
    if devices.kinds:
        yield _OTHER_PLACES
    yield from _not_on_host(devices, chains)
    for name in METHODS:
        if name in asked and not PLANNED[name].divides:
            yield Skipped(f"divided state of {name}", "sharding does not go with three versions of the weights")


def _not_on_host(devices: Devices, chains: Collection[BlockChain]) -> Iterator[Skipped]:
    """Yield what is not tried in the memory of the host, of what might be there."""
    if devices.kinds:
        yield Skipped(_ON_THE_HOST, "not tried where devices differ")
    elif devices.memory is not None and devices.host is None:
        said = "the bandwidth to the memory of the host is not known: give --host-bandwidth, or --cluster"
        yield Skipped(_ON_THE_HOST, said)
    elif devices.memory is not None and devices.cores is not None:
        yield Skipped(_ACTIVATIONS, "ranks compute on the cores of their host, so they are there already")
    elif devices.memory is not None and not all(chain.movable for chain in chains):
        said = "the profile does not say how much of them can be moved (movable); measure it again"
        yield Skipped(_ACTIVATIONS, said)


def why_not_tried(
    method: PlannedMethod, devices: Devices, chains: Collection[BlockChain], asked: Collection[str] | None
) -> str | None:
    """Return why no configuration of a method is tried; None if some are.

    Args:
        method: which.
        devices: to plan for.
        chains: of blocks, one for each size of microbatches.
        asked: methods that are asked for by name; None if all are to be tried.
    """
    if method.on_request and asked is None:
        return (
            "reads weights that are two updates late, which costs far more loss than one update "
            "(docs/which-method.md): tried where --methods names it only"
        )
    if method.plain != method.name and method.plain in (METHODS if asked is None else asked):
        return f"takes as long as {method.plain}, whose orders it has, and more memory"
    if method.halved and any(chain.halved is None for chain in chains):
        return "the profile does not tell the halves of backwards of every layer apart"
    if method.full and devices.memory is None:
        return "divides weights among pipelines, which is tried under a limit (--memory) only"
    return None
