"""Takes the options of a pipeline from a configuration."""

from __future__ import annotations

from penstock.models.gpt import TIED_EMBEDDINGS
from penstock.models.gpt_shape import GPTConfig
from penstock.options.all_options import PipelineOptions
from penstock.options.divergence import Divergence
from penstock.schedule.methods.compatibility import correction_options
from penstock.train.config.schema import TrainConfig
from penstock.train.config.sections import FallbackSection
from penstock.train.setup.lr_schedule import rate_schedule
from penstock.weights.corrections.base import Correction
from penstock.weights.corrections.registry import make_correction
from penstock.weights.updates.lr_schedulers import by_factor


def pipeline_options(config: TrainConfig, model: GPTConfig) -> PipelineOptions:
    """The options of the pipeline under the method of a configuration.

    A key that has the name of an option is that option; only those whose values are of another kind are named here.

    Args:
        config: of the run.
        model: the shape of its model.

    Raises:
        ConfigError: two keys do not go together, whatever the schedule.
    """
    alike = {key: getattr(config, key) for key in PipelineOptions.names() & TrainConfig.model_fields.keys()}
    others = {
        "combine": config.combine.chosen,
        "correction": _correction(config),
        "divergence": _divergence(config.fallback),
        "divisor": tokens_per_batch(config, model),
        "lr_scheduler": by_factor(rate_schedule(config.lr_schedule, config.batches)),
        "tied": TIED_EMBEDDINGS if config.model.tied else None,
    }
    return PipelineOptions().changed(**alike | others)


def tokens_per_batch(config: TrainConfig, model: GPTConfig) -> int:
    """Of all parallel pipelines together."""
    return config.width * config.microbatches * config.microbatch_size * model.context


def _correction(config: TrainConfig) -> Correction | None:
    row = config.row
    options = correction_options(row, config.correction)
    return make_correction(row.correction, options, config.batches, config.lr_schedule.warm_up)


def _divergence(section: FallbackSection) -> Divergence | None:
    if not section.when:
        return None
    return Divergence(section.spike if "spike" in section.when else None, section.window, "nonfinite" in section.when)
