"""What a profile predicts of a run beside what the run took, by stage and by cause; and a profile that fits.

Predicted is what the planner simulates. Measured times of passes are medians, so that the first batches, which are
slower, do not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from penstock.errors import ConfigError
from penstock.plan.planned_timeline import idle_shares
from penstock.plan.profile.layer_graph import sizes_of
from penstock.plan.profile.schema import Calibration, Numbers, Profile, ProfiledLayer
from penstock.plan.run_forecast import RunSettings, run_forecast
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.proof.proof import Proof
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import Simulation, simulate_schedule
from penstock.timeline import Timeline

_WORK = ("F", "R", "B", "I", "W", "STEP")
# Batches that are simulated: more than planners need (`steady_spans`), as idle shares are those of a long run; with
# three versions of the weights they settle later.
_SPAN, _SPAN_OF_THREE = 4, 6


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a stage.

    Attributes:
        predicted, measured: by kind of work: F, R, B, I, W and STEP; kinds that the run does not have are left out.
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


def compare_with_run(profile: Profile, settings: RunSettings, timeline: Timeline) -> RunComparison:
    """Compare what a profile predicts with the timeline of a run.

    Raises:
        ConfigError: as `run_forecast`; or the timeline holds too little.
        ScheduleError: there is no such schedule.
    """
    proof, costs = run_forecast(profile, settings)
    played, longer = _spans(proof, costs)
    batch = (longer.bubble.makespan - played.bubble.makespan) / _span(proof)
    stages, between = [], profile.in_runs.between
    for at in range(proof.schedule.num_stages):
        predicted = _medians(longer.timeline, at, range(settings.stages))
        measured = _medians(timeline, at, settings.numbers.of_pipeline(0))
        predicted = {k: v if k == "STEP" else v - between for k, v in predicted.items()}  # simulated as part of passes
        if "F" not in measured:
            raise ConfigError(f"the timeline of the run has no forwards of stage {at}; runs write it when they end")
        stages.append(StageTimes({k: v for k, v in predicted.items() if k in measured}, measured))
    shares = idle_shares(longer.timeline), idle_shares(timeline)
    return RunComparison(tuple(stages), (batch, batch_seconds(timeline)), shares)


def predicted_batch(profile: Profile, settings: RunSettings) -> float:
    """Return the seconds that one more batch of a long run takes by a profile.

    Raises:
        ConfigError, ScheduleError: as `run_forecast`.
    """
    proof, costs = run_forecast(profile, settings)
    played, longer = _spans(proof, costs)
    return (longer.bubble.makespan - played.bubble.makespan) / _span(proof)


def recalibrated(profile: Profile, settings: RunSettings, comparison: RunComparison, run: str) -> Profile:
    """Return a profile whose layers take as long as those of their stage did in a run.

    Args:
        profile: that was compared.
        settings: of the run.
        comparison: what was found.
        run: its name, for the profile's source.
    """
    at = sizes_of(profile).index(settings.microbatch_size) if profile.microbatch_sizes else 0
    profile = _folded(profile)
    layers, before = list(profile.layers), profile.update
    update = min([before, *(stage.measured["STEP"] for stage in comparison.stages if "STEP" in stage.measured)])
    ends = pairwise((0, *accumulate(settings.balance)))
    for stage, (first, last), recomputed in zip(comparison.stages, ends, settings.recompute, strict=True):
        forward, step = _factor(stage, "F"), _factor(stage, "STEP", (before, update))
        for number in range(first, last):
            layer = layers[number]
            again = _value(layer.forward, at) if recomputed else 0.0
            halves = [_value(numbers, at) for numbers in (layer.backward_input, layer.backward_weight)]
            if "I" in stage.measured:
                parts = _factor_of_part(stage, "I", halves[0], again, forward), _factor(stage, "W")
                both = sum(halves)
                backward = sum(f * h for f, h in zip(parts, halves, strict=True)) / both if both else 1.0
            else:
                backward = _factor_of_part(stage, "B", _value(layer.backward, at), again, forward)
                parts = backward, backward
            layers[number] = _with_times(layer, forward, backward, parts, step)
    source = f"{profile.source}; recalibrated from {run}"[:2_000]
    return profile.model_copy(update={"layers": layers, "source": source, "update": update})


def _folded(profile: Profile) -> Profile:
    """Return a profile whose layers take what its calibration makes of them."""
    if (more := profile.calibration) is None:
        return profile
    times = more.forward, more.backward, (more.backward, more.backward), more.step
    layers = [_with_times(layer, *times) for layer in profile.layers]
    left = Calibration(between=more.between, runs=more.runs)
    return profile.model_copy(update={"layers": layers, "calibration": left, "update": profile.update_in_runs})


def _with_times(
    layer: ProfiledLayer, forward: float, backward: float, halves: Sequence[float], step: float
) -> ProfiledLayer:
    """Return a layer whose times are multiplied by factors."""
    return layer.model_copy(
        update={
            "forward": _scaled(layer.forward, forward),
            "backward": _scaled(layer.backward, backward),
            "backward_input": _scaled(layer.backward_input, halves[0]),
            "backward_weight": _scaled(layer.backward_weight, halves[1]),
            "step": layer.step * step,
        }
    )


def _spans(proof: Proof, costs: Costs) -> tuple[Simulation, Simulation]:
    """Return two simulated spans of a schedule, one of which has as many batches more as `_span` says."""
    return simulate_schedule(proof, costs, _span(proof)), simulate_schedule(proof, costs, 2 * _span(proof))


def _span(proof: Proof) -> int:
    return _SPAN_OF_THREE if RULES[proof.schedule.rule].delay > 1 else _SPAN


def _medians(timeline: Timeline, stage: int, ranks: Collection[int]) -> dict[str, float]:
    """Return the median seconds of each kind of work of a stage on some ranks."""
    found: dict[str, list[float]] = {}
    for each in timeline.work():
        if each.what in _WORK and each.stage == stage and each.rank in ranks:
            found.setdefault(each.what, []).append(each.end - each.start)
    return {kind: statistics.median(times) for kind, times in found.items()}


def batch_seconds(timeline: Timeline) -> float:
    """Return the median time from an update of the first stage to its next one, on the first rank.

    Raises:
        ConfigError: there are too few updates.
    """
    steps = [each for each in timeline.work(0) if each.what == "STEP" and (each.stage, each.direction) == (0, 0)]
    ends = sorted(each.end for each in steps)
    if len(ends) < 2:
        raise ConfigError("the timeline of the run has fewer than two updates; train for a few batches more")
    return statistics.median(b - a for a, b in pairwise(ends))


def _factor(stage: StageTimes, kind: str, fixed: tuple[float, float] = (0.0, 0.0)) -> float:
    """Return by what the predicted time must be multiplied, but for a part of it, given before and after."""
    predicted, measured = stage.predicted.get(kind), stage.measured.get(kind)
    if not predicted or not measured or predicted <= fixed[0]:
        return 1.0
    return max(measured - fixed[1], 0.0) / (predicted - fixed[0])


def _factor_of_part(stage: StageTimes, kind: str, base: float, again: float, forward: float) -> float:
    """Return the same for a backward, or a half, that takes `base` seconds and holds a forward that takes `again`."""
    return max((base + again) * _factor(stage, kind) - again * forward, 0.0) / base if base else 1.0


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
