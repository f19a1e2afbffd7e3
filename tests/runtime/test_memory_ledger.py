"""The recorded account of parameter-sized memory is true after every action, though most passes are not looked at."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from penstock.runtime.ops.bound import BoundAction, Turn
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.verify.reference import Scaling
from penstock.view.progress import summary
from support.cases import Case, make_batches, make_pipeline
from support.correction_cases import case_of

CASES = {
    "1f1b": Case("1f1b", 2, 3),
    "interleaved": Case("interleaved", 2, 2),
    "2bw in bf16": Case("2bw", 2, 2, precision="bf16"),
    "stash": Case("stash", 4, 1),
    "vertical-sync": Case("vertical-sync", 4, 2),
    "2bw recomputed": Case("2bw", 2, 2, recompute="stage"),
    "zb-h1": Case("zb-h1", 2, 3),
    "zb-h2-post": Case("zb-h2-post", 2, 4, loss="spiky", scaling=Scaling(64.0, 2.0, 0.5, 2), spikes=(2,), clip=1.0),
    "gap-aware": case_of("gap-aware", 3, 1),
    "pipemare": case_of("pipemare", 4, 2),
    "xpipe": case_of("xpipe", 2, 3),
    "i-timeprest": case_of("i-timeprest", 3, 2),
}


def watched(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Compare the record with the truth after every action; counts those after which something had changed."""
    act, seen = BoundAction.act, Counter[bool]()

    def compare(self: BoundAction, turn: Turn) -> None:
        ledger = self._span.memory
        live = ledger._recorder.live
        before = {role: live[role] for role in ledger._recorder.roles}
        act(self, turn)
        truth: Counter[str] = Counter()
        for each in ledger._stages:
            truth.update(each.weights.bytes_by_role())
        assert {role: live[role] for role in truth} == dict(truth), f"after {turn.label}"
        assert ledger._recorder.roles == truth.keys()
        seen[dict(truth) != before] += 1

    monkeypatch.setattr(BoundAction, "act", compare)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_the_account_is_true_after_every_action(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, seen = CASES[name], watched(monkeypatch)
    pipeline = make_pipeline(case)
    for batches in (make_batches(case), make_batches(case)):  # the second span begins with what the first one has left
        for _ in pipeline.run(batches):
            pass
    assert seen[True] > 4
    assert seen[False] > 4


@pytest.mark.parametrize("combine", [Combine("elastic", every=2), Combine("wsp", every=2, distance=1)])
def test_also_where_pipelines_meet(combine: Combine, monkeypatch: pytest.MonkeyPatch) -> None:
    case, seen = replace(CASES["1f1b"], width=2), watched(monkeypatch)
    pipeline = make_pipeline(case, combine=combine)
    for _ in pipeline.run(make_batches(case)):
        pass
    assert seen[True] > 4


def test_the_allocator_of_a_device_is_asked_for_its_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what the ledger counts, and no part of its total; on the host there is no such figure."""
    case = Case("1f1b", 2, 3)
    pipeline = make_pipeline(case)
    list(pipeline.run(make_batches(case)))
    peaks = pipeline.peak_bytes()
    assert not any(kind.startswith("device") for kinds in peaks.values() for kind in kinds)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: {"cpu": 7000}[device.type])
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda device: {"cpu": 8000}[device.type])
    there = {"device: allocated": 7000, "device: reserved": 8000}
    assert pipeline.peak_bytes() == {rank: kinds | there for rank, kinds in peaks.items()}
    rows = [line.split("  ")[0].strip() for line in summary(pipeline).splitlines()]
    assert rows[rows.index("total") :][1:3] == ["device: allocated", "device: reserved"]
