"""What is said of a search beside its plans: what is never tried, what memory excludes, and what nearly fits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import itemgetter

from penstock.byte_sizes import human_bytes, size_of
from penstock.errors import CapabilityError, ScheduleError
from penstock.plan.candidates.block_chain import BlockChain
from penstock.plan.candidates.candidate import Candidate, NoPlanError
from penstock.plan.candidates.device_choice import MOST_CHOICES, MOST_ORDERS
from penstock.plan.candidates.planned_methods import METHODS, PLANNED, PlannedMethod
from penstock.plan.candidates.rank_memory import ACTIVATIONS, MESSAGES, OPTIMIZER
from penstock.plan.candidates.schedule_cache import KnownSchedules
from penstock.plan.simulated.candidate_trial import CandidateTrial
from penstock.plan.simulated.fitting_cuts import LeastMemory
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import LEAST_GAIN, Excluded, Skipped

_MOST_NEAR = 48  # candidates of which the nearest fit is looked for
_MOST_FREED = 4  # candidates that are tried without a limit of memory
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


# --- what is never tried ----------------------------------------------------------------------------------------------


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


# --- what memory excludes ---------------------------------------------------------------------------------------------


def memory_excluded(
    met: Iterable[tuple[float, Candidate]],
    seconds: float,
    chains: Mapping[int, BlockChain],
    devices: Devices,
    known: KnownSchedules,
) -> Excluded | None:
    """Return a candidate that a limit excludes and that is faster than the best plan; None if none is known.

    Of the candidates whose first bound, which counts no memory, is below the time of that plan, those with the least
    bounds are tried without a limit, until one is faster. So a plan that only recomputes for lack of room is found out,
    too.

    Args:
        met: candidates that divide and move nothing, with the seconds per sample that each takes at least.
        seconds: of the best plan, per sample.
        chains: of blocks, by samples of a microbatch.
        devices: with their limits.
        known: schedules of candidates.
    """
    kinds = tuple(replace(kind, memory=None) for kind in devices.kinds)
    free = replace(devices, memory=None, kinds=kinds)
    most = seconds / LEAST_GAIN
    faster = sorted((each for each in met if each[0] < most), key=itemgetter(0))
    for _, of in faster[:_MOST_FREED]:
        of = replace(of, on=tuple(replace(each, memory=None) for each in of.on))
        trial = CandidateTrial(of, chains[of.sized.samples], free, known)
        try:
            if max(trial.bounds()) < most:
                found = trial.fastest((most, 0))
                return Excluded(str(of), found.seconds, seconds / found.seconds)
        except (NoPlanError, ScheduleError, CapabilityError):
            continue
    return None


# --- where no plan fits -----------------------------------------------------------------------------------------------


def nearest_fit(trials: Iterable[CandidateTrial], devices: Devices) -> str | None:
    """Return which candidate fits into the least memory, in how much, and what may help; None if none is known.

    Candidates whose devices hold the least on average come first, until no other one can hold less. Of ranks with
    several stages the cuts are those that were found step by step, so that they may fit into less. Where devices
    differ, none is looked for.

    Args:
        trials: candidates that do not fit.
        devices: on which they do not.
    """
    if devices.kinds:
        return None
    best: tuple[LeastMemory, Candidate] | None = None
    ordered = sorted(((trial.held_on_average(), trial) for trial in trials), key=itemgetter(0))
    for least, trial in ordered[:_MOST_NEAR]:
        if best is not None and least >= best[0].nbytes:
            break
        try:
            found = trial.least_memory()
        except (ScheduleError, CapabilityError):
            continue
        if found is None or (devices.memory is not None and found.nbytes <= devices.memory):
            continue  # more memory of devices is not what it lacks
        if best is None or found.nbytes < best[0].nbytes:
            best = found, trial.of
    return None if best is None else _said_of_nearest(*best, devices)


def _said_of_nearest(least: LeastMemory, of: Candidate, devices: Devices) -> str:
    """Return what is missing, and what may help, by what takes the most; that is not tried."""
    kind = max(least.kinds, key=lambda name: least.kinds[name])
    if kind in (ACTIVATIONS, MESSAGES) and of.sized.samples > 1:
        help_ = "a profile of smaller microbatches (--microbatch-sizes)"
    elif kind in (ACTIVATIONS, OPTIMIZER) and devices.host is None and devices.cores is None:
        help_ = "moving them to the host (--host-bandwidth)"
    else:
        help_ = "more devices (--devices)"
    limit = "" if devices.memory is None else f" of {human_bytes(devices.memory, 2)}"
    return (
        f"the closest is {of}: it fits with {_rounded_up(least.nbytes)} for each device instead{limit}; "
        f"{least.kinds[kind] / least.nbytes:.0%} of what its fullest one holds are {kind}, so {help_} may help"
    )


def _rounded_up(nbytes: float) -> str:
    """Return a number of bytes as `--memory` takes it, no less."""
    said = human_bytes(nbytes, 2)
    while size_of("--memory", said) < nbytes:
        nbytes *= 1.001
        said = human_bytes(nbytes, 2)
    return said
