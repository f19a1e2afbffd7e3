"""Where a rank computes, what its messages travel on, and tensors that pass through the memory of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.comm.core.devices import BOTH, choose_backend, choose_device, on_device
from penstock.comm.core.tagged_group import TaggedGroup
from penstock.comm.p2p.codec import Codec
from penstock.comm.p2p.gloo import ReceiveLane
from penstock.comm.p2p.tensor_message import Header, TensorMessage
from penstock.errors import ConfigError
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.ir.schedule import Payload
from penstock.schedule.machine.instructions import LaneKey
from support.cases import Case, Outcome, assert_same, expected, together, train
from support.pool import Pool

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(
    ("name", "local_rank", "available", "device"),
    [
        ("auto", 0, 0, "cpu"),
        ("auto", 1, 2, "cuda:1"),
        ("auto", 5, 2, "cuda:1"),
        ("cpu", 1, 2, "cpu"),
        ("cuda", 1, 4, "cuda:1"),
        ("cuda:3", 1, 4, "cuda:3"),
        (torch.device("cuda", 0), 1, 4, "cuda:0"),
        ("meta", 1, 0, "meta"),
    ],
)
def test_the_device_of_a_rank(name: Any, local_rank: int, available: int, device: str) -> None:
    assert choose_device(name, local_rank, available) == torch.device(device)


@pytest.mark.parametrize(
    ("name", "available", "said"),
    [
        ("cuda", 0, "torch sees no GPU here .*; use device=cpu"),
        ("cuda:2", 2, "device is 'cuda:2', but torch sees 2 GPUs here, the last one cuda:1"),
        ("gpu", 2, "device must be auto, cpu, cuda, or one by its number, such as cuda:1; got 'gpu'"),
        (1.5, 2, "device must be auto"),
    ],
)
def test_devices_that_are_not_there(name: Any, available: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_device(name, 0, available)


@pytest.mark.parametrize(
    ("name", "device", "alone", "backend"),
    [
        ("auto", "cpu", True, "gloo"),
        ("auto", "cuda:0", True, BOTH),
        ("auto", "cuda:0", False, "gloo"),
        ("gloo", "cuda:0", True, "gloo"),
        ("nccl", "cuda:0", True, BOTH),
        (BOTH, "cuda:0", True, BOTH),
    ],
)
def test_the_backend_of_a_job(
    name: str, device: str, alone: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert choose_backend(name, torch.device(device), alone) == backend


@pytest.mark.parametrize(
    ("name", "device", "alone", "said"),
    [
        ("mpi", "cpu", True, "backend must be auto, gloo, nccl"),
        ("nccl", "cpu", True, "ranks compute on cpu; use backend=gloo, or device=cuda"),
        ("nccl", "cuda:0", False, "several ranks of this machine share cuda:0, which NCCL does not allow"),
    ],
)
def test_backends_that_ranks_could_not_talk_over(name: str, device: str, alone: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_backend(name, torch.device(device), alone)


def test_a_tree_goes_to_a_device() -> None:
    here = torch.ones(2)
    moved = on_device({"a": here, "b": (here, 3, None)}, META)
    assert moved["a"].device == moved["b"][0].device == META
    assert moved["b"][1:] == (3, None)
    assert on_device(here, CPU) is here


class Copies(TorchDispatchMode):
    """Notes which copies between devices the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def __torch_dispatch__(self, function: Any, _: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default:
            self.waits.append(not options.get("non_blocking", False))
        return function(*arguments, **(options or {}))


def test_the_host_waits_for_what_it_is_to_read_itself() -> None:
    """Torch pins the memory of a copy to the host that nobody waits for, and returns before it is there."""
    with FakeTensorMode(), Copies() as copies:
        far = torch.empty(3, device="cuda")
        assert on_device(far, CPU).device == CPU
        assert on_device(torch.empty(3), far.device).device == far.device
    assert copies.waits == [True, False]


def test_what_a_lane_receives_goes_to_the_device_of_the_rank() -> None:
    block = Codec("a lane").encode(TensorMessage(Header(0, 0, True), {"x": torch.ones(3), "n": 2}))
    lane = LaneKey(0, 1, Payload.ACTIVATION)
    for device, expected_device in ((META, META), (CPU, CPU), (None, CPU)):
        tree = ReceiveLane(lane, 2, None, device=device).decode(block).tree
        assert tree["x"].device == expected_device
        assert tree["n"] == 2


def test_blocks_are_moved_and_batches_follow() -> None:
    """On the meta device nothing is computed, so passes stop where a number is read for the first time."""
    seen: list[tuple[torch.device, ...]] = []

    class Probe(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((x.device,))
            return x

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append((output.device, target.device))
        raise KeyboardInterrupt

    blocks = [nn.Linear(2, 2), Probe(), nn.Linear(2, 1)]
    pipeline = Pipeline(
        blocks, method="1f1b", stages=3, microbatches=1, loss=loss, optimizer=torch.optim.AdamW, device="meta"
    )
    assert {stage.module.device for stage in pipeline.stages.values()} == {META}
    assert {p.device for block in blocks for p in block.parameters()} == {META}
    assert {tensor.device for tensor in pipeline.state_dict().values()} == {META}
    with pytest.raises(KeyboardInterrupt):
        list(pipeline.run([[(torch.ones(4, 2), torch.ones(4, 1))]]))
    assert seen == [(META,), (META, META)]


def train_through_host(group: dist.ProcessGroup, case: Case) -> Outcome:
    """Train with every tensor taken for one that only the host can send."""
    moved: list[torch.Tensor] = []
    before = TaggedGroup._passes_host
    TaggedGroup._passes_host = lambda _, tensor: not moved.append(tensor)  # type: ignore[method-assign, func-returns-value]
    try:
        outcome = train(group, case)
    finally:
        TaggedGroup._passes_host = before  # type: ignore[method-assign]
    assert moved
    return outcome


@pytest.mark.parametrize("case", [Case("2bw", 2, 2, tied=True, width=2), Case("bpipe", 4, 5, clip=0.5)])
def test_tensors_pass_through_the_host_with_the_same_bits(pool: Pool, case: Case) -> None:
    found = together(pool.submit(train_through_host, case, ranks=4, fresh=True))
    assert_same(found, expected(case))
