"""A run of `penstock train`, so that a profile predicts it: how it was configured, and whether the two go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError, ConfigError
from penstock.models.gpt import gpt_blocks
from penstock.models.gpt_shape import GPTConfig
from penstock.partition.blocks import cut_blocks
from penstock.plan.profile.schema import Profile
from penstock.plan.run_forecast import RunSettings
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.transforms.batch_ops import what_decides
from penstock.train.config.load import load_config, validate_config
from penstock.train.config.schema import TrainConfig
from penstock.train.export.weights_folder import load_index
from penstock.train.setup.model_shape import shape_of


def profile_file_of(run: Path) -> Path:
    """Return the profile that the run of a folder was planned with.

    Raises:
        ConfigError: its configuration names none.
    """
    config = load_config(run / "config.yaml", [])
    if config.profile is None:
        raise ConfigError(f"the run {str(run)!r} has no profile from its plan; give the one to compare with: --profile")
    return Path(config.profile)


def settings_of_run(config: TrainConfig, run: Path) -> RunSettings:
    """Return how a run was configured.

    Raises:
        PenstockError: its stages are unknown.
    """
    _check_comparable(config)
    config.check_chain("comparisons of runs with profiles", "as profiles are of blocks in a row")
    rule = "provisional-in-place" if config.undo == "in-place" else None
    request = ScheduleRequest(config.row.name, config.stages, config.microbatches, rule, options=config.options)
    fp16 = config.precision == "fp16"
    stages, modes = request.schedule.num_stages, config.recompute
    each = [modes] * stages if isinstance(modes, str) else modes
    return RunSettings(
        config.row.name,
        config.stages,
        config.width,
        config.microbatches,
        config.microbatch_size,
        tuple(mode == "block" for mode in each),
        tuple(config.balance or _balance(config, run, stages)),
        frozenset(index for index, mode in enumerate(each) if mode == "stage"),
        config.segments,
        config.options,
        rule,
        config.window,
        config.sharding,
        bool(what_decides(config.max_grad_norm is not None, fp16, fp16, 1, None, config.tensor_parallel)),
        config.tensor_parallel,
        config.rank_order,
    )


def check_profile_is_of_run(profile: Profile, config: TrainConfig, run: Path) -> None:
    """Refuse the profile of another model than a run's; profiles of blocks of one's own do not say what they are of.

    Raises:
        ConfigError: it is one.
    """

    if profile.freezes:
        raise ConfigError(
            "the profile is of a model with frozen blocks (`trained: false`), but penstock train trains all; "
            "leave that out of the profile"
        )
    if not profile.settings:
        return
    there, here = (shape_of(each) for each in (validate_config(dict(profile.settings)), config))
    for key in ("layers", "width", "heads", "context"):
        if getattr(there, key) != getattr(here, key):
            raise ConfigError(
                f"the profile is of another model: its model.{key} is {getattr(there, key)}, that of the run "
                f"{str(run)!r} is {getattr(here, key)}; measure that one with penstock profile"
            )


def _check_comparable(config: TrainConfig) -> None:
    """Refuse runs of which more happens than a schedule and a profile say.

    Raises:
        ConfigError: it is one.
    """
    in_flight: Any = config.options.get("in_flight")
    reasons = {
        "it has a schedule of its own; take a method": config.schedule is not None,
        "its method changes on the way (sync, fallback)": config.phased,
        "options.in_flight=auto has changed its order on the way": isinstance(in_flight, str),
        "profiles do not say what copies to the host take (offload, offload_optimizer)": config.offload != "none"
        or config.offload_optimizer != "none",
        "its ranks lay on devices that differ (placement), while a profile is of one device": config.placement
        is not None,
        f"its pipelines have weights of their own (combine.kind={config.combine.kind})": config.combine.kind
        != "reduce",
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"this run cannot be compared with a profile: {reason}")


def _balance(config: TrainConfig, run: Path, stages: int) -> list[int]:
    """Return the blocks of each stage of a run without a plan, divided as the run has divided them.

    Raises:
        ConfigError: the shape of its model is unknown.
    """

    if config.model.vocabulary is not None:
        shape = shape_of(config)
    else:  # that of the data
        try:
            shape = GPTConfig(**load_index(run)["model"])
        except (CheckpointError, TypeError):
            raise ConfigError(
                f"the blocks of each stage of {str(run)!r} are not known: its configuration has neither balance, as "
                "those of plans have, nor model.vocabulary, and it has no weights, which a run saves when it has "
                f"finished; finish it with penstock train --resume {run}"
            ) from None
    return [len(part) for part in cut_blocks(gpt_blocks(shape, config.seed), stages)]
