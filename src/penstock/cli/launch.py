"""The command `penstock launch`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import (
    ConfigFile,
    DataPath,
    Microbatches4,
    OptionalMethod,
    OrderCorrection,
    OrderFile,
    OrderRule,
    Stages2,
    TrainChanges,
)
from penstock.cli.train import changes_of

_LONGEST_NAME = 57  # characters; a host name may have 63, of which -NUMBER of a pod takes up to six
Launcher = Annotated[
    str, typer.Option("--print", metavar="LAUNCHER", help="slurm, kubernetes, skypilot or ray.", show_default=False)
]


def launch(
    launcher: Launcher,
    method: OptionalMethod = None,
    stages: Stages2 = None,
    microbatches: Microbatches4 = None,
    batches: Annotated[int | None, typer.Option(metavar="T", help="Updates to make; 1000 if not given.", min=1)] = None,
    machines: Annotated[int, typer.Option(metavar="N", help="Machines to run on.", min=1)] = 1,
    cpus: Annotated[int, typer.Option(metavar="N", help="CPUs of each rank.", min=1)] = 1,
    image: Annotated[
        str, typer.Option(metavar="IMAGE", help="A container image with penstock, for kubernetes.")
    ] = "IMAGE",
    file: OrderFile = None,
    rule: OrderRule = None,
    correction: OrderCorrection = None,
    data: DataPath = None,
    changes: TrainChanges = None,
    config: ConfigFile = None,
) -> None:
    """Print the file that starts `penstock train` with the same options on a cluster; nothing is started.

    For example: penstock launch --print slurm 2bw --stages 8 --machines 2 --set out=/shared/runs > train.sbatch

    docs/launchers.md says how to use it. All machines must reach the folder `out`, and the configuration and the data
    under the same names.
    """
    from penstock.launch.cluster_job_files import JobPlan, job_file
    from penstock.train.config.load import load_config

    named = {"stages": stages, "microbatches": microbatches, "batches": batches, "data": data}
    own = {"rule": rule, "corrected_by": correction}
    settings = load_config(config, changes_of(method, file, changes, **named, **own))
    given = [method] if method is not None else []
    paths: dict[str, Path | str | None] = {"config": config, "file": file, "rule": rule, "correction": correction}
    for option, value in {**paths, **named}.items():
        given += [] if value is None else [f"--{option}", str(value)]
    for change in changes or ():
        given += [] if change.startswith("out=") else ["--set", change]
    name = re.sub(r"[^a-z0-9]+", "-", f"penstock-{settings.row.name}".lower())[:_LONGEST_NAME].strip("-")
    ranks = settings.processes
    gpus = int(settings.device.startswith("cuda"))  # `auto` takes what there is
    plan = JobPlan(name, given, settings.out, machines, ranks, settings.model_dump(), cpus, gpus, image)
    sys.stdout.write(job_file(launcher, plan))
