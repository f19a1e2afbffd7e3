"""Spans: runs in several parts, leaving early, stopping, and what is reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import PenstockError
from support.cases import (
    BALANCE,
    LOSSES,
    METHODS,
    ONE_OF_EACH,
    OPTIMIZERS,
    Case,
    Outcome,
    Recording,
    assert_same,
    expected,
    finish,
    make_batches,
    make_blocks,
    make_pipeline,
    together,
    train,
    train_on_ranks,
)
from support.pool import Pool

SHAPES = [("sequential", 2, 2), ("gpipe", 3, 4), ("1f1b", 3, 2), ("1f1b", 4, 4), ("eager", 4, 5)]
SHAPES += [("2bw", 1, 1), ("2bw", 2, 1), ("2bw", 3, 2), ("2bw", 4, 5)]
SHAPES += [("stash", 1, 1), ("stash", 4, 1), ("stash", 3, 4)]


@pytest.mark.parametrize(("method", "depth", "m"), SHAPES)
def test_parts_in_one_process(method: str, depth: int, m: int) -> None:
    case = Case(method, depth, m, optimizer="sgd", spans=(3, 1, 1, 2), skips=())
    assert_same(train(None, case), expected(case))


@pytest.mark.parametrize(("method", "depth", "m"), SHAPES)
def test_parts_on_ranks(pool: Pool, method: str, depth: int, m: int) -> None:
    case = Case(method, depth, m, optimizer="nadam", spans=(1, 2, 3), skips=())
    assert_same(train_on_ranks(pool, case), expected(case))


@pytest.mark.parametrize("method", METHODS)
def test_only_stash_notices_a_drain(method: str) -> None:
    """So that the tests above mean something: a drain changes the delays of stash, and of nothing else."""
    whole = Case(method, 3, 2, spans=(7,), skips=())
    same = expected(whole).weights["head.weight"].equal(expected(replace(whole, spans=(3, 4))).weights["head.weight"])
    assert same == (method != "stash")


class Stopper:
    """A block that stops the pipeline when a microbatch passes."""

    def __init__(self, at: int) -> None:
        self.at, self.passed = at, 0
        self.stop: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.passed == self.at:
            self.stop()
        self.passed += 1
        return x


def interrupted(group: dist.ProcessGroup | None, case: Case, how: str, at: int) -> tuple[int, Outcome]:
    """Run until something ends the first span, then run the rest; returns how many batches the first span had.

    Args:
        how: "leave" the loop at report `at`, call "stop" there, or have it called "inside" the forward of microbatch
            `at` on the first stage.
    """
    recording = Recording(OPTIMIZERS[case.optimizer])
    stopper = Stopper(at if how == "inside" else -1)
    balance = list(BALANCE[case.depth])
    balance[0] += 1
    blocks = {"stopper": stopper, **make_blocks(case.model)}
    pipeline = make_pipeline(case, group, blocks=blocks, balance=balance, optimizer=recording, timeout=5.0)
    stopper.stop = pipeline.stop
    batches, outcome = make_batches(case), Outcome()
    for report in pipeline.run(batches):
        outcome.reports.append((report.batch, report.loss, report.weight))
        if report.batch == at and how == "leave":
            break
        if report.batch == at and how == "stop":
            pipeline.stop()
    finished = pipeline.batches
    if how == "leave":  # nobody saw the reports of batches that had entered
        outcome.reports += [(t, None, None) for t in range(len(outcome.reports), finished)]
    outcome.reports += [(r.batch, r.loss, r.weight) for r in pipeline.run(batches[finished:])]
    return finished, finish(outcome, pipeline, recording)


def check_interrupted(case: Case, how: str, at: int, finished: int, outcome: Outcome) -> None:
    """All batches are trained, in two spans, and no more than were announced in the first one."""
    first = at // case.m if how == "inside" else at
    ahead = 0 if how == "inside" else -(-2 * (case.depth - 1) // case.m)  # what the first stage may have begun since
    assert first + 1 <= finished <= first + ahead + 2
    total = sum(case.spans)
    wanted = expected(replace(case, spans=(finished, total - finished)))
    if how == "leave":
        for t in range(at + 1, finished):
            wanted.reports[t] = (t, None, None)
    assert_same(outcome, wanted)


@pytest.mark.parametrize(("at", "how"), [(0, "leave"), (2, "stop")])
@pytest.mark.parametrize(("method", "depth", "m"), SHAPES)
def test_ending_early_in_one_process(method: str, depth: int, m: int, at: int, how: str) -> None:
    case = Case(method, depth, m, spans=(6,), skips=())
    check_interrupted(case, how, at, *interrupted(None, case, how, at))


@pytest.mark.parametrize("how", ["leave", "stop"])
@pytest.mark.parametrize(("method", "depth", "m"), [("1f1b", 3, 2), ("gpipe", 2, 3), ("2bw", 4, 3), ("stash", 3, 1)])
def test_ending_early_on_ranks(pool: Pool, method: str, depth: int, m: int, how: str) -> None:
    case = Case(method, depth, m, spans=(6,), skips=())
    results = pool.submit(interrupted, case, how, 1, ranks=depth)
    assert len({finished for finished, _ in results}) == 1
    check_interrupted(case, how, 1, results[0][0], together([outcome for _, outcome in results]))


@pytest.mark.parametrize(("method", "depth", "m"), [("1f1b", 3, 4), ("2bw", 3, 2), ("stash", 4, 1)])
def test_stopping_between_two_microbatches(method: str, depth: int, m: int) -> None:
    for at in range(2 * m):
        case = Case(method, depth, m, spans=(5,), skips=())
        check_interrupted(case, "inside", at, *interrupted(None, case, "inside", at))


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "depth", "m"),
    [
        ("1f1b", 3, 4),
        ("2bw", 3, 3),
        ("stash", 3, 2),
    ],
)
def test_stopping_between_two_microbatches_on_ranks(pool: Pool, method: str, depth: int, m: int) -> None:
    """No RECV may be left behind that would catch a message of the next span."""
    case = Case(method, depth, m, spans=(5,), skips=())
    for at in range(m):
        results = pool.submit(interrupted, case, "inside", at, ranks=depth, fresh=True)
        assert len({finished for finished, _ in results}) == 1
        check_interrupted(case, "inside", at, results[0][0], together([outcome for _, outcome in results]))


def no_data(group: dist.ProcessGroup | None, case: Case) -> tuple[int, list[int]]:
    """Runs without and with data in turn."""
    pipeline = make_pipeline(case, group)
    counts = [len(list(pipeline.run(batches))) for batches in ([], make_batches(case), iter(()), make_batches(case))]
    return pipeline.batches, counts


def test_an_empty_iterator_trains_nothing(pool: Pool) -> None:
    case = Case("2bw", 3, 2, spans=(2,))
    assert no_data(None, case) == (4, [0, 2, 0, 2])
    assert pool.submit(no_data, case, ranks=3) == [(4, [0, 2, 0, 2])] * 3


def test_data_is_taken_one_batch_ahead() -> None:
    """An endless stream may be given; batches are not fetched long before they are needed."""
    case = Case("2bw", 3, 2, spans=(6,))
    taken = []

    def stream() -> Iterator[Any]:
        for t, batch in enumerate(make_batches(case)):
            taken.append(t)
            yield batch

    for report in make_pipeline(case).run(stream()):
        assert max(taken) <= report.batch + 3


def test_stop_outside_a_run_does_nothing() -> None:
    case = Case("1f1b", 2, 2, spans=(3,))
    pipeline = make_pipeline(case)
    pipeline.stop()
    assert len(list(pipeline.run(make_batches(case)))) == 3
    pipeline.stop()
    assert [r.batch for r in pipeline.run(make_batches(case))] == [3, 4, 5]


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])
def test_the_modules_hold_the_newest_weights_after_a_run(method: str) -> None:
    """Their own parameters are back in place, and changes of them count."""
    case = Case(method, 2, 2, spans=(3,))
    blocks = make_blocks("mixed")
    own = {id(p) for name in ("table", "head") for p in blocks[name].parameters()}
    pipeline = make_pipeline(case, blocks=blocks)
    list(pipeline.run(make_batches(case)))
    assert {id(p) for name in ("table", "head") for p in blocks[name].parameters()} == own
    assert blocks["head"].weight.equal(expected(case).weights["head.weight"])
    newest = pipeline.stages[max(pipeline.stages)].weights.store
    assert newest is not None
    blocks["head"].weight.data.fill_(0.5)
    assert newest.newest_tensors()["head.weight"].eq(0.5).all()


@pytest.mark.parametrize("method", METHODS)
def test_evaluation_leaves_no_trace(method: str) -> None:
    case = Case(method, 3, 2, spans=(2, 3), skips=())
    batches = make_batches(case)
    recording = Recording(OPTIMIZERS[case.optimizer])
    pipeline, outcome = make_pipeline(case, optimizer=recording), Outcome()
    values = []
    for part in (batches[:2], batches[2:]):
        values.append(pipeline.evaluate(batches[:2]))
        outcome.reports += [(r.batch, r.loss, r.weight) for r in pipeline.run(part)]
    values.append(pipeline.evaluate(batches[:2]))
    assert_same(finish(outcome, pipeline, recording), expected(case))
    weight = sum(w or 0 for _, _, w in expected(case, 2).reports)
    assert [value and value[1] for value in values] == [weight] * 3
    assert len(set(values)) == 3


def trained_and_evaluated(group: dist.ProcessGroup | None, case: Case) -> list[tuple[float, float] | None]:
    pipeline, batches = make_pipeline(case, group), make_batches(case)
    first = pipeline.evaluate(batches[:2])
    list(pipeline.run(batches))
    return [first, pipeline.evaluate(batches[:2])]


def evaluated_by_hand(case: Case, weights: dict[str, Tensor] | None) -> tuple[float, float]:
    """The mean over all tokens that count, with plain torch."""
    blocks = make_blocks(case.model)
    for name, block in blocks.items():
        if weights is not None and isinstance(block, nn.Module):
            block.load_state_dict(
                {k.removeprefix(f"{name}."): v for k, v in weights.items() if k.startswith(f"{name}.")}
            )
    sums: list[tuple[float, float]] = []
    for batch in make_batches(case)[:2]:
        for x, target in batch:
            for block in blocks.values():
                x = block(x)
            total, weight = LOSSES["tokens"](x, target)
            sums.append((float(total.detach()), weight))
    weight = sum(w for _, w in sums)
    return sum(total for total, _ in sums) / weight, weight


@pytest.mark.parametrize("method", METHODS)
def test_evaluation_is_the_mean_over_tokens_with_the_newest_weights(pool: Pool, method: str) -> None:
    case = Case(method, 3, 2, spans=(3,), skips=())
    wanted = [evaluated_by_hand(case, None), evaluated_by_hand(case, expected(case).weights)]
    assert wanted[0] != wanted[1]
    on_ranks = pool.submit(trained_and_evaluated, case, ranks=3)
    for found in (trained_and_evaluated(None, case), *on_ranks):
        assert [weight for _, weight in found] == [weight for _, weight in wanted]
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in wanted], rel=1e-6)


@pytest.mark.parametrize("what", ["run", "evaluate"])
def test_a_second_run_inside_a_run_is_refused(what: str) -> None:
    case = Case("2bw", 3, 2, spans=(6,))
    pipeline, batches = make_pipeline(case), make_batches(case)
    first = pipeline.run(batches)
    next(first)
    try:
        with pytest.raises(PenstockError, match="under way"):
            list(pipeline.run(batches)) if what == "run" else pipeline.evaluate(batches)
        assert len(list(first)) == 5
    finally:
        with suppress(Exception):
            first.close()


def meet_after_every_batch(group: dist.ProcessGroup, case: Case) -> list[float]:
    """Tell every rank the loss, as a loop that stops early would."""
    losses = []
    for report in make_pipeline(case, group).run(make_batches(case)):
        loss = torch.tensor([float("nan") if report.loss is None else report.loss])
        dist.broadcast(loss, group_src=case.depth - 1, group=group)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("method", ONE_OF_EACH)
@pytest.mark.parametrize(("depth", "m"), [(2, 1), (3, 2), (4, 5)])
def test_ranks_may_meet_in_the_loop(pool: Pool, method: str, depth: int, m: int) -> None:
    """A report comes after what the peers need for theirs has been sent."""
    case = Case(method, depth, max(m, depth - 1) if method == "2bw" else m, skips=())
    wanted = [loss for _, loss, _ in train(None, case).reports]
    assert pool.submit(meet_after_every_batch, case, ranks=depth) == [pytest.approx(wanted)] * depth
