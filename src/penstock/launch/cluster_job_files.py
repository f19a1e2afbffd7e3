"""Files that start a run on a cluster: a batch script of Slurm, manifests of Kubernetes, a SkyPilot task, a Ray script.

Each starts one process per rank of the pipelines, with the variables of `penstock.job.place`, and runs one command.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from penstock.checks import in_words
from penstock.errors import ConfigError

_PORT = 29500  # torch's own choice


@dataclass(frozen=True)
class JobPlan:
    """What a file is to start.

    Attributes:
        name: of the job, of lower-case letters, digits and hyphens.
        command: the arguments of `penstock train`.
        out: the folder for runs, which all machines share.
        machines, ranks: how many of each; every machine gets as many ranks.
        values: all keys of the configuration, for launchers that take no command.
        cpus: per rank.
        gpus: per rank.
        image: a container image with penstock, where one is needed.
    """

    name: str
    command: Sequence[str]
    out: str
    machines: int
    ranks: int
    values: Mapping[str, Any]
    cpus: int = 1
    gpus: int = 0
    image: str = "IMAGE"

    def __post_init__(self) -> None:
        """Check what does not depend on the launcher.

        Raises:
            ConfigError: the ranks cannot be spread evenly.
        """
        if self.ranks % self.machines:
            raise ConfigError(
                f"{self.ranks} processes (stages x width x tensor_parallel) cannot be spread evenly over "
                f"{self.machines} machines; take a number of machines that divides {self.ranks}"
            )

    @property
    def ranks_per_machine(self) -> int:
        """On every machine."""
        return self.ranks // self.machines


def job_file(launcher: str, plan: JobPlan) -> str:
    """Return the text of the file that starts a run.

    Args:
        launcher: a key of `LAUNCHERS`.
        plan: what to start.

    Raises:
        ConfigError: there is no such launcher.
    """
    if launcher not in LAUNCHERS:
        raise ConfigError(f"penstock writes files for {in_words(LAUNCHERS, 'and')}, not for {launcher!r}")
    return LAUNCHERS[launcher](plan)


def _slurm(plan: JobPlan) -> str:
    """Return a batch script, which resumes its own run when Slurm starts it again."""
    gpus = f"#SBATCH --gpus-per-node={plan.gpus * plan.ranks_per_machine}\n" if plan.gpus else ""
    return f"""#!/bin/bash
#SBATCH --job-name={plan.name}
#SBATCH --nodes={plan.machines}
#SBATCH --ntasks-per-node={plan.ranks_per_machine}
#SBATCH --cpus-per-task={plan.cpus}
{gpus}#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# 180 seconds before the time is over all tasks are asked to save and to end. The job is then queued again, and goes on.
out={shlex.quote(plan.out)}/$SLURM_JOB_ID
run=$(ls -d "$out"/*/ 2>/dev/null | tail -n 1)
if [ -n "$run" ]; then
    set -- --resume "$run"
else
    set -- {shlex.join(plan.command)} --set "out=$out"
fi
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
srun --kill-on-bad-exit=1 penstock train "$@" || exit
run=$(ls -d "$out"/*/ | tail -n 1)
[ -d "$run/weights" ] || scontrol requeue "$SLURM_JOB_ID"
"""


def _kubernetes(plan: JobPlan) -> str:
    """Return a headless service and an indexed job with one pod per rank."""
    variables = [
        {
            "name": "RANK",
            "valueFrom": {
                "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
            },
        },
        {"name": "WORLD_SIZE", "value": str(plan.ranks)},
        {"name": "LOCAL_RANK", "value": "0"},
        {"name": "LOCAL_WORLD_SIZE", "value": "1"},
        {"name": "MASTER_ADDR", "value": f"{plan.name}-0.{plan.name}"},
        {"name": "MASTER_PORT", "value": str(_PORT)},
    ]
    gpus = {"nvidia.com/gpu": str(plan.gpus)} if plan.gpus else {}
    container = {
        "name": "rank",
        "image": plan.image,
        "command": ["penstock", "train", *plan.command, "--set", f"out={plan.out}"],
        "env": variables,
        "resources": {"requests": {"cpu": str(plan.cpus)}, "limits": {"cpu": str(plan.cpus)} | gpus},
        "volumeMounts": [{"name": "runs", "mountPath": plan.out}],
    }
    pod = {
        "subdomain": plan.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 180,
        "containers": [container],
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": "CLAIM"}}],
    }
    labels = {"app": plan.name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": plan.name},
        # Ranks look for rank 0 before it is ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": plan.name},
        "spec": {
            "completionMode": "Indexed",
            "completions": plan.ranks,
            "parallelism": plan.ranks,
            "backoffLimit": 0,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    return yaml.safe_dump_all([service, job], sort_keys=False)


def _skypilot(plan: JobPlan) -> str:
    """Return a task whose machines run torchrun."""
    command = shlex.join(["penstock", "train", *plan.command, "--set", f"out={plan.out}"])
    run = (
        f"torchrun --no-python --nproc-per-node {plan.ranks_per_machine} --nnodes $SKYPILOT_NUM_NODES "
        f'--node-rank $SKYPILOT_NODE_RANK --master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" '
        f"--master-port {_PORT} {command}\n"
    )
    gpus = {"accelerators": f"GPU:{plan.gpus * plan.ranks_per_machine}"} if plan.gpus else {}
    task = {
        "name": plan.name,
        "num_nodes": plan.machines,
        "resources": {"cpus": f"{plan.cpus * plan.ranks_per_machine}+"} | gpus,
        "setup": "pip install penstock\n",
        "run": run,
    }
    return yaml.safe_dump(task, sort_keys=False, width=1000)


def _ray(plan: JobPlan) -> str:
    """Return a script for `ray job submit`."""
    values = json.loads(json.dumps({**plan.values, "out": plan.out}))
    lines = "".join(f"    {key!r}: {value!r},\n" for key, value in values.items())
    return f'''"""Trains {plan.name} on a Ray cluster: ray job submit --working-dir . -- python THIS_FILE"""

from penstock.cli.on_ray import train_on_ray

CONFIG = {{
{lines}}}

if __name__ == "__main__":
    train_on_ray(CONFIG, cpus_per_rank={plan.cpus}, gpus_per_rank={plan.gpus})
'''


LAUNCHERS: dict[str, Callable[[JobPlan], str]] = {
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "skypilot": _skypilot,
    "ray": _ray,
}
"""How to write the file for each launcher."""
