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


@pytest.mark.parametrize("method", ["1f1b", "2bw", "zb-h1", "interleaved:chunks=2"])
def test_offload_does_not_change_a_bit(method):
    stages = 2 if method.startswith("interleaved") else 4
    losses, weights, before, _ = trained(method, "none", stages)
    same, again, after, pipeline = trained(method, AWAY, stages)
    assert same == losses
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    assert after[0]["activations"] < before[0]["activations"]
    assert after[0]["parked activations"] > 0
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


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="offload must be one of none, activations; got 'all'"):
        Recompute(offload="all")
    with pytest.raises(ConfigError, match="recompute has 'block'"):
        Recompute(["none", "block"], offload="activations")
