"""Predicted against measured: factors that a simulated run was made with are found again, stage by stage."""

import json
import re
from dataclasses import replace

import pytest
import torch
import yaml
from torch import nn

import penstock
from penstock.cli.plans.profiled_runs import settings_of_run
from penstock.cli.train import against_plan
from penstock.errors import ConfigError
from penstock.models.gpt import Head, gpt_blocks, language_loss
from penstock.models.gpt_shape import GPTConfig
from penstock.plan.calibration import recalibrated
from penstock.plan.measured_run import (
    PredictedRun,
    compare_with_run,
    measured_batch,
    predicted_batch,
    prediction_in_words,
)
from penstock.plan.planned_timeline import idle_shares
from penstock.plan.profile.files import profile_text, read_profile
from penstock.plan.profile.schema import Profile, ProfiledLayer, ProfiledLink
from penstock.plan.run_forecast import RunSettings, run_forecast, stages_decide
from penstock.schedule.machine.shared_machine import SharedCores
from penstock.schedule.methods.table import METHODS
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.simulate import simulate_schedule
from penstock.timeline import Timeline
from penstock.train.config.load import load_config
from penstock.train.config.schema import TrainConfig
from penstock.train.export.weights_folder import save_index
from penstock.train.setup.model_shape import describe_model
from support.schedules import make_schedule

SETTINGS = RunSettings("1f1b", 2, 1, 4, 2, (False, False), (2, 1))


def small_profile(**values):
    layers = [
        ProfiledLayer(name=f"l{n}", forward=[0.5, 1.0 + n], backward=[1.0, 2.0 + n], output=[1.0, 2.0], step=0.1)
        for n in range(3)
    ]
    links = [ProfiledLink(bandwidth=1e9)]
    return Profile(format="penstock profile 1", microbatch_sizes=[1, 2], layers=layers, links=links, **values)


def played(forward, backward, steps, batches=6, method="1f1b"):
    costs = Costs(tuple(StageCost(f, b, 0.0, s) for f, b, s in zip(forward, backward, steps, strict=True)))
    return simulate_schedule(make_schedule(method, 2, 4), costs, batches).timeline


def test_a_run_as_predicted_has_no_error():
    found = compare_with_run(small_profile(), SETTINGS, played((3.0, 3.0), (5.0, 4.0), (0.2, 0.1)))
    for stage in found.stages:
        assert [stage.error(kind) for kind in ("F", "B", "STEP")] == pytest.approx([0, 0, 0], abs=1e-9)
    assert found.batch[0] == pytest.approx(found.batch[1], rel=0.02)
    seen = [{cause for cause, share in idle.items() if share > 1e-6} for idle in found.idle]
    assert seen[0] == seen[1]
    assert "fill" in seen[0]


def test_ranks_that_share_cores_are_predicted_to():
    """Passes are told by the clock, as they were measured; batches are as much longer."""
    costs = Costs((StageCost(3.0, 5.0, 0.0, 0.2), StageCost(3.0, 4.0, 0.0, 0.1)), cores=SharedCores(1))
    timeline = simulate_schedule(make_schedule("1f1b", 2, 4), costs, 6).timeline
    found = compare_with_run(small_profile(cores=1), SETTINGS, timeline)
    alone = compare_with_run(small_profile(), SETTINGS, timeline)
    for stage in found.stages:
        assert [stage.error(kind) for kind in ("F", "B")] == pytest.approx([0, 0], abs=1e-6)
    assert found.batch == pytest.approx((60.3, 60.3), rel=1e-3)  # all work of both
    assert alone.batch[0] < 0.8 * found.batch[0]


@pytest.mark.parametrize(("cores", "work"), [(None, 0.0), (4.0, 0.0), (2.0, 0.25 + 2 * 0.125)])
def test_messages_keep_ranks_from_their_passes_where_no_core_is_free(cores, work):
    """A pass of either stage receives a message or sends one, of two bytes; both ranks have two cores, or four."""
    profile = small_profile(cores=cores)
    link = ProfiledLink(bandwidth=1e9, work=0.25, work_per_byte=0.125)
    stages = [StageCost(3.0 + work, 5.0 + work, 0.0, 0.2), StageCost(3.0 + work, 4.0 + work, 0.0, 0.1)]
    expected = [simulate_schedule(make_schedule("1f1b", 2, 4), Costs(tuple(stages)), n).bubble.makespan for n in (4, 8)]
    found = predicted_batch(profile.model_copy(update={"links": [link]}), SETTINGS)
    assert found == pytest.approx((expected[1] - expected[0]) / 4, rel=1e-6)


def test_a_run_is_told_beside_what_was_planned():
    """1f1b with 4 microbatches: the second stage takes 7 s for each, and 28 s of a batch, the first one 8 and 32."""
    timeline = played((3.0, 3.0), (5.0, 4.0), (0.2, 0.3))
    batch = measured_batch(timeline)
    said = prediction_in_words(PredictedRun(2 * batch, (32.0, 42.0), (0.2, 0.6)), timeline, [0, 1], 4)
    assert said.splitlines() == [
        f"A batch took {batch:.4g} s, planned {2 * batch:.4g} s (+100.0%).",
        "stage 0: passes 32 s, planned 32 s (+0.0%); update 0.2 s, planned 0.2 s",
        "stage 1: passes 28 s, planned 42 s (+50.0%); update 0.3 s, planned 0.6 s",
    ]
    assert prediction_in_words(PredictedRun(batch), timeline, [0, 1], 4).endswith("(+0.0%).")
    of_one = prediction_in_words(PredictedRun(batch, (32.0, 42.0), (0.2,)), timeline, [0, 1], 4)
    assert of_one.endswith("\nstage 1: passes 28 s, planned 42 s (+50.0%)")


def test_idle_time_is_told_beside_what_was_planned():
    """The second rank waits for the first forward, the first one for the last backwards."""
    timeline = played((3.0, 3.0), (5.0, 4.0), (0.2, 0.3))
    found = idle_shares(timeline)
    planned = {cause: share - 0.01 for cause, share in found.items()} | {"communication": 0.25}
    said = prediction_in_words(PredictedRun(1.0, idle=planned), timeline, [0, 1], 4).splitlines()[-1]
    first, *others = said.removeprefix("idle, of the time of all ranks: ").split("; ")
    assert first == "communication 0.0%, planned 25.0%"
    assert sorted(others) == sorted(f"{c} {share:.1%}, planned {share - 0.01:.1%}" for c, share in found.items())


@pytest.mark.parametrize("method", ["zb-h1", "zb-h2"])
def test_passes_of_halved_backwards_count_once(method):
    costs = Costs((StageCost(3.0, 2.0, 1.5, 0.1),) * 3)
    timeline = simulate_schedule(make_schedule(method, 3, 6), costs, 8).timeline
    said = prediction_in_words(PredictedRun(1.0, (39.0, 39.0, 50.0)), timeline, range(3), 6)
    assert "stage 2: passes 39 s, planned 50 s (+28.2%)" in said.splitlines()


def test_a_run_that_cannot_be_told_beside_its_plan_says_why(tmp_path):
    """It has trained, so that is no error."""
    config = TrainConfig(predicted={"batch": 1.0})
    assert against_plan(config, tmp_path).startswith("Not compared with what was planned: there are no timelines in ")


@pytest.mark.parametrize(
    ("changes", "there"),
    [
        ([], True),
        (["batches=5", "optimizer.lr=0.1", "data=x.txt", "microbatches=4"], True),
        (["microbatches=8"], False),
        (["model.layers=3"], False),
        (["method=1f1b"], False),
        (["device=cpu"], False),
        (["data=tokens.npy"], False),
        (["optimizer.name=sgd"], False),
        (["max_grad_norm=null"], False),
        (["cuda_graphs=true"], False),
        (["checkpoint.every=3", "out=elsewhere", "seed=3", "lr_schedule.warm_up=7"], True),
    ],
)
def test_predictions_hold_for_what_was_planned(tmp_path, changes, there):
    file = tmp_path / "plan.yaml"
    file.write_text("method: 2bw\nstages: 2\nmicrobatches: 4\npredicted: {batch: 0.5, passes: [0.2, 0.3]}\n")
    assert load_config(file, changes).predicted.batch == (0.5 if there else None)


def test_factors_are_found_again():
    """The first stage takes 1.5 times as long forward, the second one half backward: so do their layers then."""
    timeline = played((4.5, 3.0), (5.0, 2.0), (0.2, 0.3))
    profile = small_profile()
    found = compare_with_run(profile, SETTINGS, timeline)
    assert found.stages[0].error("F") == pytest.approx(1 / 1.5 - 1)
    better = recalibrated(profile, SETTINGS, found, "a run")
    assert better.source.endswith("recalibrated from a run")
    assert [layer.forward[1] for layer in better.layers] == pytest.approx([1.5, 3.0, 3.0])
    assert [layer.backward[1] for layer in better.layers] == pytest.approx([2.0, 3.0, 2.0])
    assert [layer.backward[0] for layer in better.layers] == pytest.approx([1.0, 1.0, 0.5])
    assert [layer.step for layer in better.layers] == pytest.approx([0.1, 0.1, 0.3])
    again = compare_with_run(better, SETTINGS, timeline)
    assert [stage.error(kind) for stage in again.stages for kind in ("F", "B")] == pytest.approx([0] * 4, abs=1e-9)


def test_what_every_update_takes_stays_where_a_run_took_longer():
    profile = small_profile(update=0.0625)
    timeline = played((3.0, 3.0), (5.0, 4.0), (0.4625, 0.3625))
    better = recalibrated(profile, SETTINGS, compare_with_run(profile, SETTINGS, timeline), "a run")
    assert (better.update, [layer.step for layer in better.layers]) == (0.0625, pytest.approx([0.2, 0.2, 0.3]))
    found = compare_with_run(better, SETTINGS, timeline)
    assert [stage.error("STEP") for stage in found.stages] == pytest.approx([0] * 2, abs=1e-9)
    shorter = played((3.0, 3.0), (5.0, 4.0), (0.1625, 0.03))  # than every update was taken to be
    better = recalibrated(profile, SETTINGS, compare_with_run(profile, SETTINGS, shorter), "a run")
    assert better.update == pytest.approx(0.03)
    found = compare_with_run(better, SETTINGS, shorter)
    assert [stage.error("STEP") for stage in found.stages] == pytest.approx([0] * 2, abs=1e-9)


def halved_profile(layers):
    """A layer's forward takes 1, its backward 2 and 1 for the weights, an update 0.125; all bytes are 0."""
    found = [
        ProfiledLayer(name=f"l{n}", forward=1, backward=3, backward_input=2, backward_weight=1, output=0, step=0.125)
        for n in range(layers)
    ]
    return Profile(format="penstock profile 1", layers=found)


def settings_of(method, depth, m, stages, **more):
    return RunSettings(method, depth, more.pop("width", 1), m, 1, (False,) * stages, (1,) * stages, **more)


@pytest.mark.parametrize(
    ("method", "stages", "m"),
    [("zb-h1", 2, 4), ("interleaved", 4, 4), ("zb-v", 4, 4), ("chimera", 2, 4), ("stash", 2, 3), ("seq1f1b", 2, 3)],
)
def test_runs_of_other_methods_have_no_error_either(method, stages, m):
    """Halves of backwards, several stages on a rank, two directions, no flush, slices of sequences."""
    slices = 2 if method == "seq1f1b" else 1
    costs = Costs((StageCost(1.0, 2.0, 1.0, 0.125),) * stages)
    timeline = simulate_schedule(make_schedule(method, 2, m, decides=True), costs, 6).timeline
    profile = halved_profile(stages)
    found = compare_with_run(profile, settings_of(method, 2, m, stages), timeline)
    for stage in found.stages:
        assert [stage.error(kind) for kind in stage.measured] == pytest.approx([0] * len(stage.measured), abs=1e-9)
    assert found.stages[0].measured["F"] == 1 / slices
    halved = {"zb-h1", "zb-v"}
    assert all(("I" in each.measured) == (method in halved) for each in found.stages)
    assert found.batch[0] == pytest.approx(found.batch[1], rel=0.05)


def test_factors_of_halves_are_found_again():
    """Second halves take twice as long as the profile says, first ones half."""
    costs = Costs((StageCost(1.0, 1.0, 2.0),) * 2)
    timeline = simulate_schedule(make_schedule("zb-h1", 2, 4), costs, 4).timeline
    settings = settings_of("zb-h1", 2, 4, 2)
    better = recalibrated(halved_profile(2), settings, compare_with_run(halved_profile(2), settings, timeline), "run")
    assert [(x.backward, x.backward_input, x.backward_weight) for x in better.layers] == [(3.0, 1.0, 2.0)] * 2


def test_a_batch_of_parallel_pipelines_is_that_of_one():
    """Updates of the first stage come from both pipelines at about the same time, which is no batch."""
    costs = Costs((StageCost(1.0, 3.0, 0.0, 0.125),) * 2)
    one = simulate_schedule(make_schedule("1f1b", 2, 4), costs, 6).timeline
    two = Timeline(
        4, [*one.intervals, *(i._replace(rank=i.rank + 2, start=i.start + 0.5, end=i.end + 0.5) for i in one.intervals)]
    )
    settings = settings_of("1f1b", 2, 4, 2, width=2)
    assert (
        compare_with_run(halved_profile(2), settings, two).batch[1]
        == compare_with_run(halved_profile(2), replace(settings, width=1), one).batch[1]
    )


def test_what_a_run_adds_to_its_method_is_predicted_too():
    """Stages that are run again as a whole, gathers and sums of sharded state, an order's options."""
    plain = settings_of("1f1b", 2, 4, 2)
    times = [
        predicted_batch(halved_profile(4 if each.options else 2), each)
        for each in (
            plain,
            replace(plain, whole=frozenset({0, 1})),
            settings_of("1f1b", 2, 4, 2, width=2, sharding="gradients"),
            settings_of("interleaved", 2, 4, 4, options={"chunks": 2}),
        )
    ]
    assert times[0] == pytest.approx(5 * 4 + 0.125)
    assert times[1] == pytest.approx(5 + 3 + 5 + 5 + 4 + 0.125)  # the first stage runs the first forward again early
    assert times[2] == pytest.approx(5 * 4 + 0.125 / 2)
    assert times[3] == pytest.approx(4 * 8 + 4 + 0.25)


@pytest.mark.long
@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if not row.divides_head])
def test_runs_of_every_method_are_predicted(method):
    row = METHODS[method]
    m, width = int(row.settings.get("microbatches", 4)), 1 + (row.sharding != "none")
    stages, decides = make_schedule(method, 2, m).num_stages, "max_grad_norm" not in row.settings
    settings = settings_of(method, 2, m, stages, width=width, decides=decides)
    assert predicted_batch(halved_profile(stages), settings) > m * 4


def test_a_batch_with_three_versions_is_that_of_a_long_run():
    """It repeats every three batches, and later than others; four batches of eight took 39.6 s here."""
    times = ((3, 8, 2), (3, 1, 0), (2, 8, 2), (3, 2, 2))
    layers = [
        ProfiledLayer(name=f"l{n}", forward=f, backward=b, output=1.0, step=s) for n, (f, b, s) in enumerate(times)
    ]
    profile = Profile(format="penstock profile 1", layers=layers, links=[ProfiledLink(bandwidth=0.3)])
    settings = RunSettings("3bw", 4, 1, 3, 1, (False,) * 4, (1,) * 4)
    short, long = (simulate_schedule(*run_forecast(profile, settings), batches).bubble.makespan for batches in (30, 60))
    assert predicted_batch(profile, settings) == pytest.approx((long - short) / 30, rel=1e-6)


def test_backwards_that_recompute_are_taken_apart():
    """A measured backward holds another forward, which the profile does not count."""
    settings = replace(SETTINGS, recompute=(True, True))
    timeline = played((6.0, 3.0), (20.0, 7.0), (0.2, 0.1))
    profile = small_profile()
    found = compare_with_run(profile, settings, timeline)
    assert found.stages[0].predicted["B"] == pytest.approx(8.0)
    again = compare_with_run(recalibrated(profile, settings, found, "run"), settings, timeline)
    assert [stage.error(kind) for stage in again.stages for kind in ("F", "B")] == pytest.approx([0] * 4, abs=1e-9)


def test_what_cannot_be_compared():
    timeline = played((3.0, 3.0), (5.0, 4.0), (0.2, 0.1))
    for changes, said in (
        ({"method": "zb-v"}, "zb-v has 4 stages, but the blocks of 2 are given"),
        ({"method": "zb-h1"}, "backwards of zb-h1 come in two halves, which the profile does not tell apart"),
        ({"method": "vocabulary-1f1b"}, "as their stages are no chain"),
        ({"balance": (2, 2)}, "the run has 4 blocks, the profile 3"),
        ({"microbatch_size": 3}, "microbatch size 3 was not profiled"),
    ):
        with pytest.raises(ConfigError, match=said):
            compare_with_run(small_profile(), replace(SETTINGS, **changes), timeline)
    with pytest.raises(ConfigError, match="no forwards of stage 0"):
        compare_with_run(small_profile(), SETTINGS, Timeline(2))
    with pytest.raises(ConfigError, match="fewer than 4 updates; the last ones do not show what a batch takes"):
        compare_with_run(small_profile(), SETTINGS, played((3.0, 3.0), (5.0, 4.0), (0.2, 0.1), batches=3))


@pytest.mark.parametrize("batches", [4, 5, 9])
def test_the_end_of_a_run_that_does_not_flush_is_not_measured(batches):
    """Between the last updates of 2bw there are no forwards of the first stage."""
    stages = (3.0, 3.0), (5.0, 4.0), (0.2, 0.1)
    found = measured_batch(played(*stages, batches, method="2bw"))
    assert found == pytest.approx(4 * 8 + 0.2, rel=0.01)


def test_the_command_compares_a_run(command, tmp_path):
    """A pipeline in this process, and the configuration that `penstock train` would have written."""
    blocks = [nn.Linear(4, 4) for _ in range(3)]
    pipeline = penstock.Pipeline(
        blocks, method="1f1b", stages=2, microbatches=4, partition=[2, 1], loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )  # fmt: skip
    for _ in pipeline.run((torch.randn(8, 4), torch.randn(8, 4)) for _ in range(5)):
        pass
    run = tmp_path / "run"
    pipeline.write_timeline(run)
    values = {"method": "1f1b", "stages": 2, "microbatches": 4, "microbatch_size": 2, "balance": [2, 1]}
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "profile.yaml").write_text(profile_text(small_profile()))
    given = ["profile", str(tmp_path / "profile.yaml"), "--check", str(run)]
    answer = command(*given, "--fit", "layers", "--out", str(tmp_path / "better.yaml"))
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "A batch: predicted" in answer.stdout
    assert re.search(r"stage +work +predicted s +measured s +error", answer.stdout)
    assert re.search(r"1 +forward +[\d.e-]+ +[\d.e-]+ +[+-][\d.]+%", answer.stdout)
    said = " ".join(answer.stdout.split())
    assert "forward, backward: of one microbatch; update: of one batch. error: predicted / measured - 1" in said
    assert said.endswith(
        f"Wrote the profile {tmp_path / 'better.yaml'}. Next: penstock plan --profile {tmp_path / 'better.yaml'} "
        "--devices 2"
    )
    found = json.loads(command(*given, "--json").stdout)
    better = read_profile(tmp_path / "better.yaml")
    assert better.layers[2].forward[1] == pytest.approx(found["stages"][1]["measured"]["F"])


def test_settings_of_a_run(tmp_path):
    """Stages that a configuration does not count, what is recomputed of each, and what decides on updates."""
    values = {"method": "interleaved", "microbatches": 4, "balance": [1, 1, 1, 2], "max_grad_norm": None}
    found = settings_of_run(TrainConfig(**values, recompute=["block", "none", "stage", "none"]), tmp_path)
    assert found == RunSettings(
        "interleaved", 2, 1, 4, 2, (True, False, False, False), (1, 1, 1, 2), frozenset({2}), decides=False
    )


def test_stages_that_processes_share_are_predicted_by_a_profile_of_as_many(tmp_path):
    """They decide on every update together, even where gradients are not clipped."""
    values = {"method": "1f1b", "microbatches": 4, "balance": [2, 1], "max_grad_norm": None, "tensor_parallel": 2}
    found = settings_of_run(TrainConfig(**values), tmp_path)
    assert found == replace(SETTINGS, tensor=2, decides=True)
    run = played((3.0, 3.0), (5.0, 4.0), (0.2, 0.1))
    shared = small_profile(settings={"tensor_parallel": 2, "max_grad_norm": None})
    assert stages_decide(shared)
    assert compare_with_run(shared, found, run).stages[0].error("F") == pytest.approx(0, abs=1e-9)
    with pytest.raises(ConfigError, match=r"the run has tensor_parallel=2, but the profile was measured with 1"):
        compare_with_run(small_profile(), found, run)
    with pytest.raises(ConfigError, match=r"the run has tensor_parallel=1, but the profile was measured with 2"):
        predicted_batch(shared, SETTINGS)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"schedule": "mine.py", "method": None}, "a schedule of its own"),
        ({"offload": "activations"}, "what copies to the host take"),
        ({"offload_optimizer": "stages"}, "what copies to the host take"),
        ({"options": {"in_flight": "auto"}}, "has changed its order on the way"),
        ({"placement": ["fast", "slow"]}, "devices that differ"),
        ({"sync": {"batches": 3}}, "its method changes on the way"),
        ({"width": 2, "combine": {"kind": "average"}}, "weights of their own .combine.kind=average"),
    ],
)
def test_runs_that_profiles_do_not_explain_are_refused(tmp_path, values, said):
    with pytest.raises(ConfigError, match=said):
        settings_of_run(TrainConfig(**values), tmp_path)


TINY = GPTConfig(layers=3, width=16, heads=2, context=8, vocabulary=600)
"""Its head costs almost as much as all its layers (9,600 and 3 x 3,328), so it is the second one of two stages."""


def gpt_run(tmp_path):
    """The folder of a run without a plan: its timelines, and the configuration that `penstock train` writes."""
    pipeline = penstock.Pipeline(
        gpt_blocks(TINY, 0), method="1f1b", stages=2, microbatches=2, loss=language_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )  # fmt: skip
    tokens = torch.randint(600, (4, 8))
    for _ in pipeline.run((tokens, tokens) for _ in range(4)):
        pass
    pipeline.write_timeline(tmp_path / "run")
    values = {"method": "1f1b", "stages": 2, "microbatches": 2, "microbatch_size": 2, "balance": None}
    values["model"] = {"layers": 3, "width": 16, "heads": 2, "context": 8}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(values))
    names = ["embedding", "layers.0", "layers.1", "layers.2", "head"]
    layers = [ProfiledLayer(name=name, forward=1.0 * 2**n, backward=1.0) for n, name in enumerate(names)]
    (tmp_path / "profile.yaml").write_text(profile_text(Profile(format="penstock profile 1", layers=layers)))
    return pipeline, tmp_path / "run", ["profile", str(tmp_path / "profile.yaml"), "--check", str(tmp_path / "run")]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"layers": 3, "width": 32, "heads": 2, "context": 8}, "its model.width is 32, that of the run"),
        ({}, "layers is"),
    ],
)
def test_the_profile_of_another_model_is_refused(command, tmp_path, model, said):
    _, _, given = gpt_run(tmp_path)
    profile = read_profile(tmp_path / "profile.yaml").model_copy(update={"settings": {"model": model}})
    (tmp_path / "profile.yaml").write_text(profile_text(profile))
    answer = command(*given, "--fit", "machine", "--out", str(tmp_path / "better.yaml"))
    assert answer.returncode == 2
    assert said in " ".join(answer.stderr.split())
    assert not (tmp_path / "better.yaml").exists()


def test_a_run_without_a_plan_is_divided_as_it_was(command, tmp_path):
    """Forwards of the profile are powers of two, so their sums tell which blocks a stage is taken to have."""
    pipeline, run, given = gpt_run(tmp_path)
    held = [sum(p.numel() for g in each.param_groups for p in g["params"]) for each in pipeline.optimizers().values()]
    assert held[1] == sum(p.numel() for p in Head(TINY).parameters())
    answer = command(*given)
    assert answer.returncode == 2
    assert "finish it with penstock train --resume" in " ".join(answer.stderr.split())
    (run / "weights").mkdir()
    save_index(run, [], describe_model(TINY), text=True)
    answer = command(*given, "--json")
    assert (answer.returncode, answer.stderr) == (0, "")
    predicted = [stage["predicted"]["F"] for stage in json.loads(answer.stdout)["stages"]]
    assert predicted == [1.0 + 2.0 + 4.0 + 8.0, 16.0]
