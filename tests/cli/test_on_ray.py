"""The launcher for Ray: on a local cluster of two nodes where Ray is installed, and what is said where it is not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from penstock.cli.on_ray import train_on_ray
from penstock.errors import CapabilityError
from penstock.train.config.load import load_config
from penstock.train.export.weights_folder import load_weights
from support.command_line import TINY, Command, only_folder, settings

RAY = importlib.util.find_spec("ray") is not None


@pytest.mark.skipif(RAY, reason="it is installed")
def test_without_ray_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match=r"pip install 'penstock\[ray\]'"):
        train_on_ray({"out": str(tmp_path)})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")  # Ray warns of its own settings
@pytest.mark.skipif(not RAY, reason="Ray is not installed")
def test_two_nodes_of_ray_end_with_the_same_weights(tmp_path: Path, command: Command) -> None:
    import ray
    from ray.cluster_utils import Cluster

    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    changes = ["stages=4", "microbatches=4", f"data={text}", "sample_length=0"]
    ours = command("train", *settings(f"out={tmp_path / 'ours'}", *changes))
    assert ours.returncode == 0, ours.stderr
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address)
        folder = train_on_ray(load_config(None, [*TINY, *changes, f"out={tmp_path / 'ray'}"]).model_dump())
    finally:
        ray.shutdown()
        cluster.shutdown()
    found, wanted = load_weights(folder), load_weights(only_folder(tmp_path / "ours"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
