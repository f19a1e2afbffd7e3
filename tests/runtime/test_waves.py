"""Wave-synchronous pipelines (HetPipe): what they have equals a loop over waves by hand, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import CheckpointError, ConfigError, VersionError
from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.schedule.ir.schedule import Op
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.schedule.text_parser import parse_schedule
from penstock.weights.store import VersionStore
from penstock.weights.wave_synchronous_updates import WaveWeights
from support.cases import make_batches, make_blocks, make_pipeline
from support.meetings import assert_close, states_of
from support.snapshots import Kept
from support.wave_cases import WAVES, by_hand, case_of

CASES = [
    ("1f1b", 1, 2, 2, Combine("wsp", every=4), "momentum"),
    ("1f1b", 2, 2, 3, Combine("wsp", every=2, distance=1), "adamw"),
    ("2bw", 2, 2, 2, Combine("wsp", every=1, distance=2), "adamw"),
    ("2bw", 2, 2, 3, Combine("wsp", every=4, distance=2), "momentum"),
    ("stash", 2, 1, 2, Combine("wsp", every=2), "adamw"),
    ("stash", 2, 1, 2, Combine("wsp", every=2, distance=1), "momentum"),
    ("stash", 3, 1, 3, Combine("wsp", every=3, distance=2), "adamw"),
    ("stash", 2, 2, 3, Combine("wsp", every=1, distance=3, lag=[0, 3, 1]), "momentum"),
    ("1f1b", 2, 1, 2, Combine("wsp", every=2, distance=2, lag=[2, 0], share=0.5), "adamw"),
    ("interleaved", 1, 2, 2, Combine("wsp", every=2, distance=1), "momentum"),
    ("2bw", 4, 4, 2, Combine("wsp", every=3, distance=1), "adamw"),
    ("stash", 8, 2, 2, Combine("wsp", every=2, distance=2), "momentum"),
]


def name_of(value: Any) -> str:
    if isinstance(value, Combine):
        return f"every{value.every}-lag{value.lag if value.lag is not None else value.distance}"
    return str(value)


@pytest.mark.parametrize(("method", "depth", "m", "width", "combine", "optimizer"), CASES, ids=name_of)
def test_twenty_updates_of_waves(method: str, depth: int, m: int, width: int, combine: Combine, optimizer: str) -> None:
    """The last wave is cut short by the end."""
    case = case_of(method, depth, m, width, optimizer)
    pipeline, wanted = make_pipeline(case, combine=combine), by_hand(case, combine)
    list(pipeline.run(make_batches(case)))
    wanted.train(make_batches(case))
    assert_close(states_of(pipeline), wanted.states(), 0.0)
    if combine.agrees:
        for state in states_of(pipeline).values():
            for name, weight in state.weights.items():
                assert torch.equal(weight, state.model[name])


# --- drains: ends of runs, snapshots, evaluations ---------------------------------------------------------------------

DRAINED = [
    pytest.param("1f1b", Combine("wsp", every=2, distance=2), marks=pytest.mark.long),
    ("2bw", Combine("wsp", every=2, distance=1)),
    ("stash", Combine("wsp", every=3, distance=1, lag=(1, 0))),
    ("1f1b", Combine("wsp", every=2, distance=1, share=0.5)),
]


@pytest.mark.parametrize(("method", "combine"), DRAINED, ids=name_of)
def test_a_run_goes_on_as_if_it_had_been_drained_there(method: str, combine: Combine) -> None:
    """From the end of a wave and from its midst; waves go on up to the next multiple since the start of training."""
    case = case_of(method, 2, 2, 2, "adamw", spans=(4, 1, 6, 4))
    batches, found = make_batches(case), list[Snapshot]()
    whole = make_pipeline(case, combine=combine)
    first = list(accumulate(case.spans))
    for begin, end in pairwise((0, *first)):
        list(whole.run(batches[begin:end]))
        found.append(Kept(whole.snapshots()))
    wanted = by_hand(case, combine)
    wanted.train(batches)
    assert_close(states_of(whole), wanted.states(), 0.0)
    for kept, begin in zip(found[:2], first, strict=False):
        pipeline = make_pipeline(case, combine=combine, blocks=make_blocks(case.model, seed=99))
        pipeline.load(kept)
        for end in first[first.index(begin) + 1 :]:
            list(pipeline.run(batches[pipeline.batches : end]))
        assert_close(states_of(pipeline), wanted.states(), 0.0)


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_snapshots_and_evaluations_in_a_run_drain_it(method: str) -> None:
    """Also where a method could do without: the weights are the global model then, of all updates there are."""
    case, combine = case_of(method, 2, 2, 2, "momentum", spans=(6, 2, 5)), Combine("wsp", every=2, distance=2)
    batches, found = make_batches(case), list[Snapshot]()
    pipeline, wanted = make_pipeline(case, combine=combine), by_hand(case, combine)
    # Of batches 6 and 12 one evaluation each, of batch 8 one snapshot.
    wanted.drains = {6, 8, 12, 13}
    run = pipeline.run(batches, save=Saving(8, found.append), evaluate=Evaluating(6, lambda: batches[:2]))
    evaluated = [e for report in run for e in report.evaluated]
    wanted.train(batches)
    assert_close(states_of(pipeline), wanted.states(), 0.0)
    assert [e.version for e in evaluated] == [6, 12]
    kinds = {name.partition("/")[0] for name in Kept(found).names}
    assert {"weights", "optimizer", "optimizer.1"} <= kinds
    assert not kinds & {"weights.1", "common"}  # all pipelines have the same, and it is saved once
    again = make_pipeline(replace(case, width=1, m=4), blocks=make_blocks(case.model, seed=99))
    again.load(Kept(found))
    shorter = make_pipeline(case, combine=combine)
    list(shorter.run(batches[:6]))
    list(shorter.run(batches[6:8]))
    for name, weight in shorter.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)


def test_a_share_keeps_pipelines_apart_and_the_global_model_whole() -> None:
    case, combine = case_of("1f1b", 2, 2, 2, "adamw", spans=(4,)), Combine("wsp", every=2, distance=1, share=0.5)
    pipeline = make_pipeline(case, combine=combine)
    list(pipeline.run(make_batches(case)))
    kept = Kept(pipeline.snapshots())
    assert {name.partition("/")[0] for name in kept.names} >= {"weights", "weights.1", "common"}
    states = states_of(pipeline)
    initial = make_pipeline(case).state_dict()
    for name, world in states[0].model.items():
        own, other = (states[r].weights[name] - initial[name] for r in (0, 1))
        assert not torch.equal(own, other)
        # W_r is W(0) + u_r + u_q / 2, so the mean of both is W(0) + 3/4 of all.
        torch.testing.assert_close((own + other) / 2, 0.75 * (world - initial[name]), rtol=1e-4, atol=1e-6)
        assert torch.equal(pipeline.state_dict()[name], world)
    with pytest.raises(CheckpointError, match="weights of 2 pipelines that differ"):
        make_pipeline(case, combine=Combine("wsp", every=2)).load(kept)


def test_weights_that_somebody_writes_between_two_runs_are_nobodys_update() -> None:
    """Batches in which nothing counts make no update, so they change nothing then."""
    case = replace(case_of("1f1b", 2, 2, 2, "momentum", spans=(2, 3)), loss="tokens", skips=(2, 3, 4))
    pipeline, batches = make_pipeline(case, combine=Combine("wsp", every=2, distance=1)), make_batches(case)
    list(pipeline.run(batches[:2]))
    for rank in pipeline._ranks:
        for stage in rank.stages.values():
            for parameter in stage.module.tensors.trained.values():
                with torch.no_grad():
                    parameter.add_(1.0)
    before = states_of(pipeline)[0].weights
    list(pipeline.run(batches[2:]))
    for state in states_of(pipeline).values():
        for name, weight in state.weights.items():
            assert torch.equal(weight, before[name])


def test_with_no_lag_and_waves_of_one_batch_gradients_are_added() -> None:
    """Plain SGD at the w-th part of the rate is then data parallelism, up to roundings."""

    def sgd(rate: float) -> Any:
        return lambda named: torch.optim.SGD(named, lr=rate)

    case = case_of("1f1b", 2, 2, 3, "momentum", spans=(8,))
    found = make_pipeline(case, combine=Combine("wsp"), optimizer=sgd(0.1))
    wanted = make_pipeline(case, optimizer=sgd(0.3))
    for pipeline in (found, wanted):
        list(pipeline.run(make_batches(case)))
    for name, weight in wanted.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], weight, rtol=1e-5, atol=1e-6)


def test_a_written_schedule_with_waves() -> None:
    """tests/golden has it with a distance of one; only so it goes."""
    text = (Path(__file__).parents[1] / "golden" / "wave_synchronous.txt").read_text()
    case, schedule = case_of("stash", 2, 1, 2, "adamw", spans=(9,)), parse_schedule(text)
    written, made = (make_pipeline(case, method=s, combine=WAVES) for s in (schedule, case.schedule))
    averages = [[a for a in program.period if a.op is Op.AVERAGE] for program in schedule.programs]
    assert averages == [[a for a in program.period if a.op is Op.AVERAGE] for program in made.schedule.programs]
    for pipeline in (written, made):
        list(pipeline.run(make_batches(case)))
    assert_close(states_of(written), states_of(made), 0.0)
    with pytest.raises(ConfigError, match="have them directly after the STEPs of these batches, of 4 batches before"):
        make_pipeline(case, method=schedule, combine=Combine("wsp", every=2, distance=2))


def test_who_has_claimed_weights_notices_that_others_have_added_to_them() -> None:
    stores = [VersionStore({"a": torch.zeros(3)}, 1, "here") for _ in range(2)]
    first, second = (WaveWeights(Combine("wsp"), 2, r, store, "0") for r, store in enumerate(stores))
    handle = stores[0].read(0)
    with torch.no_grad():
        stores[1].master.views["a"].add_(1.0)
    waves = [first.push(), second.push()]
    waves[0].updates[1][0].copy_(waves[1].updates[1][0])
    handle.check("somebody")
    first.take([1, 1])
    assert stores[0].master.views["a"].tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(VersionError, match="has been rewritten"):
        handle.check("somebody")


def test_bytes_of_waves_are_those_that_are_under_way() -> None:
    """Two blocks are kept, and one of each pipeline for each wave that not all have: the lag and one more."""
    case, combine = case_of("1f1b", 2, 1, 3, "momentum", spans=(9,)), Combine("wsp", every=2, distance=2)
    pipeline = make_pipeline(case, combine=combine)
    list(pipeline.run(make_batches(case)))
    for rank in pipeline._ranks:
        (stage,) = rank.stages.values()
        whole, rank = stage.weights.store.layout.nbytes, rank.recorder.rank
        live, peak = pipeline.live_bytes()[rank], pipeline.peak_bytes()[rank]
        assert [live[role] for role in ("common model", "weights before the wave", "waves")] == [whole, whole, 0]
        assert peak["waves"] == (2 + 1) * 3 * whole
