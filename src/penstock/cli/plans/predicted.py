"""The command `penstock predicted`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.options import AsJson
from penstock.cli.output import print_json, say_written
from penstock.errors import ConfigError
from penstock.guarded_files import write_whole

if TYPE_CHECKING:
    from penstock.plan.measured_run import RunComparison
    from penstock.plan.profile.schema import Profile

_ERROR = (
    "forward, backward: of one microbatch; update: of one batch. error: predicted / measured - 1, so -5% means that "
    "the run took longer than predicted."
)

RunFolders = Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folder of a run that has ended.")]
RunProfile = Annotated[
    Path | None,
    typer.Option(
        "--profile", metavar="FILE", help="The profile that it was planned with; that of its plan if not given."
    ),
]
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
    profile: RunProfile = None,
    out: Recalibrated = None,
    calibration: Calibrated = None,
    as_json: AsJson = False,
) -> None:
    """Compare what a profile predicts of runs with what they took, by stage and cause; and calibrate the profile.

    For example: penstock predicted runs/2026-07-01-120000-2bw --profile blocks.yaml --calibrated better.yaml
    """
    from penstock.measure.run_against_profile import check_profile_is_of_run, profile_file_of, settings_of_run
    from penstock.plan.calibration import calibrated, measured_passes
    from penstock.plan.measured_run import compare_with_run
    from penstock.plan.profile.files import read_profile
    from penstock.plan.recalibration import recalibrated
    from penstock.runtime.rank.timeline_files import read_timeline
    from penstock.train.config.load import load_config

    if out is not None and len(runs) > 1:
        raise ConfigError("--out takes the times of layers from one run; give one, or --calibrated FILE for several")
    known, compared, measured = read_profile(profile or profile_file_of(runs[0])), [], {}
    for run in runs:
        config = load_config(run / "config.yaml", [])
        check_profile_is_of_run(known, config, run)
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


def _print(found: RunComparison, name: str) -> None:
    """Print what was found, under the name of its run if there is one."""
    from penstock.view.drawing.timeline_labels import WORK

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
    causes = sorted({*found.idle[0], *found.idle[1]})
    said = ", ".join(f"{c} {found.idle[0].get(c, 0.0):.1%} / {found.idle[1].get(c, 0.0):.1%}" for c in causes)
    console.print(Text(f"Idle share of the time of all ranks, predicted / measured: {said or 'never'}."))
