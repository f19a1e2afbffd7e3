"""A run of all ranks in one process without tensors: what each rank holds, as the runtime's ledger counts it.

It follows the runtime action by action: who goes on when (`runtime.execute.executor`), when a SEND counts as
taken, and what passes and updates begin and cease to hold (`stage_run`, `sharded_stage`). Activations that are moved
to the host's memory count like others, unless it is asked for what the device holds. What takes the same room from
beginning to end is not counted here (`penstock.simulate.memory.predicted`).
"""

from __future__ import annotations

from penstock.errors import CapabilityError
from penstock.schedule.ir.schedule import Op
from penstock.schedule.machine.deadlock import deadlock
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.methods.data_parallel_sync import REDUCE, Combine
from penstock.simulate.memory.fake_transport import Part, Rendezvous, take_turns
from penstock.simulate.memory.held import Blockwise, Combination
from penstock.simulate.memory.meetings import FakeWaveExchange
from penstock.simulate.memory.rank_run import RankRun, SharedRun
from penstock.simulate.memory.snapshots import KeptSnapshots, Snapshots, check_snapshots


def most_held(
    lowered: Lowered,
    batches: int,
    width: int = 1,
    blockwise: Blockwise = False,
    low_precision: bool = False,
    snapshots: Snapshots | None = None,
    combine: Combine = REDUCE,
    on_device: bool = False,
) -> dict[Part, tuple[Combination, ...]]:
    """Return what every rank holds in a run, at the moments at which it may be the most.

    Args:
        lowered: the schedule with its messages, and with all actions that its run has.
        batches: length of the run.
        width: parallel pipelines.
        blockwise: stages whose blocks are recomputed one by one before their backwards, by index; all or none if a
            truth value.
        low_precision: passes compute in 16 bits.
        snapshots: that are taken on the way; None for none.
        combine: how pipelines agree.
        on_device: activations that are moved to the host's memory are not counted there.

    Raises:
        CapabilityError: the schedule does something that is not predicted.
        DeadlockError: some ranks wait for ever; the message names their actions, and the messages that do not come.
    """
    schedule = lowered.schedule
    if Op.AVERAGE in schedule.operations and not combine.apart:
        raise CapabilityError(
            f"{schedule.name}: memory is not predicted for schedules with AVERAGE unless it is known how pipelines are "
            "combined; give combine, such as Combine('average', every=4)"
        )
    spans = [batches]
    if snapshots is not None:
        check_snapshots(schedule, combine)
        if snapshots.drains:
            whole, rest = divmod(batches, snapshots.every)
            spans, snapshots = [snapshots.every] * whole + [rest] * bool(rest), None
    shared = SharedRun(
        lowered,
        width,
        blockwise,
        low_precision,
        {},
        Rendezvous(),
        snapshots,
        KeptSnapshots(),
        combine,
        FakeWaveExchange(width),
        on_device,
    )
    parts = [(pipeline, rank) for pipeline in range(width) for rank in range(schedule.ranks)]
    ranks = {part: RankRun(shared, *part) for part in parts}
    for span in spans:
        stuck = take_turns({part: rank.run(span) for part, rank in ranks.items()})
        if stuck:
            raise deadlock(ranks[part].blocked() for part in stuck)
    return {part: rank.holdings.largest() for part, rank in ranks.items()}
