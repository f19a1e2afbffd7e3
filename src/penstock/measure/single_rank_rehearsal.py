"""One rank of a plan on one device: its real program on its real stages, among stand-ins for all other ranks.

The other stages of the schedule are single blocks without work: those that feed a stage of the rank hand on tensors of
the shapes that the real ones would, and those behind it take whatever comes. So the rank runs every action of its
program, with messages of full size, and all memory but that of the stand-ins is its own. Where processes share stages
by tensor parallelism, as many do so together, and add up what they add up within passes.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.checks import check_whole
from penstock.comm.core.devices import find_device
from penstock.comm.core.tensor_group import TensorGroup
from penstock.comm.p2p.trees import leaves_of
from penstock.errors import ConfigError
from penstock.job.cpus import Cpus
from penstock.measure.local_processes import in_processes
from penstock.measure.recompute_choice import choose_for
from penstock.measure.stage_bytes import StageInputs
from penstock.measure.stage_trial import BlockPlace, StageTrial, Training
from penstock.models.gpt_variant import LanguageModel
from penstock.options.all_options import PipelineOptions
from penstock.runtime.from_checked_plan import pipeline_of
from penstock.runtime.malloc import keep_freed_memory
from penstock.runtime.pipeline_stats import TOTAL_ON_DEVICE
from penstock.runtime.plan.plan import PipelinePlan
from penstock.schedule.ir.schedule import Schedule
from penstock.timeline import Interval
from penstock.train.config.schema import TrainConfig
from penstock.train.prepare.prepare_run import Prepared, prepare
from penstock.train.setup.optimizers import optimizer_factory
from penstock.train.setup.pipeline_options import pipeline_options
from penstock.weights.optim.optimizer_factory import OptimizerFactory

_WARM = 2  # batches before those that are timed


@dataclass(frozen=True)
class Rehearsal:
    """What a rank did.

    Attributes:
        rank: its number in the pipeline.
        ranks: of the pipeline.
        stages: of the rank.
        blocks: of these.
        method: of the schedule.
        batches: that were timed.
        busy: seconds of its work in a batch, if every pass and update takes the median of its kind.
        fastest: the same, if each is as fast as the fastest one; no batch takes less.
        passes: for each kind of work in a batch, how many there are and the median seconds of one.
        threads: that it computed with.
        samples: of a batch in this pipeline.
        width: how many pipelines the plan has.
        peak: the most bytes of each kind that it held, and together ("total").
        left_out: what was not rehearsed.
        processes: that share the rank; what is said of its memory is that of each.
    """

    rank: int
    ranks: int
    stages: tuple[int, ...]
    blocks: tuple[str, ...]
    method: str
    batches: int
    busy: float
    fastest: float
    passes: Mapping[str, tuple[int, float]]
    threads: int
    samples: int
    width: int
    peak: Mapping[str, int]
    left_out: tuple[str, ...]
    processes: int = 1

    @property
    def on_device(self) -> int:
        """The most bytes that it held together, but for what is moved to the host's memory."""
        return self.peak.get(TOTAL_ON_DEVICE, self.peak["total"])


class StandIn(nn.Module):
    """A stage without work: takes whatever comes, and hands on tensors of given shapes.

    Args:
        value: a tree with what is handed on; a single number if None.
    """

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self._value = torch.zeros(1) if value is None else value
        self.signal = nn.Parameter(torch.zeros(1))

    def forward(self, given: Any) -> Any:
        """Return the tree; what wants a gradient depends on what came."""
        wanted = [x for x in leaves_of(given) if isinstance(x, Tensor) and x.requires_grad]
        signal: Tensor = self.signal
        for each in wanted:
            signal = signal + each.mean(dtype=torch.float32) * self.signal

        def filled(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            leaf = leaf.to(self.signal.device)
            return leaf + signal.to(leaf.dtype) if leaf.is_floating_point() else leaf.clone()

        return pytree.tree_map(filled, self._value)


def rehearse(config: TrainConfig, rank: int, batches: int = 5) -> Rehearsal:
    """Run the program of one rank on the device of a configuration.

    It computes with as many threads as each process of the run would have on this machine. Where processes share its
    stages, as many run its program together, and the first one is timed.

    Args:
        config: a plan, or any configuration of `penstock train`.
        rank: in the pipeline.
        batches: to time, after two others.

    Raises:
        ConfigError: there is no such rank, or something in the configuration is wrong.
        DataError: the text is missing, unreadable or too short.
        ScheduleError: there is no such schedule.
        WorkerError: one of the processes that share its stages failed.
    """
    check_whole("batches", batches, 1, 1_000_000)
    prepared = prepare(_alone(config), choose=choose_for)
    config = config.model_copy(update={"recompute": prepared.config.recompute})
    check_whole("rank", rank, 0, prepared.plan.schedule.ranks - 1)
    threads = config.threads or Cpus.of_this_process().threads(config.processes)
    if config.tensor_parallel == 1:
        return _rehearse(config, prepared, rank, batches, threads)
    given = config.model_dump(), rank, batches, threads
    found: dict[str, Any] = in_processes(config.tensor_parallel, config.timeout, _rehearse_parts, *given)
    found["passes"] = {kind: tuple(each) for kind, each in found["passes"].items()}
    values: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    return Rehearsal(**values)


def _rehearse_parts(
    group: dist.ProcessGroup, values: dict[str, Any], rank: int, batches: int, threads: int
) -> dict[str, Any]:
    """Rehearse as one of the processes that share the stages of a rank; returns what was found as plain values."""
    config = TrainConfig.model_validate(values)
    return asdict(_rehearse(config, prepare(_alone(config)), rank, batches, threads, TensorGroup.around(group)))


def _rehearse(
    config: TrainConfig, prepared: Prepared, rank: int, batches: int, threads: int, tensor: TensorGroup | None = None
) -> Rehearsal:
    """Run the program of a rank, with so many threads."""
    alone, plan, device = prepared.config, prepared.plan, find_device(config.device)
    options = pipeline_options(alone, prepared.model).changed(device=device, tied=None)
    sample = prepared.windows.samples(0, alone.microbatch_size)
    rehearsed, before = _Rehearsed(plan, rank, prepared.model, sample, tensor), torch.get_num_threads()
    keep_freed_memory()
    torch.set_num_threads(threads)
    try:
        with options.precision.kernels.applied():
            work, peak = rehearsed.run(options, optimizer_factory(alone.optimizer), batches, _WARM)
    finally:
        torch.set_num_threads(before)
    samples = alone.microbatches * alone.microbatch_size
    return Rehearsal(
        rank, plan.schedule.ranks, rehearsed.own, rehearsed.blocks, alone.row.name, batches, work.busy, work.fastest,
        work.passes, threads, samples, config.width, peak, _left_out(config), config.tensor_parallel,
    )  # fmt: skip


def _alone(config: TrainConfig) -> TrainConfig:
    """Return the configuration of a single pipeline; with sharding of several, of which the first one owns its part."""
    if config.combine.kind != "reduce":
        raise ConfigError(
            f"with combine.kind={config.combine.kind} pipelines have weights of their own, which one rank cannot "
            "rehearse alone; --set combine.kind=reduce rehearses it with sums of gradients in their place"
        )
    return config if _shards(config) else config.model_copy(update={"width": 1})


def _shards(config: TrainConfig) -> bool:
    return config.width > 1 and str(config.sharding) not in ("none", "None")


def _left_out(config: TrainConfig) -> tuple[str, ...]:
    """Return what a rank alone does not do."""
    lost = []
    if config.width > 1:
        gathers = " and gathers of weights" if _shards(config) else ""
        lost.append(f"sums of gradients{gathers} over {config.width} pipelines")
    if config.tensor_parallel > 1:
        lost.append(f"what the {config.tensor_parallel} processes that share each stage decide together")
    if config.model.tied:
        lost.append("the sum of the gradient that first and last stage share")
    in_flight: Any = config.options.get("in_flight")
    if isinstance(in_flight, str):
        lost.append(f"the microbatches in flight that links ask for (options.in_flight={in_flight}), which take memory")
    if config.phased:
        lost.append(f"the methods that take turns with {config.row.name} (sync, fallback)")
    return tuple(lost)


class _Rehearsed:
    """The blocks of a rank among stand-ins.

    Attributes:
        own: stages of the rank.
        blocks: their names.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        rank: int,
        model: LanguageModel,
        sample: tuple[Any, Any],
        tensor: TensorGroup | None = None,
    ) -> None:
        self._plan, self._rank, self._all, self._sample = plan, rank, model.blocks, sample
        self._loss, self._tensor = model.loss, tensor
        self.own = tuple(sorted({stage.index for stage in plan.schedule.on_rank(rank)}))
        self.blocks = tuple(name for index in self.own for name in plan.parts[index])

    def run(
        self, options: PipelineOptions, optimizer: OptimizerFactory, batches: int, warm: int
    ) -> tuple[OwnWork, dict[str, int]]:
        """Return what the work takes, and the peak bytes."""
        depth = self._plan.schedule.num_stages
        shared = self._tensor or TensorGroup.alone(None)
        outputs = self._outputs(Training(self._loss, optimizer, options, tensor=shared))
        blocks, balance = dict[str, Any](), []
        for index, part in enumerate(self._plan.parts):
            own = index in self.own
            balance.append(len(part) if own else 1)
            named = {name: self._all[name] for name in part}
            blocks |= named if own else {f"instead of stage {index}": StandIn(outputs.get(index))}
        loss = self._loss if depth - 1 in self.own else _no_loss
        plan = PipelinePlan.make(blocks, self._plan.given, options.changed(balance=balance))
        pipeline = pipeline_of(plan, blocks, loss, optimizer, tensor=self._tensor, first_only=True)
        count, others = self._plan.schedule.microbatches, options.data_parallel.width - 1
        for _ in pipeline.run(
            [*(self._pair() for _ in range(count)), *[self._sample] * (count * others)] for _ in range(warm + batches)
        ):
            pass
        work = own_work(pipeline.timeline().intervals, self._rank, range(warm, warm + batches))
        return work, pipeline.peak_bytes()[self._rank]

    def _pair(self) -> tuple[Any, Any]:
        """Return a microbatch in memory of its own."""
        copy: tuple[Any, Any] = pytree.tree_map_only(Tensor, torch.clone, self._sample)
        return copy

    def _outputs(self, training: Training) -> dict[int, Any]:
        """Return what other stages hand on to one of the rank; blocks before these run once, one by one."""
        schedule, parts = self._plan.schedule, self._plan.parts
        inputs, found = StageInputs(self._sample[0], len(parts), schedule), dict[int, Any]()
        needed = _leading_to(schedule, self.own)
        alone = training._replace(options=training.options.changed(recompute="none", offload="none", balance=None))
        for index in (each for each in inputs.order if each in needed):
            given, first = inputs.of(index), inputs.place(index).first
            for name in parts[index]:
                place = BlockPlace(first=first and name == parts[index][0], last=False)
                with closing(StageTrial({name: self._all[name]}, place, alone)) as trial:
                    given = trial.output_of(given)
            inputs.add(index, given)
            if index not in self.own:
                found[index] = given.value
        return found


def _leading_to(schedule: Schedule, stages: Collection[int]) -> set[int]:
    """Return the stages from which data flow to some others."""
    found, border = set[int](), list(stages)
    while border:
        new = {edge.source for edge in schedule.predecessors[border.pop()]} - found
        found |= new
        border += new
    return found


def _no_loss(output: Any, target: Any) -> Tensor:  # noqa: ARG001
    """Return what the last stand-in hands on as a loss."""
    return output.float().mean()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class OwnWork:
    """The passes and updates of a rank, as they were measured.

    Attributes:
        passes: for each kind of work in a batch, how many there are and the seconds of one: the median on its stage, of
            several stages their mean.
        fastest: seconds of a batch in which every pass and update is as fast as the fastest of its kind on its stage.
    """

    passes: Mapping[str, tuple[int, float]]
    fastest: float

    @property
    def busy(self) -> float:
        """Seconds of a batch whose passes and updates all take their median."""
        return sum(count * seconds for count, seconds in self.passes.values())


def own_work(intervals: Iterable[Interval], rank: int, batches: range) -> OwnWork:
    """Return what the work of a rank takes; neither that of other ranks counts nor any wait.

    On a machine with other processes almost every batch has a pass that was interrupted, so that even the median of
    whole batches is far too long. The fastest of many alike passes was not interrupted.

    Args:
        intervals: of a timeline.
        rank: of which.
        batches: that count.
    """
    times: dict[tuple[str, int, int], list[float]] = {}
    for each in intervals:
        if each.is_work and each.rank == rank and each.batch in batches:
            times.setdefault((each.what, each.stage, each.direction), []).append(each.end - each.start)
    kinds: dict[str, list[float]] = {}
    for (what, _, _), found in sorted(times.items()):
        kinds.setdefault(what, []).extend([statistics.median(found)] * len(found))
    passes = {what: (round(len(found) / len(batches)), statistics.mean(found)) for what, found in kinds.items()}
    return OwnWork(passes, sum(len(found) / len(batches) * min(found) for found in times.values()))
