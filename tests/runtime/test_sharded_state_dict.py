"""Weights as DTensors: saved by torch.distributed.checkpoint, and loaded at another width, depth and sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import penstock
from penstock.errors import CapabilityError, ConfigError
from penstock.runtime.pipeline import Pipeline
from support.cases import assert_equal_tensors
from support.pool import Pool

VOCABULARY, WIDTH = 7, 5  # rows that no width divides evenly
DIVIDED = {"embed.weight", "head.weight", "head.bias", "layer.weight", "layer.bias", "norm.weight", "norm.bias"}
Shape = tuple[str, int, int, str]


class Scale(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def make_blocks(seed: int) -> dict[str, nn.Module]:
    """One parameter is shared, one has no dimensions, one layer is frozen, and one has buffers."""
    torch.manual_seed(seed)
    blocks: dict[str, Any] = {"embed": nn.Embedding(VOCABULARY, WIDTH), "layer": nn.Linear(WIDTH, WIDTH)}
    blocks |= {"frozen": nn.Linear(WIDTH, WIDTH).requires_grad_(False), "scale": Scale()}
    blocks |= {"norm": nn.BatchNorm1d(WIDTH), "head": nn.Linear(WIDTH, VOCABULARY)}
    blocks["head"].weight = blocks["embed"].weight
    return blocks


def make(group: dist.ProcessGroup | None, shape: Shape, seed: int = 0, **options: Any) -> Pipeline:
    method, depth, width, level = shape
    return Pipeline(
        make_blocks(seed),
        group=penstock.Group(group, timeout=20.0),
        method=method,
        stages=depth,
        microbatches=4,
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.Adam(named, lr=1e-2),
        **{"data_parallel": penstock.DataParallel(width, sharding=level), **options},
    )


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(VOCABULARY, (32,), generator=generator),) * 2 for _ in range(3)]


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def through_dcp(group: dist.ProcessGroup, writer: Shape, reader: Shape, folder: str) -> Any:
    first = make(group, writer, ema_decay=0.5)
    for _ in first.run(data()):
        pass
    state = first.sharded_state_dict()
    for name, tensor in first.state_dict().items():
        shown = state[name]
        assert isinstance(shown, DTensor) is (name in DIVIDED), name
        if isinstance(shown, DTensor):
            assert shown.placements == (Shard(0),)
            assert len(shown.to_local()) <= -(-len(tensor) // writer[2])
            assert torch.equal(shown.full_tensor(), tensor)
    average = first.sharded_state_dict(averaged=True)
    wanted = dict(first.full_state_dict(averaged=True))
    averaged = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in average.items()}
    dcp.save({"model": state}, checkpoint_id=folder)
    saved = dict(first.full_state_dict())
    second = make(group, reader, seed=9)
    into = {"model": second.sharded_state_dict()}
    before = copied(second.state_dict())
    dcp.load(into, checkpoint_id=folder)
    assert_equal_tensors(second.state_dict(), before, "what is loaded is a copy until it is put in")
    second.load_sharded_state_dict(into["model"])
    loaded, evaluated = copied(second.state_dict()), second.evaluate(data())
    for _ in second.run(data()):
        pass
    return saved, averaged, wanted, loaded, evaluated, copied(second.state_dict()), dict(second.full_state_dict())


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (("1f1b", 2, 2, "full"), ("2bw", 1, 4, "gradients")),
        (("1f1b", 1, 4, "optimizer"), ("1f1b", 2, 2, "none")),
        (("2bw", 4, 1, "none"), ("1f1b", 2, 2, "full")),
    ],
    ids=str,
)
def test_torch_saves_and_loads_at_any_width_depth_and_sharding(
    pool: Pool, tmp_path: Path, writer: Shape, reader: Shape
) -> None:
    found = pool.submit(through_dcp, writer, reader, str(tmp_path / "weights"), ranks=4)
    saved, wanted = found[0][0], found[0][2]
    assert saved
    trained = found[0][-1]
    for _, averaged, _, loaded, evaluated, after, _ in found:
        assert_equal_tensors(averaged, {name: wanted[name] for name in averaged}, "average")
        assert_equal_tensors(loaded, {name: saved[name] for name in loaded}, "weights")
        assert evaluated == found[0][4]
        parameters = {name: tensor for name, tensor in after.items() if "running" not in name}
        assert_equal_tensors(parameters, {name: trained[name] for name in parameters}, "afterwards")


def refused(group: dist.ProcessGroup, fault: str) -> str:
    pipeline = make(group, ("1f1b", 2, 2, "full"))
    state = pipeline.sharded_state_dict()
    before = copied(pipeline.state_dict())
    name = next(name for name, tensor in state.items() if isinstance(tensor, DTensor))
    if dist.get_rank(group) == 3:
        if fault == "missing":
            del state[name]
        elif fault == "whole":
            state[name] = torch.zeros(state[name].shape)
        else:
            state[name] = torch.zeros(state[name].shape)[:1]
    with pytest.raises(ConfigError) as raised:
        pipeline.load_sharded_state_dict(state)
    assert_equal_tensors(pipeline.state_dict(), before, "nothing is loaded")
    return str(raised.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [("missing", "there is no tensor"), ("whole", "is Tensor of shape"), ("shape", "a DTensor of shape")],
)
def test_what_does_not_fit_on_one_rank_all_refuse(pool: Pool, fault: str, message: str) -> None:
    for text in pool.submit(refused, fault, ranks=4):
        assert text.startswith("load_sharded_state_dict: nothing has been loaded; on rank 3 ")
        assert message in text


def part_of_a_job(group: dist.ProcessGroup) -> str:
    with pytest.raises(CapabilityError) as raised:
        make(group, ("1f1b", 1, 2, "none")).sharded_state_dict()
    return str(raised.value)


def test_pipelines_that_are_part_of_a_job_need_a_mesh(pool: Pool) -> None:
    for text in pool.submit(part_of_a_job, ranks=2):
        assert "all 4 ranks of the job, but the pipelines have only 2; pass the mesh" in text


def others(group: dist.ProcessGroup, method: str, combine: str) -> str:
    parallel = penstock.DataParallel(2, combine=penstock.Combine(combine, every=1 if combine == "reduce" else 2))
    with pytest.raises(CapabilityError) as raised:
        make(group, (method, 2, 2, "none"), data_parallel=parallel).sharded_state_dict()
    return str(raised.value)


@pytest.mark.parametrize(("method", "combine", "why"), [("chimera", "reduce", "twice"), ("1f1b", "average", "average")])
def test_what_is_not_shown_yet_is_named(pool: Pool, method: str, combine: str, why: str) -> None:
    for text in pool.submit(others, method, combine, ranks=4):
        assert why in text
        assert "take full_state_dict(), or penstock.Checkpoints" in text


def test_in_one_process_nothing_is_divided() -> None:
    with pytest.raises(ConfigError, match=r"full_state_dict\(\) returns the whole model"):
        make(None, ("1f1b", 1, 2, "full")).sharded_state_dict()
