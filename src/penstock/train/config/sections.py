"""The sections of a configuration, such as those of the model, the optimizer and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from penstock.models.gpt_shape import LARGEST
from penstock.schedule.ir.limits import MOST_BATCHES
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.train.config.values import MANY, MOST, Number, Strict
from penstock.train.config.wave_lags_record import lag_of

OptimizerName = Literal["adamw", "adam", "nadam", "sgd", "muon", "adan", "soap", "basis-rotation"]


class ModelSection(Strict):
    """The GPT."""

    preset: str = Field(default="tiny", description="a shape by name: tiny, small, 124m, 355m, 1.3b, 2.2b, 3.8b")
    layers: int | None = Field(
        default=None, ge=1, le=LARGEST["layers"], description="transformer layers, instead of the preset's"
    )
    width: int | None = Field(
        default=None, ge=1, le=LARGEST["width"], description="model width, instead of the preset's"
    )
    heads: int | None = Field(
        default=None, ge=1, le=LARGEST["heads"], description="attention heads, instead of the preset's"
    )
    context: int | None = Field(
        default=None, ge=2, le=LARGEST["context"], description="tokens per sample, instead of the preset's"
    )
    tied: bool = Field(default=False, description="input and output embedding are one parameter")
    vocabulary: int | None = Field(
        default=None, ge=2, le=LARGEST["vocabulary"], description="size of the vocabulary; that of the data if not set"
    )
    planned: str | None = Field(
        default=None,
        max_length=200,
        description="a model that was planned and is none of these: refused until its shape is set, or this is null",
    )


class PredictedSection(Strict):
    """What `penstock plan` predicted of the run, in seconds of a batch."""

    batch: Number | None = Field(
        default=None,
        gt=0,
        description="one more batch of a long run; a run that penstock train starts ends with what it took beside that",
    )
    passes: list[Number] | None = Field(default=None, description="the passes of each stage")
    updates: list[Number] | None = Field(default=None, description="the update of each stage")
    idle: dict[str, Number] | None = Field(
        default=None, description="by cause, the share of the time of all ranks that is idle"
    )


_TAKERS: Mapping[str, tuple[OptimizerName, ...]] = MappingProxyType(
    {
        "beta2": ("adamw", "adam", "nadam", "muon", "adan", "soap", "basis-rotation"),
        "nesterov": ("sgd", "muon"),
        "momentum": ("muon",),
        "ns_dtype": ("muon",),
        "difference": ("adan",),
        "refresh": ("soap", "basis-rotation"),
        "sides": ("basis-rotation",),
    }
)
"""Options of optimizers that not all of them take."""


class OptimizerSection(Strict):
    """The optimizer, one per stage."""

    name: OptimizerName = Field(
        default="adamw", description="adamw, adam, nadam, sgd, muon, adan, soap or basis-rotation (docs/optimizers.md)"
    )
    lr: Number = Field(default=3e-3, gt=0, le=MOST, description="peak learning rate")
    weight_decay: Number = Field(default=0.1, ge=0, le=MOST, description="decay of matrices; vectors are not decayed")
    beta1: Number = Field(default=0.9, ge=0, lt=1, description="first moment; the momentum of sgd")
    beta2: Number = Field(default=0.95, ge=0, lt=1, description="second moment")
    nesterov: bool = Field(default=True, description="sgd and muon look ahead, as Nesterov's momentum does")
    momentum: Number = Field(default=0.95, ge=0, lt=1, description="of muon, for the matrices that it steps")
    ns_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="of muon, the precision of its Newton-Schulz iteration; null: bfloat16 on GPUs, float32 on CPUs",
    )
    difference: Number = Field(default=0.92, ge=0, lt=1, description="of adan, the mean of differences of gradients")
    refresh: int = Field(
        default=10, ge=1, le=MOST_BATCHES, description="of soap and basis-rotation, updates between new bases"
    )
    sides: Literal["both", "smaller"] = Field(default="both", description="of a matrix, which basis-rotation rotates")

    @model_validator(mode="after")
    def _takes_what_is_set(self) -> OptimizerSection:
        """Nothing is set that the optimizer does not take."""
        for key, takers in _TAKERS.items():
            field = type(self).model_fields[key]
            if getattr(self, key) != field.default and self.name not in takers:
                instead = " (whose momentum is beta1)" if (key, self.name) == ("momentum", "sgd") else ""
                raise PydanticCustomError(
                    "apart",
                    "{key} is an option of {takers}, not of {name}; leave it out",
                    {"key": key, "takers": ", ".join(takers), "name": self.name + instead},
                )
        return self


class RateSection(Strict):
    """How the learning rate changes with the number of updates."""

    warm_up: int = Field(
        default=50, ge=0, le=MOST_BATCHES, description="updates over which the rate rises linearly from zero"
    )
    decay: Literal["cosine", "linear", "none"] = Field(
        default="cosine", description="shape of the fall after the warm-up"
    )
    floor: Number = Field(default=0.1, ge=0, le=1, description="fraction of the peak rate at the end")


class CheckpointSection(Strict):
    """From which a run that has ended goes on."""

    every: int | None = Field(
        default=250, ge=1, le=MOST_BATCHES, description="batches between two checkpoints; null for none"
    )
    keep: int = Field(default=2, ge=1, le=MANY, description="checkpoints that stay; older ones are removed")


class EvaluateSection(Strict):
    """Evaluations in the midst of training, on held-out samples."""

    every: int | None = Field(
        default=None, ge=1, le=MOST_BATCHES, description="batches between two evaluations; null for none"
    )
    samples: int = Field(
        default=64, ge=1, le=MOST_BATCHES, description="held-out samples, rounded down to whole batches, at least one"
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        le=MOST_BATCHES,
        description="evaluations without a better loss after which the run ends; null for no end",
    )


class SyncSection(Strict):
    """A synchronous method for the first batches, before `method` goes on (PipeMare's T3)."""

    method: str = Field(default="1f1b", description="a synchronous row of `penstock methods`")
    batches: int = Field(default=0, ge=0, le=MOST_BATCHES, description="batches that it trains; 0 for none")


class FallbackSection(Strict):
    """A synchronous method that takes the place of `method`, from a batch on or where that diverges."""

    method: str = Field(default="1f1b", description="a synchronous row of `penstock methods`")
    at: int | None = Field(
        default=None, ge=0, le=MOST_BATCHES, description="batch from which it goes on; null for none"
    )
    when: list[Literal["spike", "nonfinite"]] = Field(
        default=[], description="what is a divergence: spike (of the loss), nonfinite (a loss or gradient); [] for none"
    )
    spike: Number = Field(
        default=2.0, gt=1, le=1e100, description="times the median loss of the batches before: a spike"
    )
    window: int = Field(default=20, ge=1, le=MANY, description="batches of that median; none is judged before as many")
    batches: int | None = Field(
        default=None, ge=1, le=MOST_BATCHES, description="batches until `method` goes on again; null for never"
    )
    restore: Literal["needed", "always"] = Field(
        default="needed",
        description="after a divergence, go back to a checkpoint from before: where weights are not finite, or always",
    )


class CombineSection(Strict):
    """How parallel pipelines agree."""

    kind: Literal["reduce", "average", "bmuf", "elastic", "wsp"] = Field(
        default="reduce",
        description="reduce adds gradients in every batch; with average, bmuf, elastic and wsp pipelines meet at times",
    )
    every: int = Field(default=1, ge=1, le=MANY, description="batches from one meeting to the next; of a wave of wsp")
    optimizer_state: Literal["keep", "average", "reset"] = Field(
        default="keep", description="what becomes of the optimizers' state when pipelines meet"
    )
    momentum: Number | None = Field(default=None, ge=0, lt=1, description="of bmuf, eta; 1 - 1/width if not set")
    step: Number = Field(default=1.0, gt=0, le=MOST, description="of bmuf, zeta")
    nesterov: bool = Field(default=False, description="bmuf looks ahead")
    pull: Number | None = Field(default=None, gt=0, le=1, description="of elastic, alpha; 0.9/width if not set")
    distance: int = Field(default=0, ge=0, le=MANY, description="of wsp, waves that pipelines may be apart")
    lag: int | list[int] | str | None = Field(
        default=None,
        description="of wsp, waves until updates of a pipeline are added to others, as 1 or [0, 2]; record, or the "
        "lags.json of a run with that; distance if not set",
    )
    share: Number = Field(
        default=1.0, gt=0, le=MOST, description="of wsp, what the updates of others are multiplied by"
    )

    @property
    def chosen(self) -> Combine:
        """As a pipeline takes it.

        Raises:
            ConfigError: an option that the kind does not have, or a file of lags that cannot be read.
        """
        return Combine(**(self.model_dump() | {"lag": lag_of(self.lag)}))
