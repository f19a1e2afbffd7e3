"""The command `penstock predicted`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.options import AsJson
from penstock.cli.output import check_can_write, print_json, say_written
from penstock.errors import CheckpointError, ConfigError
from penstock.guarded_files import write_whole

if TYPE_CHECKING:
    from penstock.plan.measured_run import RunComparison
    from penstock.plan.profile.schema import Profile
    from penstock.plan.run_forecast import RunSettings
    from penstock.train.config.schema import TrainConfig

_ERROR = (
    "forward, backward: of one microbatch; update: of one batch. error: predicted / measured - 1, so -5% means that "
    "the run took longer than predicted."
)

RunFolders = Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folder of a run that has ended.")]
RunProfile = Annotated[Path, typer.Option("--profile", metavar="FILE", help="The profile that it was planned with.")]
Recalibrated = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write a profile whose layers take what they took there.")
]
Calibrated = Annotated[
    Path | None,
    typer.Option(
        "--calibrated",
        metavar="FILE",
        help="Write the profile with what passes of all these runs took beside it, for any plan on this machine.",
    ),
]


def predicted(
    runs: RunFolders,
    profile: RunProfile,
    out: Recalibrated = None,
    calibration: Calibrated = None,
    as_json: AsJson = False,
) -> None:
    """Compare what a profile predicts of runs with what they took, by stage and cause; and calibrate the profile.

    For example: penstock predicted runs/2026-07-01-120000-2bw --profile blocks.yaml --calibrated better.yaml
    """
    from penstock.plan.calibration import calibrated, measured_passes, recalibrated
    from penstock.plan.measured_run import compare_with_run
    from penstock.plan.profile.files import read_profile
    from penstock.runtime.rank.timeline_files import read_timeline
    from penstock.train.config.load import load_config

    check_can_write(out, calibration)
    if out is not None and len(runs) > 1:
        raise ConfigError("--out takes the times of layers from one run; give one, or --calibrated FILE for several")
    known, compared, measured = read_profile(profile), [], {}
    for run in runs:
        config = load_config(run / "config.yaml", [])
        _check_same_model(known, config, run)
        settings, timeline = settings_of_run(config, run), read_timeline(run)
        compared.append(found := compare_with_run(known, settings, timeline))
        if calibration is not None:
            measured[run.name] = settings, measured_passes(timeline, len(found.stages), settings.numbers.of_pipeline(0))
        if not as_json:
            _print(found, run.name if len(runs) > 1 else "")
    if not as_json:
        Console().print(Text(_ERROR, "dim"))
    else:
        print_json(_plain(compared[0]) if len(runs) == 1 else {"runs": [_plain(each) for each in compared]})
    next_step = (
        "" if settings.tensor > 1 else f"penstock plan --profile {{}} --devices {settings.stages * settings.width}"
    )
    if out is not None:
        _write_profile(out, recalibrated(known, settings, found, run.name), next_step, as_json)
    if calibration is not None:
        _write_profile(calibration, calibrated(known, measured), next_step, as_json)


def _plain(found: RunComparison) -> dict[str, Any]:
    """Return what was found as plain values."""
    return {
        "stages": [{"predicted": dict(s.predicted), "measured": dict(s.measured)} for s in found.stages],
        "batch": {"predicted": found.batch[0], "measured": found.batch[1]},
        "idle": {"predicted": dict(found.idle[0]), "measured": dict(found.idle[1])},
    }


def _write_profile(file: Path, profile: Profile, next_step: str, quiet: bool) -> None:
    """Write a profile, and say so.

    Raises:
        ConfigError: it cannot be written.
    """
    from penstock.plan.profile.files import profile_text

    try:
        write_whole(file, profile_text(profile))
    except OSError as error:
        raise ConfigError(f"cannot write the profile {str(file)!r}: {error.strerror or error}") from None
    if not quiet:
        say_written("profile", file, next_step)


def settings_of_run(config: TrainConfig, run: Path) -> RunSettings:
    """Return how a run was configured.

    Raises:
        PenstockError: its stages are unknown.
    """
    from penstock.plan.run_forecast import RunSettings
    from penstock.schedule.build import ScheduleRequest
    from penstock.schedule.transforms.batch_ops import what_decides

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


def _check_same_model(profile: Profile, config: TrainConfig, run: Path) -> None:
    """Refuse the profile of another model than a run's; profiles of blocks of one's own do not say what they are of.

    Raises:
        ConfigError: it is one.
    """
    from penstock.train.config.load import validate_config
    from penstock.train.setup.model_shape import shape_of

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
    from penstock.models.gpt import gpt_blocks
    from penstock.models.gpt_shape import GPTConfig
    from penstock.partition.blocks import cut_blocks
    from penstock.train.export.weights_folder import load_index
    from penstock.train.setup.model_shape import shape_of

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
    return [len(part) for part in cut_blocks(gpt_blocks(shape, config.seed), stages, cut=config.cut)]


def _print(found: RunComparison, name: str) -> None:
    """Print what was found, under the name of its run if there is one."""
    from penstock.plan.measured_run import idle_in_words
    from penstock.view.timeline_labels import WORK

    console = Console()
    if name:
        console.print(Text(f"\n{name}", "bold"))
    console.print(Text("predicted and measured seconds of one pass or update (median)", "italic"))
    table = Table(box=None)
    for heading in ("stage", "work", "predicted s", "measured s", "error"):
        table.add_column(heading, justify="left" if heading == "work" else "right")
    for at, stage in enumerate(found.stages):
        for kind, measured in stage.measured.items():
            error = stage.error(kind)
            said = "" if error is None else f"{error:+.1%}"
            table.add_row(
                str(at), WORK.get(kind, kind), f"{stage.predicted.get(kind, 0.0):.4g}", f"{measured:.4g}", said
            )
    console.print(table)
    before, after = found.batch
    console.print(Text(f"A batch: predicted {before:.4g} s, measured {after:.4g} s ({before / after - 1:+.1%})."))
    console.print(Text(idle_in_words("predicted", *found.idle)))
