"""What a profile predicts of a run beside what the run took, by stage and by cause; and a profile that fits.

Predicted is what the planner simulates. Measured times of passes are medians, so that the first batches, which are
slower, do not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from penstock.checks import in_words
from penstock.errors import ConfigError
from penstock.plan.planned_timeline import idle_shares
from penstock.plan.planners.two_bw import Sized
from penstock.plan.planning import stages_decide
from penstock.plan.profile.layer_graph import layer_graph, sizes_of
from penstock.plan.profile.schema import Numbers, Profile
from penstock.plan.simulated.block_chain import BlockChain
from penstock.plan.simulated.candidate import Candidate
from penstock.plan.simulated.candidate_trial import CandidateTrial
from penstock.plan.simulated.planned_methods import PLANNED, USUAL
from penstock.plan.simulated.schedule_cache import KnownSchedules
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.schedule.proof.proof import Proof
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import Simulation, simulate_schedule
from penstock.timeline import Timeline

_PASSES = ("F", "B", "STEP")
_SPAN = 4  # batches that are simulated
_FAST = 1e30  # bytes per second of a link that takes no time


@dataclass(frozen=True)
class RunSettings:
    """How a run was configured.

    Attributes:
        method: one of `penstock.plan.simulated.planned_methods.USUAL`.
        stages, width, microbatches, microbatch_size: of the run.
        recompute: of each stage, whether forwards are run again, block by block.
        balance: blocks of each stage.
    """

    method: str
    stages: int
    width: int
    microbatches: int
    microbatch_size: int
    recompute: tuple[bool, ...]
    balance: tuple[int, ...]


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a stage.

    Attributes:
        predicted, measured: by kind of work: F, B and STEP; kinds that the run does not have are left out.
    """

    predicted: Mapping[str, float]
    measured: Mapping[str, float]

    def error(self, kind: str) -> float | None:
        """Return by what part of the measured time the prediction is off; None if there was none."""
        if not self.measured.get(kind):
            return None
        return self.predicted.get(kind, 0.0) / self.measured[kind] - 1


@dataclass(frozen=True)
class RunComparison:
    """Predicted and measured.

    Attributes:
        stages: in their order.
        batch: seconds of one more batch, predicted and measured.
        idle: shares of the time of all ranks by cause, predicted and measured.
    """

    stages: tuple[StageTimes, ...]
    batch: tuple[float, float]
    idle: tuple[Mapping[str, float], Mapping[str, float]]


def check_comparable(method: str) -> None:
    """Make sure that plans know the method of a run.

    Raises:
        ConfigError: they do not.
    """
    if method not in USUAL:
        raise ConfigError(f"runs of {in_words(USUAL)} can be compared with a profile, not {method!r}")


def compare_with_run(profile: Profile, settings: RunSettings, timeline: Timeline) -> RunComparison:
    """Compare what a profile predicts with the timeline of a run.

    Raises:
        ConfigError: the profile is of another model or lacks the microbatch size, the method is none that plans know,
            or the timeline holds too little.
    """
    trial, known, candidate = _trial(profile, settings)
    costs = trial.costs(np.array([0, *accumulate(settings.balance)]), settings.recompute)
    proof = known.proof(candidate.schedule)
    played, longer = _spans(proof, costs)
    batch = (longer.bubble.makespan - played.bubble.makespan) / _SPAN
    stages = []
    for at, cost in enumerate(costs.stages):
        predicted = {"F": cost.forward, "B": cost.backward_input + cost.backward_weight, "STEP": cost.step}
        if costs.slow_down(settings.stages):  # what they take by the clock, as was measured
            predicted |= _medians(longer.timeline, at)
        measured = _medians(timeline, at)
        if "F" not in measured:
            raise ConfigError(f"the timeline of the run has no forwards of stage {at}; runs write it when they end")
        stages.append(StageTimes({k: v for k, v in predicted.items() if k in measured}, measured))
    shares = idle_shares(longer.timeline), idle_shares(timeline)
    return RunComparison(tuple(stages), (batch, _batch_seconds(timeline)), shares)


def predicted_batch(profile: Profile, settings: RunSettings) -> float:
    """Return the seconds that one more batch of a long run takes by a profile.

    Raises:
        ConfigError: the profile is of another model or lacks the microbatch size, or the method is none that plans
            know.
    """
    trial, known, candidate = _trial(profile, settings)
    costs = trial.costs(np.array([0, *accumulate(settings.balance)]), settings.recompute)
    played, longer = _spans(known.proof(candidate.schedule), costs)
    return (longer.bubble.makespan - played.bubble.makespan) / _SPAN


def recalibrated(profile: Profile, settings: RunSettings, comparison: RunComparison, run: str) -> Profile:
    """Return a profile whose layers take as long as those of their stage did in a run.

    Args:
        profile: that was compared.
        settings: of the run.
        comparison: what was found.
        run: its name, for the profile's source.
    """
    at = sizes_of(profile).index(settings.microbatch_size) if profile.microbatch_sizes else 0
    layers = list(profile.layers)
    ends = pairwise((0, *accumulate(settings.balance)))
    for stage, (first, last), recomputed in zip(comparison.stages, ends, settings.recompute, strict=True):
        forward, whole, step = (_factor(stage, kind) for kind in _PASSES)
        for number in range(first, last):
            layer = layers[number]
            again = _value(layer.forward, at) if recomputed else 0.0
            base = _value(layer.backward, at)
            backward = max((base + again) * whole - again * forward, 0.0) / base if base else 1.0
            layers[number] = layer.model_copy(
                update={
                    "forward": _scaled(layer.forward, forward),
                    "backward": _scaled(layer.backward, backward),
                    "backward_input": _scaled(layer.backward_input, backward),
                    "backward_weight": _scaled(layer.backward_weight, backward),
                    "step": layer.step * step,
                }
            )
    source = f"{profile.source}; recalibrated from {run}"[:2_000]
    return profile.model_copy(update={"layers": layers, "source": source})


def _trial(profile: Profile, settings: RunSettings) -> tuple[CandidateTrial, KnownSchedules, Candidate]:
    """Return what predicts a run.

    Raises:
        ConfigError: as `compare_with_run`.
    """
    check_comparable(settings.method)
    size = settings.microbatch_size if profile.microbatch_sizes else None
    graph = layer_graph(profile, size)
    if sum(settings.balance) != len(graph.layers):
        raise ConfigError(
            f"the run has {sum(settings.balance)} blocks, the profile {len(graph.layers)}; take that of its model"
        )
    unknown = next((layer.name for layer in graph.layers if layer.forward is None), None)
    if unknown is not None:
        raise ConfigError(f"layer {unknown!r} of the profile has options only; forward and backward are needed")
    link = profile.links[0] if profile.links else None
    level = DeviceLevel(settings.stages * settings.width, link.bandwidth if link else _FAST / 10)
    latency, work = (link.latency, (link.work, link.work_per_byte)) if link else (0.0, (0.0, 0.0))
    devices = Devices((level,), None, latency, profile.cores, link_work=work)
    sized = Sized(graph, settings.microbatch_size, settings.microbatches * settings.width)
    candidate = Candidate(sized, PLANNED[settings.method], settings.stages, settings.width)
    known = KnownSchedules(stages_decide(profile))
    return CandidateTrial(candidate, BlockChain(graph, 2.0), devices, known), known, candidate


def _spans(proof: Proof, costs: Costs) -> tuple[Simulation, Simulation]:
    """Return two simulated spans of a schedule, one of which has `_SPAN` batches more."""
    return simulate_schedule(proof, costs, _SPAN), simulate_schedule(proof, costs, 2 * _SPAN)


def _medians(timeline: Timeline, stage: int) -> dict[str, float]:
    """Return the median seconds of each kind of work of a stage."""
    found: dict[str, list[float]] = {}
    for each in timeline.work(stage):
        if each.what in _PASSES:
            found.setdefault(each.what, []).append(each.end - each.start)
    return {kind: statistics.median(times) for kind, times in found.items()}


def _batch_seconds(timeline: Timeline) -> float:
    """Return the median time from an update of the first rank to its next one.

    Raises:
        ConfigError: there are too few updates.
    """
    ends = sorted(each.end for each in timeline.work(0) if each.what == "STEP")
    if len(ends) < 2:
        raise ConfigError("the timeline of the run has fewer than two updates; train for a few batches more")
    return statistics.median(b - a for a, b in pairwise(ends))


def _factor(stage: StageTimes, kind: str) -> float:
    """Return by what the predicted time must be multiplied."""
    predicted, measured = stage.predicted.get(kind), stage.measured.get(kind)
    return measured / predicted if predicted and measured else 1.0


def _value(numbers: Numbers | None, at: int) -> float:
    """Return a number at a microbatch size."""
    if numbers is None:
        return 0.0
    return numbers[at] if isinstance(numbers, list) else numbers


def _scaled(numbers: Numbers | None, factor: float) -> Numbers | None:
    """Return numbers times a factor, at every microbatch size."""
    if isinstance(numbers, Sequence):
        return [each * factor for each in numbers]
    return None if numbers is None else numbers * factor
