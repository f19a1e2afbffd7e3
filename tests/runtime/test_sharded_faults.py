"""What goes wrong with sharded state is found: by a check, by the books, or by whoever waits."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from penstock.comm.collective.shard_exchange import GlooShards, LocalShards
from penstock.comm.core.ticket import Ticket
from penstock.errors import ScheduleError, TransportError, VersionError
from penstock.runtime.ops.handlers import ReduceAction, ReleaseAction
from penstock.runtime.ops.passes import HeldBackward
from penstock.runtime.update.gathers_and_reduce_scatters import Gathers
from penstock.schedule.build import prove
from penstock.schedule.ir.schedule import Op, WeightRef
from penstock.schedule.proof.check import check
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.weights.fully_sharded.one_version import (
    FullyShardedExactStore,
    FullyShardedMixedStore,
    FullyShardedStore,
)
from penstock.weights.memory.row_shards import Rows, RowShards
from penstock.weights.memory.squared_norm import Squares
from support.cases import Case, make_batches, make_pipeline
from support.pool import Pool
from support.runtime_faults import what_happens
from support.sharded import train_sharded

CASE = Case("2bw", 2, 3, width=2, spans=(4,), clip=0.4, skips=())
LAYERED = Case("breadth-first", 2, 2, width=2, spans=(3,), clip=0.4, skips=(), options=(("chunks", 2),))


def run(case: Case = CASE, level: str = "gradients", **changes: Any) -> None:
    for _ in make_pipeline(case, sharding=level, **changes).run(make_batches(case)):
        pass


def shifted(by: int) -> Callable[..., Rows]:
    whole = RowShards.rows

    def rows(self: RowShards, name: str, holder: int | None = None) -> Rows:
        first, end, count = whole(self, name, holder)
        return Rows(first + by if first else 0, end, count)

    return rows


@pytest.mark.parametrize("by", [1, -1])
def test_a_shard_that_is_off_by_one(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    monkeypatch.setattr(RowShards, "rows", shifted(by))
    for case, level in ((CASE, "gradients"), (LAYERED, "full")):
        with pytest.raises(VersionError, match=r"the 13 rows of table\.weight are not divided once among holders"):
            make_pipeline(case, sharding=level)


def divides_otherwise(group: dist.ProcessGroup, case: Case) -> tuple[str, str]:
    if dist.get_rank(group) == 1:
        whole = RowShards.rows

        def rows(self: RowShards, name: str, holder: int | None = None) -> Rows:
            first, end, count = whole(self, name, holder)
            return Rows(first + 1 if first else 0, end + 1 if end < count else end, count)

        patch = pytest.MonkeyPatch()
        patch.setattr(RowShards, "rows", rows)
    try:
        return what_happens(group, case, make_batches(case), 5.0, sharding="gradients")
    finally:
        if dist.get_rank(group) == 1:
            patch.undo()


def test_processes_that_divide_rows_differently(pool: Pool) -> None:
    said = pool.submit(divides_otherwise, Case("2bw", 1, 2, width=2, spans=(2,)), ranks=2, fresh=True)
    assert {kind for kind, _ in said} == {"ConfigError"}
    assert all("ranks 0 and 1 divide the rows of stage 0 differently" in text for _, text in said)


@pytest.mark.parametrize(("case", "level"), [(CASE, "gradients"), (LAYERED, "full")], ids=["2bw", "layered"])
def test_a_holder_that_is_missing_in_the_norm(monkeypatch: pytest.MonkeyPatch, case: Case, level: str) -> None:
    real = TrainedWeights.gradient_squares
    first = "stage 0 on rank 0"

    def squares(self: TrainedWeights, batch: int) -> Squares:
        lost = self.store.where == first and self.store.shards.place  # type: ignore[attr-defined]
        return Squares() if lost else real(self, batch)

    monkeypatch.setattr(TrainedWeights, "gradient_squares", squares)
    with pytest.raises(VersionError, match=r"batch \d: the norm of the gradient is without \d+ of its numbers"):
        train_sharded(None, case, level)


@pytest.mark.parametrize(
    ("change", "said"),
    [("twice", "adds nothing: .* so the sum would count twice"), ("missing", "STEP.*: needs the REDUCE of its batch")],
)
def test_a_reduction_that_comes_twice_or_never(change: str, said: str) -> None:
    schedule = prove("1f1b", 2, 2, sharding="gradients").schedule
    programs = []
    for program in schedule.programs:
        period = []
        for action in program.period:
            copies = 1 if action.op is not Op.REDUCE else 2 if change == "twice" else 0
            period += [action] * copies
        programs.append(program._replace(period=tuple(period)))
    with pytest.raises(ScheduleError, match=said):
        check(replace(schedule, programs=tuple(programs)))


def never(*_: Any) -> Any:
    """Wait for nothing."""
    yield from ()


@pytest.mark.parametrize("level", ["gradients", "full"])
def test_a_version_is_not_read_before_it_is_whole(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setattr(Gathers, "wait", never)
    with pytest.raises(
        VersionError, match=r"stage \d on rank \d: of version \d of the weights only the rows of pipeline"
    ):
        run(Case("1f1b", 2, 2, width=2, spans=(2,)), level)


def misplaced(op: Op, behind: Op, count: int) -> Any:
    """The schedule of LAYERED with the first action of a kind moved behind the first, second, ... of another one."""
    schedule = prove("breadth-first", 2, 2, options={"chunks": 2}, sharding="full").schedule
    period = list(schedule.programs[0].period)
    moved = next(action for action in period if action.op is op)
    period.remove(moved)
    places = [i for i, action in enumerate(period) if action.op is behind and action.stage == moved.stage]
    period.insert(places[count] + 1, moved)
    return replace(schedule, programs=(schedule.programs[0]._replace(period=tuple(period)), schedule.programs[1]))


def test_a_release_before_the_last_pass_that_reads() -> None:
    with pytest.raises(ScheduleError, match="B1.*: reads version t, which is not gathered here: a GATHER of it must"):
        check(misplaced(Op.RELEASE, Op.B, 0))


def test_a_gather_of_the_version_before() -> None:
    schedule = prove("breadth-first", 2, 2, options={"chunks": 2}, sharding="full").schedule

    def older(action: Any) -> Any:
        return action._replace(reads=WeightRef((-1,))) if action.op is Op.GATHER else action

    programs = tuple(p._replace(period=tuple(map(older, p.period))) for p in schedule.programs)
    with pytest.raises(
        ScheduleError, match="F0.*: reads version t, which is not gathered here: a GATHER of it must come"
    ):
        check(replace(schedule, programs=programs))


class Planted:
    """Faults of the runtime that no proof can see, each in one method."""

    @staticmethod
    def gather_of_the_version_before(patch: pytest.MonkeyPatch) -> None:
        begin = Gathers.begin
        patch.setattr(Gathers, "begin", lambda self, stage, version: begin(self, stage, max(version - 1, 0)))

    @staticmethod
    def release_before_the_last_backward(patch: pytest.MonkeyPatch) -> None:
        work = HeldBackward.work

        def early(self: HeldBackward, turn: Any) -> None:
            if turn.first % 2:
                self._runtime.release(turn.version)
            work(self, turn)

        patch.setattr(HeldBackward, "work", early)

    @staticmethod
    def no_release(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(ReleaseAction, "work", lambda *_: None)

    @staticmethod
    def release_twice(patch: pytest.MonkeyPatch) -> None:
        work = ReleaseAction.work
        patch.setattr(ReleaseAction, "work", lambda self, turn: (work(self, turn), work(self, turn))[0])

    @staticmethod
    def reduce_twice(patch: pytest.MonkeyPatch) -> None:
        work = ReduceAction.work
        patch.setattr(ReduceAction, "work", lambda self, turn: (work(self, turn), work(self, turn))[0])

    @staticmethod
    def reduce_before_the_last_backward(patch: pytest.MonkeyPatch) -> None:
        work = HeldBackward.work

        def early(self: HeldBackward, turn: Any) -> None:
            if turn.first % 2:
                self._span.updates.reduce(self._runtime, turn.batch)
            work(self, turn)

        patch.setattr(HeldBackward, "work", early)

    @staticmethod
    def step_writes_into_what_is_gathered(patch: pytest.MonkeyPatch) -> None:
        for kind in (FullyShardedExactStore, FullyShardedMixedStore):
            patch.setattr(kind, "update", gathered_before(kind.update))


def gathered_before(step: Callable[..., None]) -> Callable[..., None]:
    """An update that finds weights gathered."""

    def gathered(self: FullyShardedStore, *arguments: Any) -> None:
        self.version_shards(self.newest)
        self.complete(self.newest)
        step(self, *arguments)

    return gathered


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("gather_of_the_version_before", "a GATHER of version 0 of the weights, but the rows .* of version 1"),
        ("release_before_the_last_backward", "the backward of microbatch 1 on stage .* which are not whole: buffer .*"),
        ("no_release", "stage .*: a GATHER of version 0 of the weights comes while it is whole already; its RELEASE"),
        ("release_twice", "stage .*: a RELEASE of version 0 of the weights comes while it is not whole"),
        ("reduce_twice", "stage .*: a second REDUCE of the gradient of batch 0"),
        ("reduce_before_the_last_backward", "a backward adds to the gradient of batch 0 after its REDUCE"),
        ("step_writes_into_what_is_gathered", "the update of batch 0 comes while version 0 of the weights is gathered"),
    ],
)
def test_faults_that_are_found_at_run_time(monkeypatch: pytest.MonkeyPatch, fault: str, said: str) -> None:
    case = replace(LAYERED, options=(("chunks", 3),))  # more chunks than places
    run(case, "full")
    getattr(Planted, fault)(monkeypatch)
    with pytest.raises(VersionError, match=said):
        run(case, "full")


def test_a_step_writes_while_casts_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(LAYERED, precision="bf16")
    Planted.step_writes_into_what_is_gathered(monkeypatch)
    with pytest.raises(VersionError, match="the update of batch 0 comes while version 0 of the weights is gathered"):
        run(case, "full")


def test_a_gather_that_breaks_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    real = LocalShards.gather

    def gather(self: LocalShards, members: Any, me: Any, version: int, shards: Any) -> Ticket:
        if version < 2:
            return real(self, members, me, version, shards)
        ticket = Ticket(f"the lane of weight shards ({version})")
        ticket.complete(error=ConnectionError("gone"))
        return ticket

    monkeypatch.setattr(LocalShards, "gather", gather)
    with pytest.raises(TransportError, match=r"rank \d, stage \d, .*: the lane of weight shards \(2\) broke: gone"):
        run()


def test_a_sum_that_breaks_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a backward that waits for the place of the gradient."""

    def scatter(*_: Any) -> Ticket:
        ticket = Ticket("the reduction lane")
        ticket.complete(error=ConnectionError("gone"))
        return ticket

    monkeypatch.setattr(LocalShards, "scatter", scatter)
    with pytest.raises(TransportError, match=r"the reduction lane broke: gone"):
        run(replace(LAYERED, options=(("chunks", 3),)), "full")


def dies_in_a_gather(group: dist.ProcessGroup, case: Case, level: str) -> tuple[str, str]:
    if dist.get_rank(group) == 1:

        def gather(*_: Any) -> Ticket:
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        GlooShards.gather = gather  # type: ignore[method-assign]
    return what_happens(group, case, make_batches(case), 10.0, sharding=level)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("gradients", r"stage 0, batch 1: the lane of weight shards of ranks 0, 1 \(version 1\) broke"),
        ("full", r"stage 0, F0: the lane of weight shards of ranks 0, 1 \(version 0\) broke"),
    ],
)
def test_a_peer_that_is_lost_in_a_gather(level: str, said: str) -> None:
    case, alone = Case("1f1b", 1, 2, width=2, spans=(3,)), Pool(2)
    try:
        ((kind, text), _) = alone.submit(dies_in_a_gather, case, level, ranks=2, victims=[1], timeout=40.0)
    finally:
        alone.close()
    assert kind == "TransportError"
    assert re.search(said, text), text
