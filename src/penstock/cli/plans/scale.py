"""The command `penstock scale`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from penstock.byte_sizes import size_of
from penstock.cli.options import AsJson
from penstock.cli.output import print_json
from penstock.cli.plans.plan_devices import cluster_named
from penstock.errors import ConfigError
from penstock.guarded_files import write_whole

_WIDTH = 140  # of tables in files


def scale(
    x: Annotated[
        float | None, typer.Option("--x", metavar="X", help="A model of the family: X layers of hidden size X squared.")
    ] = None,
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="NAME|FILE", help="A preset, or a file like one.")
    ] = "a100",
    layers: Annotated[
        int | None, typer.Option("--layers", metavar="N", help="Instead of --x: a model of your own.")
    ] = None,
    hidden: Annotated[int | None, typer.Option("--hidden", metavar="N", help="Its hidden size.")] = None,
    sequence: Annotated[int | None, typer.Option("--sequence", metavar="N", help="Its tokens in a sequence.")] = None,
    heads: Annotated[int | None, typer.Option("--heads", metavar="N", help="Its heads.")] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option("--vocabulary", metavar="N", help="Of its tokens; embeddings and scores count only if given."),
    ] = None,
    critical_batch: Annotated[
        float | None,
        typer.Option("--critical-batch", metavar="B", help="In sequences; by the rules if not given."),
    ] = None,
    steps: Annotated[
        float | None, typer.Option("--steps", metavar="N", help="With the critical batch; by the rules if not given.")
    ] = None,
    devices: Annotated[int | None, typer.Option("--devices", metavar="N", help="At most so many.", min=1)] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="Of a device, instead of the cluster's.")
    ] = None,
    rules: Annotated[
        Path | None, typer.Option("--rules", metavar="FILE", help="Rules of your own, in the form of --print-rules.")
    ] = None,
    print_rules: Annotated[
        bool, typer.Option("--print-rules", help="Print the rules, each with its source, and stop.")
    ] = False,
    plots: Annotated[
        Path | None, typer.Option("--plots", metavar="FOLDER", help="Draw days by devices, and by size, as SVG there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """How fast can a model be trained at all? Critical batch, steps, fastest layouts, memory, from formulas alone.

    For example: penstock scale --x 160 --cluster a100. The analysis is that of layered gradient accumulation (arXiv
    2106.02679): a batch depth-first, or layer by layer with a modular pipeline and sharded weights.
    """
    from penstock.plan.scale.fastest import ScaledTraining
    from penstock.plan.scale.model_shape import critical_batch as by_rules
    from penstock.plan.scale.report import scaling_json, scaling_tables
    from penstock.plan.scale.rules_file import read_rules, rules_text
    from penstock.plan.scale.scaling_curves import analyse

    if print_rules:
        sys.stdout.write(rules_text())
        return
    known = read_rules(rules)
    size = None if memory is None else size_of("--memory", memory)
    shape = _shape(x, (layers, hidden, sequence, heads), vocabulary, known)
    batch = by_rules(shape, known, x) if critical_batch is None else critical_batch
    if plots is not None:
        _make_folder(plots)
    for measured in (False, True):  # all is checked before
        machine = cluster_named(cluster, measured)
        if size is not None:
            given = machine.memory.model_copy(update={"value": size, "source": "--memory"})
            machine = machine.model_copy(update={"memory": given})
        training = ScaledTraining(shape, machine, known, batch, known.steps.value if steps is None else steps, devices)
    found = analyse(training, x)
    if plots is not None:
        _draw(plots, found)
    if as_json:
        print_json(scaling_json(found))
    else:
        from penstock.view.tables import width_to_fit

        console = Console()
        if width_to_fit(console) is None:
            console = Console(width=_WIDTH)
        console.print(scaling_tables(found))
    if not any(row.fits for row in found.rows):
        raise typer.Exit(1)


def _shape(x: float | None, given: tuple[int | None, ...], vocabulary: int | None, rules: Any) -> Any:
    """Return the model of the family, or that of the options.

    Raises:
        ConfigError: neither is given, or both, or heads do not divide the hidden size.
    """
    from penstock.plan.scale.model_shape import ModelShape, family_model

    names = ("--layers", "--hidden", "--sequence", "--heads")
    if x is not None:
        wrong = next((name for name, value in zip(names, given, strict=True) if value is not None), None)
        if wrong or vocabulary is not None:
            raise ConfigError(f"--x says the whole model; leave {wrong or '--vocabulary'} out, or --x")
        return family_model(x, rules)
    layers, hidden, sequence, heads = given
    if layers is None or hidden is None or sequence is None:
        missing = ", ".join(name for name, value in zip(names[:3], given, strict=False) if value is None)
        raise ConfigError(f"give --x, or a model of your own: {missing} missing")
    name = f"{layers} x {hidden}"
    if heads is None:
        heads = max(1, hidden // 128)
    elif heads > 0 and hidden % heads:
        raise ConfigError(f"--hidden must be a multiple of --heads; {hidden} is none of {heads}")
    return ModelShape(name, layers, hidden, sequence, heads, rules.expansion.value, vocabulary or 0)


def _make_folder(folder: Path) -> None:
    """Make the folder of the plots, if it is not there.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write the plots to {str(folder)!r}: {error.strerror or error}") from None


def _draw(folder: Path, scaling: Any) -> None:
    """Write the plots.

    Raises:
        ConfigError: they cannot be written.
    """
    from penstock.plan.scale.scaling_curves import days_by_devices, days_by_size
    from penstock.view.line_plot import Curve, plot_document

    name = f"{scaling.training.shape.name} on {scaling.training.cluster.name}"
    drawings = {"days-by-devices.svg": (days_by_devices(scaling), f"{name}: days by devices", "devices")}
    if scaling.x is not None:
        title = f"X_[x] on {scaling.training.cluster.name}: days by size"
        drawings["days-by-size.svg"] = (days_by_size(scaling), title, "parameters")
    try:
        for file, (lines, title, label) in drawings.items():
            curves = [
                Curve(way, [(at, days, days, days) for at, days in points], style)
                for style, (way, points) in enumerate(lines.items())
            ]
            write_whole(folder / file, plot_document(curves, title, label, "days"))
    except OSError as error:
        raise ConfigError(f"cannot write the plots to {str(folder)!r}: {error.strerror or error}") from None
