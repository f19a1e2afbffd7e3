"""Takes the options of a pipeline from a configuration."""

from __future__ import annotations

from penstock.models.gpt_shape import GPTConfig
from penstock.models.gpt_variant import LanguageModel
from penstock.options.all_options import PipelineOptions
from penstock.options.updates import Divergence
from penstock.schedule.methods.compatibility import correction_options
from penstock.train.config.schema import TrainConfig
from penstock.train.config.sections import FallbackSection
from penstock.train.setup.lr_schedule import rate_schedule
from penstock.weights.corrections.base import Correction
from penstock.weights.corrections.registry import make_correction
from penstock.weights.updates.lr_scheduler_table import by_factor


def pipeline_options(config: TrainConfig, model: LanguageModel) -> PipelineOptions:
    """The options of the pipeline under the method of a configuration.

    A key that has the name of an option is that option; only those whose values are of another kind are named here.

    Args:
        config: of the run.
        model: its model.

    Raises:
        ConfigError: two keys do not go together, whatever the schedule.
    """
    alike = {key: getattr(config, key) for key in PipelineOptions.names() & TrainConfig.model_fields.keys()}
    others = {
        "balance": model.balance,
        "combine": config.combine.chosen,
        "correction": _correction(config),
        "divergence": _divergence(config.fallback),
        "divisor": tokens_per_batch(config, model.shape),
        "lr_scheduler": by_factor(rate_schedule(config.lr_schedule, config.batches)),
        "tied": model.tied,
    }
    return PipelineOptions().changed(**alike | others)


def tokens_per_batch(config: TrainConfig, shape: GPTConfig) -> int:
    """Of all parallel pipelines together."""
    return config.width * config.microbatches * config.microbatch_size * shape.context


def _correction(config: TrainConfig) -> Correction | None:
    row = config.row
    options = correction_options(row, config.correction)
    return make_correction(row.correction, options, config.batches, config.lr_schedule.warm_up)


def _divergence(section: FallbackSection) -> Divergence | None:
    if not section.when:
        return None
    return Divergence(section.spike if "spike" in section.when else None, section.window, "nonfinite" in section.when)
