"""The command `penstock profile`: what a model costs, whether one rank of a run fits, and what runs have taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from penstock.cli.options import FLAG, AsJson, ConfigFile, DataPath, TrainChanges, whole_numbers
from penstock.cli.output import check_can_write, print_json, say_written, write_file
from penstock.cli.plans.plan_devices import cluster_named
from penstock.cli.plans.profile_of_model import WORDS, microbatch_sizes, profile_by_formulas, shape_of_numbers
from penstock.cli.train import changes_of
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.plan.profile.schema import Calibration, Profile


_MEASURING, _READING, _FORMULAS, _CHECKING, _REHEARSING = (
    "measuring", "reading a profile", "formulas (--cluster)", "--check", "--rehearse",
)  # fmt: skip
_PROFILES = _MEASURING, _READING, _FORMULAS
_GOES_WITH: Final[Mapping[str, Sequence[str]]] = {
    "FILE": (_READING, _CHECKING),
    "--from": (_READING,),
    "--name": _PROFILES,
    "--microbatch-sizes": (_MEASURING, _FORMULAS),
    "--seconds": (_MEASURING,),
    "--cluster": (_FORMULAS,),
    "--layers": (_FORMULAS,),
    "--hidden": (_FORMULAS,),
    "--sequence": (_FORMULAS,),
    "--heads": (_FORMULAS,),
    "--vocabulary": (_FORMULAS,),
    "--data": (_MEASURING, _REHEARSING),
    "--set": (_MEASURING, _REHEARSING),
    "--config": (_MEASURING, _REHEARSING),
    "--calibration": _PROFILES,
    "--check": (_CHECKING,),
    "--fit": (_CHECKING,),
    "--batches": (_REHEARSING,),
    "--memory": (_REHEARSING,),
    "--out": (*_PROFILES, _CHECKING),
}
"""What each option says something about."""


def profile(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A profile, ours or one of another program; measure if not given."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="PROGRAM", help="Who wrote it: pipedream (*.graph.txt) or piper (*.json)."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the model; that of the file if not given.")
    ] = None,
    microbatch_sizes: Annotated[
        str | None,
        typer.Option(
            "--microbatch-sizes", metavar="B,B..", help="Samples per microbatch to measure, as in 1,2,4; as configured."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            metavar="S",
            help="For each block, size and kind of pass; 0.3 if not given.",
            min=0.0,
            max=3600.0,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME|FILE",
            help="Instead of measuring blocks: by formulas, for a transformer on such devices, or on this-machine.",
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", metavar="N", help="With --cluster: of the model.")] = None,
    hidden: Annotated[int | None, typer.Option("--hidden", metavar="N", help="Its hidden size.")] = None,
    sequence: Annotated[int | None, typer.Option("--sequence", metavar="N", help="Its tokens in a sequence.")] = None,
    heads: Annotated[
        int | None, typer.Option("--heads", metavar="N", help="Its heads; of size 128 or more if not given.")
    ] = None,
    vocabulary: Annotated[int | None, typer.Option("--vocabulary", metavar="N", help="Of its tokens.")] = None,
    links: Annotated[
        bool, typer.Option("--links/--no-links", metavar=FLAG, help="Measure the link between two processes, too.")
    ] = True,
    data: DataPath = None,
    changes: TrainChanges = None,
    config: ConfigFile = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            metavar="FILE",
            help="Take the calibration of this profile, of any model on this machine (--fit machine makes one).",
        ),
    ] = None,
    check: Annotated[
        list[Path] | None,
        typer.Option(
            "--check",
            metavar="RUN",
            help="With FILE: compare what it predicts of a run that has ended with what that took. Also several times.",
        ),
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(
            "--fit",
            metavar="layers|machine",
            help="With --check and --out: write FILE with layers that take what they took in the run, or with what "
            "passes of all runs took beside it, for any plan on this machine.",
        ),
    ] = None,
    rehearse: Annotated[
        int | None,
        typer.Option(
            "--rehearse",
            metavar="R",
            min=0,
            help="Run the program of this rank of a plan (--plan) alone, among stand-ins: does it fit, how fast is it?",
        ),
    ] = None,
    batches: Annotated[
        int | None, typer.Option("--batches", metavar="T", help="With --rehearse: to time, after two others; 5.", min=1)
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE", help="With --rehearse: of the device; exit code 1 if the rank holds more."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the profile there, as penstock plan reads it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what the blocks of a model cost on this machine; or check a profile, ours or a published one.

    Without FILE every distinct block of the GPT that [bold]penstock train[/bold] would train with the same options is
    measured once, as a stage of its own, and messages between two processes; with tensor_parallel=T in T processes that
    share it. With --rehearse one rank of a plan is tried before there are others; with --check runs that have ended are
    compared with FILE. For example: penstock profile --set model.preset=small --microbatch-sizes 1,2,4 --out small.yaml
    """
    check_can_write(out)
    numbers = (layers, hidden, sequence, heads, vocabulary)
    if rehearse is not None:
        mode = _REHEARSING
    elif check:
        mode = _CHECKING
    elif cluster is not None or any(number is not None for number in numbers):
        mode = _FORMULAS
    else:
        mode = _MEASURING if file is None else _READING
    shape = dict(zip(("--layers", "--hidden", "--sequence", "--heads", "--vocabulary"), numbers, strict=True))
    _check_go_with(
        mode,
        {
            "FILE": file, "--from": source, "--name": name, "--microbatch-sizes": microbatch_sizes,
            "--seconds": seconds, "--cluster": cluster, **shape, "--data": data, "--set": changes, "--config": config,
            "--calibration": calibration, "--check": check, "--fit": fit, "--batches": batches, "--memory": memory,
            "--out": out,
        },
    )  # fmt: skip
    settings = changes_of(None, None, changes, data=data)
    if rehearse is not None:
        from penstock.cli.plans.profiled_runs import rehearse_rank

        rehearse_rank(config, settings, rehearse, batches or 5, memory, as_json)
        return
    if check:
        from penstock.cli.plans.profiled_runs import check_runs

        if file is None:
            raise ConfigError(
                "--check compares runs with a profile; give its FILE, as in penstock profile FILE --check RUN"
            )
        check_runs(file, check, fit, out, as_json)
        return
    name = None if name is None else name[:200] or "model"
    constants = None if calibration is None else _calibration_in(calibration)
    if mode == _FORMULAS:
        found = _analytic(cluster, numbers, microbatch_sizes, name)
    elif file is None:
        found = _measured(settings, config, microbatch_sizes, 0.3 if seconds is None else seconds, links, name)
    else:
        found = _read(file, source, name)
    if constants is not None:
        found = found.model_copy(update={"calibration": constants})
    planned = " --devices N" if cluster is None else f" --cluster {quote(cluster)} --devices N"
    _print_profile(found, out, as_json, planned)


def _check_go_with(mode: str, given: Mapping[str, object]) -> None:
    """Refuse options that say nothing about what is asked for.

    Args:
        mode: what is.
        given: values by option; None where it is not given.

    Raises:
        ConfigError: one is given.
    """
    for option, value in given.items():
        if value is not None and mode not in _GOES_WITH[option]:
            instead = "a plan goes behind --plan" if (option, mode) == ("FILE", _REHEARSING) else "leave it out"
            raise ConfigError(f"{option} goes with {' or '.join(_GOES_WITH[option])}, not with {mode}; {instead}")


def _calibration_in(file: Path) -> Calibration:
    """Return the calibration of a profile.

    Raises:
        ConfigError: it is no profile, or has none.
    """
    from penstock.plan.profile.files import read_profile

    found = read_profile(file).calibration
    if found is None:
        raise ConfigError(
            f"the profile {str(file)!r} has no calibration to take; penstock profile {file} --check RUN --check RUN "
            "--fit machine --out FILE writes one that has"
        )
    return found


def _analytic(cluster: str | None, numbers: tuple[int | None, ...], sizes: str | None, name: str | None) -> Any:
    """Return the profile of a transformer on the devices of a cluster.

    Raises:
        ConfigError: something is missing, or wrong.
    """
    words = dict(zip(("layers", "hidden", "sequence", "heads", "vocabulary"), numbers, strict=True))
    lacking = [f"--{word}" for word in WORDS if words[word] is None] + ["--cluster"] * (cluster is None)
    if cluster is None or lacking:
        raise ConfigError(f"a profile by formulas needs {', '.join(lacking)}, too")
    shape = shape_of_numbers(words, "a profile by formulas needs {}, too", name)
    wanted = microbatch_sizes(sizes, [1])
    return profile_by_formulas(shape, cluster_named(cluster), wanted)


def _measured(
    changes: list[str], config: Path | None, sizes: str | None, seconds: float, links: bool, name: str | None
) -> Any:
    """Measure a profile.

    Raises:
        PenstockError: options are wrong, or something that is needed is not there.
    """
    from penstock.train.config.load import load_config

    settings = load_config(config, changes)
    wanted = [settings.microbatch_size] if sizes is None else whole_numbers("--microbatch-sizes", sizes)
    from penstock.measure.configured import measure_configured  # not before, as this imports torch

    with Console(stderr=True).status("measuring") as status:
        return measure_configured(
            settings, wanted, seconds, links, name, lambda block: status.update(f"measuring {block}")
        )


def _read(file: Path, source: str | None, name: str | None) -> Any:
    """Read a profile, ours or a published one, and check it.

    Raises:
        ConfigError: it is none.
    """
    from penstock.plan.profile.files import parse_profile, read_profile_text
    from penstock.plan.profile.layer_graph import layer_graph, sizes_of
    from penstock.plan.profile.other_programs import from_pipedream, from_piper

    readers = {"pipedream": from_pipedream, "piper": from_piper}
    if source is not None and source not in readers:
        raise ConfigError(f"--from takes pipedream or piper, got {source!r:.80}")
    text = read_profile_text(file)
    if source is None:
        found = parse_profile(text, str(file))
        found = found if name is None else found.model_copy(update={"name": name})
    else:
        try:
            found = readers[source](text, name or file.name.partition(".")[0])
        except ConfigError as error:
            raise ConfigError(f"{str(file)!r}: {error}") from None
    for size in sizes_of(found):
        layer_graph(found, size)
    return found


def _print_profile(found: Profile, out: Path | None, as_json: bool, planned: str) -> None:
    """Print a profile, and write it to a file where one is given.

    Raises:
        ConfigError: the file cannot be written.
    """
    from penstock.cli.plans.profile_table import profile_tables
    from penstock.plan.profile.files import profile_text
    from penstock.view.tables import table_console

    if out is not None:
        write_file("profile", out, profile_text(found))
    if as_json:
        print_json(found.model_dump(exclude_unset=True, exclude_none=True))
        return
    console = table_console()
    console.print(profile_tables(found, console.width))
    if out is not None:
        shared = found.tensor_parallel > 1  # for which there are no plans
        say_written(
            "profile", out, "penstock profile {} --check RUN" if shared else f"penstock plan --profile {{}}{planned}"
        )
