"""The transport for NCCL, run over gloo on the CPU: the same lanes, threads and order of messages, other wires."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from penstock.comm.transports import NcclTransports, Transports
from penstock.errors import CapabilityError
from penstock.runtime.execute.evaluation import Evaluating
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.plan.options import Precision
from penstock.weights.optim.lr_schedulers import by_factor
from support import cases
from support.cases import METHODS, Case, Outcome, Recording, assert_same, finish, make_batches, make_blocks, together
from support.pool import Pool
from support.tree_cases import RAGGED, TreeCase, batches_of, blocks_of, expected as expected_of_trees


class OverSplitLanes(Pipeline):
    def _choose_transports(self) -> Transports:
        assert self.grid.control is not None
        return NcclTransports(self.grid, self.grid.control, torch.device("cpu"), "gloo")


def train(group: dist.ProcessGroup, case: Case, then: tuple[str, ...] = ()) -> Outcome:
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
        group=group,
        timeout=20.0,
    )
    batches = batches_of(case) if trees else make_batches(case)
    evaluate = Evaluating(2, lambda: batches[:1]) if case.method != "stash" and not trees else None
    outcome = Outcome()
    for method in then:
        after = pipeline.batches
        outcome.reports += [(r.batch, r.loss, r.weight) for r in pipeline.run(batches[after : after + 1])]
        pipeline.switch(cases.make_schedule(method, case.depth, case.m))
    rest = pipeline.run(batches[pipeline.batches :], evaluate=evaluate)
    outcome.reports += [(r.batch, r.loss, r.weight) for r in rest]
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
