"""The transport for NCCL, run over gloo on the CPU: the same lanes, threads and order of messages, other wires."""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.comm.p2p import nccl
from penstock.comm.transports import NcclTransports, Transports
from penstock.errors import CapabilityError
from penstock.options.passes import Precision
from penstock.options.run import Group
from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.machine.issue_order import Issued, one_order
from penstock.weights.updates.lr_scheduler_table import by_factor
from support import cases
from support.cases import METHODS, Case, Outcome, Recording, assert_same, finish, make_batches, make_blocks, together
from support.pool import Pool
from support.tree_cases import RAGGED, TreeCase, batches_of, blocks_of, expected as expected_of_trees


class OverSplitLanes(Pipeline):
    def _choose_transports(self) -> Transports:
        assert self.grid.control is not None
        return NcclTransports(self.grid, self.grid.control, torch.device("cpu"), "gloo")


def train(
    group: dist.ProcessGroup, case: Case, then: tuple[str, ...] = (), at_report: Callable[[], None] | None = None
) -> Outcome:
    """Run a case; after one batch, and after each further one, under another method."""
    trees = isinstance(case, TreeCase)
    recording = Recording(cases.OPTIMIZERS[case.optimizer])
    pipeline = OverSplitLanes(
        blocks_of(case) if trees else make_blocks(case.model),
        cases.make_schedule(case.method, case.depth, case.m),
        loss=cases.LOSSES[case.loss],
        optimizer=recording,
        lr_scheduler=by_factor(cases.warm_up) if case.rate else None,
        precision=Precision(divisor=case.divisor),
        partition=cases.BALANCE[case.depth],
        group=Group(group, 20.0),
    )
    batches = batches_of(case) if trees else make_batches(case)
    evaluate = Evaluating(2, lambda: batches[:1]) if case.method != "stash" and not trees else None
    outcome = Outcome()
    for method in then:
        after = pipeline.batches
        outcome.reports += [(r.batch, r.loss, r.weight) for r in pipeline.run(batches[after : after + 1])]
        pipeline.switch(cases.make_schedule(method, case.depth, case.m))
    for report in pipeline.run(batches[pipeline.batches :], evaluate=evaluate):
        outcome.reports.append((report.batch, report.loss, report.weight))
        if at_report is not None:
            at_report()
    return finish(outcome, pipeline, recording)


@pytest.mark.parametrize("method", METHODS)
def test_nccl_transport_gives_the_same_numbers(pool: Pool, method: str) -> None:
    case = Case(method, 4, 3)
    found = together(pool.submit(train, case, ranks=4, fresh=True))
    assert_same(found, cases.expected(case))


def test_another_method_takes_other_lanes(pool: Pool) -> None:
    """All of them flush, so the numbers are the same; bpipe moves activations between ranks."""
    case = Case("1f1b", 4, 4)
    found = together(pool.submit(train, case, ("gpipe", "bpipe", "1f1b"), ranks=4, fresh=True))
    assert_same(found, cases.expected(case))


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_trees_and_changing_shapes(pool: Pool, method: str) -> None:
    shapes = tuple(shape for shape in RAGGED if shape[0])
    case = TreeCase(method, 4, len(shapes), "trees", optimizer="sgd", spans=(4,), shapes=shapes)
    found = together(pool.submit(train, case, ranks=4, fresh=True))
    assert_same(found, expected_of_trees(case))


def test_a_pipeline_on_a_part_of_the_job_is_refused(pool: Pool) -> None:
    """Torch wants every rank of the job when a group is made; a clear error is better than ranks that wait."""
    with pytest.raises(CapabilityError, match="must hold all 4 ranks of the job; its group has 2"):
        pool.submit(train, Case("1f1b", 2, 2), ranks=2, fresh=True)


def train_recorded(group: dist.ProcessGroup, case: Case) -> tuple[Outcome, list[Issued], bool]:
    """Run a case; also return the tensors in the order in which they were issued, and whether one thread did it."""
    issued: list[Issued] = []
    threads: set[int] = set()

    counts: Counter[str] = Counter()

    class RecordingWires(nccl.Wires):
        def note(self) -> None:
            group = self._tensors.group
            assert group is not None
            name = group.group_name  # another one after a switch of methods
            issued.append(Issued(self.lane, 1000 * zlib.crc32(name.encode()) + counts[name]))
            counts[name] += 1
            threads.add(threading.get_ident())

        def send(self, tensor: torch.Tensor) -> nccl.Work | None:
            self.note()
            return super().send(tensor)

        def receive(self, dtype: torch.dtype, shape: list[int]) -> tuple[torch.Tensor, nccl.Work | None]:
            self.note()
            return super().receive(dtype, shape)

    plain, nccl.Wires = nccl.Wires, RecordingWires  # type: ignore[misc]
    try:
        return train(group, case), issued, threads == {threading.get_ident()}
    finally:
        nccl.Wires = plain  # type: ignore[misc]


def recorded(pool: Pool, case: Case) -> list[list[Issued]]:
    found = pool.submit(train_recorded, case, ranks=4, fresh=True)
    assert all(alone for _, _, alone in found)
    assert_same(together([outcome for outcome, _, _ in found]), cases.expected(case))
    return [events for _, events, _ in found]


@pytest.mark.parametrize("method", ["1f1b", "gpipe", "2bw", "stash", "bpipe"])
def test_all_ranks_issue_their_tensors_in_one_order(pool: Pool, method: str) -> None:
    """Every rank issues from one thread, and the orders of all ranks agree with one order of all tensors."""
    orders = recorded(pool, Case(method, 4, 8))
    assert all(len(events) > 16 for events in orders)  # most messages did travel there
    one_order(orders)


def test_where_structures_change_the_order_stays(pool: Pool) -> None:
    """A posted receive of another structure is filled with anything, so nothing is issued out of turn."""
    shapes = tuple(shape for shape in RAGGED if shape[0])
    case = TreeCase("1f1b", 4, len(shapes), "trees", optimizer="sgd", spans=(4,), shapes=shapes)
    found = pool.submit(train_recorded, case, ranks=4, fresh=True)
    assert_same(together([outcome for outcome, _, _ in found]), expected_of_trees(case))
    one_order([events for _, events, _ in found])


def train_and_compare(group: dist.ProcessGroup, case: Case) -> tuple[Outcome, int]:
    """Run a case; at every report compare which tensors the ranks have issued.

    A device that carries out messages in order waits for one of which another rank has not issued the other end.
    """
    issued = {"sends": Counter[str](), "receives": Counter[str]()}

    class CountingWires(nccl.Wires):
        def send(self, tensor: torch.Tensor) -> nccl.Work | None:
            issued["sends"][str(self.lane)] += 1
            return super().send(tensor)

        def receive(self, dtype: torch.dtype, shape: list[int]) -> tuple[torch.Tensor, nccl.Work | None]:
            issued["receives"][str(self.lane)] += 1
            return super().receive(dtype, shape)

    def compare() -> None:
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, issued, group=group)  # so all ranks have to come to this report
        sends, receives = (sum((each[what] for each in found), Counter[str]()) for what in ("sends", "receives"))
        assert sends == receives

    plain, nccl.Wires = nccl.Wires, CountingWires  # type: ignore[misc]
    try:
        return train(group, case, at_report=compare), issued["sends"].total() + issued["receives"].total()
    finally:
        nccl.Wires = plain  # type: ignore[misc]


@pytest.mark.parametrize("method", METHODS)
def test_devices_wait_for_nothing_while_all_callers_have_a_report(pool: Pool, method: str) -> None:
    """So these may call torch.cuda.synchronize(), and meet."""
    case = Case(method, 4, 8)
    found = pool.submit(train_and_compare, case, ranks=4, fresh=True)
    assert all(count > 16 for _, count in found)
    assert_same(together([outcome for outcome, _ in found]), cases.expected(case))
