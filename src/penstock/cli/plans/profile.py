"""The command `penstock profile`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from penstock.cli.options import FLAG, AsJson, ConfigFile, DataPath, TrainChanges, whole_numbers
from penstock.cli.output import check_can_write, print_json, say_written
from penstock.cli.plans.plan_devices import cluster_named
from penstock.cli.plans.profile_of_model import WORDS, microbatch_sizes, profile_by_formulas, shape_of_numbers
from penstock.cli.train import changes_of
from penstock.errors import ConfigError
from penstock.guarded_files import write_whole

if TYPE_CHECKING:
    from penstock.plan.profile.schema import Calibration, Profile

MicrobatchSizes = Annotated[
    str | None,
    typer.Option(
        "--microbatch-sizes", metavar="B,B..", help="Samples per microbatch to measure, as in 1,2,4; as configured."
    ),
]
MeasuredSeconds = Annotated[
    float | None,
    typer.Option(
        "--seconds", metavar="S", help="For each block, size and kind of pass; 0.3 if not given.", min=0.0, max=3600.0
    ),
]
ProfileOut = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the profile there, as penstock plan reads it.")
]


ProfiledCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE",
        help="Instead of measuring blocks: by formulas, for a transformer on such devices, or on this-machine.",
    ),
]
ModelLayers = Annotated[int | None, typer.Option("--layers", metavar="N", help="With --cluster: of the model.")]
ModelHidden = Annotated[int | None, typer.Option("--hidden", metavar="N", help="Its hidden size.")]
ModelSequence = Annotated[int | None, typer.Option("--sequence", metavar="N", help="Its tokens in a sequence.")]
ModelHeads = Annotated[
    int | None, typer.Option("--heads", metavar="N", help="Its heads; of size 128 or more if not given.")
]
CalibratedProfile = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Take the calibration of this profile, of any model on this machine (penstock predicted --calibrated).",
    ),
]
ModelVocabulary = Annotated[int | None, typer.Option("--vocabulary", metavar="N", help="Of its tokens.")]


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
    microbatch_sizes: MicrobatchSizes = None,
    seconds: MeasuredSeconds = None,
    cluster: ProfiledCluster = None,
    layers: ModelLayers = None,
    hidden: ModelHidden = None,
    sequence: ModelSequence = None,
    heads: ModelHeads = None,
    vocabulary: ModelVocabulary = None,
    links: Annotated[
        bool, typer.Option("--links/--no-links", metavar=FLAG, help="Measure the link between two processes, too.")
    ] = True,
    data: DataPath = None,
    changes: TrainChanges = None,
    config: ConfigFile = None,
    calibration: CalibratedProfile = None,
    out: ProfileOut = None,
    as_json: AsJson = False,
) -> None:
    """Measure what the blocks of a model cost on this machine; or check a profile, ours or a published one.

    Without FILE every distinct block of the GPT that [bold]penstock train[/bold] would train with the same options is
    measured once, as a stage of its own, and messages between two processes; with tensor_parallel=T in T processes that
    share it. For example: penstock profile --set model.preset=small --microbatch-sizes 1,2,4 --out small.yaml
    """
    check_can_write(out)
    numbers = (layers, hidden, sequence, heads, vocabulary)
    name = None if name is None else name[:200] or "model"
    constants = None if calibration is None else _calibration_in(calibration)
    measuring: dict[str, object] = {"--seconds": seconds, "--data": data, "--set": changes, "--config": config}
    if cluster is not None or any(number is not None for number in numbers):
        _check_unused({"FILE": file, "--from": source, **measuring}, "--cluster, for which formulas take its place")
        found = _analytic(cluster, numbers, microbatch_sizes, name)
    elif file is None:
        if source is not None:
            raise ConfigError("--from converts the profile of another program; give its FILE")
        wanted = 0.3 if seconds is None else seconds
        found = _measured(changes_of(None, None, changes, data=data), config, microbatch_sizes, wanted, links, name)
    else:
        _check_unused({"--microbatch-sizes": microbatch_sizes, **measuring}, "FILE")
        found = _read(file, source, name)
    if constants is not None:
        found = found.model_copy(update={"calibration": constants})
    planned = " --devices N" if cluster is None else f" --cluster {quote(cluster)} --devices N"
    _write_profile(found, out, as_json, planned)


def _calibration_in(file: Path) -> Calibration:
    """Return the calibration of a profile.

    Raises:
        ConfigError: it is no profile, or has none.
    """
    from penstock.plan.profile.files import read_profile

    found = read_profile(file).calibration
    if found is None:
        raise ConfigError(
            f"the profile {str(file)!r} has no calibration to take; penstock predicted RUN RUN --profile {file} "
            "--calibrated FILE writes one that has"
        )
    return found


def _check_unused(given: Mapping[str, object], other: str) -> None:
    """Refuse options that say how blocks are measured, or what is read, where neither is done.

    Args:
        given: values by option; None where it is not given.
        other: what does not go with them.

    Raises:
        ConfigError: one is given.
    """
    unused = next((option for option, value in given.items() if value is not None), None)
    if unused is not None:
        what = "of a profile that is read" if unused in ("FILE", "--from") else "of measuring"
        raise ConfigError(f"{unused} is {what}; leave it out, or {other}")


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


def _write_profile(found: Profile, out: Path | None, as_json: bool, planned: str) -> None:
    """Print a profile, and write it to a file where one is given.

    Raises:
        ConfigError: the file cannot be written.
    """
    from penstock.cli.plans.profile_table import profile_tables
    from penstock.plan.profile.files import profile_text
    from penstock.view.tables import table_console

    if out is not None:
        try:
            write_whole(out, profile_text(found))
        except OSError as error:
            raise ConfigError(f"cannot write the profile {str(out)!r}: {error.strerror or error}") from None
    if as_json:
        print_json(found.model_dump(exclude_unset=True, exclude_none=True))
        return
    console = table_console()
    console.print(profile_tables(found, console.width))
    if out is not None:
        shared = found.tensor_parallel > 1  # for which there are no plans
        following = "penstock predicted RUN --profile {}" if shared else f"penstock plan --profile {{}}{planned}"
        say_written("profile", out, following)
