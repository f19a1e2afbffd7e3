"""What a span runs with: the executors of the ranks in this process, their data, and the loop that runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.comm.communicators import connect, holders_of
from penstock.comm.core.gloo_threads import GlooThreads
from penstock.comm.core.rank_grid import RankGrid
from penstock.comm.core.ticket import LATENCY, Polling
from penstock.comm.device_mesh import Groups
from penstock.comm.p2p.stage_routes import reads_of
from penstock.comm.p2p.transport import Channel
from penstock.comm.transports import Transports
from penstock.options.parallelism import Dims
from penstock.options.sdpa_and_tf32 import Kernels
from penstock.runtime.data.batch_source import Batches, BatchSource, batches_in
from penstock.runtime.execute.executor import Executor, Run, drive_all, drive_one
from penstock.runtime.execute.peer_failures import PeerFailures
from penstock.runtime.rank.batch_reports import Report
from penstock.runtime.setup.rank_state import RankState
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.data_parallel_sync import REDUCE, Combine
from penstock.schedule.proof.proof import Proof
from penstock.schedule.stage_state.stage_constants import stage_specs
from penstock.weights.corrections.base import Correction
from penstock.weights.corrections.two_bw_ahead import prediction_of
from penstock.weights.decision import add_shares, add_shares_alone


class SpanSetup:
    """Makes what a span runs with.

    Args:
        grid: all ranks.
        ranks: those of this process.
        proof: of the training schedule.
        forward_only: of the schedule of evaluations.
        transports: carry their messages.
        holder_groups: of those that hold the same weights; empty where gradients are added in order.
        timeout: seconds after which a missing message is an error.
        kernels: settings of torch that are made while passes run.
        gloo: gloo's threads of this process.
        combine: how parallel pipelines agree.
        polling: how this process waits, where it has one rank.
        correction: of the method.
        dims: along which dimensions batches are split.

    Attributes:
        grid, ranks, combine: as given.
        proof: of the present training schedule; another one may take its place between two spans.
        prediction: which one passes read, and no version that was decided; None if they read versions.
        last: the rank of the last stage.
        peers: what ranks leave for each other.
    """

    def __init__(
        self,
        grid: RankGrid,
        ranks: Sequence[RankState],
        proof: Proof,
        forward_only: Proof,
        transports: Transports,
        holder_groups: Groups,
        timeout: float,
        kernels: Kernels,
        gloo: GlooThreads,
        combine: Combine = REDUCE,
        polling: Polling = LATENCY,
        correction: Correction | None = None,
        dims: Dims = 0,
    ) -> None:
        self.switch(proof, correction)
        self._forward_only = forward_only
        self.grid, self.ranks, self.combine = grid, ranks, combine
        self._transports, self._holder_groups = transports, holder_groups
        self._timeout, self._kernels, self._polling, self._gloo = timeout, kernels, polling, gloo
        self.dims = dims
        self.peers = PeerFailures(None if grid.group is None else grid.everyone, ranks[0].recorder, timeout)
        self.last = self.schedule.stage_at[self.schedule.num_stages - 1, 0].rank

    def switch(self, proof: Proof, correction: Correction | None) -> None:
        """Make spans of another schedule, of a method with this correction, from now on."""
        self.proof = proof
        self.prediction = prediction_of(correction, RULES[proof.schedule.rule].delay)

    @property
    def schedule(self) -> Schedule:
        """The training schedule."""
        return self.proof.schedule

    @property
    def delay(self) -> int:
        """How many versions before the newest a span may begin with."""
        return RULES[self.schedule.rule].delay

    def training_data(self, batches: Batches, first: int, length: int | None) -> BatchSource:
        """The data of a span of training that begins with batch `first`, and of so many batches, if that is known."""
        schedule, stop = self.schedule, self.ranks[0].stop
        stop.reset(run=False)
        reads, shared = self._reads(schedule), self.grid.group is None
        return BatchSource(
            batches, schedule.microbatches, self.grid.width, reads, len(self.grid.pipelines), stop,
            shared=shared, first=first, ahead=0 if shared or not any(reads) else self._ahead(stop.alone),
            overlap=self.proof.reading.overlap, length=length, dims=self.dims,
        )  # fmt: skip

    def evaluation_data(self, batches: Batches) -> BatchSource:
        """The data of an evaluation, whose batches are counted by themselves."""
        schedule, grid = self._forward_only.schedule, self.grid
        return BatchSource(
            batches, schedule.microbatches, grid.width, self._reads(schedule), len(grid.pipelines),
            fills=True, shared=grid.group is None, length=batches_in(batches), dims=self.dims,
        )  # fmt: skip

    def _reads(self, schedule: Schedule) -> list[int]:
        return reads_of(schedule, {key.rank for key in self.grid.local})

    def _ahead(self, announces_alone: bool) -> int:
        """How far this rank reads ahead: not where it alone announces batches, or pipelines meet now and then."""
        entrance = self.schedule.stage_at[0, 0].rank in {key.rank for key in self.grid.local}
        if self.combine.apart or (entrance and announces_alone):
            return 0
        found = self.proof.reading
        return found.alone if self.grid.width * self.grid.tensor.size == 1 else found.together

    def trainers(self) -> list[Executor]:
        """The executors of a span of training."""
        return self._executors(self.proof, Channel.TRAINING, self.combine)

    def evaluators(self, channel: Channel) -> list[Executor]:
        """The executors of an evaluation, whose messages travel on a channel."""
        return self._executors(self._forward_only, channel, REDUCE)

    def _executors(self, proof: Proof, channel: Channel, combine: Combine) -> list[Executor]:
        ranks = {key.rank for key in self.grid.local}
        specs = stage_specs(proof.schedule, 0, ranks)
        lowered = self._transports.placed(proof.lowered)
        add = add_shares_alone if self.grid.first_only else add_shares
        links = connect(self.grid, lowered, add, channel, self._transports, self._holder_groups, combine)
        holders = holders_of(proof.schedule, self.grid.width)
        return [
            Executor(
                state,
                lowered,
                {spec.stage: spec for spec in specs if spec.stage.rank == state.key.rank},
                holders,
                links[state.key],
                combine,
            )
            for state in self.ranks
        ]

    def drive(self, runs: list[Run], pipelines: int) -> Iterator[Report]:
        """Run the ranks; yield the reports of the last stage, where it is in this process, of so many pipelines."""
        if self.grid.group is not None:
            peers, patience = self.peers, (self._timeout, self._polling)
            return self._kernels.during(drive_one(runs[0], *patience, self._gloo, lambda: peers.reason))
        last = [pipeline * self.grid.depth + self.last for pipeline in range(pipelines)]
        return self._kernels.during(drive_all(runs, last))
