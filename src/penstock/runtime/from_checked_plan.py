"""Makes pipelines from plans that have been checked already, and lets them go on under others."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from penstock.comm.core.rank_grid import RankGrid, rank_grid
from penstock.comm.core.tensor_group import TensorGroup
from penstock.options.parallelism import rank_numbers
from penstock.partition.blocks import Blocks, named_blocks
from penstock.runtime.engine.lifecycle import between_runs
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.plan.plan import PipelinePlan
from penstock.runtime.setup.same_weights import check_same_plans
from penstock.stage.blocks.loss import LossFunction, check_loss
from penstock.weights.optim.optimizer_factory import OptimizerFactory


def pipeline_of(
    plan: PipelinePlan,
    blocks: Blocks,
    loss: LossFunction | Mapping[int, LossFunction],
    optimizer: OptimizerFactory,
    group: dist.ProcessGroup | None = None,
    tensor: TensorGroup | None = None,
    first_only: bool = False,
) -> Pipeline:
    """The pipeline of a plan, of which nothing is checked again.

    Args:
        plan: made of the same blocks; between processes by `shared_plan`, or the like.
        blocks, loss, optimizer, group: as of `Pipeline`.
        tensor: instead of a group, processes each of which has all ranks, and shares all stages with the others.
        first_only: without a group, only the first of parallel pipelines is made; it updates as if the others had
            added nothing, and the weights that they own are of no meaning.

    Raises:
        ConfigError: the group has another size, or blocks are not what the plan takes them for; or ranks were given
            different plans.
        CapabilityError: the optimizer cannot step a stage.
    """
    check_loss(loss)
    options, pipeline = plan.options, Pipeline.__new__(Pipeline)
    numbers, parts = rank_numbers(options.data_parallel, plan.schedule.ranks), options.partition.tensor_parallel
    if tensor is None and not first_only:
        grid = rank_grid(numbers, group, options.run.timeout, parts)
    else:
        grid = RankGrid(numbers, None, options.run.timeout, tensor, first_only)
    if grid.everyone is not None:
        check_same_plans({"": plan}, None, grid.everyone)
    pipeline._build(plan, grid, blocks, named_blocks(blocks), loss, optimizer)
    return pipeline


@between_runs()
def continue_under(pipeline: Pipeline, plan: PipelinePlan) -> None:
    """Let a pipeline go on under another plan of it, as `Pipeline.switch` does, without checking the plan again.

    Args:
        pipeline: whose run is over.
        plan: of the same blocks; its present one follows it, or is followed by it.

    Raises:
        ConfigError: ranks were given different plans.
        CapabilityError: the optimizer cannot step under it.
    """
    if pipeline.grid.everyone is not None:
        check_same_plans({"": plan}, None, pipeline.grid.everyone)
    pipeline._continue(plan)
