"""What passes and updates take in runs beside what they take alone: a few numbers of a machine, fitted to short runs.

A profile measures blocks one by one, with warm caches and nothing between them. In a run the same pass takes longer,
and between two passes a rank samples, posts messages and keeps its books. Ratios of methods hardly depend on that, but
seconds do.

By the clock, passes of ranks that share cores include what other ranks do in between, which the simulation counts by
itself. So of such runs one factor on all passes and updates is fitted, with which batches take what they took.

`recalibrated` makes of a profile one whose layers take what they took in a run, which is nearer for its model and
microbatch size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from penstock.errors import ConfigError
from penstock.plan.measured_run import RunComparison, StageTimes, measured_batch, predicted_batch
from penstock.plan.profile.layer_graph import sizes_of
from penstock.plan.profile.schema import Calibration, Numbers, Profile, ProfiledLayer
from penstock.plan.run_forecast import RunSettings, profiled_devices, run_forecast
from penstock.simulate.costs import StageCost
from penstock.timeline import Interval, Timeline, Waiting

_PASSES = {
    "F": "forward",
    "B": "backward_input",  # the whole, where backwards are not halved
    "I": "backward_input",
    "W": "backward_weight",
    "STEP": "step",
}
"""Kinds of work -> what `StageCost` calls them."""
_EXACT = 1e-4  # of a factor that is fitted to batches
_LEAST, _MOST = 1e-9, 1e6
_FOR_PEERS = (Waiting.MESSAGE, Waiting.ROOM, Waiting.CONTROL)


@dataclass(frozen=True)
class MeasuredPasses:
    """What a run took.

    Attributes:
        stages: of each, mean seconds by kind of work: F, B, I, W and STEP.
        between: mean seconds of a rank from one pass or update to the next one, but for waits for other ranks.
        batch: median seconds from one update to the next.
    """

    stages: tuple[Mapping[str, float], ...]
    between: float
    batch: float


def measured_passes(timeline: Timeline, stages: int, ranks: Iterable[int]) -> MeasuredPasses:
    """Return what passes took in a run, but for its first batch, which is slower.

    Args:
        timeline: of the run.
        stages: of a pipeline.
        ranks: of one pipeline, which counts for all.

    Raises:
        ConfigError: the timeline holds too little.
    """
    found, gaps = [dict[str, list[float]]() for _ in range(stages)], list[float]()
    for rank in ranks:
        own = sorted((i for i in timeline.intervals if i.rank == rank and i.lane == "compute"), key=lambda i: i.start)
        steps = [i.end for i in own if i.what == "STEP"]
        kept = [i for i in own if steps and i.start >= steps[0]]
        for each in (i for i in kept if i.what in _PASSES):
            found[each.stage].setdefault(each.what, []).append(each.end - each.start)
        gaps += _gaps(kept)
    if not all("F" in each and "STEP" in each for each in found) or not gaps:
        raise ConfigError("the timeline of the run has fewer than two updates of every stage; train for more batches")
    means = tuple({kind: statistics.fmean(times) for kind, times in each.items()} for each in found)
    return MeasuredPasses(means, statistics.fmean(gaps), measured_batch(timeline))


def _gaps(intervals: Sequence[Interval]) -> list[float]:
    """Return the seconds from each work of a rank to its next one, without waits for other ranks."""
    found, end, waited = list[float](), None, 0.0
    for each in intervals:
        if each.what in _FOR_PEERS:
            waited += each.end - each.start
        elif each.is_work:
            if end is not None:
                found.append(max(each.start - end - waited, 0.0))
            end, waited = each.end, 0.0
    return found


def calibrated(profile: Profile, runs: Mapping[str, tuple[RunSettings, MeasuredPasses]]) -> Profile:
    """Return a profile that says what passes take in runs beside what it has measured.

    Args:
        profile: with or without an earlier calibration, which is replaced.
        runs: by name; what was configured, and what was measured.

    Raises:
        ConfigError: there is no run, one recomputes or waits for its links only, or as `run_forecast`.
        ScheduleError: there is no such schedule.
    """
    plain = profile.model_copy(update={"calibration": None})
    factors: dict[str, list[float]] = {"forward": [], "backward": [], "step": []}
    for name, (settings, _) in runs.items():
        if any(settings.recompute) or settings.whole:
            raise ConfigError(f"run {name}: backwards that recompute do not tell how long they take; take another one")
    crowded = {name: run for name, run in runs.items() if shares_cores(plain, run[0])}
    alone = [run for name, run in runs.items() if name not in crowded]
    for settings, measured in alone:
        for kind, ratio in _ratios(plain, settings, measured):
            factors[kind].append(ratio)
    between = float(f"{statistics.fmean([measured.between for _, measured in alone] or [0.0]):.4g}")
    pausing = plain.model_copy(update={"calibration": Calibration(between=between)})
    for name, (settings, measured) in crowded.items():
        factor = factor_of_batches(pausing, settings, measured.batch, name)
        for found in factors.values():
            found += [factor] * len(measured.stages)
    if not factors["forward"] or not factors["backward"] or not factors["step"]:
        raise ConfigError("a calibration takes at least one run, whose passes and updates the profile knows")
    fitted = {kind: float(f"{statistics.fmean(found):.4g}") for kind, found in factors.items()}
    return profile.model_copy(update={"calibration": Calibration(**fitted, between=between, runs=list(runs))})


def shares_cores(profile: Profile, settings: RunSettings) -> bool:
    """Return whether ranks of a run wait for a core."""
    costs = run_forecast(profile, settings)[1]
    return costs.cores is not None and not costs.cores.suffice(settings.stages)


def factor_of_batches(profile: Profile, settings: RunSettings, seconds: float, name: str) -> float:
    """Return by what all passes and updates of a run are multiplied for its batches to take so many seconds.

    What lies between passes stays.

    Raises:
        ConfigError: something else decides how long a batch takes.
    """
    between = profile.in_runs.between

    def batch(factor: float) -> float:
        given = Calibration(forward=factor, backward=factor, step=factor, between=between)
        return predicted_batch(profile.model_copy(update={"calibration": given}), settings)

    least, most = _LEAST, 1.0
    while batch(most) < seconds and most < _MOST:
        least, most = most, 2 * most
    if batch(least) > seconds or batch(most) < seconds:
        raise ConfigError(
            f"run {name}: no factor on passes and updates makes its batches take the {seconds:.4g} s that they took: "
            f"links and pauses between passes take {batch(_LEAST):.4g} s; take a run without slow links"
        )
    while most > least * (1 + _EXACT):
        middle = math.sqrt(least * most)
        least, most = (middle, most) if batch(middle) < seconds else (least, middle)
    return math.sqrt(least * most)


def _ratios(profile: Profile, settings: RunSettings, measured: MeasuredPasses) -> list[tuple[str, float]]:
    """Return by what the times of every stage are multiplied; work for messages, which is added, is none of them."""
    alone = replace(profiled_devices(profile, settings), link_work=(0.0, 0.0))
    costs = run_forecast(profile, settings)[1].stages
    passes = run_forecast(profile, settings, alone)[1].stages
    found = []
    for times, own, whole in zip(measured.stages, passes, costs, strict=True):
        found += [
            ("forward", _ratio(times, own, whole, ("F",))),
            ("backward", _ratio(times, own, whole, ("B", "I", "W"))),
        ]
        found.append(("step", _ratio(times, own, whole, ("STEP",))))
    return [(kind, ratio) for kind, ratio in found if ratio is not None]


def _ratio(times: Mapping[str, float], own: StageCost, whole: StageCost, kinds: Sequence[str]) -> float | None:
    """Return measured over predicted seconds of some kinds of work of a stage; None where nothing is predicted."""
    there = [kind for kind in kinds if kind in times]
    predicted, with_messages = (sum(getattr(each, _PASSES[kind]) for kind in there) for each in (own, whole))
    took = sum(times[kind] for kind in there) - (with_messages - predicted)
    return took / predicted if predicted > 0 and took > 0 else None


# --- from a run of the same model -------------------------------------------------------------------------------------


def recalibrated(profile: Profile, settings: RunSettings, comparison: RunComparison, run: str) -> Profile:
    """Return a profile whose layers take as long as those of their stage did in a run.

    Where ranks share cores, whose passes take turns, all layers take longer by the factor that makes its batches as
    long as they were.

    Args:
        profile: that was compared.
        settings: of the run.
        comparison: what was found.
        run: its name, for the profile's source.

    Raises:
        ConfigError: ranks share cores, but wait for their links only.
    """
    profile, source = _folded(profile), f"{profile.source}; recalibrated from {run}"[:2_000]
    if shares_cores(profile, settings):
        factor = factor_of_batches(profile, settings, comparison.batch[1], run)
        times = factor, factor, (factor, factor), factor
        layers, update = [layer.with_times(*times) for layer in profile.layers], profile.update * factor
    else:
        layers, update = _layers_as_measured(profile, settings, comparison)
    return profile.model_copy(update={"layers": layers, "source": source, "update": update})


def _layers_as_measured(
    profile: Profile, settings: RunSettings, comparison: RunComparison
) -> tuple[list[ProfiledLayer], float]:
    """Return layers, and what an update takes besides them, with the times of their stages."""
    at = sizes_of(profile).index(settings.microbatch_size) if profile.microbatch_sizes else 0
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
            layers[number] = layer.with_times(forward, backward, parts, step)
    return layers, update


def _folded(profile: Profile) -> Profile:
    """Return a profile whose layers take what its calibration makes of them."""
    if (more := profile.calibration) is None:
        return profile
    times = more.forward, more.backward, (more.backward, more.backward), more.step
    layers = [layer.with_times(*times) for layer in profile.layers]
    left = Calibration(between=more.between, runs=more.runs)
    return profile.model_copy(update={"layers": layers, "calibration": left, "update": profile.update_in_runs})


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
