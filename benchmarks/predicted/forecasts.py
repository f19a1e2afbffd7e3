"""What is predicted before anything runs: profiles of models and links, step times, and the cuts of a planner."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, product
from statistics import median
from typing import Any

import torch

from benchmarks.arms import make_optimizer, mean_loss
from benchmarks.network.hosts import Link
from benchmarks.network.team import Team
from benchmarks.predicted.configurations import ALL_MODELS, Configuration, calibrating
from penstock import gpt_blocks, keep_freed_memory
from penstock.measure.model_profile import measure_blocks, profile_of
from penstock.measure.this_machine import Ping, fit, sizes_around
from penstock.options.all_options import PipelineOptions
from penstock.plan.calibration import MeasuredPasses, calibrated, measured_passes
from penstock.plan.candidates.block_chain import BlockChain
from penstock.plan.candidates.candidate import Candidate, NoPlanError
from penstock.plan.candidates.planned_methods import PLANNED, ActivationMemory
from penstock.plan.candidates.schedule_cache import KnownSchedules
from penstock.plan.measured_run import predicted_batch
from penstock.plan.planners.two_bw import Sized
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.profile.schema import Profile, ProfiledLink
from penstock.plan.simulated.candidate_trial import CandidateTrial
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.timeline import Interval, Timeline

_TURNS = 5


def profiled(
    sizes: Mapping[str, Iterable[int]], seconds: float, between: Callable[[], None] = lambda: None
) -> dict[str, Profile]:
    """Measure the blocks of models in this process, with one thread, as `penstock profile` does.

    Models take turns, so that a slow moment of the machine does not fall on one of them; the median counts.

    Args:
        sizes: samples of a microbatch, by the name of the model.
        seconds: for each size of each block, once for every kind of pass.
        between: called after every turn.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    found: dict[str, list[Profile]] = {name: [] for name in sizes}
    for _ in range(_TURNS):
        for name in sizes:
            model = ALL_MODELS[name]
            samples = {size: model._replace(samples=size).data().pairs[0] for size in sorted(set(sizes[name]))}
            blocks = gpt_blocks(model.shape, seed=0)
            measured = measure_blocks(
                blocks, samples, mean_loss, make_optimizer, PipelineOptions(), seconds / _TURNS
            )  # fmt: skip
            # Updates of these runs wait for no norm.
            given = {"settings": {"max_grad_norm": None}, "cores": float(os.cpu_count() or 1)}
            found[name].append(profile_of(name, measured, **given))
        between()
    return {name: typical(several) for name, several in found.items()}


class CalibratingRuns:
    """Runs of a few configurations on the loopback, which tell what passes take there beside their profile.

    Args:
        teams: by their number of ranks; what is predicted of so many is calibrated with them.
        models: those that are predicted.
        batches: of a turn.
    """

    def __init__(self, teams: Mapping[int, Team], models: Iterable[str], batches: int) -> None:
        self._teams, self._batches = teams, batches
        of_all = product(models, teams)
        self._found = {key: {of: list[MeasuredPasses]() for of in calibrating(*key)} for key in of_all}
        for of, _ in self._runs():
            teams[of.ranks].ask("build", name=str(of), configuration=of._asdict())

    def _runs(self) -> list[tuple[Configuration, list[MeasuredPasses]]]:
        return [run for runs in self._found.values() for run in runs.items()]

    def turn(self) -> None:
        """Run each once."""
        for of, found in self._runs():
            ranks = self._teams[of.ranks].ask("calibrate", name=str(of), batches=self._batches)
            intervals = [Interval(*each) for rank in ranks for each in rank["intervals"]]
            found.append(measured_passes(Timeline(len(ranks), intervals), of.depth, range(of.depth)))

    def calibrated(
        self, profiles: Mapping[str, Profile], links: Mapping[int, ProfiledLink]
    ) -> dict[tuple[str, int], Profile]:
        """Return profiles of models on so many ranks, with what was found in the mean of all turns.

        Args:
            profiles: by the name of the model.
            links: between ranks of each team.
        """
        better = {}
        for (name, ranks), turns in self._found.items():
            every = [(of, number, passes) for of, found in turns.items() for number, passes in enumerate(found)]
            runs = {f"{of}, turn {number}": (of.settings, passes) for of, number, passes in every}
            fitted = calibrated(profiles[name].model_copy(update={"links": [links[ranks]]}), runs).calibration
            better[name, ranks] = profiles[name].model_copy(update={"calibration": fitted})
        return better


def typical(several: Sequence[Profile]) -> Profile:
    """Return the profile whose times are the medians of several of one model."""
    layers = []
    for alike in zip(*(profile.layers for profile in several), strict=True):
        times = {key: [getattr(layer, key) for layer in alike] for key in ("forward", "backward", "step")}
        layers.append(alike[0].model_copy(update={key: _median(values) for key, values in times.items()}))
    return several[0].model_copy(update={"layers": layers})


def _median(values: Sequence[Any]) -> Any:
    """Return the median of numbers, or of those at each microbatch size."""
    if isinstance(values[0], list):
        return [median(each) for each in zip(*values, strict=True)]
    return median(values)


def measured_link(team: Team, link: Link, messages: Iterable[int]) -> ProfiledLink:
    """Measure a link as `penstock profile` does.

    Args:
        team: of ranks, the first two of which it joins.
        link: which.
        messages: bytes of those that will be sent.
    """
    team.network.set(link)
    sizes = sizes_around(messages)
    return fit([Ping(*each) for each in team.ask("ping", sizes=sizes)[0]["pings"]])


def predicted(of: Configuration, profile: Profile, link: ProfiledLink) -> float:
    """Return the seconds that a batch is predicted to take."""
    return predicted_batch(profile.model_copy(update={"links": [link]}), of.settings)


def planned(
    configurations: Iterable[Configuration], profile: Profile, link: ProfiledLink
) -> list[tuple[Configuration, float]]:
    """Return configurations with the planner's cut, and the seconds of a batch by which it ranks them.

    The planner (`--cost simulated`) takes the least of these over samples. As it recomputes only what does not fit
    otherwise, one that recomputes gets the cut of the same without.

    Raises:
        RuntimeError: it refuses one of them.
    """
    known, found = KnownSchedules(decides=False), []
    for of in configurations:
        graph = layer_graph(profile, of.samples)
        level, work = DeviceLevel(of.ranks, link.bandwidth), (link.work, link.work_per_byte)
        given = {"link_work": work, "between": profile.in_runs.between}
        devices = Devices((level,), None, link.latency, profile.cores, **given)
        candidate = Candidate(Sized(graph, of.samples, of.m * of.width), PLANNED[of.method], of.depth, of.width)
        trial = CandidateTrial(candidate, BlockChain(graph, optimizer_copies=2.0), devices, known)
        try:
            deque(trial.bounds(), maxlen=0)  # which are known before cuts are
            cuts = trial.fastest((math.inf, 0)).cuts
        except NoPlanError as error:
            raise RuntimeError(f"the planner refuses {of}: {error.skipped}") from None
        does = ActivationMemory.RECOMPUTED if of.recompute else ActivationMemory.KEPT
        (seconds,) = trial.times.batch_times([(cuts, [does] * of.depth)])
        found.append((of._replace(balance=tuple(b - a for a, b in pairwise(cuts))), seconds))
    return found
