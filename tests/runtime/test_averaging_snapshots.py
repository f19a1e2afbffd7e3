"""Snapshots of averaging pipelines: a run goes on from them, with the same or with other pipelines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.errors import CheckpointError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.verify.reference import Scaling
from support.averaging_cases import KINDS, merged
from support.cases import Case, make_batches, make_blocks, make_pipeline
from support.meetings import (
    State,
    assert_close,
    states_of,
)
from support.pool import Pool
from support.snapshots import Kept

RESTLESS = Scaling(initial=2.0**24, growth=2.0, backoff=0.5, interval=2)
SAVED = [
    (Case("1f1b", 2, 2, "restless", width=2, spans=(7,), skips=(2,)), Combine("average", every=2)),
    (Case("2bw", 2, 2, width=2, spans=(7,), skips=(), clip=0.4), Combine("bmuf", every=2, nesterov=True)),
    (Case("2bw", 1, 2, width=3, spans=(7,), skips=(2,)), Combine("elastic", every=3, optimizer_state="average")),
    (
        Case("1f1b", 2, 2, loss="spiky", width=2, spans=(7,), skips=(), scaling=RESTLESS, spikes=(1, 2)),
        Combine("elastic", every=2),
    ),
    (Case("stash", 2, 2, width=2, spans=(7,), skips=()), Combine("average", every=2, optimizer_state="reset")),
    (Case("2bw", 2, 3, "faint", width=2, spans=(7,), tied=True, precision="bf16"), Combine("bmuf", every=4)),
    (Case("chimera", 2, 4, width=2, spans=(7,)), Combine("average", every=5, optimizer_state="average")),
]


def saved_by(case: Case, combine: Combine, batch: int) -> tuple[dict[int, State], Kept, Pipeline]:
    """A whole run, and its snapshots before `batch`."""
    found: list[Snapshot] = []
    pipeline = make_pipeline(case, combine=combine)
    list(pipeline.run(make_batches(case), save=Saving(batch, found.append)))
    return states_of(pipeline), Kept([snapshot for snapshot in found if snapshot.batch == batch]), pipeline


@pytest.mark.parametrize("batch", [4, 5])
@pytest.mark.parametrize(("case", "combine"), SAVED, ids=lambda x: getattr(x, "kind", getattr(x, "method", "")))
def test_a_run_of_averaging_pipelines_goes_on_bit_for_bit(case: Case, combine: Combine, batch: int) -> None:
    """From a meeting and from between two: every pipeline has its own weights, optimizer state and loss scale."""
    wanted, kept, _ = saved_by(case, combine, batch)
    if case.spikes:  # the gradient of one pipeline alone is not finite there
        assert wanted[0].scale != wanted[1].scale
    pipeline = make_pipeline(case, combine=combine, blocks=make_blocks(case.model, seed=99))
    pipeline.load(kept)
    list(pipeline.run(make_batches(case)[batch:]))
    assert_close(states_of(pipeline), wanted, 0.0)


def goes_on(group: dist.ProcessGroup, case: Case, combine: Combine, kept: Kept) -> dict[int, State]:
    pipeline = make_pipeline(case, group, combine=combine, blocks=make_blocks(case.model, seed=99))
    pipeline.load(kept)
    list(pipeline.run(make_batches(case)[pipeline.batches :]))
    return states_of(pipeline)


def test_processes_go_on_bit_for_bit(pool: Pool) -> None:
    case, combine = SAVED[1]
    wanted, kept, _ = saved_by(case, combine, 3)
    assert_close(merged(pool.submit(goes_on, case, combine, kept, ranks=4)), wanted, 0.0)


def test_what_pipelines_agree_on_is_saved_once() -> None:
    case = Case("1f1b", 2, 2, width=2, spans=(7,), skips=())
    combine = Combine("average", every=2, optimizer_state="reset")
    kinds = [{n.partition("/")[0] for n in saved_by(case, combine, batch)[1].names} for batch in (4, 5)]
    assert kinds == [{"weights"}, {"weights", "weights.1", "optimizer", "optimizer.1"}]


@pytest.mark.parametrize("changes", [{"width": 3}, {"width": 1, "combine": Combine()}, {"combine": Combine()}])
def test_from_a_meeting_a_run_goes_on_with_other_pipelines(changes: dict[str, Any]) -> None:
    """Not from between two."""
    case, combine = Case("1f1b", 2, 2, width=2, spans=(7,), skips=()), Combine("average", every=2)
    other = replace(case, width=changes.get("width", 2), spans=(2,))
    _, kept, _ = saved_by(case, combine, 4)
    pipeline = make_pipeline(other, combine=changes.get("combine", combine))
    pipeline.load(kept)
    for name, weight in pipeline.state_dict().items():
        assert torch.equal(weight, kept.tensor(f"weights/{name}"))
    list(pipeline.run(make_batches(other)))
    _, kept, _ = saved_by(case, combine, 5)
    with pytest.raises(CheckpointError, match="weights of 2 pipelines that differ, so it goes on with width 2"):
        make_pipeline(other, combine=changes.get("combine", combine)).load(kept)


@pytest.mark.parametrize("kind", ["bmuf", "elastic"])
def test_pipelines_that_differ_begin_no_common_model(kind: str) -> None:
    """Each would begin with its own."""
    case = Case("1f1b", 2, 2, width=2, spans=(6,), skips=())
    _, kept, _ = saved_by(case, Combine("average", every=2), 5)
    with pytest.raises(CheckpointError, match=f"no model that they have in common, from which combine={kind} goes on"):
        make_pipeline(case, combine=Combine(kind, every=2)).load(kept)


@pytest.mark.parametrize("kind", KINDS)
def test_pipelines_that_added_their_gradients_go_apart(kind: str) -> None:
    """They begin from the same weights, with nothing in motion."""
    case, found = Case("2bw", 2, 2, width=2, spans=(4,), skips=()), list[Snapshot]()
    list(make_pipeline(case).run(make_batches(case), save=Saving(4, found.append)))
    pipeline, kept = make_pipeline(case, combine=Combine(kind, every=2)), Kept(found)
    pipeline.load(kept)
    for state in states_of(pipeline).values():
        for name, weight in state.weights.items():
            assert torch.equal(weight, kept.tensor(f"weights/{name}"))
            assert kind == "average" or torch.equal(state.model[name], weight)
            assert kind != "bmuf" or not state.motion[name].any()
