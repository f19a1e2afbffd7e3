"""Runs that move activations to the host's memory: the same bits, and a ledger that says where bytes are."""

import pytest
import torch

from penstock.errors import ConfigError
from penstock.options.passes import Recompute
from penstock.runtime.pipeline import Pipeline
from support.predicted_memory import SAMPLES, WIDTH, Run, blocks_for, optimizer_for, peaks_of_a_run, squared

AWAY = Recompute(offload="activations")


def trained(method, recompute, stages=4, m=6, **more):
    torch.manual_seed(5)
    data = [[tuple(torch.randn(2, SAMPLES, WIDTH)) for _ in range(m)] for _ in range(3)]
    pipeline = Pipeline(
        blocks_for(4), method=method, stages=stages, microbatches=m, loss=squared, optimizer=optimizer_for("1f1b"),
        partition=[2] * 4, recompute=recompute, **more,
    )  # fmt: skip
    losses = [report.loss for report in pipeline.run(data)]
    return losses, pipeline.state_dict(), pipeline.peak_bytes(), pipeline


@pytest.mark.slow
@pytest.mark.parametrize("method", ["1f1b", "2bw", "zb-h1", "interleaved:chunks=2"])
def test_offload_does_not_change_a_bit(method):
    stages = 2 if method.startswith("interleaved") else 4
    losses, weights, before, _ = trained(method, "none", stages)
    same, again, after, pipeline = trained(method, AWAY, stages)
    assert same == losses
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    assert after[0]["activations"] < before[0]["activations"]
    assert after[0]["offloaded activations"] > 0
    message = 4 * SAMPLES * WIDTH  # which may be taken a little later
    assert abs(after[0]["total"] - before[0]["total"]) <= message  # the host is where all of it is
    assert any(i.what == "OFFLOAD" for i in pipeline.timeline().intervals)


def test_it_goes_with_stages_that_recompute():
    losses, weights, _, _ = trained("gpipe", "none")
    same, again, _, pipeline = trained("gpipe", Recompute(["none", "stage", "none", "stage"], offload="activations"))
    assert same == losses
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    assert pipeline.schedule.recomputed == {1, 3}


@pytest.mark.parametrize("method", ["1f1b", "gpipe", "2bw"])
def test_the_memory_of_all_kinds_is_predicted(method):
    predicted, found = peaks_of_a_run(Run(method, 3, 5, offload="activations"))
    assert predicted == found


MIXED = ("none", "block", "none", "stage")


@pytest.mark.long
@pytest.mark.parametrize(
    "run",
    [
        *(Run(method, 3, 5, offload="activations") for method in ("1f1b", "gpipe", "2bw", "2bw-eager")),
        Run("eager", 4, 6, offload="activations", precision="bf16"),
        Run("zb-h1", 4, 6, offload="activations"),
        Run("interleaved", 2, 6, offload="activations"),
        Run("1f1b", 4, 6, MIXED, offload="activations"),
        Run("2bw", 4, 6, MIXED, offload="activations", width=2, sharding="gradients"),
        Run("gpipe", 4, 4, offload=("activations", "none", "none", "activations")),
        Run("seq1f1b", 3, 3, offload="activations"),
    ],
    ids=str,
)
def test_the_memory_of_devices_alone_is_predicted(run):
    predicted, found = peaks_of_a_run(run, on_device=True)
    assert predicted == found
    in_all, _ = peaks_of_a_run(run)
    assert sum(predicted.values()) < sum(in_all.values())


def test_some_stages_offload_and_others_do_not():
    away = Recompute(["none", "block", "none", "none"], offload=["activations", "none", "none", "none"])
    (losses, weights, _, _), (same, again, peaks, _) = trained("gpipe", "none"), trained("gpipe", away)
    assert same == losses
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    assert [rank for rank, kinds in peaks.items() if "offloaded activations" in kinds] == [0]


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match=r"offload must be one of none, activations, or a list .*; got 'all'"):
        Recompute(offload="all")
    with pytest.raises(ConfigError, match="recompute is 'block'; leave one of them out"):
        Recompute("block", offload="activations")
    with pytest.raises(ConfigError, match="of stage 1, but recompute is 'stage' there"):
        Recompute(["none", "stage"], offload=["none", "activations"])
    with pytest.raises(ConfigError, match="offload has 2 entries, but there are 4 stages"):
        trained("gpipe", Recompute(offload=["none", "activations"]))
