"""Ranks compare their options: those that must be alike, and not those that concern one process alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from penstock.errors import ConfigError
from penstock.options.all_options import PipelineOptions
from penstock.options.parallelism import DataParallel, Microbatches, Partition
from penstock.options.passes import Precision, Recompute, Staleness
from penstock.options.run import Device, Group
from penstock.options.updates import Divergence
from penstock.partition.blocks import LazyBlock
from penstock.partition.sequence_slices import Slicing
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.plan.options_equal_on_ranks import common_options
from penstock.runtime.plan.plan import PipelinePlan, UnprovenPlan
from penstock.runtime.setup.shared_plan import shared_plan
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.weights.decision import LossScale
from support.own_methods import correction_of
from support.pool import Pool
from support.schedules import make_schedule

pytestmark = pytest.mark.processes


def make_pipeline(group: dist.ProcessGroup, given: dict[str, Any]) -> Pipeline:
    torch.manual_seed(0)
    options = {"blocks": [nn.Linear(3, 3) for _ in range(4)], "method": "1f1b", "microbatches": 4} | given
    waiting = {name: options.pop(name) for name in ("timeout", "waits") if name in options}
    return Pipeline(
        **options,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        group=Group(group, **{"timeout": 10.0} | waiting),
    )


def precision(**given: Any) -> dict[str, Any]:
    return {"precision": Precision(**given)}


def delays(**given: Any) -> dict[str, Any]:
    return {"staleness": Staleness(**given)}


def parallel(**given: Any) -> dict[str, Any]:
    return {"data_parallel": DataParallel(2, **given)}


def partition(**given: Any) -> dict[str, Any]:
    return {"partition": Partition([2, 2], **given)}


def lazy(tied: dict[str, str]) -> dict[str, Any]:
    blocks = {name: LazyBlock(lambda: nn.Linear(3, 3), seed=0, cost=1.0) for name in "abcd"}
    return {"blocks": blocks, **partition(tied=tied)}


class Pairs(nn.Module):
    """A whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.b(self.a(x))
        return found


def whole(**given: Any) -> dict[str, Any]:
    return {"blocks": Pairs(), "example": torch.ones(1, 3), "stages": 2, "partition": Partition(**given)}


def on_a_mesh() -> dict[str, Any]:
    """Needs the ranks of a job, so it is made there; nobody uses its groups, so it has none."""
    return parallel(mesh=DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("width", "depth"), _init_backend=False))


def as_it_is(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda _: 1.0)


BMUF = Combine("bmuf", momentum=0.25)
ORDERED = {"method": make_schedule("stash", 2, 4), "microbatches": None}

Given = dict[str, Any] | Callable[[], dict[str, Any]]

DIFFERENT: dict[str, tuple[Given, Given, str, str]] = {
    "max_grad_norm": ({"max_grad_norm": 0.01}, {"max_grad_norm": 1.0}, "max_grad_norm=0.01", "max_grad_norm=1"),
    "ema_decay": ({}, {"ema_decay": 0.5}, "ema_decay=None", "ema_decay=0.5"),
    "seed": ({}, {"seed": 7}, "seed=0", "seed=7"),
    "divergence": (
        {"max_grad_norm": 1.0, "divergence": Divergence(spike=2.0)},
        {"max_grad_norm": 1.0, "divergence": Divergence(spike=3.5)},
        "divergence=Divergence(spike=2, window=20, nonfinite=True)",
        "divergence=Divergence(spike=3.5, window=20, nonfinite=True)",
    ),
    "dims": (
        {"microbatches": Microbatches(4, dims={"mask": None})},
        {"microbatches": Microbatches(4, dims=1)},
        "dims={'mask': None}",
        "dims=1",
    ),
    "cut": ({"partition": Partition(cut=["2"])}, {"partition": Partition(cut=["3"])}, "cut=['2']", "cut=['3']"),
    "units": (whole(units=["a"]), whole(units=["b"]), "units=['a']", "units=['b']"),
    "by": (whole(by="time"), whole(), "by='time'", "by='work'"),
    "divisor": (precision(divisor=4), precision(divisor=40), "divisor=4", "divisor=40"),
    "precision": ({}, {"precision": "bf16"}, "precision='fp32'", "precision='bf16'"),
    "boundary_gradients": (
        {},
        precision(boundary_gradients="bf16"),
        "boundary_gradients='same'",
        "boundary_gradients='bf16'",
    ),
    "loss_scale": (
        precision(loss_scale=LossScale(8.0)),
        precision(loss_scale=LossScale(16.0)),
        "loss_scale=LossScale(initial=8)",
        "loss_scale=LossScale(initial=16)",
    ),
    "tf32": ({}, precision(tf32=True), "tf32=None", "tf32=True"),
    "sdpa": ({}, precision(sdpa="math"), "sdpa=None", "sdpa='math'"),
    "recompute": ({}, {"recompute": "block"}, "recompute='none'", "recompute='block'"),
    "offload_optimizer": (
        {},
        {"device": Device(offload_optimizer="pieces")},
        "offload_optimizer='none'",
        "offload_optimizer='pieces'",
    ),
    "offload": ({}, {"recompute": Recompute(offload="activations")}, "offload='none'", "offload='activations'"),
    "segments": (
        {"recompute": Recompute("stage", 1)},
        {"recompute": Recompute("stage", 2)},
        "segments=1",
        "segments=2",
    ),
    "delays": (delays(), delays(delays=2), "delays=0, backward_delays=0", "delays=2, backward_delays=2"),
    "delays by block": (
        delays(delays=[0, 0, 1, 0]),
        delays(delays=lambda name: int(name == "1")),
        "delays=[0, 0, 1, 0]",
        "delays=[0, 1, 0, 0]",
    ),
    "backward_delays": (delays(delays=1), delays(delays=1, backward_delays=2), "=1", "backward_delays=2"),
    "correction": (
        {**ORDERED, "staleness": correction_of("gap-aware")},
        ORDERED,
        "correction=OwnCorrection(spec=gap-aware, options={'average': 0.999, 'eps': 1e-08})",
        "correction=None",
    ),
    "reduce": (parallel(), parallel(reduce="fast"), "reduce='ordered'", "reduce='fast'"),
    "combine": (
        parallel(combine=Combine("average", every=2)),
        parallel(combine=Combine("bmuf", every=2)),
        "combine=Combine(kind='average', every=2)",
        "combine=Combine(kind='bmuf', every=2)",
    ),
    "an option of combine": (
        parallel(combine=Combine("bmuf")),
        parallel(combine=BMUF),
        "combine=Combine(kind='bmuf')",
        "combine=Combine(kind='bmuf', momentum=0.25)",
    ),
    "sharding": (parallel(), parallel(sharding="optimizer"), "sharding='none'", "sharding='optimizer'"),
    "rank_order": (
        parallel(),
        parallel(rank_order="tp-dp-pp"),
        "rank_order='tp-pp-dp'",
        "rank_order='tp-dp-pp'",
    ),
    "slicing": (
        {"method": "seq1f1b", **partition()},
        {"method": "seq1f1b", **partition(slicing=Slicing(dimension=2))},
        "slicing=Slicing()",
        "slicing=Slicing(dimension=2)",
    ),
    "tied": (
        lazy({"d.weight": "a.weight"}),
        lazy({"d.bias": "a.bias"}),
        "tied=[[['a.weight'], ['d.weight']]]",
        "tied=[[['a.bias'], ['d.bias']]]",
    ),
    "lr_scheduler": ({}, {"lr_scheduler": as_it_is}, "lr_scheduler=None", "lr_scheduler='given'"),
    "mesh": (parallel(), on_a_mesh, "mesh=None", "mesh={'depth': 1, 'width': 2}"),
}


def build_all(group: dist.ProcessGroup) -> dict[str, str]:
    """What each rank says of every case; nothing where it builds the pipeline."""
    said = {}
    for what, case in DIFFERENT.items():
        given = case[dist.get_rank(group)]
        try:
            make_pipeline(group, given() if callable(given) else given)
            said[what] = ""
        except ConfigError as error:
            said[what] = str(error)
    return said


def test_ranks_with_different_options_are_told_which(pool: Pool) -> None:
    said = pool.submit(build_all, ranks=2, timeout=30.0)
    for what, (_, _, first, second) in DIFFERENT.items():
        for rank, (here, there) in enumerate([(first, second), (second, first)]):
            text = said[rank][what]
            assert text.startswith("ranks build different pipelines: this one has "), (what, text)
            mine, others = text.split(f", rank {1 - rank} has ")
            assert here in mine, (what, text)
            assert there in others, (what, text)


def test_every_option_is_compared_or_known_to_concern_one_process() -> None:
    """Each option that is compared has a case above."""
    plan = PipelinePlan.make({"a": nn.Linear(2, 2)}, make_schedule("1f1b", 1, 1), PipelineOptions())
    compared = common_options(plan.options, plan.ties, plan.delays, None, plan.schedule.sharding)
    left_out = PipelineOptions.names() - compared.keys()
    alone = {"timeout", "device", "cuda_graphs", "waits", "compile"}
    assert left_out == alone | {"balance", "microbatches", "in_flight"}  # these are of the stages and the schedule
    assert compared.keys() - {"width", "tensor_parallel", "in_flight_bytes"} <= DIFFERENT.keys()


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"device": "cpu", "waits": "shared", "max_grad_norm": 1, "staleness": Staleness(delays=1)},
        {"timeout": 9.0, "waits": "latency", "max_grad_norm": 1.0, "staleness": Staleness(delays=[1] * 4)},
    ),
    (
        precision(precision="fp16") | {"lr_scheduler": as_it_is},
        precision(precision="fp16", loss_scale=LossScale(65536)) | {"lr_scheduler": lambda made: as_it_is(made)},
    ),
    (partition(), partition(tied={})),
]


def build_alike(group: dist.ProcessGroup) -> list[str]:
    return [repr(make_pipeline(group, case[dist.get_rank(group)])) for case in SAME]


def test_options_that_mean_the_same_or_concern_one_process_are_not_refused(pool: Pool) -> None:
    first, second = pool.submit(build_alike, ranks=2)
    assert first == second
    assert len(first) == len(SAME)


def fails_while_planning(group: dist.ProcessGroup) -> str:
    names = dict.fromkeys("0123", 0) if dist.get_rank(group) == 0 else {}
    with pytest.raises((ConfigError, KeyError)) as caught:
        make_pipeline(group, delays(delays=lambda name: names[name]))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_later_rank_whose_function_fails_while_planning_tells_the_others(pool: Pool) -> None:
    first, second = pool.submit(fails_while_planning, ranks=2, timeout=15.0)
    assert first.startswith("ConfigError: rank 1 cannot build the pipeline that this one does, 1f1b (flush), 2 stages")
    assert first.endswith(": KeyError: '0'")
    assert second == "KeyError: '0'"


def shards_otherwise(group: dist.ProcessGroup) -> str:
    """Rank 1 wants another sharding than its request has, which it notices as plans are compared."""
    sharding = "gradients" if dist.get_rank(group) else "optimizer"
    options = PipelineOptions(DataParallel(2, sharding=sharding))
    request, blocks = ScheduleRequest("1f1b", 1, 4, sharding="optimizer"), {"a": nn.Linear(2, 2)}
    with pytest.raises(ConfigError) as caught:
        shared_plan(lambda known: UnprovenPlan.of(blocks, request, options, known), group)
    return str(caught.value)


def test_a_later_rank_that_fails_while_plans_are_compared_tells_the_others(pool: Pool) -> None:
    first, second = pool.submit(shards_otherwise, ranks=2, timeout=15.0)
    assert second == "1f1b: the schedule has sharding optimizer, but gradients is asked for; leave one out"
    assert first.endswith(f"1 stages, 4 microbatches, 1 blocks: {second}")


def pickled(group: dist.ProcessGroup) -> list[bool]:
    schedule = make_pipeline(group, {}).schedule
    made = pickle.loads(pickle.dumps(schedule)), copy.deepcopy(schedule)
    return [type(each) is Schedule and each == schedule for each in made]


def test_a_schedule_can_be_pickled_on_every_rank(pool: Pool) -> None:
    assert pool.submit(pickled, ranks=2) == [[True, True]] * 2
