"""Chooses what the stages of a configuration of `penstock train` recompute."""

from __future__ import annotations

from penstock.measure.recompute_choice import RecomputeChoice, choose_for
from penstock.partition.blocks import named_blocks
from penstock.train.prepare.prepare_run import RecomputeQuestion
from penstock.train.setup.optimizers import optimizer_factory


def chosen_recompute(question: RecomputeQuestion) -> RecomputeChoice:
    """Choose what each stage recomputes so that no rank holds more than `memory_limit`.

    Raises:
        ConfigError: nothing fits, or numbers depend on what is recomputed.
        CapabilityError: the memory of the method is not predicted.
    """
    config = question.config
    limit = config.memory_limit
    assert limit is not None
    blocks, loss = named_blocks(question.model.blocks), question.model.loss
    sample = question.windows.samples(0, config.microbatch_size)
    return choose_for(question.plans, blocks, sample, limit, loss, optimizer_factory(config.optimizer))
