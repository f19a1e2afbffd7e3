"""Parked activations: the backward reads them where they are, and the account of memory says where that is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.comm.core.ticket import Ticket
from penstock.comm.p2p.mailbox import ParkedInbox
from penstock.comm.p2p.tensor_message import TensorMessage
from penstock.comm.p2p.transport import LocalLane
from penstock.errors import ScheduleError, TransportError
from penstock.schedule.ir.schedule import Op, Payload
from penstock.schedule.machine.instructions import LaneKey
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from penstock.stage import graph_builder
from penstock.stage.autograd import activation_offload
from support.cases import (
    OPTIMIZERS,
    Case,
    Outcome,
    Recording,
    assert_same,
    expected,
    finish,
    make_batches,
    make_pipeline,
    run_spans,
    together,
    train,
    train_on_ranks,
)
from support.late_copies import LateCopies
from support.pool import Pool
from support.schedules import make_schedule
from support.tree_cases import RAGGED, TreeCase, batches_of, blocks_of, expected as expected_of_trees

GOLDEN = Path(__file__).parents[1] / "golden"
OFFLOAD, PARKED = ((GOLDEN / f"{name}.txt").read_text() for name in ("offload", "parked"))


def train_trees(group: dist.ProcessGroup | None, case: TreeCase) -> Outcome:
    recording = Recording(OPTIMIZERS[case.optimizer])
    pipeline = make_pipeline(case, group, blocks=blocks_of(case), optimizer=recording)
    outcome = Outcome([(r.batch, r.loss, r.weight) for r in pipeline.run(batches_of(case))])
    return finish(outcome, pipeline, recording)


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
    assert_same(train(None, case, method=parse_schedule(OFFLOAD)), expected(case))
    assert moved > 50


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[LateCopies]:
    streams: list[LateCopies] = []

    def stream(_: torch.device) -> LateCopies:
        streams.append(LateCopies())
        return streams[-1]

    monkeypatch.setattr(graph_builder, "side_stream", stream)
    return streams


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_a_device_moves_them_beside_its_work(monkeypatch: pytest.MonkeyPatch, recompute: Any) -> None:
    """To the bits of the reference, though copies are made as late as can be; the host waits for none."""
    streams = stand_in(monkeypatch)
    case = Case("gpipe", 2, 4, spans=(3,), recompute=recompute)
    assert_same(train(None, case, method=parse_schedule(OFFLOAD)), expected(case))
    (stream,) = streams  # the other stage moves nothing
    assert (stream.made[0] > 20) == (recompute == "none")
    assert stream.made[0] == stream.made[1]
    assert not stream.waits
    assert stream.waited == (2 * 3 if recompute == "none" else 0)  # two microbatches in each of three batches


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
    moved: set[int] = set()
    whole = activation_offload._copied

    def noted(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
        moved.add(storage._cdata)
        return whole(storage, device)

    monkeypatch.setattr(activation_offload, "_copied", noted)
    case = Case("gpipe", 2, 4, spans=(2,), skips=())
    pipeline = make_pipeline(case, method=parse_schedule(OFFLOAD))
    weights = {each for stage in pipeline.stages.values() for each in stage.weights.store.storages}
    for _ in pipeline.run(make_batches(case)):
        pass
    assert moved
    assert not moved & weights


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
    pipeline = make_pipeline(case, method=parse_schedule(OFFLOAD))
    for _ in pipeline.run(make_batches(case)):
        pass
    peaks, live = pipeline.peak_bytes(), pipeline.live_bytes()
    assert peaks[0]["offloaded activations"] > 0
    assert "offloaded activations" not in peaks[1]
    assert live[0]["offloaded activations"] == live[0]["activations"] == 0


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


class _Late(Ticket):
    """A RECV whose message is seen at the third look only."""

    __slots__ = ("looks",)

    def __init__(self, where: object) -> None:
        super().__init__(where)
        self.looks = 0

    @property
    def done(self) -> bool:
        self.looks += self._done
        return self.looks > 2


def test_what_comes_late_is_taken_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same bits, with nothing left on any account, and never more than a window of messages posted."""
    case, posted = Case("bpipe", 6, 9, spans=(3, 2)), Counter[LaneKey]()
    receive, take = LocalLane.receive, ParkedInbox.hand_over

    def later(self: LocalLane) -> Ticket:
        if self.lane.payload is not Payload.PARKED:
            return receive(self)
        posted[self.lane] += 1
        assert posted[self.lane] <= 2
        monkeypatch.setattr("penstock.comm.p2p.transport.Ticket", _Late)
        ticket = receive(self)
        monkeypatch.setattr("penstock.comm.p2p.transport.Ticket", Ticket)
        return ticket

    def counted(self: ParkedInbox, *arguments: Any) -> Any:
        posted[self._route.lane] -= 1
        return take(self, *arguments)

    monkeypatch.setattr(LocalLane, "receive", later)
    monkeypatch.setattr(ParkedInbox, "hand_over", counted)
    recording = Recording(OPTIMIZERS[case.optimizer])
    pipeline = make_pipeline(case, optimizer=recording)
    assert pipeline.proof.lowered.window == 2
    assert_same(finish(run_spans(pipeline, case), pipeline, recording), expected(case))
    timeline = pipeline.timeline()
    for rank in range(6):
        taken = [i for i in timeline.intervals if i.rank == rank and i.label.startswith("take parked")]
        moves = [i for i in timeline.work(rank) if i.what in ("HOLD", "FETCH")]
        assert len(taken) == len(moves)  # none of them at once
        assert bool(moves) == (rank in (0, 1, 4, 5))
    for live in pipeline.live_bytes().values():
        assert not any(live.get(kind, 0) for kind in ("messages", "activations", "parked activations"))


def test_whoever_takes_activations_in_computes_meanwhile() -> None:
    """If HOLD1 waited, rank 0 would wait for B0 of rank 1 for ever; if FETCH1 did, rank 1 for F2 of rank 0."""
    text = """
        rule flush
        microbatches 3
        nodes 0@0 1@1
        rank 0: F0^t F1^t B0^t OFFLOAD1@0>1/parked FETCH1@0<1/parked F2^t B1^t B2^t STEP[t]
        rank 1: HOLD1@1<0/parked F0^t B0^t F1^t F2^t RETURN1@1>0/parked B1^t B2^t STEP[t]
    """
    case = Case("gpipe", 2, 3, spans=(3,))
    assert_same(train(None, case, method=parse_schedule(text)), expected(case))


def test_parked_activations_that_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever needs them says so."""
    send = LocalLane.send

    def losing(self: LocalLane, message: TensorMessage) -> Ticket:
        return Ticket(self.lane) if self.lane == (0, 1, Payload.PARKED) else send(self, message)

    monkeypatch.setattr(LocalLane, "send", losing)
    case = Case("gpipe", 2, 3, spans=(2,))
    with pytest.raises(TransportError, match="rank 1, stage 1, RETURN1 on the parked lane from rank 0 to rank 1"):
        train(None, case, method=parse_schedule(PARKED))


@pytest.mark.long
def test_parked_activations_of_changing_size(pool: Pool) -> None:
    """Both ends of a lane agree on the size of a block although messages are taken later than their HOLDs."""
    shapes = (*RAGGED, *RAGGED[::-1])
    case = TreeCase("bpipe", 4, len(shapes), "mixed", optimizer="sgd", spans=(3,), shapes=shapes)
    assert_same(together(pool.submit(train_trees, case, ranks=4)), expected_of_trees(case))


def test_offload_on_ranks(pool: Pool) -> None:
    case = Case("bpipe", 4, 8, spans=(2, 1))
    assert_same(train_on_ranks(pool, case), expected(case))


def test_what_a_half_of_a_backward_needs_is_moved_as_well() -> None:
    """Between I and W small graphs keep inputs of operations; nothing but what was parked may hold them."""
    text = PARKED.replace("B0^t FETCH", "I0^t W0^t FETCH").replace("B1^t", "I1^t W1^t").replace("B2^t", "I2^t W2^t")
    text = text.replace("B0^t F1^t RETURN", "I0^t W0^t F1^t RETURN")
    case = Case("gpipe", 2, 3, spans=(2,))
    assert_same(train(None, case, method=parse_schedule(text)), expected(case))


def test_activations_are_not_moved_to_a_stage_of_the_same_rank() -> None:
    """Which would free nothing."""
    text = """
        microbatches 1
        nodes 0@0 1@1 2@0
        rank 0: F0@0 OFFLOAD0@0>2/parked HOLD0@2<0/parked F0@2 B0@2 RETURN0@2>0/parked FETCH0@0<2/parked B0@0
        rank 1: F0@1 B0@1
    """
    with pytest.raises(ScheduleError, match="moves activations to a stage of the same rank, which frees nothing"):
        check(parse_schedule(text))
