"""From a checked configuration to the pipeline that trains it."""

from __future__ import annotations

import torch.distributed as dist

from penstock.models.gpt import TIED_EMBEDDINGS, gpt_blocks, language_loss
from penstock.partition.sequence_slices import EQUAL_SLICES, Slicing, equal_time_lengths
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.update.divergence import Divergence
from penstock.train.setup.lr_schedule import rate_schedule
from penstock.train.setup.optimizers import optimizer_factory
from penstock.train.setup.phase_plan import Course
from penstock.train.setup.prepare import Prepared
from penstock.weights.optim.updater import OptimizerFactory


def make_pipeline(
    prepared: Prepared, group: dist.ProcessGroup | None = None, optimizer: OptimizerFactory | None = None
) -> Pipeline:
    """The pipeline of a configuration, under the method of its first batch.

    Args:
        prepared: the configuration, checked.
        group: one process per rank; None to run all ranks in this process.
        optimizer: what makes the optimizer of a stage; as configured if None.
    """
    config, fallback = prepared.config, prepared.config.fallback
    divergence = Divergence(
        fallback.spike if "spike" in fallback.when else None, fallback.window, "nonfinite" in fallback.when
    )
    first = Course(config).phase(0)
    equal_times = Slicing(lengths=equal_time_lengths(1 / (12 * prepared.model.width)))
    return Pipeline(
        gpt_blocks(prepared.model, config.seed),
        prepared.proof_of(first),
        loss=language_loss,
        optimizer=optimizer or optimizer_factory(config.optimizer),
        rate=rate_schedule(config.rate, config.batches),
        divisor=prepared.tokens_per_batch,
        clip=config.clip,
        precision=config.precision,
        average=config.average,
        recompute=config.recompute,
        segments=config.segments,
        seed=config.seed,
        width=config.width,
        reduce=config.reduce,
        combine=config.combine.chosen,
        tied=TIED_EMBEDDINGS if config.model.tied else None,
        slicing=equal_times if prepared.proof.schedule.slices > 1 else EQUAL_SLICES,
        correction=prepared.correction_of(first),
        delays=config.delays,
        backward_delays=config.backward_delays,
        divergence=divergence if fallback.when else None,
        balance=config.balance,
        group=group,
        timeout=config.timeout,
    )
