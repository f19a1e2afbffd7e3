"""A run that goes on from a snapshot equals one that was never interrupted, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import CapabilityError, CheckpointError, ConfigError, PenstockError
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.runtime.setup import rank_state
from penstock.verify.reference import Scaling
from support.cases import (
    OPTIMIZERS,
    Case,
    Outcome,
    Recording,
    add_decisions,
    assert_equal_tensors,
    assert_same,
    cut,
    expected,
    finish,
    make_batches,
    make_blocks,
    make_pipeline,
    together,
    token_loss,
    train,
)
from support.late_copies import LateCopies
from support.own_methods import train_reference
from support.pool import Pool
from support.rest_of_a_run import rest_of
from support.snapshots import Kept

RESTLESS = Scaling(initial=2.0**24, growth=2.0, backoff=0.5, interval=2)


def kept_at(case: Case, batch: int, ends: int) -> Kept:
    """The snapshots that a run of `ends` batches takes before `batch`."""
    found: list[Snapshot] = []
    pipeline = make_pipeline(case)
    for _ in pipeline.run(make_batches(case)[:ends], save=Saving(batch, found.append)):
        pass
    return Kept([snapshot for snapshot in found if snapshot.batch == batch])


def go_on(group: dist.ProcessGroup | None, case: Case, kept: Kept) -> Outcome:
    """The rest of a run, by a pipeline that began with other weights."""
    recording = Recording(OPTIMIZERS[case.optimizer])
    blocks = make_blocks(case.model, seed=99, device=case.device)
    pipeline = make_pipeline(case, group, optimizer=recording, blocks=blocks)
    pipeline.load(kept)
    outcome = Outcome()
    for r in pipeline.run(make_batches(case)[pipeline.batches :]):
        outcome.reports.append((r.batch, r.loss, r.weight))
        add_decisions(outcome, case, r.decided)
    add_decisions(outcome, case, pipeline.decided())
    return finish(outcome, pipeline, recording)


def uninterrupted(case: Case) -> Outcome:
    """The whole run; parallel pipelines have buffers of their own, of which the reference knows nothing."""
    return expected(case) if case.width == 1 else train(None, case)


CASES = [
    Case("2bw", 1, 2, spans=(7,), skips=()),
    Case("2bw", 2, 1, spans=(7,), skips=()),
    Case("2bw", 3, 2, "restless", "nadam", spans=(8,), skips=(1,), clip=0.6),
    Case("2bw", 2, 2, "half", "sgd", spans=(9,), skips=(), scaling=RESTLESS),
    Case("2bw", 2, 3, "mixed", "adamw", spans=(7,), skips=(), precision="bf16", clip=0.6),
    Case("2bw", 3, 3, "faint", "adamw", spans=(7,), skips=(), tied=True, clip=0.6),
    Case("2bw", 2, 2, "restless", "adamw", spans=(7,), skips=(), width=2),
    Case("2bw-eager", 3, 4, "matrices", "muon", spans=(7,), skips=()),
    Case("3bw", 4, 2, "restless", "adamw", spans=(7,), skips=(1,), clip=0.6),
    Case("3bw", 2, 1, "half", "sgd", spans=(9,), skips=(), scaling=RESTLESS),
    Case("1f1b", 3, 4, "restless", "adamw", spans=(7,), skips=(2,), recompute="stage"),
    Case("1f1b", 2, 2, "half", "adafactor", spans=(9,), skips=(), scaling=RESTLESS),
    Case("gpipe", 4, 2, "mixed", "sgd", spans=(7,), skips=(), recompute="block"),
    Case("sequential", 1, 2, "restless", "nadam", spans=(7,), skips=()),
]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.method}-{c.depth}-{c.m}-{c.model}-{c.precision}-{c.width}")
def test_a_run_goes_on_from_a_snapshot_bit_for_bit(case: Case, batch: int, device: str) -> None:
    """The snapshot is taken while later batches are under way, and the run before it is not drained."""
    case = replace(case, device=device)
    end = sum(case.spans)
    assert_same(go_on(None, case, kept_at(case, batch, end)), rest_of(uninterrupted(case), batch))


def test_a_snapshot_of_the_last_batch_is_that_of_the_drained_pipeline() -> None:
    case = Case("2bw", 2, 2, "restless", spans=(4,), skips=())
    found: list[Snapshot] = []
    pipeline = make_pipeline(case)
    list(pipeline.run(make_batches(case), save=Saving(4, found.append)))
    on_the_way, at_the_end = Kept(found), Kept(pipeline.snapshots())
    assert_equal_tensors(on_the_way.tensors, at_the_end.tensors, "snapshot")
    assert on_the_way.facts == at_the_end.facts


def test_stash_is_drained_for_a_snapshot() -> None:
    """A drain changes what the next batches read: the run equals one that drained at the same batches."""
    case = Case("stash", 3, 2, "restless", spans=(3, 3, 1), skips=(), clip=0.6)
    found: list[Snapshot] = []
    pipeline = make_pipeline(case)
    list(pipeline.run(make_batches(case), save=Saving(3, found.append)))
    wanted = expected(case)
    assert_equal_tensors(pipeline.state_dict(), wanted.weights, "weights")
    kept = Kept([snapshot for snapshot in found if snapshot.batch == 6])
    assert {s.batch for s in found} == {3, 6}
    assert_same(go_on(None, case, kept), rest_of(wanted, 6))


@pytest.mark.parametrize("method", ["stash", "2bw"])
def test_whoever_is_given_a_snapshot_may_end_the_run(method: str) -> None:
    """Also where the run is drained for it, and goes on with another span."""
    case = Case(method, 3, 2, spans=(8,))
    pipeline = make_pipeline(case)
    reports = list(pipeline.run(make_batches(case), save=Saving(2, lambda _: pipeline.stop())))
    assert len(reports) == (2 if method == "stash" else 4)
    assert len(list(pipeline.run(make_batches(case)[:3]))) == 3


@pytest.mark.parametrize("depth", [1, 3, 4])
@pytest.mark.parametrize("method", ["2bw", "1f1b"])
def test_a_snapshot_loads_at_another_depth(method: str, depth: int) -> None:
    """Optimizer state included: the numbers of double-buffered and flushed methods do not depend on the depth."""
    case = Case(method, 2, 4, "restless", "nadam", spans=(7,), skips=())
    other = replace(case, depth=depth)
    assert_same(go_on(None, other, kept_at(case, 3, 7)), rest_of(expected(other), 3))


@pytest.mark.parametrize(("from_", "to"), [(1, 3), (3, 1), (2, 4)])
def test_a_tied_parameter_goes_by_another_name_at_another_depth(from_: int, to: int) -> None:
    """On one stage it is one tensor, whose gradient autograd adds up in an order of its own."""
    case = Case("2bw", from_, 4, "faint", "adamw", spans=(6,), skips=(), tied=True, clip=0.6)
    wanted = expected(replace(case, depth=max(from_, to))).weights
    found = go_on(None, replace(case, depth=to), kept_at(case, 2, 6)).weights
    assert found.keys() == wanted.keys() - ({"head.weight"} if to == 1 else set())
    for name, weight in found.items():
        exact = {"rtol": 0.0, "atol": 0.0} if min(from_, to) > 1 else {"rtol": 1e-4, "atol": 1e-6}
        assert torch.allclose(weight, wanted[name], **exact), name


def test_a_snapshot_loads_at_another_width() -> None:
    """The same samples in a batch: sums are added in another order, so the numbers are nearly the same."""
    wide = Case("2bw", 2, 2, spans=(6,), skips=(), width=2)
    narrow = replace(wide, m=4, width=1)
    found, wanted = go_on(None, narrow, kept_at(wide, 3, 6)), expected(wide)
    for name, weight in wanted.weights.items():
        assert torch.allclose(found.weights[name], weight, rtol=1e-4, atol=1e-6), name


def plain_sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


@pytest.mark.parametrize(
    ("before", "after"), [("2bw", "1f1b"), ("1f1b", "2bw"), ("stash", "2bw"), ("2bw", "stash"), ("1f1b", "3bw")]
)
def test_another_method_goes_on_with_the_newest_weights(before: str, after: str) -> None:
    """A method with double-buffered weights begins with them twice, as at the start of training."""
    case = Case(before, 2, 3, spans=(6,), skips=(), rate=False)
    pipeline = make_pipeline(case, optimizer=plain_sgd)
    list(pipeline.run(make_batches(case)[:3]))
    blocks = make_blocks(case.model)
    newest = pipeline.state_dict()
    for name, block in blocks.items():
        if isinstance(block, nn.Module):
            block.load_state_dict(
                {key.removeprefix(f"{name}."): w for key, w in newest.items() if key.startswith(name)}
            )
    wanted = train_reference(
        cut(blocks, (3, 3)), token_loss, make_batches(case)[3:], method=after, optimizer=plain_sgd, divisor=7.0
    )
    other = make_pipeline(replace(case, method=after), optimizer=plain_sgd)
    other.load(Kept(pipeline.snapshots()))
    reports = [(r.batch, r.loss) for r in other.run(make_batches(case)[3:])]
    assert reports == [(t + 3, loss) for t, loss in enumerate(wanted.losses)]
    assert_equal_tensors(other.state_dict(), wanted.versions[-1], "weights")


def test_what_does_not_fit_is_refused() -> None:
    case = Case("2bw", 2, 2, spans=(3,), skips=())
    kept = kept_at(case, 3, 3)
    with pytest.raises(CheckpointError, match=r"state of AdamW, .* is stepped by SGD"):
        make_pipeline(case, optimizer=plain_sgd).load(kept)
    with pytest.raises(CheckpointError, match=r"the model does not have, the first of them [^/]+; .* load it into"):
        make_pipeline(replace(case, model="matrices")).load(kept)
    missing = Kept([])
    missing.facts, missing.tensors = kept.facts, dict(kept.tensors)
    del missing.tensors["weights/second.wide.bias"]
    with pytest.raises(CheckpointError, match=r"no weights/second\.wide\.bias, which stage 1 on rank 1 needs"):
        make_pipeline(case).load(missing)
    more = Kept([])
    more.facts, more.tensors = kept.facts, kept.tensors | {"weights/second.wide.bias2": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"has a second\.wide\.bias2, which block 'second' does not have"):
        make_pipeline(case).load(more)
    broken = make_pipeline(case)
    missing.tensors["weights/second.wide.bias"] = torch.zeros(3)
    with pytest.raises(CheckpointError):
        broken.load(missing)
    with pytest.raises(PenstockError, match="broke in an earlier run and cannot go on"):
        list(broken.run(make_batches(case)))
    with pytest.raises(CheckpointError, match=r"second\.wide\.bias has shape \(3,\) in the checkpoint and \(16,\)"):
        make_pipeline(case).load(missing)
    with pytest.raises(ConfigError, match="save: every must be a whole number of at least 1, got 0"):
        list(make_pipeline(case).run(make_batches(case), save=Saving(0, print)))


class Remembering(torch.optim.SGD):
    """An optimizer that remembers what no checkpoint can hold."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [1, 2]


def test_an_optimizer_that_cannot_be_saved_is_named() -> None:
    case = Case("1f1b", 1, 2, spans=(1,), skips=())
    pipeline = make_pipeline(case, optimizer=lambda named: Remembering(named, lr=0.1))
    list(pipeline.run(make_batches(case)))
    with pytest.raises(CapabilityError, match=r"Remembering has a list in its state \(history of"):
        pipeline.snapshots()


class Counting(torch.optim.SGD):
    """An optimizer that counts in its groups, where no checkpoint looks."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


def test_an_optimizer_that_changes_its_groups_is_named() -> None:
    case = Case("1f1b", 1, 2, spans=(1,), skips=())
    pipeline = make_pipeline(case, optimizer=lambda named: Counting(named, lr=0.1))
    pipeline.snapshots()
    list(pipeline.run(make_batches(case)))
    with pytest.raises(CapabilityError, match="Counting changes k in its parameter groups"):
        pipeline.snapshots()


def test_the_ledger_knows_snapshots_as_long_as_they_are_held() -> None:
    case = Case("2bw", 2, 2, "restless", spans=(9,), skips=())
    pipeline, held, batches = make_pipeline(case), [], make_batches(case)

    def live() -> int:
        return sum(roles.get("snapshots", 0) for roles in pipeline.live_bytes().values())

    list(pipeline.run(batches[:5], save=Saving(3, held.append)))
    assert sum(snapshot.nbytes for snapshot in held) == live() > 0
    list(pipeline.run(batches[5:7]))
    assert live() > 0
    for snapshot in held:
        snapshot.tensors.clear()
    list(pipeline.run(batches[7:]))
    assert live() == 0


def test_where_there_is_no_room_nothing_is_copied() -> None:
    case = Case("2bw", 2, 2, "restless", spans=(6,), skips=())
    pipeline, held = make_pipeline(case), []
    list(pipeline.run(make_batches(case), save=Saving(3, held.append, lambda batch: batch != 3)))
    assert sorted({snapshot.batch for snapshot in held}) == [6]


def save(group: dist.ProcessGroup, case: Case, batch: int) -> list[Snapshot]:
    found: list[Snapshot] = []
    list(make_pipeline(case, group).run(make_batches(case), save=Saving(batch, found.append)))
    return [snapshot for snapshot in found if snapshot.batch == batch]


@pytest.mark.processes
@pytest.mark.parametrize("case", [CASES[2], CASES[6]], ids=["depth 3", "width 2"])
def test_snapshots_between_processes(pool: Pool, case: Case) -> None:
    ranks = case.width * case.depth
    parts = pool.submit(save, case, 4, ranks=ranks)
    kept = Kept([snapshot for snapshots in parts for snapshot in snapshots])
    outcomes = pool.submit(go_on, case, kept, ranks=ranks)
    found = together(outcomes)
    for outcome in outcomes[: case.depth]:  # buffers of the first pipeline
        found.weights |= outcome.weights
    assert_same(found, rest_of(uninterrupted(case), 4))


STREAMED = [
    Case("1f1b", 2, 4, "restless", spans=(7,), skips=(2,), clip=0.6),
    Case("2bw", 3, 2, "restless", "nadam", spans=(7,), skips=(1,), clip=0.6),
    Case("2bw", 2, 3, "mixed", "adamw", spans=(7,), skips=(), precision="bf16"),
    Case("interleaved", 2, 2, spans=(7,), skips=(), options=(("chunks", 2),)),
    Case("2bw", 2, 2, "restless", "adamw", spans=(7,), skips=(), width=2),
    Case("stash", 3, 1, spans=(7,), skips=()),
]


@pytest.mark.parametrize("case", STREAMED, ids=lambda case: f"{case.method}-{case.model}")
def test_a_device_copies_snapshots_beside_its_work(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """To the same bits, though copies are made as late as can be; the thread that trains waits for none."""

    def snapshots() -> list[Snapshot]:
        found: list[Snapshot] = []
        pipeline = make_pipeline(case)
        for _ in pipeline.run(make_batches(case), save=Saving(2, found.append)):
            pass
        return found

    plain, streams = snapshots(), list[LateCopies]()

    def stream(_: torch.device) -> LateCopies:
        streams.append(LateCopies())
        return streams[-1]

    monkeypatch.setattr(rank_state, "side_stream", stream)
    late = snapshots()
    for one, other in zip(late, plain, strict=True):
        assert replace(one, tensors={}, copied=None) == replace(other, tensors={})
    assert not any(stream.waits for stream in streams)
    drained = case.method == "stash"  # its snapshots are taken where nothing else is done
    for one, other in zip(late, plain, strict=True):
        assert_equal_tensors(
            one.on_cpu(one.tensors), other.on_cpu(other.tensors), f"stage {one.stage} before {one.batch}"
        )
    assert any(stream.waits for stream in streams) != drained
    assert all((stream.waited > 0) != drained for stream in streams[: case.depth])
