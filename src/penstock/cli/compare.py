"""The command `penstock compare`."""

from __future__ import annotations

import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli.options import (
    AsJson,
    Changes,
    ConfigFile,
    DataPath,
    ListKeys,
    MaybeMicrobatches,
    MethodNames,
    OrderCorrection,
    OrderFiles,
    OrderRule,
    Stages8,
)
from penstock.cli.output import print_json
from penstock.errors import ConfigError
from penstock.schedule.ir.limits import MOST_BATCHES

if TYPE_CHECKING:
    from penstock.compare.config import ComparisonConfig


Jobs = Annotated[
    int, typer.Option(metavar="N", help="Runs to train at a time, each in a process of its own.", min=1, max=10**4)
]


def compare(
    methods: MethodNames = None,
    stages: Stages8 = None,
    microbatches: MaybeMicrobatches = None,
    batches: Annotated[
        int | None, typer.Option(metavar="T", help="Updates to make; 300 if not given.", min=1, max=MOST_BATCHES)
    ] = None,
    files: OrderFiles = None,
    rule: OrderRule = None,
    correction: OrderCorrection = None,
    data: DataPath = None,
    seeds: Annotated[
        int | None, typer.Option(metavar="N", help="Runs of each method; 3 if not given.", min=1, max=10**6)
    ] = None,
    lr: Annotated[
        str | None, typer.Option(metavar="RATES", help="Learning rates to try with each method, as in 1e-3,3e-3.")
    ] = None,
    tune: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Seeds to try all rates with; the others use the best one. All if not given.", min=1
        ),
    ] = None,
    jobs: Jobs = 1,
    changes: Changes = None,
    config: ConfigFile = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder for the results; an interrupted comparison is continued."),
    ] = None,
    as_json: AsJson = False,
    keys: ListKeys = False,
) -> None:
    """Train one model with several methods, from the same weights on the same data, and compare the results.

    For example: penstock compare 1f1b 2bw stash --stages 8 --out comparisons/first

    All ranks run in this process, one run after the other, or --jobs of them at a time in processes of their own.
    The folder gets results.csv, summary.csv, comparison.html.
    If it is interrupted, by Ctrl-C or otherwise, the same command continues with the runs that have not finished.
    """
    from penstock.compare.config import comparison_config, comparison_keys
    from penstock.view.tables import keys_table
    from penstock.yaml_file import read_yaml

    if keys:
        Console().print(keys_table(comparison_keys()))
        return
    if out is None:
        raise ConfigError("give the folder for the results, as in --out comparisons/first")
    sizes = {"stages": stages, "microbatches": microbatches, "batches": batches}
    others = {"data": data, "seeds": seeds, "lr": lr, "tune": tune}
    given = {"methods": ",".join(methods) if methods else None} | sizes | others
    values = None if config is None else read_yaml(config)
    _compare(comparison_config(changes or [], given, files or (), values, rule, correction), out, jobs, as_json)


def _compare(settings: ComparisonConfig, out: Path, jobs: int, as_json: bool) -> None:
    """Train what has not been trained yet, and print a summary; as JSON, all else goes to standard error."""
    from penstock.compare.run import ComparisonRun
    from penstock.view.comparison_page import PAGE, write_findings
    from penstock.view.comparison_progress import TerminalComparison, summary_table

    observer, run = TerminalComparison(Console(stderr=as_json)), None
    try:
        run = ComparisonRun(settings, out, observer)
        run.run(jobs)
    except KeyboardInterrupt:
        observer.close()
        Console(stderr=True).print("interrupted; the same command continues with the runs that have not finished")
        raise typer.Exit(128 + signal.SIGINT) from None
    finally:
        observer.close()
        if run is not None:
            write_findings(run.findings(), out)
    if as_json:
        print_json([asdict(summary) for summary in run.findings().summaries()])
        return
    Console().print(summary_table(run.findings()))
    Console().print(Text(str(out / PAGE)), soft_wrap=True)
