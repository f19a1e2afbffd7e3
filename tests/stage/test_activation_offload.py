"""Parked activations: the backward reads them where they are, and the account of memory says where that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import ScheduleError
from penstock.schedule.build import make_schedule
from penstock.schedule.ir.schedule import Op
from penstock.schedule.proof.check import check
from penstock.schedule.text import parse_schedule
from penstock.stage.autograd import activation_offload
from support.cases import Case, assert_same, expected, make_batches, make_pipeline, train, train_on_ranks
from support.pool import Pool

GOLDEN = Path(__file__).parents[1] / "golden"
OFFLOAD, PARKED = ((GOLDEN / f"{name}.txt").read_text() for name in ("offload", "parked"))


def test_the_backward_reads_what_was_moved(monkeypatch: Any) -> None:
    """Each move makes a copy, and what was there before becomes rubbish."""
    moved = 0

    def copied(storage: torch.UntypedStorage, _: torch.device) -> torch.UntypedStorage:
        nonlocal moved
        moved += 1
        copy = storage.clone()
        storage.fill_(255)
        return copy

    monkeypatch.setattr(activation_offload, "_copied", copied)
    case = Case("gpipe", 2, 4, spans=(3,))
    assert_same(train(None, case, schedule=parse_schedule(OFFLOAD)), expected(case))
    assert moved > 50


def test_the_backward_reads_what_came_back(monkeypatch: Any) -> None:
    """What was sent becomes rubbish."""
    sent = 0
    whole = activation_offload.ActivationOffload.take_bytes

    def given(self: activation_offload.ActivationOffload) -> list[torch.Tensor]:
        nonlocal sent
        tensors = whole(self)
        sent += len(tensors)
        copies = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor.fill_(255)
        return copies

    monkeypatch.setattr(activation_offload.ActivationOffload, "take_bytes", given)
    case = Case("bpipe", 6, 9, spans=(3,))
    assert_same(train(None, case), expected(case))
    assert sent > 10


def test_weights_and_inputs_stay(monkeypatch: Any) -> None:
    """Whatever lives anyway is not moved: versions of the weights, and what was received."""
    addresses: set[int] = set()
    whole = activation_offload._copied

    def noted(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
        addresses.add(storage.data_ptr())
        return whole(storage, device)

    monkeypatch.setattr(activation_offload, "_copied", noted)
    case = Case("gpipe", 2, 4, spans=(2,), skips=())
    pipeline = make_pipeline(case, schedule=parse_schedule(OFFLOAD))
    weights = {address for stage in pipeline.stages.values() for address in stage.weights.store.storages}
    for _ in pipeline.run(make_batches(case)):
        pass
    assert addresses
    assert not addresses & weights


@pytest.mark.parametrize(("recompute", "parks"), [("none", True), ("stage", False)])
def test_the_account(recompute: Any, parks: bool) -> None:
    """Ranks of the first half park, those of the second hold; of a microbatch that is recomputed there is nothing."""
    case = Case("bpipe", 6, 9, spans=(3,), recompute=recompute)
    pipeline = make_pipeline(case)
    for _ in pipeline.run(make_batches(case)):
        pass
    peaks, live = pipeline.peak_bytes(), pipeline.live_bytes()
    held = [rank for rank in range(6) if peaks[rank].get("parked activations", 0)]
    assert held == ([4] if parks else [])  # the first stage looks tokens up, which are the caller's
    assert all(live[rank].get("parked activations", 0) == live[rank]["activations"] == 0 for rank in range(6))
    plain = make_pipeline(Case("1f1b", 6, 9, spans=(3,), recompute=recompute))
    for _ in plain.run(make_batches(case)):
        pass
    if parks:
        assert peaks[1]["activations"] < plain.peak_bytes()[1]["activations"]


def test_the_hosts_memory_has_an_account_of_its_own() -> None:
    case = Case("gpipe", 2, 4, spans=(2,))
    pipeline = make_pipeline(case, schedule=parse_schedule(OFFLOAD))
    for _ in pipeline.run(make_batches(case)):
        pass
    peaks, live = pipeline.peak_bytes(), pipeline.live_bytes()
    assert peaks[0]["parked activations"] > 0
    assert "parked activations" not in peaks[1]
    assert live[0]["parked activations"] == live[0]["activations"] == 0


@pytest.mark.parametrize(("p", "pairs"), [(4, [(0, 3)]), (8, [(0, 7), (1, 6), (2, 5)])])
def test_who_parks_with_whom(p: int, pairs: list[tuple[int, int]]) -> None:
    schedule = make_schedule("bpipe", p, 2 * p)
    found = {
        (rank, action.peer.rank)
        for rank, program in enumerate(schedule.programs)
        for action in program.period
        if action.op is Op.OFFLOAD and action.peer is not None
    }
    assert sorted(found) == pairs


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (" RETURN1@1>0/parked", "", "RETURN and FETCH move the activations of 1 from stage 1 to stage 0 0 and 1 times"),
        (" HOLD1@1<0/parked", "", "OFFLOAD and HOLD move the activations of 1 from stage 0 to stage 1 1 and 0 times"),
        ("HOLD1@1<0/parked", "HOLD1@1<0/parked HOLD1@1<0/parked", "from stage 0 to stage 1 1 and 2 times"),
        ("FETCH1@0<1/parked", "FETCH1", "from stage 1 to stage 0 1 and 0 times"),
        ("OFFLOAD1@0>1/parked", "OFFLOAD1@0>1/activation", "moves activations, so its payload must be /parked"),
        (" FETCH1@0<1/parked", "", "from stage 1 to stage 0 1 and 0 times"),
        ("HOLD1@1<0/parked", "HOLD1@1", "HOLD and RETURN must name the peer"),
        ("F0^t HOLD1@1<0/parked", "HOLD1@1<0/parked F0^t", ""),
    ],
)
def test_a_wrong_one_is_refused(old: str, new: str, message: str) -> None:
    assert old in PARKED
    schedule = parse_schedule(PARKED.replace(old, new))
    if not message:
        check(schedule)
        return
    with pytest.raises(ScheduleError, match=message):
        check(schedule)


def test_offload_on_ranks(pool: Pool) -> None:
    case = Case("bpipe", 4, 8, spans=(2, 1))
    assert_same(train_on_ranks(pool, case), expected(case))


def test_what_a_half_of_a_backward_needs_is_moved_as_well() -> None:
    """Between I and W small graphs keep inputs of operations; nothing but what was parked may hold them."""
    text = PARKED.replace("B0^t FETCH", "I0^t W0^t FETCH").replace("B1^t", "I1^t W1^t").replace("B2^t", "I2^t W2^t")
    text = text.replace("B0^t F1^t RETURN", "I0^t W0^t F1^t RETURN")
    case = Case("gpipe", 2, 3, spans=(2,))
    assert_same(train(None, case, schedule=parse_schedule(text)), expected(case))
