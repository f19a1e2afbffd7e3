"""A profile whose layers take what they took in a run: nearer for its model and microbatch size than a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from penstock.plan.calibration import factor_of_batches, shares_cores
from penstock.plan.measured_run import RunComparison, StageTimes
from penstock.plan.profile.layer_graph import sizes_of
from penstock.plan.profile.schema import Calibration, Numbers, Profile, ProfiledLayer
from penstock.plan.run_forecast import RunSettings


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
        layers, update = [_with_times(layer, *times) for layer in profile.layers], profile.update * factor
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
            layers[number] = _with_times(layer, forward, backward, parts, step)
    return layers, update


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
