"""Builds the pipeline of a checked configuration."""

from __future__ import annotations

import torch.distributed as dist

from penstock.runtime.from_checked_plan import pipeline_of
from penstock.runtime.pipeline import Pipeline
from penstock.train.prepare.prepare_run import Prepared
from penstock.train.setup.optimizers import optimizer_factory
from penstock.train.setup.phase_plan import Course
from penstock.weights.optim.optimizer_factory import OptimizerFactory


def make_pipeline(
    prepared: Prepared, group: dist.ProcessGroup | None = None, optimizer: OptimizerFactory | None = None
) -> Pipeline:
    """The pipeline of a configuration, under the method of its first batch.

    Args:
        prepared: the configuration, checked.
        group: one process per rank; None to run all ranks in this process.
        optimizer: what makes the optimizer of a stage; as configured if None.
    """
    config = prepared.config
    return pipeline_of(
        prepared.plan_of(Course(config).phase(0)),
        prepared.model.blocks,
        prepared.model.loss,
        optimizer or optimizer_factory(config.optimizer),
        group,
    )
