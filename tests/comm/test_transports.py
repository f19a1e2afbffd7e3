"""Which transport a pipeline gets, and what is refused where it is not offered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.comm import transports
from penstock.comm.core.rank_grid import RankGrid, RankKey
from penstock.comm.p2p.local import LocalTransport
from penstock.comm.p2p.transport import Channel
from penstock.comm.transports import GlooTransports, LocalTransports, NcclTransports, choose_transports
from penstock.errors import CapabilityError
from penstock.schedule.build import make_schedule
from penstock.schedule.machine.lower import lower


def grid(width: int = 1) -> Any:
    """As between processes."""
    return SimpleNamespace(group=object(), control=object(), width=width)


@pytest.fixture
def with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "backends", lambda _: {"cpu": "gloo", "cuda": "nccl"})


def test_ranks_of_one_process_share_a_transport_with_their_pipeline() -> None:
    chosen = choose_transports(RankGrid(2, 2, None, 1.0), {"cuda"}, ties=True)
    assert isinstance(chosen, LocalTransports)
    made = chosen.make(lower(make_schedule("1f1b", 2, 2)), Channel.TRAINING)
    assert list(made) == [RankKey(0, 0), RankKey(0, 1), RankKey(1, 0), RankKey(1, 1)]
    assert all(isinstance(transport, LocalTransport) for transport in made.values())
    assert made[RankKey(0, 0)] is made[RankKey(0, 1)] is not made[RankKey(1, 0)]


@pytest.mark.usefixtures("with_nccl")
def test_nccl_is_for_stages_on_gpus() -> None:
    assert isinstance(choose_transports(grid(), {"cuda"}, ties=False), NcclTransports)
    assert isinstance(choose_transports(grid(), set(), ties=False), NcclTransports)  # stages without tensors
    assert isinstance(choose_transports(grid(2), {"cpu"}, ties=True), GlooTransports)


@pytest.mark.usefixtures("with_nccl")
@pytest.mark.parametrize(("width", "ties", "what"), [(2, False, "parallel pipelines"), (1, True, "parameters that")])
def test_what_nccl_does_not_offer(width: int, ties: bool, what: str) -> None:
    with pytest.raises(CapabilityError, match=f"{what}.* offered over gloo so far, not over NCCL"):
        choose_transports(grid(width), {"cuda"}, ties=ties)


def test_without_nccl_everything_travels_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "backends", lambda _: {"cpu": "gloo", "cuda": "gloo"})
    assert isinstance(choose_transports(grid(2), {"cuda"}, ties=True), GlooTransports)


def test_groups_are_made_once_for_the_same_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(transports, "lane_groups", lambda lanes, *_: made.append(lanes) or [dict.fromkeys(lanes)])  # type: ignore[func-returns-value]
    nccl = NcclTransports(grid(), grid(), "gloo")
    lanes = [lower(make_schedule(name, 4, 8)).lanes for name in ("1f1b", "gpipe", "bpipe")]
    for each in lanes:
        nccl.prepare(Channel.TRAINING, each)
    nccl.prepare(Channel.EVALUATION, lanes[2])
    assert made == [lanes[0], lanes[2], lanes[2]]
