"""Build the state of one rank for its spans: mailbox, routes, ledgers, updates and meetings."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.comm.communicators import Communicators
from penstock.comm.core.rank_grid import Holder
from penstock.comm.p2p.mailbox import Mailbox
from penstock.comm.p2p.stage_routes import StageRoutes
from penstock.options.parallelism import rank_numbers
from penstock.runtime.rank.batch_reports import Reports
from penstock.runtime.rank.loss_ledger import LossLedger
from penstock.runtime.rank.memory_ledger import MemoryLedger, StageMemory, WatchfulMemory
from penstock.runtime.rank.span import RankSpan, StageSpan
from penstock.runtime.setup.rank_state import RankState
from penstock.runtime.update.averaging_rounds import Combining, Meetings, NoMeetings, Party
from penstock.runtime.update.gathers_and_reduce_scatters import Gathers
from penstock.runtime.update.tied_gradients import TiedGradients
from penstock.runtime.update.unsharded_gradient_limit import GradientPlaces
from penstock.runtime.update.update_step import Updates
from penstock.runtime.update.wave_synchronous_parallel import WaveCombining
from penstock.schedule.ir.schedule import Op, Stage
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.schedule.stage_state.stage_constants import StageSpec

Holders = Mapping[int, tuple[Holder, ...]]


def build_span(
    state: RankState,
    lowered: Lowered,
    specs: Mapping[Stage, StageSpec],
    holders: Holders,
    links: Communicators,
    combine: Combine,
) -> RankSpan:
    """Build the state of a rank for spans of one schedule; see `penstock.runtime.execute.executor.Executor`."""
    schedule, recorder, decisions = lowered.schedule, state.recorder, state.decisions
    pipeline, rank = state.key
    numbers = rank_numbers(state.options.data_parallel, schedule.ranks)
    mailbox = Mailbox(numbers.of_pipeline(pipeline), lowered, links.transport, recorder)
    meetings, holders = _meetings(state, holders, links, combine)
    provisional = RULES[schedule.rule].provisional
    memory = MemoryLedger(recorder, state.stages.values())
    always = all(instruction.action.unit.every == 1 for instruction in lowered.programs[rank].period)
    gathers, kind = None, StageMemory
    if links.shards is not None:
        places = schedule.sharding.gradients
        apart = any(runtime.weights.keeps_sums_apart for runtime in state.stages.values())
        room = GradientPlaces(places) if places is not None and apart else None
        kind = StageMemory if room is None else WatchfulMemory
        level = schedule.sharding.level
        gathers = Gathers(pipeline, holders, links.shards, recorder, level, room, memory.freed)
    stages = {
        key: StageSpan(
            state.stages[key],
            spec,
            StageRoutes(schedule, key, mailbox, state.options.precision.between_stages),
            kind(memory, state.stages[key].weights),
            is_last=key.index == schedule.num_stages - 1,
            name=f"rank {recorder.rank}, stage {key.name}",
            repeats=always and not provisional and isinstance(meetings, NoMeetings),
        )
        for key, spec in specs.items()
    }
    tying = TiedGradients(pipeline, holders, links.ties, sum(bool(runtime.ties) for runtime in state.stages.values()))
    updates = Updates(pipeline, holders, links.reducer, tying, links.control, decisions, recorder, provisional, gathers)
    forwards = sum(instruction.action.op is Op.F for instruction in lowered.programs[rank].period)
    decides = any(spec.decides for spec in specs.values())
    losses = LossLedger(sum(stage.trained for stage in stages.values()), decides and not provisional)
    part = decides and len(holders[schedule.num_stages - 1]) > 1
    reports = Reports(forwards, decides, losses, decisions, recorder, part=part)
    return RankSpan(
        schedule, pipeline, stages, mailbox, recorder, decisions, updates, meetings, losses, reports, memory,
        state.options, provisional, state.stop,
    )  # fmt: skip


def _meetings(state: RankState, holders: Holders, links: Communicators, combine: Combine) -> tuple[Meetings, Holders]:
    """How the rank meets other pipelines, and the stages that hold the weights that it updates."""
    if links.global_control is None:
        return NoMeetings(), holders
    party = Party(combine, state.key.pipeline, holders, links.global_control, state.decisions, state.recorder)
    own = {index: tuple(h for h in all_ if h.pipeline == state.key.pipeline) for index, all_ in holders.items()}
    if links.averages is not None:
        return Combining(party, links.averages), own
    return (NoMeetings() if links.waves is None else WaveCombining(party, links.waves)), own
