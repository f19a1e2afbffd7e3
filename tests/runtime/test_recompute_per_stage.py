"""What is recomputed, stage by stage: numbers stay the same, and memory is what is predicted."""

import pytest
import torch

from penstock.errors import CapabilityError, ConfigError
from penstock.options.passes import Recompute
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.add_options import extend
from penstock.schedule.methods.table import METHODS
from penstock.verify.derived_delays import order_of
from support.predicted_memory import SAMPLES, WIDTH, Run, blocks_for, optimizer_for, peaks_of_a_run, squared
from support.schedules import make_schedule

MIXED = ("none", "stage", "block", "stage")


def losses_and_weights(method, recompute, depth=4, m=5, **more):
    torch.manual_seed(3)
    data = [(torch.randn(m * SAMPLES, WIDTH), torch.randn(m * SAMPLES, WIDTH)) for _ in range(3)]
    pipeline = Pipeline(
        blocks_for(depth),
        method=method,
        stages=more.pop("stages", depth),
        microbatches=m,
        loss=squared,
        optimizer=optimizer_for("1f1b"),
        partition=[2] * depth,
        recompute=recompute,
        **more,
    )
    reports = [report.loss for report in pipeline.run(data)]
    return reports, pipeline.state_dict(), pipeline


@pytest.mark.parametrize("method", ["1f1b", "2bw", "zb-h1", "interleaved:chunks=2"])
def test_recompute_of_some_stages_does_not_change_a_bit(method):
    stages = 2 if method.startswith("interleaved") else 4
    m = 4
    losses, weights, _ = losses_and_weights(method, "none", m=m, stages=stages)
    mixed, same, pipeline = losses_and_weights(method, list(MIXED), m=m, stages=stages)
    assert mixed == losses
    assert all(torch.equal(same[name], tensor) for name, tensor in weights.items())
    assert pipeline.schedule.recomputed == {1}  # the last stage runs backwards at once


@pytest.mark.parametrize("method", ["1f1b", "2bw", "zb-h1"])
def test_the_memory_of_a_mixture_is_predicted_to_the_byte(method):
    predicted, found = peaks_of_a_run(Run(method, 4, 5, MIXED))
    assert predicted == found


@pytest.mark.long
def test_a_mixture_takes_memory_between_none_and_all():
    """Stages 1 and 2 hold less, stage 0 holds what it holds without recompute."""
    _, none = peaks_of_a_run(Run("1f1b", 4, 5, "none"))
    _, mixed = peaks_of_a_run(Run("1f1b", 4, 5, MIXED))
    assert mixed[0] == none[0]
    assert mixed[1] < none[1]
    assert mixed[2] < none[2]


def test_only_the_chosen_stages_recompute():
    schedule = extend(make_schedule("gpipe", 4, 4), recomputes=(0, 2)).schedule
    assert schedule.recomputed == {0, 2}
    with pytest.raises(ConfigError, match=r"recomputes stages \[0, 2\] by itself"):
        extend(schedule, recomputes=(0, 1))


@pytest.mark.parametrize(
    ("recompute", "said"),
    [
        (["none", "stage"], "recompute has 2 entries, but there are 4 stages"),
        (["none", "all", "none", "none"], "one of none, block, stage, or a list"),
        ([], "one of none, block, stage, or a list"),
        ("auto", "choose_recompute"),
    ],
)
def test_wrong_lists_are_refused(recompute, said):
    with pytest.raises(ConfigError, match=said):
        losses_and_weights("1f1b", recompute)


def test_segments_go_with_one_word_for_all():
    with pytest.raises(ConfigError, match="is for recompute='stage'"):
        Recompute(["stage", "stage"], segments=2)


def test_the_reference_refuses_a_mixture_where_it_changes_what_is_read():
    with pytest.raises(CapabilityError, match="recomputes all stages alike"):
        order_of(METHODS["1f1b"], make_schedule("pipemare", 2, 2), ("none", "stage"))
