"""`Pipeline`: a model divided into stages and trained by a proven schedule, on one pipeline or several.

Without a process group all ranks run in this process, in turns; with one, each rank is a process. Both give the same
numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from penstock.comm.core.rank_grid import check_group, rank_grid, warn_if_alone
from penstock.comm.device_mesh import from_mesh
from penstock.errors import ConfigError
from penstock.options.all_options import PipelineOptions
from penstock.options.parallelism import DataParallel, Microbatches, Partition, rank_numbers
from penstock.options.passes import Precision, PrecisionName, Recompute, Staleness
from penstock.options.run import Device, Group, RunOptions
from penstock.options.updates import Divergence, UpdateOptions
from penstock.partition.blocks import Blocks, check_same_blocks, named_blocks
from penstock.runtime.data.batch_source import Batches, inputs_alone
from penstock.runtime.engine.lifecycle import between_runs
from penstock.runtime.execute.evaluation_without_draining import Evaluating, check_evaluating
from penstock.runtime.plan.plan import UnprovenPlan
from penstock.runtime.plan.received_schedule import ranks_of
from penstock.runtime.plan.schedule_from_arguments import Chosen, default_stages, request_for, with_asked_in_flight
from penstock.runtime.plan.sharding_limits import check_shown
from penstock.runtime.rank.batch_reports import Report
from penstock.runtime.rank.snapshot import Saving, check_saving
from penstock.runtime.saved_states import SavedStates
from penstock.runtime.setup.shared_plan import shared_plan
from penstock.runtime.training_run import TrainingRun
from penstock.runtime.update.run_events import Evaluation, with_numbers
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.proof.proof import Proof
from penstock.stage.autograd.recompute import RecomputeMode
from penstock.stage.blocks.loss import LossFunction, check_loss
from penstock.weights.corrections.base import Correction
from penstock.weights.optim.optimizer_factory import OptimizerFactory, refuse_instances
from penstock.weights.update_hooks import UpdateHook
from penstock.weights.updates.lr_scheduler_table import SchedulerFactory


class Pipeline(SavedStates):
    """A model that is divided into stages and trained by a method of pipeline parallelism.

        pipeline = Pipeline(
            model, method="2bw", stages=4, microbatches=8, loss=loss, optimizer=make_optimizer, example=inputs
        )
        for report in pipeline.run(loader):
            ...

    While a run is under way, the pipeline owns the modules, optimizers and batches that it was given: batches overlap,
    weights have several versions, and updates are not in step with the loop over reports. In the loop read what you
    like, and set attributes of modules; what changes weights, gradients, optimizers or what is trained goes into an
    option (`max_grad_norm`, `lr_scheduler`), a hook of an optimizer, or between two runs, where all of it is yours. A
    batch is not written into once it was yielded. Between processes each has the trained weights of its own stages:
    `full_state_dict` has all of them. Only weights and gradients written in the loop, rates set there, and a loader
    that refills its first batch are noticed; nothing else of the kind is.

    Args:
        blocks: the model, with an `example`. It is divided into blocks (`parts`), and its parameters keep their names.
            Or its blocks, without: an nn.Sequential, or a list or dict of modules and functions, each of which takes
            what the one before returned. A `LazyBlock` is built only in the process that holds it. The names of a dict
            are those of `full_state_dict`. Hooks on parameters run for each microbatch, as in plain torch where
            gradients accumulate; those of `register_hook` get the gradient of its loss sum divided by
            `Precision.divisor`.
        method: what ranks run: the name of a method, such as "2bw" (`penstock methods` lists them), or what
            `penstock.method` returned; an order of your own, a function as of `make_schedule`, which rank 0 alone calls
            and proves; or a schedule as `make_schedule`, `check` or `load_schedule` return it.
        stages: d, the number of stages (of ranks, if the method places several stages on one). By default, one for each
            rank that the group has for a pipeline.
        microbatches: m, the number of microbatches that a batch is split into, for each of the parallel pipelines; or a
            `Microbatches`, with how many of them are in flight, such as ``Microbatches(8, in_flight="auto")``: as many
            as the links between processes ask for, measured in the first batches (`Pipeline.in_flight`).
        loss: a function, (output, target) -> the mean over a microbatch, as torch's losses return it; or (sum, weight),
            such as the sum over tokens and their number. Updates are those of the mean over the whole batch: a mean
            counts by its samples (the length of the first dimension of the target, or of the output if the target has
            none), less those that the loss does not count: the operations of each call are followed, so targets that
            torch's losses over classes ignore, weights of classes, and masks are found wherever the loss uses them. A
            number that is not seen to be a mean over samples, such as a sum or a root, is refused. A whole model's own
            loss, ``lambda output, target: output.loss``, counts by the targets that torch's loss in its forward counts.
            A third of what a loss returns is a dict of numbers, added up over the batch (`Report.numbers`). A dict of
            losses, by stage,
            gives stages without a successor losses of their own; their sums are added, and divided by the weight of the
            last stage, whose loss is reported.
        optimizer: a function, named parameters -> optimizer, such as ``lambda named: torch.optim.AdamW(named,
            lr=1e-3)``, called once per stage. A parameter that a batch does not use counts as one with a gradient of
            zero (plain torch would skip it), so momentum and weight decay act on it. Step hooks run once per update
            (again where post-validation makes an update again).
        lr_scheduler: a function, optimizer -> scheduler of torch, called once per stage, such as ``lambda optimizer:
            OneCycleLR(optimizer, max_lr=1e-3, total_steps=500)``, or ``lambda optimizer: LambdaLR(optimizer, factor)``
            of a function of the number of the update. It sets the rates, and momentum if it does that, of every update
            that is made; nobody steps it by hand, and a resumed run has it where it was.
        max_grad_norm: the largest global norm of a gradient; larger ones are scaled down, as by
            `torch.nn.utils.clip_grad_norm_`. With it, a gradient that is not finite skips the update (as with a loss
            scale or parallel pipelines).
        ema_decay: the decay of a moving average of the weights, A = decay A + (1 - decay) W after every update, for
            ``evaluate(..., averaged=True)`` and ``state_dict(averaged=True)``.
        precision: "fp32", "bf16" or "fp16", the format of forwards and backwards; or a `Precision` with more options.
        recompute: "none", "block" or "stage": which forwards are run again to save memory; a list with one of these
            for each stage; or a `Recompute`.
        data_parallel: the number of parallel pipelines; or a `DataParallel`, which says how they agree.
        staleness: what is done about weights that are read late, if no method brings it; or a `Staleness`, with delays
            of your own choice.
        partition: the number of blocks of each stage; or a `Partition`, with tied parameters and slices of sequences.
            Stages are balanced by the cost of blocks if None.
        divergence: what counts as a divergence, for `Pipeline.trouble`.
        example: of a whole model, inputs of a batch as it takes them, such as ``next(iter(loader))[0]`` (a tuple by
            position, a dict by name; a few samples are enough). The model is divided as it is: its forward is run to
            find the layers that it calls, their order and their work; each stage runs the model's own forward, and
            computes what is its own of it; and the stages are compared with the model on the example, gradients
            included. Code between layers that stages cannot run alike is refused, with its line.
        seed: of the random numbers that blocks draw, such as dropout.
        group: a process group with one process per rank, the ranks of a pipeline next to each other (or the replicas of
            a stage: `DataParallel.rank_order`); None to run all ranks in this process. Pipelines whose runs overlap in
            time need a group each. On GPUs messages travel over NCCL if the group has it (``init_process_group(
            "cpu:gloo,cuda:nccl")``; the group is then the whole job), else over gloo through the memory of the host, as
            they must where several ranks share a GPU. Or a `Group`, with the seconds after which a missing message is
            an error (300), and how a process waits for messages.
        device: where the blocks are moved to and compute: "auto" (a GPU if there is one), "cpu", "cuda" (processes of a
            machine take its GPUs in turns, by LOCAL_RANK), or one such as "cuda:1". By default they stay where they
            are. Batches may be anywhere; they are moved there. It has run on one GPU so far. Or a `Device`, such as
            ``Device("cuda", cuda_graphs=True)``, where the host issues each pass by one call, or with
            `offload_optimizer`, which keeps optimizer states in the host's memory between updates.

    Raises:
        ConfigError: model, schedule, options and group do not fit.
        ScheduleError: the schedule cannot be built, or is wrong.
        CapabilityError: the runtime does not offer something, or the optimizer cannot step a stage.

    Attributes:
        schedule: what ranks run.
        proof: of the schedule, with the facts that it derived; `ProvenSchedule.of` makes of it what can be drawn.
        parts: the names of the blocks of each stage.
        grid: all ranks, and which of them are in this process.
        delays, backward_delays: by how many updates the weights that each block reads are late by choice (`Staleness`).
    """

    def __init__(
        self,
        blocks: Blocks,
        method: Chosen,
        *,
        stages: int | None = None,
        microbatches: int | Microbatches | None = None,
        loss: LossFunction | Mapping[int, LossFunction],
        optimizer: OptimizerFactory,
        lr_scheduler: SchedulerFactory | None = None,
        max_grad_norm: float | None = None,
        ema_decay: float | None = None,
        precision: PrecisionName | Precision = "fp32",
        recompute: RecomputeMode | Sequence[RecomputeMode] | Recompute = "none",
        data_parallel: int | DataParallel = 1,
        staleness: Correction | Staleness | None = None,
        partition: Sequence[int] | Partition | None = None,
        divergence: Divergence | None = None,
        example: Any = None,
        seed: int = 0,
        group: dist.ProcessGroup | Group | None = None,
        device: str | torch.device | Device | None = None,
    ) -> None:
        processes = group if isinstance(group, Group) else Group(group)
        division = partition if isinstance(partition, Partition) else Partition(partition)
        depth_at_least = _stages_at_least(stages, processes.group)
        named = blocks_of(blocks, optimizer, lr_scheduler, example, depth_at_least, division)
        place = device if isinstance(device, Device) else Device(device)
        options = PipelineOptions(
            data_parallel if isinstance(data_parallel, DataParallel) else DataParallel(data_parallel),
            precision if isinstance(precision, Precision) else Precision(precision),
            recompute if isinstance(recompute, Recompute) else Recompute(recompute),
            staleness if isinstance(staleness, Staleness) else Staleness(staleness),
            division,
            microbatches if isinstance(microbatches, Microbatches) else Microbatches(microbatches),
            UpdateOptions(
                max_grad_norm=max_grad_norm,
                lr_scheduler=lr_scheduler,
                ema_decay=ema_decay,
                divergence=divergence,
            ),
            RunOptions(seed=seed, **vars(place), timeout=processes.timeout, waits=processes.waits),
        )
        mesh, split, group = options.data_parallel.mesh, options.microbatches, processes.group
        correction, width = options.staleness.correction, options.data_parallel.width
        check_group(group)
        if isinstance(method, Schedule | Proof) and not (stages is None and split.microbatches is None):
            raise ConfigError("a schedule has its stages and microbatches; leave stages and microbatches out")
        tensor = options.partition.tensor_parallel
        depth = partial(default_stages, width * tensor, group, mesh) if stages is None else stages
        request, correction = request_for(method, correction, depth, split.microbatches)
        request = with_asked_in_flight(request, split.in_flight)
        ranks = ranks_of(request)
        numbers, tensor, group = from_mesh(mesh, rank_numbers(options.data_parallel, ranks), tensor, group)
        if group is None:
            warn_if_alone()
        check_loss(loss)  # on all ranks alike, so that none waits for one that has refused it
        options = options.changed(
            width=numbers.width, rank_order=numbers.order, correction=correction, tensor_parallel=tensor
        )
        grid = rank_grid(numbers, group, processes.timeout, tensor)
        plan = shared_plan(lambda known: UnprovenPlan.of(named, request, options, known), grid.everyone, tensor)
        self._build(plan, grid, blocks, named, loss, optimizer)

    def __repr__(self) -> str:
        """Return the schedule and how far training is."""
        width = f"{self.grid.width} pipelines, " if self.grid.width > 1 else ""
        return f"<Pipeline of {self.schedule!r}: {width}{self.batches} batches trained>"

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self, batches: Batches, *, save: Saving | None = None, evaluate: Evaluating | None = None) -> TrainingRun:
        """Train on batches, and yield a report for each.

            for report in pipeline.run(loader):
                print(report.batch, report.loss)

        A batch is a pair (inputs, targets) of tensors, or of trees of tensors, as a DataLoader yields it, or a dict or
        dataclass with `labels`, which go to the loss. It is split along the first dimension into m microbatches for
        each parallel pipeline, which differ by one sample at most (`Whole` and `Microbatches` say what is not). A list
        of that many pairs (input, target) is taken as microbatches. Of two pairs, a tuple is a whole batch, a list of
        two tuples is two microbatches, and another list is refused. Between processes, every rank passes the same
        batches. Each batch has tensors of its own, since the next one is read while this one is trained on: for a
        loader that refills the same ones ``((x.clone(), y.clone()) for x, y in loader)`` helps.

        Losses become known while later microbatches are under way, so updates are not in step with the loop. The run
        ends when the data ends or `stop` was called. Leaving the loop, an exception of the data's iterator and Ctrl-C
        end it, too; all batches that have entered the pipeline are always finished. Any rank may leave or stop, and the
        others end after the same batch, a few batches later, as if their data ended there; where one has left, a
        warning says which and when.

        Snapshots and evaluations fit between two batches without draining the pipeline where all stages have one newest
        version there: under methods that flush and under 2bw. Under the others it is drained for them, which with stash
        and vertical-sync changes what the next batches read; so it is, and does, under every method where pipelines are
        combined by "wsp". Evaluations of the last versions, which later batches would read, come at the end of the run.

        Args:
            batches: the data.
            save: snapshots to take on the way, such as ``checkpoints.every(100)``.
            evaluate: evaluations to make on the way; what they find comes with the reports.

        Raises:
            DataError: a batch cannot be split. As with whatever else the data's iterator raises, all batches before it
                have been trained on and reported by then, and the pipeline is as good as after any run; ranks that
                could read it raise a DataError, too. The same holds of an evaluation, after the batches under way. Or
                ranks have other numbers of batches. Or the loader has written into the first batch while it was read;
                then the pipeline is broken.
            ConfigError: `lr_scheduler` has no rate for the update of a batch; as with a batch that cannot be split, but
                all ranks raise it. Or, when the run begins, no parameter of the model is trained, or parameters or
                blocks have come, gone, or begun or ceased to be trained since the pipeline was made, or a process is to
                go on from weights that another one has trained further, for another pipeline of the model; on the other
                ranks a DataError. (New values are taken over: by `load_state_dict`, also with assign=True, or ``p.data
                = ...``. All passes of the next batch read them.)
            PenstockError: a message did not arrive, the data differ between ranks, or weights were rewritten under a
                reader; then, and after whatever the model itself raises, the pipeline is broken, and a note of the
                error says what is lost and how to go on. Or another rank made another call.
        """
        check_same_blocks(*self._given)
        self._sharing.check()
        if save is not None:
            check_saving(save)
        if evaluate is not None:
            check_evaluating(evaluate)
            if self.combine.apart and evaluate.every % self.combine.every:
                raise ConfigError(
                    f"evaluate: every is {evaluate.every}, but pipelines meet every {self.combine.every} batches, and "
                    "in between each has weights of its own; evaluate every multiple of it"
                )
        if save is not None:
            save = save._replace(sink=partial(self._sink, save.sink, shares=save.shares))
        return TrainingRun(self._engine.train(batches, save, evaluate, self._halts), self.stop)

    @between_runs()
    def evaluate(self, batches: Batches, *, averaged: bool = False) -> Evaluation | None:
        """Return the mean loss on batches under the newest weights, and its weight, on all ranks.

        Args:
            batches: the data, as for `run`; but a pair may have any number of samples, so a short last batch counts.
            averaged: read the averaged weights (`ema_decay`).

        Returns:
            (mean, weight), such as the number of samples, a pair whose `numbers` are the sums of those that the loss
            returns; None if the weight is zero.

        Raises:
            DataError: a batch cannot be split. After this, and after whatever else the data's iterator, the model or
                the loss raises, the pipeline is as it was. Other ranks raise a DataError, or a PenstockError that
                quotes the error.
            ConfigError: a process has old weights of what another one has trained further, for another pipeline of the
                model; on the other ranks a DataError.
        """
        check_same_blocks(*self._given)
        total, weight, numbers, _ = self._spans.evaluate(batches, averaged)
        return with_numbers(Evaluation(total / weight, weight), numbers) if weight else None

    def predict(self, batches: Batches, *, averaged: bool = False) -> Iterator[Any]:
        """Yield what the last stage returns for each batch, in order, under the newest weights.

            for output in pipeline.predict(loader):
                print(output.argmax(-1))

        It runs forwards only, in evaluation mode, as far as outputs are asked for, and computes no loss. Between
        processes all ranks go through it together: those of the last stage get outputs, of parallel pipelines each its
        part of every batch; the others get None. Leaving the loop ends it after the batches under way.

        Args:
            batches: the data, as for `evaluate`; or inputs alone, each a tensor or a dict (of a tuple of inputs, a pair
                of it and None).
            averaged: read the averaged weights (`ema_decay`).

        Raises:
            DataError: as `evaluate`; or the outputs for the microbatches of a batch, which are joined along their first
                dimension, or that which `Microbatches(dims=)` says of targets, differ in others.
            ConfigError: as `evaluate`.
        """
        check_same_blocks(*self._given)
        with self._spans.life.exclusive():
            yield from self._spans.predict(inputs_alone(batches), averaged)

    def step(self, batch: Any) -> Report:
        """Train on one batch, and return its report: a run of this batch alone.

        The pipeline is empty before and behind it, so it is for methods that empty it after every batch anyway: the
        numbers are those of `run`, and between processes the call takes a little longer.

        Raises:
            ConfigError: batches of the method overlap, which is what it is for; use `run` over an iterator.
            DataError, PenstockError: as `run`.
        """
        if self.schedule.rule != "flush":
            raise ConfigError(
                f"step() empties the pipeline after its batch, but batches of {self.schedule.name} overlap, and the "
                "report of one comes while later ones are under way; use run(), of any iterator: for report in "
                "pipeline.run(batches): ..."
            )
        (report,) = self.run([batch])
        return report

    def stop(self) -> None:
        """End the run after the batches that are under way; between processes any rank may ask for it.

        The request travels with gradients, or with what all stages decide together. So in a pipeline whose first stages
        have no backward (`frozen` in its schedule) only their ranks can ask.
        """
        self._ranks[0].stop.ask()

    def on_update(self, hook: UpdateHook) -> RemovableHandle:
        """Let a function be called at every update of each stage in this process, such as one that averages weights.

            averages = {}

            def average(update, weights):
                for name, tensor in weights.items():
                    averages.setdefault(name, tensor.clone()).lerp_(tensor, 0.001)

            pipeline.on_update(average)

        Updates are not in step with the loop over reports: what is done there sees weights that are one or more updates
        older or newer. The function is called on the rank of each stage, directly after its update, with the number of
        updates made so far (1 at the first, going on in a resumed run) and the new weights in the precision of the
        optimizer, by name. With sharding it is called when a gather has made these whole: before the first forward of
        the stage that reads them, or at the end of the run. Skipped updates do not count. The next update writes over
        the weights: clone what is to outlive the call, and write nothing into them. Where this process holds several
        copies of a stage, it is called for the first; where pipelines have weights of their own (`Combine`), before
        they meet. What it keeps is not part of checkpoints.

        Args:
            hook: (update, weights) -> anything.

        Returns:
            A handle, whose `remove()` ends the calls.

        Raises:
            ConfigError: it is no function; within a run, it has written into the weights.
            CapabilityError: with sharding in low precision, or under a method that reads ahead, no pipeline has the
                weights that it would be shown.
        """
        if not callable(hook):
            raise ConfigError(f"on_update takes a function, (update, weights) -> None; got {hook!r:.80}")
        check_shown(self.schedule, self._plan.options)
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def abandon(self) -> None:
        """Drop the batches in flight when the loop is left, instead of finishing them, because the job is to end."""
        self._spans.life.abandoned = True


def _stages_at_least(stages: int | None, group: dist.ProcessGroup | None) -> int:
    """Return into how many stages a model is cut, as far as that is known before there is a schedule."""
    if isinstance(stages, int):
        return max(stages, 1)
    return dist.get_world_size(group) if isinstance(group, dist.ProcessGroup) else 2


def blocks_of(
    blocks: Any, optimizer: Any, lr_scheduler: Any, example: Any, stages: int, partition: Partition
) -> dict[str, Any]:
    """Return the blocks of a model by name.

    Raises:
        ConfigError: the model is a whole one without an example, or the optimizer or the scheduler exist already, as
            first scripts have them; the message shows all the lines to write, so that one attempt after it is enough.
    """
    faults, named = [], {}
    try:
        units, cut = partition.units or (), partition.cut or ()
        named = named_blocks(blocks, example, stages, units, cut, timed=partition.by == "time")
    except ConfigError as error:
        faults.append(str(error))
    try:
        refuse_instances(optimizer, lr_scheduler)
    except ConfigError as error:
        faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    return named
