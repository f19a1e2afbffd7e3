"""Which transport a pipeline gets, and what is refused where it is not offered."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.comm import transports
from penstock.comm.collective.in_pieces import TransferPriority
from penstock.comm.core.rank_grid import RankGrid, RankKey
from penstock.comm.p2p.nccl import lane_groups
from penstock.comm.p2p.transport import Channel, LocalTransport
from penstock.comm.transports import GlooTransports, LocalTransports, NcclTransports, choose_transports
from penstock.errors import CapabilityError
from penstock.schedule.ir.rank_numbers import RankNumbers
from penstock.schedule.lowering.lower import in_one_order, lower
from penstock.schedule.lowering.report_places import with_report_places
from support.schedules import make_schedule

WARNS = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def grid(width: int = 1) -> Any:
    """As between processes."""
    return SimpleNamespace(group=object(), control=object(), width=width, numbers=RankNumbers(width, 4))


@pytest.fixture
def with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "gather_json", lambda kind, *_: [kind] * 4)
    monkeypatch.setattr(transports, "backends", lambda _: {"cpu": "gloo", "cuda": "nccl"})


def test_ranks_of_one_process_share_a_transport_with_their_pipeline() -> None:
    chosen = choose_transports(RankGrid(RankNumbers(2, 2), None, 1.0), {GPU})
    assert isinstance(chosen, LocalTransports)
    made = chosen.make(lower(make_schedule("1f1b", 2, 2)), Channel.TRAINING, TransferPriority())
    assert list(made) == [RankKey(0, 0), RankKey(0, 1), RankKey(1, 0), RankKey(1, 1)]
    assert all(isinstance(transport, LocalTransport) for transport in made.values())
    assert made[RankKey(0, 0)] is made[RankKey(0, 1)] is not made[RankKey(1, 0)]


@pytest.mark.usefixtures("with_nccl")
def test_nccl_is_for_stages_on_gpus() -> None:
    assert isinstance(choose_transports(grid(2), {GPU}), NcclTransports)
    assert isinstance(choose_transports(grid(2), {CPU}), GlooTransports)


@pytest.mark.usefixtures("with_nccl")
@pytest.mark.parametrize("here", [CPU, GPU])
def test_where_a_rank_has_no_gpu_all_take_gloo(monkeypatch: pytest.MonkeyPatch, here: torch.device) -> None:
    """A rank that took NCCL by itself would wait for ever for the groups that others do not make."""
    monkeypatch.setattr(transports, "gather_json", lambda kind, *_: [kind, "cuda", "cpu"])
    assert isinstance(choose_transports(grid(3), {here}), GlooTransports)


def test_without_nccl_everything_travels_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "backends", lambda _: {"cpu": "gloo", "cuda": "gloo"})
    assert isinstance(choose_transports(grid(2), {GPU}), GlooTransports)


def test_stages_of_a_process_are_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda _: 3)
    with pytest.raises(CapabilityError, match="rank 3 has stages on several devices, cpu, cuda:1; move its blocks"):
        choose_transports(grid(), {GPU, CPU})


def test_groups_are_made_once_for_the_same_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(transports, "lane_groups", lambda lanes, *_: made.append(lanes) or [dict.fromkeys(lanes)])  # type: ignore[func-returns-value]
    nccl = NcclTransports(grid(), grid(), GPU, "gloo")
    monkeypatch.setattr(transports, "hand_out", lambda make, *_: (make().common, None))
    lowered = [lower(make_schedule(name, 4, 8)) for name in ("1f1b", "gpipe", "bpipe")]
    for each in lowered:
        nccl.prepare(Channel.TRAINING, each)
    nccl.prepare(Channel.EVALUATION, lowered[0])
    assert made == [lowered[0].lanes, lowered[2].lanes]  # evaluations travel over gloo
    placed = with_report_places(in_one_order(lowered[2]), decided=False, in_order=True)
    assert nccl.placed(lowered[2]) == placed
    assert nccl.placed(lowered[0]) is lowered[0]


@pytest.mark.parametrize("before", [None, "1"])
def test_groups_of_a_gpu_connect_at_once_without_a_warning(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    """NCCL reads the environment when a group is made; afterwards it is as the user left it."""
    if before is None:
        monkeypatch.delenv(WARNS, raising=False)
    else:
        monkeypatch.setenv(WARNS, before)
    made: list[Any] = []
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *_: 4)
    monkeypatch.setattr("torch.distributed.get_global_rank", lambda _, rank: rank)
    monkeypatch.setattr(
        "torch.distributed.new_group", lambda ranks, **told: made.append((ranks, told["device_id"], os.environ[WARNS]))
    )
    groups = lane_groups(lower(make_schedule("1f1b", 2, 2)).lanes, grid().control, "nccl", [[0, 1], [2, 3]], GPU)
    assert made == [(ranks, GPU, "0") for ranks in ([0, 1], [1, 0], [2, 3], [3, 2])]
    assert len(groups) == 2
    assert os.environ.get(WARNS) == before
