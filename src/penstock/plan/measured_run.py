"""What a profile predicts of a run beside what the run took, by stage and by cause.

Predicted is what the planner simulates. Measured times of passes are medians, so that the first batches, which are
slower, do not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import ConfigError
from penstock.plan.planned_timeline import idle_shares
from penstock.plan.profile.schema import Profile
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
_DRAINED = 2  # batches at the end of a run that may have less between their updates
_FEWEST = _DRAINED + 2  # updates of a run


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
class PredictedRun:
    """What a plan predicts of its run, in seconds of a batch.

    Attributes:
        batch: one more of a long run.
        passes, updates: of each stage; empty if not known.
        idle: shares of the time of all ranks by cause; None if not known.
    """

    batch: float
    passes: Sequence[float] = ()
    updates: Sequence[float] = ()
    idle: Mapping[str, float] | None = None


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
    return RunComparison(tuple(stages), (batch, measured_batch(timeline)), shares)


def prediction_in_words(predicted: PredictedRun, timeline: Timeline, ranks: Collection[int], microbatches: int) -> str:
    """Return how far a plan's prediction was from what its run took: of a batch, of each stage, and of idle time.

    Args:
        predicted: of a batch.
        timeline: of the run.
        ranks: of one of its pipelines.
        microbatches: of a batch in it.

    Raises:
        ConfigError: the timeline holds too little.
    """
    batch = measured_batch(timeline)
    lines = [f"A batch took {batch:.4g} s, planned {predicted.batch:.4g} s ({predicted.batch / batch - 1:+.1%})."]
    for stage, passes in enumerate(predicted.passes):
        took = _durations(timeline, stage, ranks)
        updates, forwards = took.pop("STEP", []), len(took.get("F", []))
        each = sum(statistics.median(times) * len(times) for times in took.values())  # some backwards may be halved
        found = each * microbatches / max(forwards, 1)
        if not found:
            continue
        said = f"stage {stage}: passes {found:.4g} s, planned {passes:.4g} s ({passes / found - 1:+.1%})"
        if planned := predicted.updates[stage : stage + 1]:
            update = statistics.median(updates) if updates else 0.0
            said += f"; update {update:.4g} s, planned {planned[0]:.4g} s"
        lines.append(said)
    if predicted.idle is not None:
        lines.append(idle_in_words("planned", predicted.idle, idle_shares(timeline)))
    return "\n".join(lines)


def idle_in_words(expected: str, predicted: Mapping[str, float], measured: Mapping[str, float]) -> str:
    """Return measured shares of idle time beside predicted ones, the largest difference first.

    Args:
        expected: what to call these: "planned" or "predicted".
        predicted, measured: shares by cause.
    """
    causes = sorted({*predicted, *measured}, key=lambda c: -abs(predicted.get(c, 0.0) - measured.get(c, 0.0)))
    each = (f"{c} {measured.get(c, 0.0):.1%}, {expected} {predicted.get(c, 0.0):.1%}" for c in causes)
    return f"idle, of the time of all ranks: {'; '.join(each) or 'never'}"


def predicted_batch(profile: Profile, settings: RunSettings) -> float:
    """Return the seconds that one more batch of a long run takes by a profile.

    Raises:
        ConfigError, ScheduleError: as `run_forecast`.
    """
    proof, costs = run_forecast(profile, settings)
    played, longer = _spans(proof, costs)
    return (longer.bubble.makespan - played.bubble.makespan) / _span(proof)


def _spans(proof: Proof, costs: Costs) -> tuple[Simulation, Simulation]:
    """Return two simulated spans of a schedule, one of which has as many batches more as `_span` says."""
    return simulate_schedule(proof, costs, _span(proof)), simulate_schedule(proof, costs, 2 * _span(proof))


def _span(proof: Proof) -> int:
    return _SPAN_OF_THREE if RULES[proof.schedule.rule].delay > 1 else _SPAN


def _medians(timeline: Timeline, stage: int, ranks: Collection[int]) -> dict[str, float]:
    """Return the median seconds of each kind of work of a stage on some ranks."""
    return {kind: statistics.median(times) for kind, times in _durations(timeline, stage, ranks).items()}


def _durations(timeline: Timeline, stage: int, ranks: Collection[int]) -> dict[str, list[float]]:
    """Return the seconds of all work of a stage on some ranks, by kind."""
    found: dict[str, list[float]] = {}
    for each in timeline.work():
        if each.what in _WORK and each.stage == stage and each.rank in ranks:
            found.setdefault(each.what, []).append(each.end - each.start)
    return found


def measured_batch(timeline: Timeline) -> float:
    """Return the median time from an update of the first stage to its next one, on the first rank.

    At the end, where methods that do not flush have no more forwards between updates, these do not count.

    Raises:
        ConfigError: there are too few updates.
    """
    steps = [each for each in timeline.work(0) if each.what == "STEP" and (each.stage, each.direction) == (0, 0)]
    ends = sorted(each.end for each in steps)
    if len(ends) < _FEWEST:
        raise ConfigError(
            f"the timeline of the run has fewer than {_FEWEST} updates; the last ones do not show what a batch takes, "
            "so train for more batches"
        )
    times = [b - a for a, b in pairwise(ends)]
    return statistics.median(times[:-_DRAINED])
