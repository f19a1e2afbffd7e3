"""What `benchmarks.links` trains, and with which methods: models, arms, and the cases that combine them.

The arms of Penstock and of `torch.distributed.pipelining` are those of `benchmarks.throughput`. `ReplicasArm` and
`ShardsArm` divide the microbatches of a batch among the ranks instead, each of which has the whole model, or a share of
every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.arms import (
    Arm,
    Data,
    Pair,
    PenstockArm,
    PenstockStream,
    Task,
    TorchArm,
    make_optimizer,
    mean_loss,
    stage_modules,
)
from benchmarks.network.sharded_arms import CHUNKS, LoopedFsdpArm, ParallelPipelinesArm
from penstock import GPTConfig


class Model(NamedTuple):
    """What is trained.

    Attributes:
        shape: of the GPT.
        samples: of a microbatch.
    """

    shape: GPTConfig
    samples: int

    @property
    def message(self) -> int:
        """Bytes of the output of a stage for one microbatch, and of its gradient."""
        return 4 * self.samples * self.shape.context * self.shape.width

    @property
    def task(self) -> Task:
        """Its stages, loss and optimizer."""
        return Task(partial(stage_modules, shape=self.shape), mean_loss, make_optimizer)

    def data(self) -> Data:
        """Random tokens, which take as long as text."""
        generator = torch.Generator().manual_seed(0)
        size = (2, self.samples, self.shape.context)
        pairs = [torch.randint(self.shape.vocabulary, size, generator=generator) for _ in range(64)]
        return Data([(x, y) for x, y in pairs])


MODELS: dict[str, Model] = {
    "few": Model(GPTConfig(layers=28, width=32, heads=2, context=64, vocabulary=64), samples=16),
    "many": Model(GPTConfig(layers=8, width=256, heads=4, context=64, vocabulary=64), samples=2),
    "tiny": Model(GPTConfig(layers=4, width=8, heads=2, context=4, vocabulary=8), samples=1),
}
"""With few parameters per token (0.35 M for 1024 tokens), with many (6.3 M for 128), and one for tests.

A message takes 11 ms at 100 Mbit/s with either, somewhat less than a forward of half of the model on a core of 2.5 GHz.
"""


class _DividedArm:
    """Ranks that train on different microbatches of a batch; one update per batch."""

    module: nn.Module

    def __init__(self, microbatches: int, data: Data, task: Task) -> None:
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        if microbatches % self.ranks:
            raise ValueError(f"{microbatches} microbatches cannot be divided evenly among {self.ranks} ranks")
        self.microbatches, self.data, self.loss = microbatches, data, task.loss
        (self.whole,) = task.stages(1)
        self.module = self.wrap(self.whole)
        self.optimizer = task.optimizer(self.module.parameters())

    def wrap(self, whole: nn.Sequential) -> nn.Module:
        """Make the model one of many."""
        raise NotImplementedError

    def run(self, batches: int) -> None:
        """Train on this rank's microbatches of every batch."""
        for batch in self.data.batches(batches, self.microbatches):
            own = batch[self.rank :: self.ranks]
            for number, pair in enumerate(own):
                with self.summing(number + 1 == len(own)):
                    self.backward(pair, len(own))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def backward(self, pair: Pair, count: int) -> None:
        """Add the gradients of a microbatch, one of `count`."""
        inputs, targets = pair
        (self.loss(self.module(inputs), targets) / count).backward()

    def summing(self, last: bool) -> AbstractContextManager[None]:
        """Sum gradients over the ranks with the last microbatch of a batch only."""
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing: nothing is in flight between batches."""


class ReplicasArm(_DividedArm):
    """`DistributedDataParallel`: gradients are averaged once per batch."""

    module: DistributedDataParallel

    def wrap(self, whole: nn.Sequential) -> nn.Module:
        """Make replicas."""
        # The tables of rotary positions are buffers, the same on every rank.
        options = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
        return DistributedDataParallel(whole, process_group=dist.new_group(), **options)

    def summing(self, last: bool) -> AbstractContextManager[None]:
        """Sum gradients over the ranks with the last microbatch of a batch only."""
        return nullcontext() if last else self.module.no_sync()


class ShardsArm(_DividedArm):
    """`fully_shard` of every block, with the least bytes: parameters are gathered once per batch, gradients summed so.

    Whole parameters are kept from the first forward of a batch to its last backward, as in ZeRO-2.
    """

    def wrap(self, whole: nn.Sequential) -> nn.Module:
        """Divide the parameters."""
        mesh = init_device_mesh("cpu", (self.ranks,))
        for module in (*whole, whole):
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
        return whole

    def summing(self, last: bool) -> AbstractContextManager[None]:
        """Sum gradients over the ranks with the last microbatch of a batch only."""
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(last)
        self.module.set_reshard_after_backward(last)
        return nullcontext()


Maker = Callable[[int, Data, Task], Arm]
"""(m, data, task) -> an arm of all ranks of the process group."""

METHODS: Mapping[str, str] = {
    "penstock 2bw auto": "2bw",
    "penstock 2bw": "2bw",
    "penstock 1f1b auto": "1f1b",
    "penstock 1f1b": "1f1b",
    "penstock zb-h1": "zb-h1",
    "penstock zb-v": "zb-v",
}
"""Arms of Penstock -> the method as `make_schedule` takes it."""

AUTO = ("penstock 2bw auto", "penstock 1f1b auto")
"""Those with `in_flight="auto"`: a pipeline for each link, which measures it in its first batches.

2bw and 1f1b themselves have d microbatches in flight on the first rank.
"""

STREAMS = ("penstock 2bw auto", "penstock 2bw")
"""Those whose batches overlap: one span from beginning to end, of which a turn is a part that is not halted."""


def _penstock(name: str, m: int, data: Data, task: Task) -> Arm:
    kind = PenstockStream if name in STREAMS else PenstockArm
    in_flight = "auto" if name in AUTO else None
    return kind(METHODS[name], m, data, task=task, ranks=dist.get_world_size(), in_flight=in_flight)


MAKERS: dict[str, Maker] = {
    **{name: partial(_penstock, name) for name in METHODS},
    "torch 1f1b": partial(TorchArm, "1f1b"),
    "torch zbv": partial(TorchArm, "zbv"),
    "torch ddp": ReplicasArm,
    "torch fsdp2": ShardsArm,
}
"""The arms of `benchmarks.links` by name."""

PARALLEL = ("layered", "depth-first-full", "breadth-first")
"""Methods of two parallel pipelines: fully sharded, the same depth-first, and replicated."""
PARALLEL_MAKERS: dict[str, Maker] = {
    **{f"penstock {name} x 2": partial(ParallelPipelinesArm, name, CHUNKS, None) for name in PARALLEL},
    "torch looped bfs, fsdp2 x 2": LoopedFsdpArm,
}
LEVELS: dict[str, Maker] = {
    f"penstock 2bw x 2, {level}": partial(ParallelPipelinesArm, "2bw", 1, level) for level in ("none", "gradients")
}
"""The arms of `benchmarks.sharded_links` by name, and those of `benchmarks.sharded_levels`."""

DIVIDED = ("torch ddp", "torch fsdp2")
"""Arms whose batches all take the same time, so that a quarter of the microbatches is enough in a turn."""


class Case(NamedTuple):
    """A number of hosts, a model and a batch, with the arms that are compared there.

    Attributes:
        hosts: one rank on each.
        model: of `MODELS`.
        m: microbatches per batch.
        arms: of `MAKERS`.
        links: of `benchmarks.network.hosts.LINKS`; all of them if empty.
    """

    hosts: int
    model: str
    m: int
    arms: tuple[str, ...] = tuple(MAKERS)
    links: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """How the raw data tell it."""
        return f"{self.hosts} hosts, {self.model} parameters, m = {self.m}"


_FAST_ENOUGH = ("loopback", "1 Gbit/s", "200 Mbit/s", "100 Mbit/s", "1 Gbit/s, 5 ms")  # messages do not set the pace
CASES = (
    Case(2, "few", 2, links=_FAST_ENOUGH),
    Case(2, "few", 8),
    Case(2, "many", 8, links=_FAST_ENOUGH),
    Case(4, "few", 8, links=_FAST_ENOUGH),
)
SHARDED = tuple(Case(4, "many", m, tuple(PARALLEL_MAKERS)) for m in (2, 4, 16))
"""Of `benchmarks.sharded_links`: two pipelines of two ranks, m microbatches for each."""
REPLICATED = Case(4, "many", 8, tuple(LEVELS), ("loopback",))
"""Two pipelines of two ranks without links: what sharding costs beside replicas."""
TINY = (Case(2, "tiny", 2),)
"""For tests."""


def case_named(name: str) -> Case:
    """Find a case."""
    return next(case for case in (*CASES, *SHARDED, REPLICATED, *TINY) if case.name == name)


def arms_of(case: Case, names: tuple[str, ...]) -> Iterator[tuple[str, Arm]]:
    """Make arms of a case, on every rank in the same order."""
    model = MODELS[case.model]
    data = model.data()
    for name in names:
        yield name, (MAKERS | PARALLEL_MAKERS | LEVELS)[name](case.m, data, model.task)
