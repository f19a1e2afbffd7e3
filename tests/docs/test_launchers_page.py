"""The files for clusters on docs/launchers.md: what they start, as far as that can be tried without a cluster."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from penstock.job.place import JobPlace, job_place

PAGE = (Path(__file__).parents[2] / "docs" / "launchers.md").read_text()


def block(heading: str) -> str:
    found = re.search(rf"^## {heading}\n.*?```\w+\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    assert found
    return found[1]


def bash(folder: Path, text: str, **variables: str) -> list[str]:
    """Run a script with commands that only write down how they were called; returns that, an argument a line."""
    for name in ("srun", "scontrol", "torchrun"):
        (folder / name).write_text(f'#!/bin/bash\nprintf "%s\\n" {name} "$@" >> {folder}/said\n')
        (folder / name).chmod(0o755)
    (folder / "said").unlink(missing_ok=True)
    environment = {**os.environ, **variables, "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", text], env=environment, check=True)
    return (folder / "said").read_text().splitlines()


def test_the_manifest_gives_every_pod_its_place_and_is_one_of_kubernetes() -> None:
    """Also by the schema of the oldest version that is still in wide use; unknown fields are refused."""
    service, job = resources = list(yaml.safe_load_all(block("Kubernetes")))
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    environment = {entry["name"]: entry.get("value", "3") for entry in container["env"]}
    assert job_place(environment) == JobPlace("the launcher", 3, 8, "penstock-2bw-0.penstock-2bw", 29500, 0, 1)
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 8
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
    validator = pytest.importorskip("kubernetes_validate")
    for version in ("1.31", validator.latest_version()):
        for resource in resources:
            validator.validate(resource, version, strict=True)


def test_the_batch_script_resumes_its_own_run_until_there_are_weights(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    script = block("Slurm").replace("/shared/runs", str(out))
    run = out / "7" / "2026-01-01-2bw"
    step, slurm = (
        ["srun", "--kill-on-bad-exit=1", "penstock", "train"],
        {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "4"},
    )
    begun = bash(tmp_path, script, **slurm)
    assert begun[: len(step) + 5] == [*step, "2bw", "--stages", "8", "--set", f"out={out}/7"]
    run.mkdir(parents=True)
    resumed = [*step, "--resume", f"{run}/"]
    assert bash(tmp_path, script, **slurm) == [*resumed, "scontrol", "requeue", "7"]
    (run / "weights").mkdir()
    assert bash(tmp_path, script, **slurm) == resumed


def test_the_task_of_skypilot_starts_torchrun_on_every_machine(tmp_path: Path) -> None:
    task = yaml.safe_load(block("SkyPilot"))
    said = bash(
        tmp_path, task["run"], SKYPILOT_NUM_NODES="2", SKYPILOT_NODE_RANK="1", SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2"
    )
    assert said[:9] == [
        "torchrun", "--no-python", "--nproc-per-node", "4", "--nnodes", "2", "--node-rank", "1", "--master-addr"
    ]  # fmt: skip
    assert said[9:] == [
        "10.0.0.1", "--master-port", "29500", "penstock", "train", "2bw", "--stages", "8", "--set",
        "out=/checkpoints/runs",
    ]  # fmt: skip


def test_the_script_for_ray_calls_functions_that_exist() -> None:
    """All but Ray's own, which is not installed here."""
    lines = block("Ray").splitlines()
    exec("\n".join(line for line in lines if line.startswith("from penstock")), {})
    compile("\n".join(lines), "ray", "exec")
