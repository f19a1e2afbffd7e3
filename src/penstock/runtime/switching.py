"""A pipeline that goes on under another schedule: another method, or more microbatches in flight."""

from __future__ import annotations

import logging

import torch.distributed as dist

from penstock.comm.collective.control_plane import from_first, gather_json
from penstock.comm.p2p.transport import Channel
from penstock.runtime.engine.engine import Halt
from penstock.runtime.engine.lifecycle import between_runs
from penstock.runtime.pipeline_stats import Inspection
from penstock.runtime.plan.adapted_in_flight import MEASURED, AdaptedInFlight, adapt
from penstock.runtime.plan.capabilities import check_shown
from penstock.runtime.plan.pass_and_message_times import measured_by_all
from penstock.runtime.plan.plan import PipelinePlan
from penstock.runtime.plan.schedule_from_arguments import Chosen, request_for
from penstock.runtime.setup.shared_plan import shared_plan
from penstock.schedule.in_flight_choice import NO_LINKS_HERE, on_v
from penstock.schedule.rank_schedule import Json
from penstock.weights.corrections.base import Correction

_LOG = logging.getLogger(__name__)


class Switching(Inspection):
    """The part of `Pipeline` that replaces its schedule."""

    @between_runs()
    def switch(
        self,
        method: Chosen,
        *,
        correction: Correction | None = None,
    ) -> None:
        """Continue under another method, between two runs; between processes all ranks call this together.

        Stages, weights and optimizer states stay where they are. The next run begins as after a synchronous one: every
        pass reads the newest weights, or what is made of them; older versions stay only where both methods read them
        with a constant delay (2bw, 3bw), or both read the same prediction (2bw-ahead). Parameter-sized buffers that the
        new schedule does not need are freed, and those that it needs besides are made (`live_bytes` shows both once a
        run has begun).

        Args:
            method: as of `Pipeline`, for as many ranks and microbatches as before.
            correction: what is done about stale weights, where a schedule does not bring it. The one before is over;
                one that comes back begins anew.

        Raises:
            ConfigError: the schedule has other stages, or other ranks for them, or takes other batches; or ranks were
                given different schedules.
            CapabilityError: the runtime does not offer it, or the optimizer cannot step under it, or functions given to
                `on_update` could not be shown the weights.
        """
        if self.grid.group is not None:  # what rank 0 hands out would not be understood in another call
            with self._spans.life.together():
                gather_json(None, "agreeing to switch()", self.grid.everyone)
        depth, microbatches = self.schedule.ranks, self.schedule.microbatches
        request, correction = request_for(method, correction, depth, microbatches)
        present = self._plan
        plan = shared_plan(lambda known: present.followed_by(request, correction, known), self.grid.control)
        self._continue(plan)

    def _continue(self, plan: PipelinePlan) -> None:
        """Continue under a plan that may follow the present one."""
        if self._hooks:
            check_shown(plan.schedule, plan.options)
        for state in self._ranks:
            state.check_switch(plan.proof, plan.options.staleness.correction)
        self._take(plan)
        self._adopt()

    def _take(self, plan: PipelinePlan) -> None:
        proof = plan.proof
        self._transports.prepare(Channel.TRAINING, proof.lowered)
        self._engine.switch(proof, plan.options.staleness.correction)
        self._note(plan)

    def _note(self, plan: PipelinePlan) -> None:
        self._plan, self.proof, self.schedule = plan, plan.proof, plan.schedule

    # --- microbatches in flight -------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> AdaptedInFlight | None:
        """The microbatches in flight that were found for the links of the present method, with what was measured.

        None where nothing has been found (yet): it did not ask for `in_flight="auto"`, or all ranks are in one process,
        where messages take no time.
        """
        return self._adaptations.of(self._plan.auto)

    def _halts(self) -> Halt | None:
        """When a run stands still, to go on with as many microbatches in flight as its links ask for."""
        if self._plan.auto is None:
            return None
        if self.grid.group is None or self.grid.depth == 1:
            if self._adaptations.first_told() and (self.grid.group is None or not dist.get_rank(self.grid.group)):
                _LOG.info("in flight: %s", NO_LINKS_HERE)
            return None
        until = self._adaptations.measured_until(self._plan.auto, self.batches)
        if until is None:
            return None
        return Halt(until, self._adapt)

    def _adapt(self) -> None:
        """Choose the microbatches in flight by what the batches so far have taken; all ranks do it together."""
        plan, batch = self._plan, self.batches
        assert plan.auto is not None
        counted = range(batch - MEASURED, batch)
        measured = measured_by_all(self._ranks[0].recorder, self.grid, counted, folded=on_v(plan.auto))

        def choose() -> Json:
            return None if measured is None else adapt(plan, measured, batch).state()

        state = from_first(choose, "choosing the microbatches in flight", self.grid.control)
        if state is None:  # a rank has measured nothing
            self._adaptations.begin_anew(plan.auto, batch)
            return
        found = AdaptedInFlight.of_state(state)
        self._adaptations.settle(plan.auto, found)
        if not dist.get_rank(self.grid.group):
            _LOG.info("in flight: %s", found)
        self._adopt()

    def _adopt(self) -> None:
        """Go on with what has been found for the present plan, if anything has."""
        found = self.in_flight
        if found is None:
            return
        present = self._plan
        plan = shared_plan(lambda known: present.adapted(found.choice, found.window, known), self.grid.control)
        if plan.schedule.actions_hash == self.schedule.actions_hash:
            self._transports.prepare(Channel.TRAINING, plan.proof.lowered)
            self._engine.widen(plan.proof)
            self._note(plan)
        else:
            self._take(plan)

    @between_runs()
    def look_out(self, first: float = 0) -> None:
        """Watch for divergence from batch `first` on, and forget what was found before; infinity ends the watch.

        Call it between two runs; all ranks call it together.
        """
        for state in self._ranks:
            state.decisions.detector.watch_from(first)
