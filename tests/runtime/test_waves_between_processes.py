"""Wave-synchronous pipelines in processes: the bits of one process, and nobody waits for anybody."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from penstock.errors import ConfigError
from penstock.runtime.rank.snapshot import Saving
from penstock.schedule.methods.data_parallel_sync import Combine
from support.cases import Case, make_batches, make_pipeline
from support.meetings import State, assert_close, states_of
from support.pool import Pool
from support.snapshots import Kept
from support.wave_cases import WAVES, by_hand, case_of


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


@pytest.mark.long
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
