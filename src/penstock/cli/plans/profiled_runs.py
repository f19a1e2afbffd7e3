"""Runs beside a profile: `penstock profile --rehearse` before a run, `--check` behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from penstock.byte_sizes import human_bytes, size_of
from penstock.cli.output import print_json, say_written, write_file
from penstock.cli.plans.terminal_width_table import FittedTable
from penstock.errors import CheckpointError, ConfigError
from penstock.view.plurals import counted
from penstock.view.timeline_labels import WORK

if TYPE_CHECKING:
    from penstock.measure.single_rank_rehearsal import Rehearsal
    from penstock.plan.measured_run import RunComparison
    from penstock.plan.profile.schema import Profile
    from penstock.plan.run_forecast import RunSettings
    from penstock.train.config.schema import TrainConfig

_ERROR = (
    "forward, backward: of one microbatch; update: of one batch. error: predicted / measured - 1, so -5% means that "
    "the run took longer than predicted."
)


# --- before a run -----------------------------------------------------------------------------------------------------


def rehearse_rank(
    config: Path | None, changes: Sequence[str], rank: int, batches: int, memory: str | None, as_json: bool
) -> None:
    """Run the program of one rank alone, on one device, and print whether it fits, and how fast it is.

    All other ranks are stand-ins that send and take messages of the same shapes, and do no work.

    Args:
        config: a plan, or any configuration of penstock train; the defaults if None.
        changes: of its keys.
        rank: of the pipeline.
        batches: to time, after two others.
        memory: of the device; exit code 1 if the rank holds more.
        as_json: prints that instead of a table.

    Raises:
        PenstockError: the configuration is wrong, or a process failed.
    """
    from penstock.train.config.load import load_config

    limit = None if memory is None else size_of("--memory", memory)
    settings = load_config(config, changes)
    from penstock.measure.single_rank_rehearsal import rehearse  # not before, as this imports torch

    with Console(stderr=True).status(f"rehearsing rank {rank}"):
        found = rehearse(settings, rank, batches)
    fits = None if limit is None else found.on_device <= limit
    if as_json:
        print_json(asdict(found) | {"fits": fits})
    else:
        _print_rehearsal(found)
        if fits is not None:
            Console().print(Text(f"It {'fits' if fits else 'does not fit'} into {memory}."))
    if fits is False:
        raise typer.Exit(1)


def _print_rehearsal(found: Rehearsal) -> None:
    """Print what a rank did."""
    console, blocks = Console(), found.blocks
    named = " ".join(blocks) if len(blocks) < 4 else f"{blocks[0]} .. {blocks[-1]} ({len(blocks)})"
    shared = f", shared by {found.processes} processes" if found.processes > 1 else ""
    console.print(Text(f"Rank {found.rank} of {found.ranks}, {found.method}{shared}: {named}"))
    rows = [(kind, *found.passes[kind]) for kind in sorted(found.passes, key=[*WORK, *found.passes].index)]
    cells = {
        "work": [WORK.get(kind, kind) for kind, _, _ in rows],
        "times": [str(count) for _, count, _ in rows],
        "s each": [f"{seconds:.4g}" for _, _, seconds in rows],
        "s per batch": [f"{count * seconds:.4g}" for _, count, seconds in rows],
    }
    _print_table(console, "work of a batch, medians; a pass is that of one microbatch", cells)
    rate = found.samples / found.fastest if found.fastest else 0.0
    in_all = f", {found.width * rate:.4g} in {found.width} pipelines" if found.width > 1 else ""
    console.print(
        Text(
            f"Its own work takes {found.busy:.4g} s a batch by these medians, {found.fastest:.4g} s by the fastest of "
            f"each kind ({counted(found.threads, 'thread')}): at most {rate:.4g} samples per second in a pipeline"
            f"{in_all}."
        )
    )
    kinds = ", ".join(
        f"{kind} {human_bytes(count)}" for kind, count in found.peak.items() if count and "total" not in kind
    )
    apart = " on the device" if found.on_device < found.peak["total"] else ""
    each = "Each of them held" if shared else "Held"
    console.print(Text(f"{each} {human_bytes(found.on_device)} at most{apart} (each kind at its own most: {kinds})."))
    if found.left_out:
        console.print(Text(f"Not rehearsed: {'; '.join(found.left_out)}."))


def _print_table(console: Console, title: str, cells: Mapping[str, Sequence[str]]) -> None:
    for part in FittedTable(title, cells).fitted(console.width):
        console.print(part)


# --- behind it --------------------------------------------------------------------------------------------------------


def check_runs(file: Path, runs: Sequence[Path], fit: str | None, out: Path | None, as_json: bool) -> None:
    """Print what a profile predicts of runs beside what they took, by stage and cause; and fit the profile to them.

    Args:
        file: the profile.
        runs: folders of runs that have ended.
        fit: "layers" takes the times of layers from the run, "machine" what passes of all runs took beside theirs.
        out: where the profile that is fitted goes.
        as_json: prints that instead of tables.

    Raises:
        PenstockError: a file cannot be read or written, or a run cannot be compared with the profile.
    """
    from penstock.plan.calibration import calibrated, measured_passes, recalibrated
    from penstock.plan.measured_run import compare_with_run
    from penstock.plan.profile.files import profile_text, read_profile
    from penstock.runtime.rank.timeline_files import read_timeline
    from penstock.train.config.load import load_config

    _check_fit(fit, out, len(runs))
    known, compared, measured = read_profile(file), [], {}
    for run in runs:
        config = load_config(run / "config.yaml", [])
        _check_same_model(known, config, run)
        settings, timeline = settings_of_run(config, run), read_timeline(run)
        compared.append(found := compare_with_run(known, settings, timeline))
        if fit == "machine":
            measured[run.name] = settings, measured_passes(timeline, len(found.stages), settings.numbers.of_pipeline(0))
        if not as_json:
            _print_comparison(found, run.name if len(runs) > 1 else "")
    if as_json:
        print_json(_plain(compared[0]) if len(runs) == 1 else {"runs": [_plain(each) for each in compared]})
    else:
        Console().print(Text(_ERROR, "dim"))
    if out is None:
        return
    fitted = calibrated(known, measured) if measured else recalibrated(known, settings, found, run.name)
    write_file("profile", out, profile_text(fitted))
    if not as_json:
        plan = f"penstock plan --profile {{}} --devices {settings.stages * settings.width}"
        say_written("profile", out, plan if settings.tensor == 1 else "")


def _check_fit(fit: str | None, out: Path | None, runs: int) -> None:
    """Refuse options that do not go together.

    Raises:
        ConfigError: they do not.
    """
    if fit not in (None, "layers", "machine"):
        raise ConfigError(f"--fit takes layers or machine, got {fit!r:.80}")
    if (fit is None) != (out is None):
        raise ConfigError("with --check, --fit layers or --fit machine says which profile --out FILE is: give both")
    if fit == "layers" and runs > 1:
        raise ConfigError("--fit layers takes the times of layers from one run; give one, or --fit machine for several")


def _plain(found: RunComparison) -> dict[str, Any]:
    """Return what was found as plain values."""
    return {
        "stages": [{"predicted": dict(s.predicted), "measured": dict(s.measured)} for s in found.stages],
        "batch": {"predicted": found.batch[0], "measured": found.batch[1]},
        "idle": {"predicted": dict(found.idle[0]), "measured": dict(found.idle[1])},
    }


def _print_comparison(found: RunComparison, name: str) -> None:
    """Print what was found, under the name of its run if there is one."""
    from penstock.plan.measured_run import idle_in_words

    console = Console()
    if name:
        console.print(Text(f"\n{name}", "bold"))
    rows = [(at, stage, kind) for at, stage in enumerate(found.stages) for kind in stage.measured]
    errors = [stage.error(kind) for _, stage, kind in rows]
    cells = {
        "stage": [str(at) for at, _, _ in rows],
        "work": [WORK.get(kind, kind) for _, _, kind in rows],
        "predicted s": [f"{stage.predicted.get(kind, 0.0):.4g}" for _, stage, kind in rows],
        "measured s": [f"{stage.measured[kind]:.4g}" for _, stage, kind in rows],
        "error": ["" if error is None else f"{error:+.1%}" for error in errors],
    }
    _print_table(console, "predicted and measured seconds of one pass or update (median)", cells)
    before, after = found.batch
    console.print(Text(f"A batch: predicted {before:.4g} s, measured {after:.4g} s ({before / after - 1:+.1%})."))
    console.print(Text(idle_in_words("predicted", *found.idle)))


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
