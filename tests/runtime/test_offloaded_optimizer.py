"""Optimizer states in the memory of the host: the bits of runs without, copies of which nobody waits but the update."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.errors import ConfigError, ScheduleError
from penstock.options.run import Device
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.runtime.setup import rank_state, stage_builder
from penstock.schedule.ir.schedule import Op
from penstock.weights.memory import gradient_scratch
from support.cases import (
    Case,
    Outcome,
    add_state,
    assert_equal_tensors,
    assert_same,
    expected,
    make_batches,
    make_blocks,
    make_pipeline,
    run_spans,
    together,
    train,
)  # fmt: skip
from support.late_copies import LateCopies
from support.own_methods import correction_of
from support.pool import Pool
from support.sharded import Parts, assert_as_whole, train_sharded
from support.snapshots import Kept

CLIP = 0.4  # of most batches
CASES = [
    Case("1f1b", 2, 3, clip=CLIP),
    Case("2bw", 2, 3, spans=(4, 3)),
    Case("2bw", 2, 3, "mixed", "momentum", clip=CLIP, precision="bf16"),
    Case("interleaved", 2, 2, "mixed", "nadam", clip=CLIP, options=(("chunks", 2),)),
    Case("stash", 3, 4, "mixed", "configured muon"),
    Case("zb-v", 2, 4),
    Case("2bw-ahead", 2, 3, correction=correction_of("2bw-ahead")),
    Case("2bw", 2, 2, "mixed", "adafactor", spans=(5,)),
]
SHARDED = [
    Case("1f1b", 2, 3, width=2, clip=CLIP, spans=(5,)),
    Case("2bw", 2, 3, width=2, clip=CLIP, spans=(3, 3)),
    Case("2bw", 2, 2, "mixed", "configured muon", width=2, spans=(4,)),
]
said = cache(expected)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[LateCopies]:
    """A device whose copies are made as late as can be, and pieces of a parameter each."""
    found: list[LateCopies] = []

    def stream(_: torch.device) -> LateCopies:
        found.append(LateCopies())
        return found[-1]

    monkeypatch.setattr(stage_builder, "side_stream", stream)
    monkeypatch.setattr(gradient_scratch, "_CHUNK", 1)
    return found


def train_plain(group: dist.ProcessGroup | None, case: Case, kind: str) -> Outcome:
    """Without step hooks, with which an optimizer steps all parameters together."""
    pipeline = make_pipeline(case, group, offload_optimizer=kind)
    outcome = run_spans(pipeline, case)
    outcome.weights = {name: w.clone() for name, w in pipeline.state_dict().items()}
    for optimizer in pipeline.optimizers().values():
        add_state(outcome, optimizer.state_dict())
    return outcome


@pytest.mark.parametrize("kind", ["stages", "pieces"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.method}-{c.optimizer}-{c.precision}")
def test_states_that_were_away_have_the_numbers_of_the_reference(
    streams: list[LateCopies], case: Case, kind: Any
) -> None:
    found, wanted = train_plain(None, case, kind), said(case)
    assert repr((found.reports, found.decided)) == repr((wanted.reports, wanted.decided))
    assert_equal_tensors({name: found.weights[name] for name in wanted.weights}, wanted.weights, "weights")
    for name, state in wanted.state.items():
        assert_equal_tensors(found.state[name], state, f"optimizer state of {name}")
    assert streams
    for stream in streams:
        stored, fetched = stream.made
        assert stored >= fetched > 0
        assert stream.waited > 0


@pytest.mark.parametrize("level", ["optimizer", "gradients"])
@pytest.mark.parametrize("case", SHARDED, ids=lambda c: f"{c.method}-{c.optimizer}")
def test_rows_of_a_state_are_moved_as_well(streams: list[LateCopies], case: Case, level: str) -> None:
    outcome, parts, _ = train_sharded(None, case, level, offload_optimizer="pieces")
    assert_as_whole(outcome, [settled(parts, streams)], said(case))


def settled(parts: Parts, streams: list[LateCopies]) -> Parts:
    for stream in streams:
        stream.make(len(stream._queue))
    return parts


def train_away(group: dist.ProcessGroup | None, case: Case) -> Outcome:
    return train(group, case, offload_optimizer="stages")


@pytest.mark.long
def test_optimizers_away_between_processes(pool: Pool) -> None:
    for case in (CASES[0], CASES[1]):
        assert_same(together(pool.submit(train_away, case, ranks=2)), said(case))


def test_the_ledger_has_bytes_of_device_and_host_apart() -> None:
    """Adam has two numbers for each weight; interleaved chunks come one after the other, at most two at a time."""
    case = Case("interleaved", 2, 2, "gpt", "adamw", "even", spans=(4,), skips=(), options=(("chunks", 3),))
    plain, away = ended(case, "none"), ended(case, "stages")
    for rank in range(2):
        before, after = plain.live_bytes()[rank], away.live_bytes()[rank]
        counters = after["optimizer"]  # which stay
        assert counters < before["optimizer"] / 20
        assert after["offloaded optimizer"] + counters == before["optimizer"]
        assert sum(after.values()) == sum(before.values())
        peak = away.peak_bytes()[rank]
        assert peak["offloaded optimizer"] == after["offloaded optimizer"]
        assert peak["optimizer"] < plain.peak_bytes()[rank]["optimizer"]
    assert "offloaded optimizer" not in plain.peak_bytes()[0]


def ended(case: Case, kind: str) -> Pipeline:
    pipeline = make_pipeline(case, offload_optimizer=kind)
    for _ in pipeline.run(make_batches(case)):
        pass
    return pipeline


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("before", "after"), [("stages", "none"), ("none", "pieces"), ("pieces", "stages")])
def test_a_snapshot_is_whole_wherever_the_state_is(
    streams: list[LateCopies], monkeypatch: pytest.MonkeyPatch, before: Any, after: Any, batch: int
) -> None:
    """Taken in the midst of a run, on another stream; the run goes on from it with and without offload."""
    monkeypatch.setattr(rank_state, "side_stream", lambda _: LateCopies())
    case, found = Case("2bw", 2, 3, "mixed", spans=(6,)), list[Snapshot]()
    first = make_pipeline(case, offload_optimizer=before)
    for _ in first.run(make_batches(case), save=Saving(batch, found.append)):
        pass
    rest = make_pipeline(case, blocks=make_blocks(case.model, seed=99), offload_optimizer=after)
    rest.load(Kept([snapshot for snapshot in found if snapshot.batch == batch]))
    for _ in rest.run(make_batches(case)[batch:]):
        pass
    wanted = said(case)
    for pipeline in (first, rest):
        weights, outcome = pipeline.state_dict(), Outcome()
        assert_equal_tensors({name: weights[name] for name in wanted.weights}, wanted.weights, "weights")
        for optimizer in pipeline.optimizers().values():
            add_state(outcome, optimizer.state_dict())
        for name, state in wanted.state.items():
            assert_equal_tensors(outcome.state[name], state, f"optimizer state of {name}")
    assert streams


def test_options_that_do_not_go_with_it() -> None:
    with pytest.raises(ConfigError, match="offload_optimizer must be one of none, stages, pieces; got 'host'"):
        Device(offload_optimizer="host")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="correction 'spectrain' may look at optimizer states between updates"):
        make_pipeline(Case("spectrain", 2, 4, correction=correction_of("spectrain")), offload_optimizer="stages")
    with pytest.raises(ScheduleError, match="set offload_optimizer to none"):
        make_pipeline(Case("zb-h2-post", 2, 4), offload_optimizer="stages")


def test_the_schedule_says_so() -> None:
    pipeline = make_pipeline(CASES[0], offload_optimizer="stages")
    assert {Op.SWAPIN, Op.SWAPOUT} <= pipeline.schedule.operations
