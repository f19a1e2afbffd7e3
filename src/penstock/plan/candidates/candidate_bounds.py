"""The least that one configuration takes, however it is cut; and with the work of its ranks, from cut to cut."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.plan.candidates.block_chain import BlockChain, Floats
from penstock.plan.candidates.candidate import Candidate
from penstock.plan.candidates.planned_methods import stage_forecast
from penstock.plan.stages.device_hierarchy import Devices
from penstock.schedule.ir.rank_numbers import RANK_ORDERS

_GATHERED = 2  # stages of a rank that are whole at once, where weights are divided


class CandidateBounds:
    """The least that a configuration takes, however it is cut.

    Args:
        of: the configuration.
        chain: its blocks.
        devices: to plan for.
    """

    def __init__(self, of: Candidate, chain: BlockChain, devices: Devices) -> None:
        self._of, self._chain, self._devices = of, chain, devices

    def seconds_per_sample(self) -> float:
        """Return the seconds per sample that it takes at least.

        A rank is busy for m microbatches and an update, and a lane of messages for m of these, or more if a rank has
        several stages; all ranks together compute no faster than the cores that they share. With a flush the batch
        begins once the forwards of the stages before have run, and ends with their backwards, of halved ones the first
        halves; then come the sums of gradients. So with one stage on each rank, if T is the time of the batch without
        these and t_i that of what others wait for in a stage, m t_s + sum of t_i before s <= T for every stage, hence
        T (1 - (1 - 1/m)^d) is at least the sum of all t. In any case every stage has a block, so that at least r of
        them come before rank r, as `least_of_ranks` says.
        """
        of, devices = self._of, self._devices
        m, d, passes = of.microbatches, of.depth, of.passes_of(self._chain)
        together, fastest = float(of.speeds.sum()), float(of.speeds.max())
        total, message = float(passes.busy[-1]), self._message()
        longest = least_of_largest(np.diff(passes.busy), d) / fastest
        besides = self._chain.least_updates(of.stages) * devices.update
        updates = float(of.updates(self._chain, devices)[-1]) + besides
        shared = (m * total + updates) / fastest / of.cores(self._devices)  # while sums of other ranks may run
        busy = max((m * total + updates) / together, m * longest)
        steady = max(busy, m * of.messages * message, self._collectives())
        after = self.after()
        if not of.method.flushes:
            return max(steady, shared, after) / of.samples
        through = (total - float(passes.second[-1])) / fastest
        hops = message + of.hop_latencies(self._devices)
        path = through + 2 * float(hops.sum())
        flushed = through / (1 - (1 - 1 / m) ** d) if of.method.chunks == 1 else 0.0
        way = 2 * np.concatenate([[0.0], np.cumsum(hops)])  # of messages there and back, up to each rank
        outside = float(passes.path[:d].mean()) / fastest + float(way[:d].mean())
        if of.method.forwards_first:
            outside += float((passes.path[-1] - passes.path[-d:]).mean()) / fastest + float((way[-1] - way[-d:]).mean())
        return max(max(steady, path, flushed, m * through / d + outside) + after, shared) / of.samples

    def after(self) -> float:
        """Return the seconds that sums and gathers take at least, as `Candidate.after` counts them."""
        return self._of.after(self._sums())

    def hop(self) -> float:
        """Return the seconds from the end of a pass to the next rank at least, in any order of ranks."""
        of, devices = self._of, self._devices
        orders = RANK_ORDERS if len(devices.levels) > 1 else (of.rank_order,)
        in_order = [CandidateBounds(replace(of, rank_order=each), self._chain, devices) for each in orders]
        least = min(float(each._of.hop_latencies(devices).min(initial=math.inf)) for each in in_order)
        return min(each._message() for each in in_order) + (least if of.depth > 1 else 0.0)

    def _message(self) -> float:
        """Return the seconds that a message between ranks takes of its lane at least."""
        along = self._of.bandwidth(self._devices)
        return float(self._chain.crossing[1:-1].min(initial=math.inf)) / along if self._of.depth > 1 else 0.0

    def _collectives(self) -> float:
        """Return the seconds that gathers and sums of fully sharded stages take of a rank's lane at least.

        Forwards gather each stage; backwards, too, but for those that are still there where all forwards come first.
        """
        if self._of.sharding != "full":
            return 0.0
        (reduced, gathered), method = self._sums(), self._of.method
        v = method.chunks
        return v * reduced + (max(2 * v - _GATHERED, v) if method.flushes else v) * gathered

    def _sums(self) -> tuple[float, float]:
        """Return what `Candidate.sums` says of a stage of average size."""
        return self._of.sums(float(self._chain.parameters[0, -1]) / self._of.stages, self._devices)


class RankWork(NamedTuple):
    """Seconds of ranks: numbers for each, or matrices from cut to cut.

    Attributes:
        busy: of a microbatch, all passes.
        path: the part of them that other stages wait for.
        forward: of the forward of its first stage.
        step: of an update.
        before: from the begin of a batch to its first forward, and from its last backward to the end.
        through: from a forward of its first stage to the end of the backward of the same microbatch.
        behind: from a forward of its last stage to the backward of the same microbatch.
    """

    busy: Floats
    path: Floats
    forward: Floats
    step: Floats
    before: Floats
    through: Floats
    behind: Floats


def least_of_ranks(of: Candidate, work: RankWork, ranks: npt.NDArray[np.intp]) -> Floats:
    """Return the seconds that a batch takes at least without sums, as far as each rank shows.

    It is busy for m microbatches and an update. With a flush others run before the rank begins and after it has
    ended; where all forwards come first, also between its forwards and its backwards. Otherwise, with n
    microbatches in flight, a forward comes after the backward of the nth one before it, with or without a flush.
    Where backwards come in halves, all but the first forwards come after the first of them that others wait for.

    Args:
        of: the configuration.
        work: of ranks.
        ranks: their numbers, in the first dimension.
    """
    m, method = of.microbatches, of.method
    busy: Floats = m * work.busy + work.step
    if method.forwards_first:
        return np.maximum(busy, work.before + m * work.path + work.behind)
    if only_busy_counts(of):
        return busy
    flight = np.full(len(ranks), m)
    if method.chunks == 1 and not method.halved:
        flight = np.array([stage_forecast(method, of.depth, m, rank).activations for rank in ranks.tolist()])
    flight = flight.reshape(-1, *[1] * (work.busy.ndim - 1))
    if not method.flushes:  # in the long run; whole rounds of what is in flight, so that the batches played show it
        batches = method.spans[1] - method.spans[0]
        return np.maximum(busy, batches * m // flight * work.through / batches)
    rounds, rest = np.divmod(m - 1, flight)
    own = np.maximum(m * work.path, rest * work.forward + (rounds + 1) * work.through)
    return np.maximum(busy + _idle_before_backwards(of, work, ranks), work.before + own)


def _idle_before_backwards(of: Candidate, work: RankWork, ranks: npt.NDArray[np.intp]) -> Floats:
    """Return how long ranks wait for their first backward at least, of orders whose forwards before it are known."""
    warm = of.method.warm_up(of.depth, of.microbatches)
    if warm is None:
        return np.zeros(1)
    first = np.array(warm, float)[ranks].reshape(-1, *[1] * (work.busy.ndim - 1))
    with np.errstate(invalid="ignore"):  # of cuts that do not fit all are infinite
        idle = work.through - (work.path - work.forward) - first * work.forward
    return np.maximum(np.nan_to_num(idle, posinf=0.0), 0.0)


def only_busy_counts(of: Candidate) -> bool:
    """Return whether `least_of_ranks` counts passes and updates alone.

    Of so many microbatches in flight the batches that are simulated may show fewer rounds.
    """
    return not of.method.flushes and (of.method.chunks > 1 or of.method.drifts)


def least_of_largest(times: Floats, ranks: int) -> float:
    """Return the time of the busiest of some ranks at least, however these blocks are divided among them.

    Of the k ranks + 1 longest blocks some rank has k + 1, which take as long as the shortest of these, or longer.
    """
    down = -np.sort(-times)
    return max(float(down[k * ranks - k : k * ranks + 1].sum()) for k in range((len(times) - 1) // ranks + 1))
