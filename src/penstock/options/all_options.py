"""All options of a pipeline, in groups, as users give them to `Pipeline`.

Each option is described in its group, and there alone; what can be said of it without a model and a schedule is checked
there, too, and here what concerns options of several groups. `penstock.runtime.plan.plan` checks the rest. A key of
`penstock train` that has the name of an option is that option (`penstock.train.setup.pipeline_options`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from penstock.errors import ConfigError
from penstock.options.parallelism import DataParallel, Microbatches, Partition
from penstock.options.passes import Precision, Recompute, Staleness
from penstock.options.run import RunOptions
from penstock.options.updates import UpdateOptions
from penstock.schedule.transforms.batch_ops import what_decides
from penstock.weights.decision import Policy


@dataclass(frozen=True)
class PipelineOptions:
    """All options of a pipeline; no two groups have an option of one name.

    Raises:
        ConfigError: two options do not go together, whatever the model and the schedule.
    """

    data_parallel: DataParallel = field(default_factory=DataParallel)
    precision: Precision = field(default_factory=Precision)
    recompute: Recompute = field(default_factory=Recompute)
    staleness: Staleness = field(default_factory=Staleness)
    partition: Partition = field(default_factory=Partition)
    microbatches: Microbatches = field(default_factory=Microbatches)
    update: UpdateOptions = field(default_factory=UpdateOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        """Check options of different groups together."""
        combine, average = self.data_parallel.combine, self.update.ema_decay
        if average is not None and combine.apart:
            raise ConfigError(
                f"ema_decay={average} and combine={combine.kind} do not go together: each pipeline would average "
                "weights of its own; leave one of them out"
            )
        away = self.run.offload_optimizer
        if away != "none" and combine.apart:
            raise ConfigError(
                f"with combine={combine.kind} parallel pipelines look at optimizer states when they meet, so these "
                "cannot be in the memory of the host; set offload_optimizer to none"
            )
        if away != "none" and self.staleness.spec.reads_states:
            raise ConfigError(
                f"correction {self.staleness.spec.name!r} may look at optimizer states between updates, when "
                f"offload_optimizer={away} has them in the memory of the host; set that to none"
            )
        if self.update.divergence is not None and combine.apart:
            raise ConfigError(
                f"with combine={combine.kind} parallel pipelines see losses of their own, so they would not agree on a "
                "divergence; leave one of them out"
            )
        if self.update.divergence is not None and not self.deciding:
            raise ConfigError(
                "a divergence is noticed where all stages decide together; besides divergence=, set max_grad_norm=, "
                "precision='fp16' (or a Precision with a loss scale) or data_parallel= (penstock train: besides "
                "fallback.when, max_grad_norm, loss_scale or width)"
            )

    @classmethod
    def names(cls) -> frozenset[str]:
        """The name of every option, whatever its group."""
        default = cls()
        return frozenset(option.name for group in fields(cls) for option in fields(getattr(default, group.name)))

    def changed(self, **values: Any) -> PipelineOptions:
        """These options with other values for some.

        Args:
            values: by the name of the option, whatever its group.

        Raises:
            ConfigError: as the groups.
        """
        unknown = values.keys() - self.names()
        if unknown:
            raise TypeError(f"a pipeline has no option {sorted(unknown)[0]!r}")
        groups = {}
        for group in fields(self):
            present = getattr(self, group.name)
            own = {option.name: values[option.name] for option in fields(present) if option.name in values}
            groups[group.name] = replace(present, **own)
        return PipelineOptions(**groups)

    @property
    def policy(self) -> Policy:
        """What stages decide by."""
        return Policy(self.update.max_grad_norm, self.precision.scaling)

    @property
    def deciding(self) -> Mapping[str, str]:
        """For what all stages decide together before an update, each with how to be without it."""
        parallel, precision = self.data_parallel, self.precision
        return what_decides(
            self.update.max_grad_norm is not None,
            precision.scaling is not None,
            precision.loss_scale is None,
            parallel.width,
            parallel.combine.kind if parallel.combine.apart else None,
            self.partition.tensor_parallel,
        )
