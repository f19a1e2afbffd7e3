"""The command line."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from penstock.errors import ConfigError, InterruptedRunError, PenstockError, WorkerError

if TYPE_CHECKING:
    from penstock.compare.config import ComparisonConfig
    from penstock.schedule.proof.check import Proof
    from penstock.simulate.costs import Costs

app = typer.Typer(
    name="penstock",
    help="Pipeline-parallel training that wastes neither time nor memory: every schedule is proven, drawn, simulated "
    "and run.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

Stages = Annotated[int, typer.Option("--stages", help="Stages (ranks) of the pipeline.", min=1)]
Microbatches = Annotated[int, typer.Option("--microbatches", help="Microbatches per batch.", min=1)]
MaybeStages = Annotated[
    int | None, typer.Option("--stages", help="Stages (ranks) of the pipeline.", min=1, show_default="4")
]
MaybeMicrobatches = Annotated[
    int | None, typer.Option("--microbatches", help="Microbatches per batch.", min=1, show_default="8")
]
MethodOrConfig = Annotated[
    str | None,
    typer.Argument(metavar="METHOD", help="A row of [bold]penstock methods[/bold], or a YAML file; 2bw if not given."),
]
ConfiguredStages = Annotated[int | None, typer.Option("--stages", help="Stages (ranks) of the pipeline.")]
ConfiguredMicrobatches = Annotated[int | None, typer.Option("--microbatches", help="Microbatches per batch.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Change a value, as in [bold]--set optimizer.lr=0.001[/bold].")
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data", help="Text file, folder, or tokens (.npy, .bin); the standard library's sources if not given."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
OrderOptions = Annotated[
    list[str] | None, typer.Option("--set", metavar="OPTION=N", help="An option of the order, such as chunks=4.")
]
MethodName = Annotated[
    str | None, typer.Argument(metavar="METHOD", help="A row of [bold]penstock methods[/bold]; or give a file.")
]
OrderName = Annotated[
    str | None,
    typer.Option("--order", help="Another order of passes than the method's, such as zb-exact or forward-only."),
]
OrderFile = Annotated[
    Path | None,
    typer.Option(
        "--file", help="A Python file with a function (stages, microbatches) -> order; a schedule as text; torch's CSV."
    ),
]


Segments = Annotated[
    str | None,
    typer.Option(
        "--segments",
        metavar="N|auto",
        help="Recompute forwards before their backwards, N stages from one input; auto: square root of the stages.",
    ),
]


def main() -> None:
    """Run the command line: user errors exit with a message and code 2, worker failures with code 1.

    A run that was ended by a signal exits with 128 + its number, as in shells.
    """
    try:
        app()
    except WorkerError as error:
        if error.trace:
            sys.stderr.write(error.trace.rstrip() + "\n\n")
        _exit(error, 1)
    except InterruptedRunError as error:
        _exit(error, 128 + error.signal)
    except PenstockError as error:
        _exit(error, 2)


def _exit(error: PenstockError, code: int) -> NoReturn:
    hint = f"\n{error.hint}" if error.hint else ""
    message = Text.assemble(("error: ", "bold red"), str(error), hint)
    Console(stderr=True).print(message, soft_wrap=True)
    sys.exit(code)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def _order_options(changes: list[str] | None) -> dict[str, int]:
    """Parse the values of --set as options of an order."""
    options: dict[str, int] = {}
    for change in changes or ():
        name, _, value = change.partition("=")
        try:
            options[name.strip()] = int(value)
        except ValueError:
            raise ConfigError(
                f"--set takes an option of the order and a whole number, such as chunks=4; got {change!r}"
            ) from None
    return options


def _config_of(what: str | None, stages: int | None, microbatches: int | None) -> tuple[Path | None, list[str]]:
    """The configuration file, if one is given, and what is set besides; a word that names no file is a method."""
    from penstock.schedule.methods.table import find_method

    named: dict[str, str | int | None] = {"method": None, "stages": stages, "microbatches": microbatches}
    config = None
    if what is not None and (Path(what).suffix or "/" in what or Path(what).is_file()):
        config = Path(what)
    elif what is not None:
        named["method"] = find_method(what).name
    return config, [f"{key}={value}" for key, value in named.items() if value is not None]


def _with_data(changes: list[str] | None, data: str | None) -> list[str]:
    return [*(changes or []), *([f"data={data}"] if data is not None else [])]


def _prove(
    method: str | None,
    file: Path | None,
    stages: int | None,
    microbatches: int | None,
    changes: list[str] | None,
    segments: str | None,
    order: str | None,
    costs: tuple[Costs, int],
) -> Proof:
    """Prove the schedule of a method or in a file, with recompute if asked for.

    `costs` are those of so many ranks together: an order that is searched for given times gets them as options.
    """
    from penstock.schedule.build import extend, prove
    from penstock.schedule.load import prove_file
    from penstock.simulate.search_options import with_search_options

    if (method is None) == (file is None):
        raise ConfigError("give either a METHOD (penstock methods lists them) or --file")
    options = _order_options(changes)
    if file is not None and order is not None:
        raise ConfigError("a --file holds the order; leave --order out")
    if file is not None and file.suffix != ".py" and (stages or microbatches or options):
        raise ConfigError(f"{file} holds a finished schedule; leave --stages, --microbatches and --set out")
    size = stages or 4, microbatches or 8
    if file is not None:
        proof = prove_file(file, *size, options)
    else:
        options = with_search_options(method or "", order, options, *costs)
        proof = prove(method or "", *size, order=order, options=options)
    if segments is None:
        return proof
    if segments != "auto" and not (segments.isascii() and segments.isdigit()):
        raise ConfigError(f"--segments takes a number of stages, or auto; got {segments!r}")
    return extend(proof, recomputes=True, segments="auto" if segments == "auto" else int(segments))


def _window(text: str | None) -> int | Literal["unlimited"] | None:
    """What --window says.

    Raises:
        ConfigError: it is neither a positive number nor "unlimited".
    """
    if text is None:
        return None
    if text == "unlimited":
        return "unlimited"
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ConfigError(f"--window takes a number of messages, at least 1, or unlimited; got {text!r}")
    return int(text)


@app.command()
def methods(stages: Stages = 4, microbatches: Microbatches = 8, as_json: AsJson = False) -> None:
    """List every method with what its schedule costs: weight copies, delay, activations, bubble."""
    from penstock.view.tables import UNBOUNDED, combines_table, methods_json, methods_table

    if as_json:
        _print_json(methods_json(stages, microbatches))
    else:
        console = Console()
        if not console.is_terminal:  # do not cut or wrap for programs that read the output
            console = Console(width=UNBOUNDED)
        console.print(methods_table(stages, microbatches, console.width))
        console.print(combines_table())


@app.command()
def show(
    method: MethodName = None,
    stages: MaybeStages = None,
    microbatches: MaybeMicrobatches = None,
    batches: Annotated[int | None, typer.Option(help="Batches to draw; 1 if flushed, else 3.", min=1)] = None,
    forward: Annotated[float, typer.Option(help="Time of a forward.", min=0)] = 1.0,
    backward: Annotated[float, typer.Option(help="Time of a full backward.", min=0)] = 2.0,
    order: OrderName = None,
    changes: OrderOptions = None,
    segments: Segments = None,
    file: OrderFile = None,
    text: Annotated[bool, typer.Option("--text", help="Print the text form, which --file reads, instead.")] = False,
    as_json: AsJson = False,
    svg: Annotated[Path | None, typer.Option(help="Also write the drawing to this SVG file.")] = None,
    width: Annotated[
        int | None, typer.Option(help="Columns of the drawing.", min=40, show_default="those of the terminal")
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Leave nothing out of the middle of a long drawing.")] = False,
) -> None:
    """Draw a schedule: what every rank does when, and the version of the weights that each pass reads."""
    from penstock.simulate.costs import Costs, StageCost
    from penstock.simulate.simulate import simulate_schedule
    from penstock.view.schedule_drawing import print_drawing, schedule_json, write_svg
    from penstock.view.text import wrap_schedule

    times = forward, backward / 2, backward / 2
    share = Costs((StageCost(*times),)), 1
    proof = _prove(method, file, stages, microbatches, changes, segments, order, share)
    schedule = proof.schedule
    span = batches or (3 if any(program.epilogue for program in schedule.programs) else 1)
    simulation = simulate_schedule(proof, Costs.uniform(schedule, *times), span)
    if svg is not None:
        write_svg(svg, simulation, span)
    console = Console() if width is None else Console(width=width)
    if as_json:
        _print_json(schedule_json(simulation, span))
    elif text:
        form = wrap_schedule(str(schedule), console.width) if console.is_terminal else str(schedule)
        console.print(form.rstrip("\n"), markup=False, highlight=False, soft_wrap=True)
    else:
        print_drawing(console, simulation, span, whole=whole)


@app.command()
def simulate(
    method: MethodName = None,
    stages: MaybeStages = None,
    microbatches: MaybeMicrobatches = None,
    forward: Annotated[float, typer.Option(help="F, time of a forward of a rank's whole share.", min=0)] = 1.0,
    backward_input: Annotated[float, typer.Option(help="Time of the backward for the inputs.", min=0)] = 1.0,
    backward_weight: Annotated[float, typer.Option(help="Time of the backward for the weights.", min=0)] = 1.0,
    batches: Annotated[int, typer.Option(help="Batches between two drains.", min=1)] = 1,
    step: Annotated[float, typer.Option(help="Time of an update.", min=0)] = 0.0,
    latency: Annotated[float, typer.Option(help="Time of a hop; it occupies no rank.", min=0)] = 0.0,
    fused: Annotated[float, typer.Option(help="Time of a fused pair, as a part of that of both.", min=0)] = 1.0,
    left: Annotated[float, typer.Option(help="Part of the activations that is left between I and W.", min=0)] = 1.0,
    per_stage: Annotated[
        Path | None,
        typer.Option(
            help="JSON list with forward, backward_input, backward_weight[, step] of each stage, in place of the times "
            "given as options."
        ),
    ] = None,
    order: OrderName = None,
    changes: OrderOptions = None,
    segments: Segments = None,
    file: OrderFile = None,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="N|unlimited",
            help="Messages that may be outstanding on a lane between two ranks.",
            show_default="the least that costs no time",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict makespan, bubble, activations, versions and messages of a span of batches."""
    from penstock.idle_time import split_time
    from penstock.simulate.costs import Costs, StageCost, read_stage_costs
    from penstock.simulate.long_run import steady_bubble
    from penstock.simulate.simulate import simulate_schedule
    from penstock.view.tables import simulation_table, time_table

    if per_stage is not None:
        share = read_stage_costs(per_stage, None, latency), stages or 4
    else:
        share = Costs((StageCost(forward, backward_input, backward_weight),), latency), 1
    share = replace(share[0], left=left), share[1]
    proof = _prove(method, file, stages, microbatches, changes, segments, order, share)
    if per_stage is not None:
        costs = read_stage_costs(per_stage, proof.schedule.num_stages, latency)
    else:
        costs = Costs.uniform(proof.schedule, forward, backward_input, backward_weight, latency=latency, step=step)
    costs = replace(costs, fused=fused, left=left)
    simulation = simulate_schedule(proof, costs, batches, window=_window(window))
    in_a_long_run = max(steady_bubble(simulation.lowered, costs, proof.steady_from + 2), 0.0)
    if as_json:
        _print_json(simulation.figures() | {"bubble_in_a_long_run": in_a_long_run})
    else:
        table = simulation_table(simulation, batches, in_a_long_run)
        Console().print(table, time_table(split_time(simulation.timeline), unit=""))


@app.command()
def train(
    what: MethodOrConfig = None,
    stages: ConfiguredStages = None,
    microbatches: ConfiguredMicrobatches = None,
    changes: Changes = None,
    data: DataOption = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Resume the run in this folder from its newest checkpoint, with its configuration."),
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every key with its default and meaning.")] = False,
) -> None:
    """Train a GPT on text through a pipeline of local worker processes: penstock train 1f1b --stages 4.

    Ctrl-C ends the run after the batches in flight, with a checkpoint; a second Ctrl-C ends it at once.

    Started by torchrun (torchrun --nproc-per-node 2 -m penstock train ...), this process joins that job as one of its
    workers instead.
    """
    from penstock.launch.launch import is_worker, launch_local
    from penstock.train.config.key_reference import described_keys, with_options
    from penstock.train.config.load import load_config
    from penstock.train.setup.prepare import check_resume, make_run_folder, prepare
    from penstock.train.setup.run_folder import how_to_go_on
    from penstock.view.tables import keys_table

    if keys:
        Console().print(keys_table(with_options(described_keys())))
        return
    config, named = _config_of(what, stages, microbatches)
    if resume is not None and config is None:
        config = resume / "config.yaml"
    settings = load_config(config, named + _with_data(changes, data))
    if resume is not None:
        check_resume(settings, resume)
    if is_worker():
        _work(settings.model_dump(), None if resume is None else str(resume), None)
        return
    prepare(settings)
    folder = resume or make_run_folder(settings)
    workers, console = settings.stages * settings.width, Console()
    try:
        launch_local(
            workers, _work, settings.model_dump(), str(folder), restarts=settings.restarts, timeout=settings.timeout
        )
    except (WorkerError, InterruptedRunError) as error:
        if console.is_terminal:
            console.line()  # a worker that was killed has left the cursor behind its live display
        error.hint = how_to_go_on(folder)
        raise
    finally:
        console.show_cursor()  # a killed worker could not


def _work(values: dict[str, Any], folder: str | None, drain: str | None) -> None:
    """Train as one worker of a job."""
    from penstock.train.config.load import validate_config
    from penstock.train.loop import train as run
    from penstock.view.progress import TerminalObserver

    observer = TerminalObserver()
    try:
        place, request = (Path(path) if path else None for path in (folder, drain))
        run(validate_config(values), place, observer, request)
    finally:
        observer.close()


@app.command()
def verify(
    what: MethodOrConfig = None,
    stages: ConfiguredStages = None,
    microbatches: ConfiguredMicrobatches = None,
    changes: Changes = None,
    data: DataOption = None,
    batches: Annotated[int, typer.Option(help="Batches to train; delays show from the third one on.", min=1)] = 4,
    as_json: AsJson = False,
) -> None:
    """Train some batches with the pipeline and by the equations of its method, and compare every number.

    All ranks run in this process, which must hold the whole model several times: use a small model of the same kind.
    Synchronous methods are also compared with plain torch. Exit code 1 if anything differs.
    """
    from penstock.train.config.load import load_config
    from penstock.verify.verify import verify as run
    from penstock.view.verification import verification_json, verification_table

    config, named = _config_of(what, stages, microbatches)
    settings = load_config(config, named + _with_data(changes, data))
    with Console(stderr=True).status(f"training {batches} batches, again and again"):
        found = run(settings, batches)
    if as_json:
        _print_json(verification_json(found))
    else:
        Console().print(verification_table(found))
        Console().print(Text(found.verdict, "green" if found.agrees else "red"), soft_wrap=True)
    if found.error is not None and not isinstance(found.error, PenstockError):
        traceback.print_exception(found.error)
    if not found.agrees:
        raise typer.Exit(1)


@app.command()
def compare(
    methods: Annotated[
        str | None,
        typer.Option(
            help="Rows of [bold]penstock methods[/bold], as in 1f1b,2bw:sync=50,stash; 1f1b,2bw if not given."
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="text (a byte-level GPT, if not given) or digits (a residual CNN).")
    ] = None,
    stages: Annotated[int | None, typer.Option(help="Stages (ranks) of the pipeline; 8 if not given.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches per batch; 8 if not given.")] = None,
    batches: Annotated[int | None, typer.Option(help="Updates to make; 300 if not given.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each method; 3 if not given.")] = None,
    lr: Annotated[str | None, typer.Option(help="Learning rates to try with each method, as in 1e-3,3e-3.")] = None,
    tune: Annotated[
        int | None, typer.Option(help="Seeds to try all rates with; the others use the best one. All if not given.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a value, as in [bold]--set max_grad_norm=1.0[/bold].")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; an interrupted comparison is continued.")
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every key with its default and meaning.")] = False,
) -> None:
    """Train one model with several methods, from the same weights on the same data, and compare the results.

    All ranks run in this process, one run after the other. The folder gets results.csv, summary.csv, comparison.html.
    If it is interrupted, by Ctrl-C or otherwise, the same command continues with the runs that have not finished.
    """
    from penstock.compare.config import ComparisonConfig, comparison_config
    from penstock.train.config.key_reference import described_keys
    from penstock.view.tables import keys_table

    if keys:
        Console().print(keys_table(described_keys(ComparisonConfig), "keys of --set"))
        return
    if out is None:
        raise ConfigError("give the folder for the results, as in --out comparisons/first")
    numbers = {"stages": stages, "microbatches": microbatches, "batches": batches, "seeds": seeds, "tune": tune}
    _compare(comparison_config(changes or [], {"methods": methods, "task": task, "lr": lr, **numbers}), out)


def _compare(settings: ComparisonConfig, out: Path) -> None:
    from penstock.compare.run import ComparisonRun
    from penstock.view.comparing import TerminalComparison, summary_table
    from penstock.view.comparison_page import PAGE, write_findings

    observer, run = TerminalComparison(), None
    try:
        run = ComparisonRun(settings, out, observer)
        run.run()
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; the same command continues with the runs that have not finished")
        raise typer.Exit(128 + signal.SIGINT) from None
    finally:
        observer.close()
        if run is not None:
            write_findings(run.findings(), out)
    Console().print(summary_table(run.findings()))
    Console().print(Text(str(out / PAGE)), soft_wrap=True)


@app.command()
def config() -> None:
    """Print every key of a training run with its default and meaning, as YAML to edit."""
    from penstock.train.config.key_reference import commented_reference

    sys.stdout.write(commented_reference())


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="A run folder of [bold]penstock train[/bold].")],
    prompt: Annotated[str, typer.Option(help="The beginning of the text.")] = "def ",
    length: Annotated[int, typer.Option(help="Bytes to sample.", min=1)] = 400,
    temperature: Annotated[float, typer.Option(help="Below 1 for likelier text, 0 for the likeliest.", min=0)] = 0.8,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0)] = 0,
) -> None:
    """Sample text with the weights of a finished run."""
    from penstock.train.export.sample import sample_text

    sys.stdout.write(sample_text(run, prompt, length, temperature, seed) + "\n")


if __name__ == "__main__":
    main()
