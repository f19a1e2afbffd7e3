"""Parked activations: the backward reads them where they are, and the account of memory says where that is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime_cases import Case, assert_same, expected, make_batches, make_pipeline, train

from penstock.runtime import parking
from penstock.schedule.build import make_schedule
from penstock.schedule.ir import Op


def test_the_backward_reads_what_was_moved(monkeypatch: Any) -> None:
    """Each move makes a copy, and what was there before becomes rubbish."""
    moved = 0

    def copied(storage: torch.UntypedStorage, _: torch.device) -> torch.UntypedStorage:
        nonlocal moved
        moved += 1
        copy = storage.clone()
        storage.fill_(255)
        return copy

    monkeypatch.setattr(parking, "_copied", copied)
    case = Case("bpipe", 6, 9, spans=(3,))
    assert_same(train(None, case), expected(case))
    assert moved > 50


def test_weights_and_inputs_stay(monkeypatch: Any) -> None:
    """Whatever lives anyway is not moved: versions of the weights, and what was received."""
    addresses: set[int] = set()
    whole = parking._copied

    def noted(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
        addresses.add(storage.data_ptr())
        return whole(storage, device)

    monkeypatch.setattr(parking, "_copied", noted)
    case = Case("bpipe", 6, 9, spans=(2,), skips=())
    pipeline = make_pipeline(case)
    weights = {address for node in pipeline.nodes.values() if node.store for address in node.store.storages}
    for _ in pipeline.run(make_batches(case)):
        pass
    assert addresses
    assert not addresses & weights


@pytest.mark.parametrize(("recompute", "parks"), [("none", True), ("stage", False)])
def test_the_account(recompute: Any, parks: bool) -> None:
    """Ranks of the first half park; of a microbatch that is recomputed there is nothing to be parked."""
    case = Case("bpipe", 6, 9, spans=(3,), recompute=recompute)
    pipeline = make_pipeline(case)
    for _ in pipeline.run(make_batches(case)):
        pass
    peaks, live = pipeline.peak_bytes(), pipeline.live_bytes()
    assert (peaks[1].get("parked activations", 0) > 0) is parks
    assert all(live[rank].get("parked activations", 0) == live[rank]["activations"] == 0 for rank in range(6))
    plain = make_pipeline(Case("1f1b", 6, 9, spans=(3,), recompute=recompute))
    for _ in plain.run(make_batches(case)):
        pass
    if parks:
        assert peaks[1]["activations"] < plain.peak_bytes()[1]["activations"]


def test_only_the_first_half_parks() -> None:
    schedule = make_schedule("bpipe", 4, 8)
    parking_ranks = [r for r, p in enumerate(schedule.programs) if any(a.op is Op.OFFLOAD for a in p.period)]
    assert parking_ranks == [0]
