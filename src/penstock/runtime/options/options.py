"""All options of a pipeline, in groups, as users give them to `Pipeline`.

Each option is described in its group, and there alone; what can be said of it without a model and a schedule is checked
there, too, and here what concerns options of several groups. `penstock.runtime.plan.plan` checks the rest. A key of
`penstock train` that has the name of an option is that option (`penstock.train.setup.pipeline_options`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

import torch

from penstock.checks import is_number
from penstock.comm.collective.polling import Waits
from penstock.errors import ConfigError
from penstock.runtime.options.division import DataParallel, InFlight, Partition
from penstock.runtime.options.passes import Precision, Recompute, Staleness
from penstock.runtime.options.updates import UpdateOptions
from penstock.schedule.transforms.batch_ops import what_decides
from penstock.weights.decision import Policy


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What belongs to a run as a whole.

    Attributes:
        seed: of the random numbers that blocks draw (`penstock.stage.rng`).
        timeout: seconds after which a missing message is an error; between runs, where all ranks meet, the group's own
            time-out counts.
        device: where ranks compute: "auto", "cpu", "cuda" (ranks of a machine take its GPUs in turns), one such as
            "cuda:1", or where the blocks are if None.
        waits: how a process waits for messages: "latency", "shared" or "auto" (`penstock.comm.collective.polling`).
        compile: blocks that are modules are compiled by torch.compile, each for every shape that it gets.

    Raises:
        ConfigError: a value is no such number, or no such name.
    """

    seed: int = 0
    timeout: float = 300.0
    device: str | torch.device | None = None
    waits: Waits = "auto"
    compile: bool = False

    def __post_init__(self) -> None:
        """Check each by itself."""
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be a whole number; got {self.seed!r:.80}")
        if not is_number(self.timeout) or not self.timeout > 0:
            raise ConfigError(f"timeout must be a number of seconds above 0; got {self.timeout!r:.80}")
        if not isinstance(self.compile, bool):
            raise ConfigError(f"compile must be True or False; got {self.compile!r:.80}")
        if self.waits not in get_args(Waits):
            raise ConfigError(f"waits must be one of {', '.join(get_args(Waits))}; got {self.waits!r:.80}")


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
    in_flight: InFlight = field(default_factory=InFlight)
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
        )
