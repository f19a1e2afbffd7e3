"""What ranks tell each other before and after a span: whether it begins, who has left it, what has failed."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from penstock.comm.collective.control_plane import gather_json
from penstock.comm.core.rank_grid import RankGrid
from penstock.errors import ConfigError, DataError, PenstockError, TransportError
from penstock.runtime.data.batch_source import BatchSource, failed_elsewhere
from penstock.runtime.execute.peer_failures import PeerFailures
from penstock.runtime.setup.param_group_consistency import check_settings, settings_by_hand
from penstock.runtime.setup.rank_state import RankState
from penstock.runtime.setup.same_weights import check_written, follow_first, follow_hooks, follow_settings
from penstock.runtime.update.run_events import Evaluated, with_numbers
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.stage.blocks.loss import summed
from penstock.stage.checks.remotely_trained_modules import HeldElsewhere
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.weights.updates.lr_scheduler_table import NoRateError

_LOG = logging.getLogger(__name__)

Losses = list[list[Any]]
"""Loss sums of batches with their weights and the numbers beside them."""


class SpanBorders:
    """The agreements of all ranks before and after a span; what one of them cannot do, all hear of.

    Args:
        grid: all ranks.
        ranks: those of this process.
        combine: how parallel pipelines agree.
        peers: what ranks leave for each other; they agree here under which name.
        held: what this process has of the stages of others.
    """

    def __init__(
        self, grid: RankGrid, ranks: Sequence[RankState], combine: Combine, peers: PeerFailures,
        held: HeldElsewhere | None = None,
    ) -> None:  # fmt: skip
        self._grid, self._ranks, self._combine, self._peers, self._held = grid, ranks, combine, peers, held
        places = {n.direction for state in ranks for n in state.stages}
        for weights in self._trained if grid.group is not None and not combine.apart else ():
            weights.copied = grid.width * len(places) > 1
            if weights.copied:
                weights.watch_writes()
        self._settings: list[Any] = []  # by hand, on all ranks, as they have last been compared

    def begin(self, source: BatchSource, batches: int, first: int, call: str, *, trains: bool) -> bool:
        """Prepare a span; return whether there is a first batch, on which all ranks agree.

        Args:
            source: of its data.
            batches: that have been trained on.
            first: the rank that reads the inputs.
            call: of the user, for messages.
            trains: it is one of training, so there must be something to train.

        Raises:
            ConfigError, DataError: what cannot be, here or on another rank.
            NoRateError: the learning-rate scheduler has no rate for the first batch, on any rank.
            TransportError: a peer is dead, or has made another call.
        """
        failure = self._take_over() or source.failure
        check_written(self._combine, self._grid, self._ranks)
        for stage in (stage for state in self._ranks for stage in state.stages.values()):
            stage.weights.begin_span(batches)
        asked = self._grid.group is None or self._grid.local[0].rank == first
        begins = failure is None and (source.begins() or not asked)
        failure, more = failure or source.failure, source.goes_on(0)
        ends = None if failure is not None else source.read_ahead()
        rewritten, by_hand = any(weights.rewritten for weights in self._trained), settings_by_hand(self._ranks)
        mine: list[Any] = [self._copies(), begins, _text(failure), more, ends, rewritten, self._parameters(), by_hand]
        # Others must hear of a failure before it is raised here.
        met = self._gather([self._peers.proposal, source.length, mine], f"agreeing to start {call}")
        self._peers.name, lengths, told = met[0][0], [length for _, length, _ in met], [rest[1:] for *_, rest in met]
        if any(written for *_, written, _, _ in told):  # on one stage: then no batch reads old weights of others
            for weights in self._trained:
                weights.forget_older()
        texts = [text for _, text, *_ in told]
        for reason in (
            failure,
            _no_rate(texts) or _failed_elsewhere(texts, "begin"),
            _nothing_to_train([counts for *_, counts, _ in told]) if trains else None,
            _missing([more for _, _, more, *_ in told]),
            _of_other_lengths(lengths),
            _of_other_writes([copies for _, _, (copies, *_) in met]),
        ):
            if reason is not None:
                raise reason
        settings = [settings for *_, settings in told]
        if self._grid.group is not None and settings != self._settings:
            check_settings(settings)
            self._settings = settings
        for end in (end for _, _, _, end, *_ in told if end is not None):
            source.end_before(end)
        begins = all(flag for flag, *_ in told)
        if begins and trains and self._held is not None:
            self._held.begin()
        return begins

    @property
    def _trained(self) -> list[TrainedWeights]:
        stages = [stage for state in self._ranks for stage in state.stages.values()]
        return [stage.weights for stage in stages if isinstance(stage.weights, TrainedWeights)]

    def _copies(self) -> list[tuple[int, int, int]]:
        """The stages here that other processes have copies of: index, tensor rank, checksum of the newest weights."""
        tensor, stages = self._grid.tensor.index, [stage for state in self._ranks for stage in state.stages.items()]
        found = [(key.index, each.weights) for key, each in stages if isinstance(each.weights, TrainedWeights)]
        return [(index, tensor, w.watch.now) for index, w in found if w.copied and w.watch is not None]

    def _parameters(self) -> tuple[int, int]:
        """How many parameters of the model are trained here, and how many are not; copies of stages do not count."""
        if not self._grid.tensor.counts:
            return 0, 0
        tensors = [
            stage.module.tensors
            for state in self._ranks
            for stage in state.stages.values()
            if (state.key.pipeline, stage.key.direction) == (0, 0)
        ]
        return sum(len(each.trained) for each in tensors), sum(len(each.frozen()) for each in tensors)

    def _take_over(self) -> ConfigError | None:
        """Adopt what users have changed between two runs; return what is wrong with it."""
        try:
            if self._held is not None:
                self._held.check()
            for state in self._ranks:
                for stage in state.stages.values():
                    stage.adopt()
            follow_hooks(self._ranks)
            follow_settings(self._ranks)
            if not self._combine.apart:
                follow_first(self._ranks)
            for state in self._ranks:
                state.recorder.begin_span()
                state.recorder.align()
                for stage in state.stages.values():
                    stage.refresh()
        except ConfigError as error:
            return error
        return None

    def end(
        self, left: int | None, batches: int, failure: str | None, source: BatchSource, start: int
    ) -> tuple[bool, Exception | None]:
        """Tell all ranks after a span of training whether the caller has left here, and what could not be read.

        The first rank whose caller has not left warns of the others that have; the rest of them log it as information.

        Args:
            left: the batch after whose report the caller has left; None where it has not.
            batches: that have been trained on.
            failure: the reason of an evaluation that has failed.
            source: of its data.
            start: its first batch.

        Returns:
            Whether the caller has left on any rank, and the first failure of another one that this one raises, too.

        Raises:
            TransportError: a peer is dead, or has not come this far in time.
        """
        noted = [[*found, dict(found.numbers)] for state in self._ranks for found in state.decisions.take_noted()]
        more = self._grid.group is not None and source.goes_on(batches - start)
        mine = [left, failure, more, _text(source.failure), noted]
        try:
            told = self._gather(mine, "ending a run", self._grid.patience)
        except TransportError as error:
            if more is False:
                error.add_note(f"the data ended here after batch {batches - 1}; every rank needs the same batches")
            raise
        parts = [with_numbers(Evaluated(*found), numbers) for *_, part in told for *found, numbers in part]
        if parts:  # of one version, as meetings have shared all before
            total, weight = math.fsum(p.total for p in parts), math.fsum(p.weight for p in parts)
            found = with_numbers(Evaluated(parts[0].version, total, weight), summed([p.numbers for p in parts]))
            for state in self._ranks:
                state.decisions.events.evaluated_everywhere(found)
        if self._grid.group is None:
            return left is not None, None
        after = [batch for batch, *_ in told]
        unreadable = [text for *_, text, _ in told]
        gone = [rank for rank, batch in enumerate(after) if batch is not None]
        if gone and left is None:
            first = after.index(None) == dist.get_rank(self._grid.everyone)
            _LOG.log(
                logging.WARNING if first else logging.INFO,
                "rank %d left the loop after the report of batch %d, so the run ends after batch %d on all ranks; if "
                "that is not wanted, leave the loop on no rank, or on all after the same batch",
                gone[0],
                after[gone[0]],
                batches - 1,
            )
        failed = _first_failure([reason for _, reason, *_ in told]) or _no_rate(unreadable)
        ended = f", so the run ends after batch {batches - 1} on all ranks"
        failed = failed or _failed_elsewhere(unreadable, "read its next batch", ended)
        return bool(gone), failed or _of_other_ends([more for _, _, more, *_ in told], ended)

    def gather_losses(self, found: Losses, failure: str | None) -> tuple[Losses, Exception | None]:
        """Return what all ranks have found in an evaluation, and the first failure of another one."""
        if self._grid.group is None:
            return found, None
        found = [] if self._grid.tensor.index else found
        told = self._gather([found, failure], "gathering the losses of an evaluation", self._grid.patience)
        return [pair for part, _ in told for pair in part], _first_failure([reason for _, reason in told])

    def _gather(self, mine: list[Any], what: str, timeout: timedelta | None = None) -> list[Any]:
        return [mine] if self._grid.group is None else gather_json(mine, what, self._grid.everyone, timeout)


def _nothing_to_train(counts: Sequence[tuple[int, int]]) -> ConfigError | None:
    """What all ranks raise where no parameter is trained; of each rank how many are, and how many are not."""
    trained, frozen = (sum(part) for part in zip(*counts, strict=True))
    if trained:
        return None
    why = f"all {frozen} parameters have requires_grad=False" if frozen else "the blocks have no parameters"
    return ConfigError(
        f"run() has nothing to train: {why}; set requires_grad=True on what is to be trained before the pipeline is "
        "made, or measure the loss of the model as it is with pipeline.evaluate(loader)"
    )


def _missing(more: Sequence[bool | None]) -> DataError | None:
    """What all ranks raise where the data of one of them, of all by rank, have no batch although others have one."""
    if not {True, False} <= set(more):
        return None
    return DataError(
        f"rank {more.index(False)} has no batch, but rank {more.index(True)} has: every rank needs the same batches (a "
        "generator that was used up? a DistributedSampler?)"
    )


def _of_other_lengths(lengths: Sequence[int | None]) -> DataError | None:
    """What all ranks raise where the data of two of them, of all by rank, have other numbers of batches."""
    known = {length: rank for rank, length in reversed([*enumerate(lengths)]) if length is not None}
    if len(known) <= 1:
        return None
    said = " and ".join(f"{length} on rank {rank}" for length, rank in sorted(known.items(), key=lambda item: item[1]))
    return DataError(
        f"the numbers of batches differ: {said}; every rank needs the same batches (a DistributedSampler?). Nothing "
        "has been run"
    )


def _of_other_writes(copies: Sequence[Sequence[Sequence[int]]]) -> ConfigError | None:
    """What all ranks raise where copies of a stage, of all by rank, no longer have the same weights."""
    first: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, found in enumerate(copies):
        for index, tensor, value in found:
            other, wanted = first.setdefault((index, tensor), (rank, value))
            if value != wanted:
                return ConfigError(
                    f"weights of stage {index} were written into between two runs, but not the same on ranks {other} "
                    f"and {rank}, which have copies of it in parallel pipelines: write the same on all ranks, or load "
                    "the same weights on all of them (pipeline.load_state_dict, or Checkpoints.load)"
                )
    return None


def _of_other_ends(more: Sequence[bool | None], ended: str) -> DataError | None:
    """What all ranks raise where the data have ended on one of them, of all by rank, and go on on another one."""
    if not {True, False} <= set(more):
        return None
    return DataError(
        f"the data have ended on rank {more.index(False)}, but not on rank {more.index(True)}{ended}; every rank needs "
        "the same batches"
    )


def _text(failure: BaseException | None) -> str | None:
    return None if failure is None else f"{type(failure).__name__}: {failure}"


def _no_rate(texts: Sequence[str | None]) -> NoRateError | None:
    """What all ranks raise where the scheduler of one of them has no rate for the next update.

    All have made the same scheduler, so every rank is as much to blame, and reads what the first one has to say.
    """
    mark = f"{NoRateError.__name__}: "
    return next((NoRateError(text.removeprefix(mark)) for text in texts if text and text.startswith(mark)), None)


def _first_failure(reasons: Sequence[str | None]) -> PenstockError | None:
    """What a rank raises where an evaluation has failed on another one."""
    return next((failed_elsewhere(reason) for reason in reasons if reason is not None), None)


def _failed_elsewhere(texts: Sequence[str | None], what: str, so: str = "") -> DataError | None:
    """What a rank raises where another one, of all by rank, could not do something."""
    for rank, text in enumerate(texts):
        if text is not None:
            return DataError(f"rank {rank} could not {what} ({text:.200}){so}")
    return None
