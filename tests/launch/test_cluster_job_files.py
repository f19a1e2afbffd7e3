"""Files for clusters: what is in them, and that the batch script does what it says.

SkyPilot has its schema only in the package itself, with all that it needs, so the fields of a task are listed here.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.errors import ConfigError
from penstock.job.place import JobPlace, job_place
from penstock.launch.cluster_job_files import LAUNCHERS, JobPlan, job_file
from penstock.train.config.load import validate_config
from support.command_line import run

PLAN = JobPlan("penstock-2bw", ["2bw", "--stages", "4", "--data", "my text"], "/shared/runs", 2, 4, {"stages": 4}, 3)


def test_the_manifest_gives_every_pod_its_place() -> None:
    service, job = yaml.safe_load_all(job_file("kubernetes", PLAN))
    assert service["kind"] == "Service"
    assert service["spec"]["clusterIP"] == "None"
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    pod = spec["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    assert container["command"][:3] == ["penstock", "train", "2bw"]
    environment = {entry["name"]: entry.get("value", "3") for entry in container["env"]}
    place = job_place(environment)
    assert place == JobPlace("the launcher", 3, 4, f"{job['metadata']['name']}-0.penstock-2bw", 29500, 0, 1)
    assert container["resources"]["limits"] == {"cpu": "3"}


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_manifest_is_one_by_the_schema_of_kubernetes(gpus: int) -> None:
    """Also of the oldest version that is still in wide use; unknown fields are refused."""
    validator = pytest.importorskip("kubernetes_validate")
    text = job_file("kubernetes", replace(PLAN, gpus=gpus))
    for version in ("1.31", validator.latest_version()):
        for resource in yaml.safe_load_all(text):
            validator.validate(resource, version, strict=True)
        wrong = yaml.safe_load(text.split("---\n")[1].replace("backoffLimit: 0", "backOffLimit: 0"))
        with pytest.raises(validator.ValidationError):
            validator.validate(wrong, version, strict=True)


def test_names_are_those_of_pods_and_services(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """At most 63 letters, digits and dashes, with the number of the pod behind the name of the job."""
    file = tmp_path / "an_order_of_my_own_whose_file_has_a_name_that_says_all_there_is_to_say.py"
    file.write_text("from penstock.schedule.orders.one_f_one_b import one_f_one_b as order\n")
    given = ("--file", file, "--stages", 2, "--set", "out=/runs")
    code, out, err = run(monkeypatch, capsys, "launch", "--print", "kubernetes", *given)
    assert code == 0, err
    service, job = yaml.safe_load_all(out)
    assert service["metadata"]["name"] == job["metadata"]["name"]
    assert re.fullmatch(r"[a-z][-a-z0-9]{0,55}[a-z0-9]", job["metadata"]["name"])  # and -12345


def test_the_task_has_the_fields_of_skypilot() -> None:
    task = yaml.safe_load(job_file("skypilot", replace(PLAN, gpus=1)))
    kinds = {"name": str, "num_nodes": int, "resources": dict, "setup": str, "run": str}
    assert {key: type(value) for key, value in task.items()} == kinds
    assert re.fullmatch(r"[a-zA-Z]([-_.a-zA-Z0-9]*[a-zA-Z0-9])?", task["name"])
    assert re.fullmatch(r"\d+\+?", task["resources"]["cpus"])
    assert re.fullmatch(r"[-\w]+(:\d+)?", task["resources"]["accelerators"])


def test_the_task_starts_torchrun_on_every_machine(tmp_path: Path) -> None:
    task = yaml.safe_load(job_file("skypilot", PLAN))
    assert task["num_nodes"] == 2
    tools(tmp_path, "torchrun")
    said = bash(
        tmp_path, task["run"], SKYPILOT_NUM_NODES="2", SKYPILOT_NODE_RANK="1", SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2"
    )
    assert said == [
        "torchrun", "--no-python", "--nproc-per-node", "2", "--nnodes", "2", "--node-rank", "1", "--master-addr",
        "10.0.0.1", "--master-port", "29500", "penstock", "train", "2bw", "--stages", "4", "--data", "my text", "--set",
        "out=/shared/runs",
    ]  # fmt: skip


def test_ranks_on_gpus_ask_for_them() -> None:
    plan = replace(PLAN, gpus=1)
    assert "\n#SBATCH --gpus-per-node=2\n" in job_file("slurm", plan)
    assert "gpus" not in job_file("slurm", PLAN)
    _, job = yaml.safe_load_all(job_file("kubernetes", plan))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "3", "nvidia.com/gpu": "1"}
    assert yaml.safe_load(job_file("skypilot", plan))["resources"] == {"cpus": "6+", "accelerators": "GPU:2"}
    assert "gpus_per_rank=1)" in job_file("ray", plan)


def tools(folder: Path, *names: str) -> None:
    """Commands that write their name and their arguments down, one a line."""
    for name in names:
        (folder / name).write_text(f'#!/bin/bash\nprintf "%s\\n" {name} "$@" >> {folder}/said\n')
        (folder / name).chmod(0o755)


def bash(folder: Path, text: str, **variables: str) -> list[str]:
    """Run a script with the commands in a folder; returns what they wrote down."""
    (folder / "said").unlink(missing_ok=True)
    environment = {**os.environ, **variables, "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-eu", "-c", text], env=environment, check=True)
    return (folder / "said").read_text().splitlines()


def test_the_batch_script_goes_on_with_its_own_run(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    script = job_file("slurm", JobPlan("penstock-2bw", ["2bw", "--data", "my text"], str(out), 2, 4, {}, 3))
    asked = dict(
        line.removeprefix("#SBATCH --").split("=") for line in script.splitlines() if "#SBATCH" in line and "=" in line
    )
    assert (asked["nodes"], asked["ntasks-per-node"], asked["cpus-per-task"]) == ("2", "2", "3")
    assert asked["signal"] == "TERM@180"
    tools(tmp_path, "srun", "scontrol")
    step = ["srun", "--kill-on-bad-exit=1", "penstock", "train"]
    (out / "7" / "2026-01-01-2bw").mkdir(parents=True)
    (out / "8").mkdir()
    slurm = {"SLURM_CPUS_PER_TASK": "3"}
    resumed = [*step, "--resume", f"{out}/7/2026-01-01-2bw/"]
    assert bash(tmp_path, script, SLURM_JOB_ID="7", **slurm) == [*resumed, "scontrol", "requeue", "7"]
    (out / "7" / "2026-01-01-2bw" / "weights").mkdir()
    assert bash(tmp_path, script, SLURM_JOB_ID="7", **slurm) == resumed
    begins = script[: script.index("|| exit")]
    assert bash(tmp_path, begins, SLURM_JOB_ID="8", **slurm) == [
        *step,
        "2bw",
        "--data",
        "my text",
        "--set",
        f"out={out}/8",
    ]


def test_the_script_for_ray_has_the_whole_configuration() -> None:
    values = validate_config({"stages": 4}).model_dump()
    script = job_file("ray", JobPlan("penstock-2bw", [], "/shared", 1, 4, values))
    (config,) = [node for node in ast.parse(script).body if isinstance(node, ast.Assign)]
    found: Any = ast.literal_eval(config.value)
    assert validate_config(found) == validate_config({**values, "out": "/shared"})
    assert "from penstock.cli.on_ray import train_on_ray" in script


def test_what_cannot_be_spread_or_written_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 processes .* evenly over 3 machines; take a number .* that divides 4"):
        JobPlan("a", [], "/shared", 3, 4, {})
    with pytest.raises(ConfigError, match="'skypilot' and 'ray', not for 'pbs'"):
        job_file("pbs", PLAN)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_command_prints_the_file_of_its_options(
    launcher: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--stages", "4", "--set", "out=/shared/runs", "--set", "optimizer.lr=0.01", "--machines", "2"]
    code, out, err = run(monkeypatch, capsys, "launch", "--print", launcher, "1f1b", *given)
    assert code == 0, err
    assert "0.01" in out
    assert "/shared/runs" in out
    assert out.count("out=/shared/runs") <= 1
