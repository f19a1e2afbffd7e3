"""The commands of training runs: `penstock train`, `sample` and `config`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli.failures import is_first_to_say
from penstock.cli.options import (
    FLAG,
    Changes,
    ConfigFile,
    DataPath,
    InFlightNumber,
    ListKeys,
    Microbatches4,
    OptionalMethod,
    OrderCorrection,
    OrderFile,
    OrderRule,
    Stages2,
)
from penstock.cli.output import print_words
from penstock.errors import CheckpointError, ConfigError, InterruptedRunError, PenstockError, WorkerError
from penstock.job.place import Agent, job_place
from penstock.job.surroundings import check_surroundings
from penstock.launch.fork_server import start_method
from penstock.schedule.ir.limits import MOST_BATCHES

if TYPE_CHECKING:
    from penstock.train.config.schema import TrainConfig
    from penstock.train.prepare.prepare_run import Prepared

_PRELOAD = __name__, "penstock.view.progress"
"""Imported once for all workers."""


def changes_of(
    method: str | None,
    file: Path | None,
    changes: list[str] | None,
    **named: str | int | None,
) -> list[str]:
    """Return everything that a configuration is changed by, as `key=value`; options go before --set.

    Args:
        method, file: the method, or the order of one's own.
        changes: those of --set.
        named: the values of options that are called like a key; None where an option is not given.

    Raises:
        ConfigError: both a method and a file are given.
    """
    if method is not None and file is not None:
        raise ConfigError("give either a METHOD (penstock methods lists them) or --file")
    keys = {"method": method, "schedule": None if file is None else str(file), **named}
    return [*(changes or ()), *(f"{key}={value}" for key, value in keys.items() if value is not None)]


def print_train_keys() -> None:
    """Print every key of a training run."""
    from penstock.train.config.key_reference import described_keys, with_option_keys
    from penstock.view.tables import keys_table

    Console().print(keys_table(with_option_keys(described_keys())))


def train(
    method: OptionalMethod = None,
    stages: Stages2 = None,
    microbatches: Microbatches4 = None,
    batches: Annotated[
        int | None, typer.Option(metavar="T", help="Updates to make; 1000 if not given.", min=1, max=MOST_BATCHES)
    ] = None,
    file: OrderFile = None,
    rule: OrderRule = None,
    correction: OrderCorrection = None,
    in_flight: InFlightNumber = None,
    data: DataPath = None,
    changes: Changes = None,
    config: ConfigFile = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Resume the run in this folder from its newest checkpoint."),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart", metavar=FLAG, help="With --resume: begin again; metrics and checkpoints are set aside."
        ),
    ] = False,
    keys: ListKeys = False,
) -> None:
    """Train a GPT on text through a pipeline of local worker processes.

    For example: penstock train 1f1b --stages 4 --microbatches 8 --data my.txt --set optimizer.lr=0.001

    Ctrl-C ends the run after the batches in flight, with a checkpoint; a second Ctrl-C ends it at once.
    Exit code 3: the run has finished, but none of its checkpoints could be written (1 of torchrun, whatever its workers
    exit with, and 0 while it has restarts left, as it would train again).

    Started by a launcher (torchrun --no-python --nproc-per-node 2 penstock train ..., srun, mpirun), this process joins
    that job as one of its workers instead.
    """
    if keys:
        print_train_keys()
        return
    own = {"rule": rule, "corrected_by": correction, "options.in_flight": in_flight}
    named = changes_of(
        method, file, changes, stages=stages, microbatches=microbatches, batches=batches, data=data, **own
    )
    if restart and resume is None:
        raise ConfigError("--restart begins the run of a folder again; give the folder with --resume")
    if job_place(os.environ) is not None:
        settings = _checked(config, named, resume, restart)
        _work(settings.model_dump(), None if resume is None else str(resume), restart, None)
        return
    with Console(stderr=True).status("checking the schedule, the model and the data"):
        settings = _checked(config, named, resume, restart, local=True)
    _launch(settings, resume, restart)


def _checked(
    config: Path | None, changes: list[str], resume: Path | None, restart: bool, local: bool = False
) -> TrainConfig:
    """Return the configuration, after checking what can be checked before processes start.

    Args:
        config, changes: as of `load_config`.
        resume: the folder of a run that goes on.
        restart: it begins again.
        local: all processes will run on this machine, and this one starts them.

    Raises:
        PenstockError: something is wrong.
    """
    from penstock.train.config.load import load_config
    from penstock.train.setup.model_shape import check_enough_blocks

    file = config if resume is None else _config_of(resume, config)
    settings = load_config(
        file, changes, proves=local, resumes=resume is not None
    )  # rank 0 of a job that runs already proves for all
    check_enough_blocks(settings)
    check_surroundings(os.environ, settings.processes)
    say_places(settings)
    if local:
        start_method(_PRELOAD)  # workers are forked from a process that imports torch while this one does, too
    from penstock.train.prepare.prepare_run import prepare  # not before, as it imports torch
    from penstock.train.setup.run_folder import check_resume

    if resume is not None and not restart:
        check_resume(settings, resume)
    if local:
        return _chosen(prepare(settings, local=True, choose=_choose_recompute))
    return settings


def say_places(settings: TrainConfig) -> None:
    """Print on which devices the ranks of this run belong, on one rank.

    Raises:
        ConfigError: the plan is one for another number of ranks.
    """
    from penstock.plan.stages.device_hierarchy import places_in_words

    if settings.placement is None:
        return
    if len(settings.placement) != settings.processes:
        raise ConfigError(
            f"placement names the devices of {len(settings.placement)} ranks, but this run has {settings.processes}; "
            "plan again, or set placement to null"
        )
    place = job_place(os.environ)
    if place is None or place.rank == 0:
        print_words(Console(stderr=True), Text(f"{places_in_words(settings.placement, settings.stages)}."))


def _choose_recompute(*asked: Any) -> object:
    """Choose what stages recompute."""
    from penstock.measure.recompute_choice import choose_for  # imports all that measures

    return choose_for(*asked)


def _chosen(prepared: Prepared) -> TrainConfig:
    """Return a configuration with what was chosen for it, which is said."""
    for note in prepared.notes():
        print_words(Console(stderr=True), Text(note))
    return prepared.config


def _config_of(run: Path, config: Path | None) -> Path:
    """Return the file with the configuration of a run that goes on: the one that is given, or the run's own.

    Raises:
        ConfigError: the folder is none of a run, or a file in it is not a regular one.
        CheckpointError: a run is under way there.
    """
    from penstock.checkpoint.folder_claim import reading
    from penstock.train.config.written_config import CONFIG, changed_by_hand, changes_in_words
    from penstock.train.setup.run_folder import check_is_run, check_own_files

    check_is_run(run)
    check_own_files(run)
    if job_place(os.environ) is None:  # those of a job that runs may be started again
        with reading(run):
            pass
    if config is None and (by_hand := changed_by_hand(run)):
        said = f"{run / CONFIG} was changed by hand: {changes_in_words(by_hand)}"
        if is_first_to_say(said):
            print_words(Console(stderr=True), Text(said))
    return config or run / CONFIG


def _launch(settings: TrainConfig, resume: Path | None, restart: bool) -> None:
    """Train in worker processes, in the folder of the run that goes on or in a new one.

    Raises:
        WorkerError, InterruptedRunError: see `launch_local`.
        UnsavedRunError: the run has ended, but no checkpoint of it could be written.
    """
    from penstock.checkpoint.folder_claim import reading
    from penstock.launch.launch import launch_local
    from penstock.train.setup.config_rollback import ConfigBefore
    from penstock.train.setup.recorded_progress import recorded
    from penstock.train.setup.run_folder import check_is_saved, how_to_go_on, make_run_folder, saved_batches

    folder = resume or make_run_folder(settings)
    start = 0 if restart else recorded(folder).size
    if resume is not None and not restart and saved_batches(folder) is None:
        print_words(Console(), Text(f"There is no checkpoint in {folder} yet, so the run begins with batch 1."))
    before = None if resume is None or restart else ConfigBefore(folder, settings)
    console = Console()
    try:
        launch_local(
            settings.processes, _work, settings.model_dump(), str(folder), restart,
            folder=folder, restarts=settings.restarts, timeout=settings.timeout,
        )  # fmt: skip
        if settings.checkpoint.every is not None:
            check_is_saved(folder, start)
        if settings.predicted.batch is not None:
            print_words(console, Text(against_plan(settings, folder)))
    except (WorkerError, InterruptedRunError) as error:
        if console.is_terminal:
            console.line()  # a worker that was killed has left the cursor behind its live display
        failed = isinstance(error, WorkerError) and before is not None
        as_before = None
        with suppress(CheckpointError), reading(folder):  # unless another job has the folder
            as_before = before.advice() if failed and before is not None else None
        error.hint = how_to_go_on(folder, str(error), as_before)
        if isinstance(error, WorkerError):
            error.hint += _how_to_take_less(settings, str(error))
        raise
    finally:
        console.show_cursor()  # a killed worker could not


def against_plan(settings: TrainConfig, folder: Path) -> str:
    """Return how far the prediction of a plan was from what its run took, or why that cannot be told.

    Args:
        settings: of the run that has ended, with a prediction.
        folder: of the run.
    """
    from penstock.plan.measured_run import PredictedRun, prediction_in_words  # imports all that simulates
    from penstock.runtime.rank.timeline_files import read_timeline
    from penstock.schedule.ir.rank_numbers import RankNumbers

    found, ranks = settings.predicted, RankNumbers(settings.width, settings.stages, settings.rank_order)
    assert found.batch is not None, "there is a prediction"
    planned = PredictedRun(found.batch, found.passes or (), found.updates or (), found.idle)
    try:
        return prediction_in_words(planned, read_timeline(folder), ranks.of_pipeline(0), settings.microbatches)
    except PenstockError as error:
        return f"Not compared with what was planned: {error}"


def _how_to_take_less(settings: TrainConfig, said: str) -> str:
    """Return what to do where a worker may have found no memory left."""
    from penstock.train.data.corpus import load_corpus
    from penstock.train.setup.machine_memory import may_lack_memory, ways_to_take_less
    from penstock.train.setup.model_shape import model_shape
    from penstock.train.setup.run_folder import is_of_a_run

    if not may_lack_memory(said):
        return ""
    try:
        skip = partial(is_of_a_run, Path(settings.out))
        model = model_shape(settings, load_corpus(settings.data, skip, settings.model.vocabulary))
    except PenstockError:  # of the text, which is no longer there
        return ""
    ways = "".join(f"\n  {way}" for way in ways_to_take_less(settings, model))
    return f"\nif there was no memory left (`dmesg` tells), one of these takes less (`penstock train --set`):{ways}"


def _work(values: dict[str, Any], folder: str | None, restart: bool, drain: str | None) -> None:
    """Train as one worker of a job."""
    from penstock.train.config.load import validate_config
    from penstock.train.loop import train as run
    from penstock.view.closed_terminal_stream import lasting_streams
    from penstock.view.progress import TerminalObserver

    with lasting_streams():
        observer = TerminalObserver(Console())
        try:
            place, request = (Path(path) if path else None for path in (folder, drain))
            # Workers that elastic starts again would train all batches once more, and on the same disk.
            must_save = request is None and not Agent(os.environ).starts_again
            run(
                validate_config(values),
                place,
                observer,
                request,
                restart=restart,
                must_save=must_save,
                choose=_choose_recompute,
            )
        finally:
            observer.close()


def config() -> None:
    """Print every key of a training run with its default and meaning, as YAML to edit and to give to --config."""
    from penstock.train.config.key_reference import commented_reference

    sys.stdout.write(commented_reference())


def sample(
    run: Annotated[Path, typer.Argument(metavar="FOLDER", help="A run folder of [bold]penstock train[/bold].")],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The beginning of the text.")] = "def ",
    length: Annotated[int, typer.Option(metavar="N", help="Bytes to sample.", min=1, max=10**9)] = 400,
    temperature: Annotated[
        float, typer.Option(metavar="X", help="Below 1 for likelier text, 0 for the likeliest.", min=0)
    ] = 0.8,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the sampling.", min=0, max=2**63 - 1)] = 0,
) -> None:
    """Sample text with the weights of a finished run."""
    from penstock.checkpoint.folder_claim import reading
    from penstock.train.export.sample import sample_text

    with reading(run):
        text = sample_text(run, prompt, length, temperature, seed)
    sys.stdout.write(f"{text}\n")
