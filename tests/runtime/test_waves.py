"""Wave-synchronous pipelines (HetPipe): what they have equals a loop over waves by hand, bit for bit."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock.comm.collective.wave_exchange import LocalExchange
from penstock.comm.core.rank_grid import Holder
from penstock.errors import CheckpointError, ConfigError, PenstockError, TransportError, VersionError
from penstock.runtime.execute.evaluation import Evaluating
from penstock.runtime.options.division import DataParallel
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.runtime.update.divergence import Divergence
from penstock.schedule.ir.schedule import Op
from penstock.schedule.methods.combine import Combine
from penstock.schedule.text import parse_schedule
from penstock.stage.precision import PrecisionName
from penstock.weights.store import VersionStore
from penstock.weights.waves import WaveWeights
from support.cases import OPTIMIZERS, Case, make_batches, make_blocks, make_pipeline, mean_loss
from support.meetings import State, assert_close, states_of
from support.pool import Pool
from support.schedules import make_schedule
from support.snapshots import Kept
from support.waves_by_hand import Waved, reads_of

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


def case_of(method: str, depth: int, m: int, width: int, optimizer: str, spans: tuple[int, ...] = (21,)) -> Case:
    """Nothing is scaled, so that every bit of a gradient is the optimizer's."""
    model = "long" if depth == 8 else "mixed"
    return Case(
        method, depth, m, model, width=width, optimizer=optimizer, loss="even", rate=False, spans=spans, skips=()
    )


def by_hand(case: Case, combine: Combine) -> Waved:
    return Waved(
        combine.lags(case.width),
        combine.every,
        combine.share,
        list(accumulate(case.spans)),
        case.m,
        case.schedule.num_stages,
        OPTIMIZERS[case.optimizer],
        reads_of(case.method, case.depth, case.m),
        case.model,
    )


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
    ("1f1b", Combine("wsp", every=2, distance=2)),
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
            for parameter in stage.module.trained.values():
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


# --- staleness --------------------------------------------------------------------------------------------------------


class Counts(nn.Module):
    """Its parameter counts the updates of each pipeline that its weights have; it takes down what a forward sees."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(width))

    def forward(self, x: Any) -> Any:
        if torch.is_grad_enabled():
            for row in x:
                Counts.forwards.append((int(row[0]), int(row[1]), self.seen.detach().tolist()))
        # The gradient of the parameter is -1 at the place of the pipeline.
        return torch.cat([x, -(self.seen[x[:, 1].long()])[:, None]], dim=1)

    forwards: ClassVar[list[tuple[int, int, list[float]]]] = []


def count_missing(in_flight: int, distance: int, precision: PrecisionName) -> int:
    """The most updates of minibatches before its own that a forward misses, of another pipeline."""
    width, count = 2, (distance + 3) * in_flight
    Counts.forwards.clear()
    blocks = {"first": Counts(width)} | {f"on{s}": Pass() for s in range(1, in_flight)}
    batches = [[(torch.tensor([[float(t), float(r)]]), torch.zeros(1)) for r in range(width)] for t in range(count)]
    pipeline = Pipeline(
        blocks,
        make_schedule("stash", in_flight, 1),
        loss=lambda out, _: (out[:, 2].sum(), 1.0),
        optimizer=lambda named: torch.optim.SGD(named, lr=1.0),
        data_parallel=DataParallel(width=width, combine=Combine("wsp", every=in_flight, distance=distance)),
        partition=[1] * in_flight,
        precision=precision,
    )
    list(pipeline.run(batches))
    return max(t - int(seen[1 - r]) for t, r, seen in Counts.forwards)


class Pass(nn.Module):
    """Hands on; its own parameter counts for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.0 * self.idle


@pytest.mark.parametrize(
    ("in_flight", "distance", "missing", "precision"),
    [
        (1, 0, 0, "fp32"),
        (2, 1, 4, "fp32"),
        (4, 0, 6, "fp32"),
        (4, 1, 10, "bf16"),
        (4, 4, 22, "fp32"),
        (7, 4, 40, "fp32"),
    ],
)
def test_the_bound_on_missing_updates(in_flight: int, distance: int, missing: int, precision: PrecisionName) -> None:
    """HetPipe, section 5: s_global = (D + 1)(s_local + 1) + s_local - 1, which stashing reaches and does not pass."""
    local = in_flight - 1
    assert missing == (distance + 1) * (local + 1) + local - 1
    assert count_missing(in_flight, distance, precision) == missing


class Watched(list[Any]):
    """A batch that takes down who reads it."""

    log: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, number: int, m: int, pairs: Any) -> None:
        super().__init__(pairs)
        self.number, self.m = number, m

    def __getitem__(self, k: Any) -> Any:
        Watched.log.append((k // self.m, self.number))
        return super().__getitem__(k)


@pytest.mark.parametrize("distance", [0, 1, 2])
def test_nobody_waits_for_a_pipeline_that_is_few_waves_behind(distance: int) -> None:
    """In one process a pipeline has the turn until it must wait: the first one, for the end of wave 0 of the other."""
    case = case_of("1f1b", 1, 1, 2, "momentum", spans=(12,))
    combine = Combine("wsp", every=2, distance=distance)
    Watched.log.clear()
    list(make_pipeline(case, combine=combine).run([Watched(t, 1, b) for t, b in enumerate(make_batches(case))]))
    reads = Watched.log[: next(i for i, (r, _) in enumerate(Watched.log) if r == 1)]
    assert [t for _, t in reads] == list(range(2 * (distance + 1)))


# --- processes --------------------------------------------------------------------------------------------------------


class Late(list[Any]):
    """A batch that the second pipeline begins only when the first one has read another, or fails after long."""

    def __init__(self, number: int, other: int, folder: str, pairs: Any) -> None:
        super().__init__(pairs)
        self.number, self.other, self.folder = number, other, Path(folder)

    def __getitem__(self, k: Any) -> Any:
        (self.folder / f"{k // 2}-{self.number}").touch()
        deadline = time.monotonic() + 30
        while k // 2 == 1 and not (self.folder / f"0-{self.other}").exists():
            assert time.monotonic() < deadline, f"the other pipeline waits before batch {self.number}"
            time.sleep(0.005)
        return super().__getitem__(k)


def trained(group: dist.ProcessGroup | None, case: Case, combine: Combine, folder: str = "") -> dict[int, State]:
    pipeline, batches = make_pipeline(case, group, combine=combine), make_batches(case)
    if folder:  # a stage has updated with batch t - 2 when it begins batch t
        ended = [max(t - 1, 0) // combine.every for t in range(len(batches))]
        ahead = [min((n + combine.distance + 1) * combine.every, len(batches)) - 1 for n in ended]
        batches = [Late(t, ahead[t], folder, batch) for t, batch in enumerate(batches)]
    list(pipeline.run(batches))
    return states_of(pipeline)


def together(parts: Sequence[dict[int, State]]) -> dict[int, State]:
    found: dict[int, State] = {}
    for r, state in (pair for part in parts for pair in part.items()):
        whole = found.setdefault(r, State())
        for what in ("weights", "optimizer", "model"):
            getattr(whole, what).update(getattr(state, what))
    return found


def test_processes_have_the_bits_of_one_and_do_not_wait_for_each_other(pool: Pool, tmp_path: Path) -> None:
    """The second pipeline is as far behind all the time as it may be, and its stages wait for nobody's word."""
    case, combine = case_of("stash", 2, 2, 2, "adamw", spans=(15,)), Combine("wsp", every=2, distance=2)
    wanted = trained(None, case, combine)
    found = pool.submit(trained, case, combine, str(tmp_path), ranks=4)
    assert_close(together(found), wanted, 0.0)


RECORDED = Combine("wsp", every=2, distance=2, lag="record")


def recorded(group: dist.ProcessGroup | None, case: Case) -> tuple[dict[int, State], dict[str, Any]]:
    pipeline = make_pipeline(case, group, combine=RECORDED)
    list(pipeline.run(make_batches(case)))
    return states_of(pipeline), pipeline.lags()


def test_what_has_come_is_taken_and_taken_down() -> None:
    """In one process pipelines take turns, so lags differ, and a loop by hand makes the same of them."""
    case = case_of("stash", 2, 2, 2, "adamw", spans=(6, 9))
    pipeline, batches = make_pipeline(case, combine=RECORDED), make_batches(case)
    list(pipeline.run(batches[:6]))
    list(pipeline.run(batches[6:]))
    lags = pipeline.lags()
    assert {one for waves in lags.values() for taken in waves.values() for one in taken} >= {0, 1}
    assert all(list(waves) == [1, 3, 5, 7, 9, 11, 13] for waves in lags.values())
    wanted = by_hand(case, RECORDED)
    wanted.record = lags
    wanted.train(batches)
    assert_close(states_of(pipeline), wanted.states(), 0.0)


def test_a_snapshot_has_what_was_taken_down() -> None:
    case = case_of("stash", 2, 2, 2, "adamw", spans=(6, 4))
    pipeline, batches = make_pipeline(case, combine=RECORDED), make_batches(case)
    list(pipeline.run(batches[:6]))
    kept = Kept(pipeline.snapshots())
    kept.facts = json.loads(json.dumps(kept.facts))  # as files have it
    list(pipeline.run(batches[6:]))
    again = make_pipeline(case, combine=RECORDED)
    again.load(kept)
    list(again.run(batches[6:]))
    assert again.lags() == pipeline.lags()
    assert_close(states_of(again), states_of(pipeline), 0.0)
    chosen = make_pipeline(case, combine=WAVES)
    chosen.load(kept)
    assert chosen.lags() == {}


def test_what_processes_have_taken_down_makes_the_same_run_in_one(pool: Pool) -> None:
    case = case_of("stash", 2, 2, 2, "adamw", spans=(15,))
    parts = pool.submit(recorded, case, ranks=4)
    lags = {place: waves for _, own in parts for place, waves in own.items()}
    assert sorted(lags) == ["0/0", "0/1", "1/0", "1/1"]
    again = make_pipeline(case, combine=replace(RECORDED, lag=lags))
    list(again.run(make_batches(case)))
    assert again.lags() == lags
    assert_close(together([part for part, _ in parts]), states_of(again), 0.0)


def test_a_record_that_does_not_fit_is_refused() -> None:
    case = case_of("stash", 2, 2, 2, "adamw", spans=(4,))
    _, lags = recorded(None, case)
    longer = make_pipeline(case, combine=replace(RECORDED, lag=lags))
    with pytest.raises(ConfigError, match="recorded at ./. after batches 1 to 3, but not after batch 5"):
        list(longer.run(make_batches(replace(case, spans=(6,)))))
    with pytest.raises(ConfigError, match=r"not recorded at 0/2 \(pipeline/stage\) of this run"):
        make_pipeline(replace(case, depth=3), combine=replace(RECORDED, lag=lags))
    with pytest.raises(ConfigError, match="recorded with 2 pipelines, but this run has 3"):
        make_pipeline(replace(case, width=3), combine=replace(RECORDED, lag=lags))
    with pytest.raises(ConfigError, match="they must be whole numbers from 0 to distance=0"):
        replace(RECORDED, distance=0, lag=lags)
    for changes in ({"tied": True}, {"method": "chimera", "m": 4}):
        with pytest.raises(
            ConfigError,
            match="unless lag is a number, each stage adds the updates that have",
        ):
            make_pipeline(replace(case, **changes), combine=RECORDED)


STOPS = ((0, 3, None), (3, 3, None), (3, 6, Saving(8, lambda _: None)))  # who asks at which report, and what else


def stops(group: dist.ProcessGroup, case: Case, combine: Combine) -> list[tuple[int, float]]:
    found = []
    for who, at, save in STOPS:
        pipeline = make_pipeline(case, group, combine=combine)
        for report in pipeline.run(make_batches(case), save=save):
            if report.batch == at and dist.get_rank(group) == who:
                pipeline.stop()
        total = sum(w.double().sum() for w in states_of(pipeline)[dist.get_rank(group) // 2].weights.values())
        found.append((pipeline.batches, float(total)))
    return found


def test_any_rank_may_stop_a_run_of_waves(pool: Pool) -> None:
    """It ends after the same batch everywhere, also where that is drained, and all pipelines have the same weights."""
    case = case_of("2bw", 2, 2, 2, "momentum", spans=(40,))
    ends = pool.submit(stops, case, Combine("wsp", every=2, distance=2), ranks=4)
    early, late, drained = zip(*ends, strict=True)
    for of_rank in (early, late, drained):
        assert len({batch for batch, _ in of_rank}) == 1
        assert of_rank[0] == of_rank[2]
        assert of_rank[1] == of_rank[3]
    assert all(4 + 2 * 2 <= of_rank[0][0] <= 16 for of_rank in (early, late))
    assert drained[0][0] == 8


# --- failures and refusals --------------------------------------------------------------------------------------------


def test_a_pipeline_that_fails_is_no_reason_to_go_on() -> None:
    """The other one waits for its wave, and the error is its own."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if target[0, 0] < 0:
            raise ValueError("a target that cannot be")
        return mean_loss(output, target)

    case = case_of("1f1b", 2, 1, 2, "momentum", spans=(8,))
    batches = make_batches(case)
    batches[3][1][1][0, 0] = -7
    pipeline = make_pipeline(case, combine=Combine("wsp", every=2, distance=1), loss=loss)
    with pytest.raises(ValueError, match="a target that cannot be"):
        list(pipeline.run(batches))
    with pytest.raises(PenstockError, match="broke in an earlier run"):
        pipeline.snapshots()


def test_waves_that_never_come_are_named() -> None:
    """In a group whose other member does not post, here."""
    stage = make_schedule("1f1b", 1, 1).stages[0]
    members = tuple(Holder(r, stage) for r in range(2))
    posted = LocalExchange().post(members, members[1], 3, [[torch.zeros(1)], [torch.ones(1)]])
    with pytest.raises(TransportError, match=r"the end of wave 3: nothing moved on the lane of waves from pipeline 0"):
        posted.came[0].wait(0.01, "the end of wave 3")
    assert not posted.sent.done


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kind": "wsp", "distance": -1}, "distance must be a whole number of at least 0, got -1"),
        ({"kind": "wsp", "distance": True}, "distance must be a whole number"),
        ({"kind": "wsp", "lag": 1}, "lag must be a whole number of waves from 0 to distance=0, one for each pipe"),
        ({"kind": "wsp", "distance": 2, "lag": [0, 3]}, "from 0 to distance=2, one for each pipeline, 'record'"),
        ({"kind": "wsp", "distance": 2, "lag": []}, "or recorded lags; got ()"),
        ({"kind": "wsp", "distance": 2, "lag": "soon"}, "or recorded lags; got 'soon'"),
        ({"kind": "wsp", "share": 0.0}, "share must be a positive number, got 0.0"),
        ({"kind": "wsp", "optimizer_state": "average"}, "optimizer_state is an option of average, bmuf, elastic, not"),
        ({"kind": "average", "distance": 1}, "distance is an option of wsp, not of average"),
        ({"kind": "reduce", "lag": 0}, "lag is an option of wsp, not of reduce"),
    ],
    ids=str,
)
def test_choices_of_waves_that_make_no_sense(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Combine(**arguments)
    assert said in str(caught.value)


WAVES = Combine("wsp", every=2, distance=1)


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("1f1b", {"width": 1}, "combine=wsp needs parallel pipelines; set data_parallel"),
        ("1f1b", {"combine": Combine("wsp", distance=1, lag=[0, 1, 0])}, "lag has 3 numbers for 2 pipelines; give one"),
        ("1f1b", {"reduce": "fast"}, "reduce=fast cannot be used with combine=wsp"),
        ("1f1b", {"ema_decay": 0.9}, "ema_decay=0.9 and combine=wsp do not go together"),
        ("1f1b", {"delays": 2}, "delays cannot be used with combine=wsp"),
        ("1f1b", {"divergence": Divergence()}, "so they would not agree on a divergence"),
        ("zb-h2-post", {}, "use the method without post-validation"),
        ("newest", {}, "under which a microbatch reads several versions"),
    ],
    ids=str,
)
def test_what_does_not_go_with_waves(method: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_pipeline(Case(method, 2, 4, width=2), **({"combine": WAVES} | changes))
    assert said in str(caught.value)


def test_a_written_schedule_with_waves() -> None:
    """tests/golden has it with a distance of one; only so it goes."""
    text = (Path(__file__).parents[1] / "golden" / "wave_synchronous.txt").read_text()
    case, schedule = case_of("stash", 2, 1, 2, "adamw", spans=(9,)), parse_schedule(text)
    written, made = (make_pipeline(case, schedule=s, combine=WAVES) for s in (schedule, case.schedule))
    averages = [[a for a in program.period if a.op is Op.AVERAGE] for program in schedule.programs]
    assert averages == [[a for a in program.period if a.op is Op.AVERAGE] for program in made.schedule.programs]
    for pipeline in (written, made):
        list(pipeline.run(make_batches(case)))
    assert_close(states_of(written), states_of(made), 0.0)
    with pytest.raises(ConfigError, match="have them directly after the STEPs of these batches, of 4 batches before"):
        make_pipeline(case, schedule=schedule, combine=Combine("wsp", every=2, distance=2))


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
