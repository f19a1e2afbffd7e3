"""What goes wrong with sharded state is found: by a check, by the books, or by whoever waits."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.comm.collective.shard_exchange import GlooShards, LocalShards
from penstock.comm.core.ticket import Ticket
from penstock.errors import CapabilityError, ConfigError, ScheduleError, TransportError, VersionError
from penstock.runtime.options.division import DataParallel
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.update.gathers import Gathers
from penstock.schedule.build import prove
from penstock.schedule.ir.schedule import Op
from penstock.schedule.methods.combine import Combine
from penstock.schedule.proof.check import check
from penstock.stage.stage_weights import TrainedWeights
from penstock.weights.memory.row_shards import Rows, RowShards
from support.cases import Case, expected, make_batches, make_pipeline
from support.pool import Pool
from support.runtime_faults import what_happens
from support.sharded import assert_as_whole, train_sharded

CASE = Case("2bw", 2, 3, width=2, spans=(4,), clip=0.4, skips=())


def run(case: Case = CASE, level: str = "gradients", **changes: Any) -> None:
    for _ in make_pipeline(case, sharding=level, **changes).run(make_batches(case)):
        pass


# --- planted faults ---------------------------------------------------------------------------------------------------


def shifted(by: int) -> Callable[..., Rows]:
    whole = RowShards.rows

    def rows(self: RowShards, name: str, holder: int | None = None) -> Rows:
        first, end, count = whole(self, name, holder)
        return Rows(first + by if first else 0, end, count)

    return rows


@pytest.mark.parametrize("by", [1, -1])
def test_a_shard_that_is_off_by_one(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    monkeypatch.setattr(RowShards, "rows", shifted(by))
    with pytest.raises(VersionError, match=r"the 13 rows of table\.weight are not divided once among holders"):
        make_pipeline(CASE, sharding="gradients")


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


def test_a_holder_that_is_missing_in_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """No check can know what a norm should be: the numbers are compared."""
    real = TrainedWeights.gradient_squares
    first = "stage 0 on rank 0"

    def squares(self: TrainedWeights, batch: int) -> tuple[float, float]:
        lost = self.store.where == first and self.store.shards.place  # type: ignore[attr-defined]
        return (0.0, 0.0) if lost else real(self, batch)

    monkeypatch.setattr(TrainedWeights, "gradient_squares", squares)
    outcome, parts, _ = train_sharded(None, CASE, "gradients")
    with pytest.raises(AssertionError):
        assert_as_whole(outcome, [parts], expected(CASE))


@pytest.mark.parametrize("change", ["twice", "missing"])
def test_a_reduction_that_comes_twice_or_never(change: str) -> None:
    schedule = prove("1f1b", 2, 2, sharding="gradients").schedule
    programs = []
    for program in schedule.programs:
        period = []
        for action in program.period:
            copies = 1 if action.op is not Op.REDUCE else 2 if change == "twice" else 0
            period += [action] * copies
        programs.append(program._replace(period=tuple(period)))
    wanted = "count twice|second time" if change == "twice" else "REDUCE|GATHER"
    with pytest.raises(ScheduleError, match=wanted):
        check(replace(schedule, programs=tuple(programs)))


def never(*_: Any) -> Any:
    """Wait for nothing."""
    yield from ()


def test_a_version_is_not_read_before_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gathers, "wait", never)
    for case in (CASE, Case("1f1b", 2, 2, width=2, spans=(2,))):
        with pytest.raises((VersionError, AssertionError), match="only the rows of pipeline|the version before"):
            run(case)


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


def dies_in_a_gather(group: dist.ProcessGroup, case: Case) -> tuple[str, str]:
    if dist.get_rank(group) == 1:

        def gather(*_: Any) -> Ticket:
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        GlooShards.gather = gather  # type: ignore[method-assign]
    return what_happens(group, case, make_batches(case), 10.0, sharding="gradients")


@pytest.mark.processes
def test_a_peer_that_is_lost_in_a_gather() -> None:
    case, alone = Case("1f1b", 1, 2, width=2, spans=(3,)), Pool(2)
    try:
        ((kind, text), _) = alone.submit(dies_in_a_gather, case, ranks=2, victims=[1], timeout=40.0)
    finally:
        alone.close()
    assert kind == "TransportError"
    assert re.search(r"stage 0, batch 1: the lane of weight shards of ranks 0, 1 \(version 1\) broke", text), text


# --- refused by name --------------------------------------------------------------------------------------------------


class MyOwn(torch.optim.SGD):
    """Nobody knows what it does."""


@pytest.mark.parametrize(
    ("case", "changes", "kind", "text"),
    [
        (Case("1f1b", 2, 2), {"sharding": "gradients"}, ConfigError, "but width is 1; set width"),
        (Case("1f1b", 2, 2, width=2), {"sharding": "full"}, CapabilityError, "sharding full .* set sharding to gradi"),
        (Case("stash", 2, 2, width=2), {"sharding": "optimizer"}, ConfigError, "not with 'stash'.*set sharding to no"),
        (Case("1f1b", 2, 2, width=2), {"sharding": "rows"}, ConfigError, "unknown sharding 'rows'"),
        (
            Case("1f1b", 2, 2, width=2, reduce="fast"), {"sharding": "gradients"}, ConfigError,
            "adds gradients in the order of the pipelines; set reduce to ordered",
        ),
        (
            Case("1f1b", 2, 2, width=2), {"sharding": "optimizer", "combine": Combine("average", every=2)}, ConfigError,
            "states of their own|nothing to share",
        ),
        (
            Case("1f1b", 2, 2, width=2, precision="bf16"), {"sharding": "optimizer"}, CapabilityError,
            "not offered in low precision yet; set precision to fp32",
        ),
        (
            Case("chimera", 2, 2, width=2), {"sharding": "optimizer"}, CapabilityError,
            "holds stages twice yet; take 1f1b",
        ),
        (
            Case("breadth-first", 2, 2, width=2, options=(("chunks", 3),)), {"sharding": "gradients"}, CapabilityError,
            "fewer full-size gradients than a rank has stages yet; allow as many, as in sharding=gradients:gradients=3",
        ),
        (
            Case("2bw", 2, 2, "faint", "adafactor", width=2, tied=True), {"sharding": "optimizer"}, CapabilityError,
            r"shares table\.weight with another stage, .*Adafactor needs whole parameters; untie them, or set sharding",
        ),
        (
            Case("1f1b", 2, 2, width=2), {"sharding": "gradients", "optimizer": MyOwn}, CapabilityError,
            "MyOwn may look at several parameters together.*or set sharding to none",
        ),
    ],
    ids=lambda c: c.method if isinstance(c, Case) else "",
)  # fmt: skip
def test_what_is_refused_by_name(case: Case, changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make_pipeline(case, **changes)


def test_a_schedule_that_has_another_sharding_than_the_options() -> None:
    blocks = {"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)}

    def make(schedule: str, option: str) -> Pipeline:
        return Pipeline(
            blocks,
            prove("1f1b", 2, 2, sharding=schedule),
            loss=torch.nn.functional.mse_loss,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            data_parallel=DataParallel(2, sharding=option),
        )

    with pytest.raises(ConfigError, match="the schedule has sharding optimizer, but gradients is asked for"):
        make("optimizer", "gradients")
    for schedule, option in (("optimizer", "none"), ("gradients", "gradients"), ("none", "optimizer")):
        level = option if schedule == "none" else schedule
        assert make(schedule, option).schedule.sharding.level == level


@pytest.mark.parametrize(
    ("before", "after"), [("optimizer", "gradients"), ("gradients", "none"), ("none", "optimizer")]
)
def test_a_switch_to_another_sharding(before: str, after: str) -> None:
    """Stages hold what they were built for."""
    pipeline = make_pipeline(Case("1f1b", 2, 2, width=2), schedule=prove("1f1b", 2, 2, sharding=before))
    with pytest.raises(ConfigError, match=rf"they differ in sharding \({before} and {after}\)"):
        pipeline.switch(schedule=prove("2bw", 2, 2, sharding=after))


def test_step_hooks_would_see_rows() -> None:
    def hooked(named: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(named, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    with pytest.raises(CapabilityError, match="SGD has step hooks, which would see rows .* set sharding to none"):
        make_pipeline(Case("1f1b", 2, 2, width=2), sharding="optimizer", optimizer=hooked)
