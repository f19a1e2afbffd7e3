"""Measured profiles: every distinct block once, figures that add up, files that planners and training take."""

import json
import re

import pytest
import torch
import yaml
from torch import nn

from penstock.errors import ConfigError, DataError
from penstock.measure.configured import _said_of_links
from penstock.measure.distinct_blocks import kind_of
from penstock.measure.model_profile import BlockFigures, MeasuredBlock, PassFigures, measure_blocks, profile_of
from penstock.measure.stage_trial import BlockInput, BlockPlace, StageTrial, Training
from penstock.measure.this_machine import SIZES, Ping, fit, ping, sizes_around
from penstock.models.gpt import gpt_blocks, language_loss
from penstock.models.gpt_shape import GPTConfig
from penstock.options.all_options import PipelineOptions
from penstock.partition.blocks import LazyBlock
from penstock.plan.measured_run import measured_batch
from penstock.plan.profile.files import parse_profile, profile_text
from penstock.runtime.rank.timeline_files import read_timeline
from support.command_line import settings

OPTIONS = PipelineOptions()


def adam(parameters):
    return torch.optim.Adam(parameters)


def squares(output, target):
    return (output - target).square().sum(), 1.0


class Multiplied(nn.Module):
    """A layer with a plain attribute that tells it from others."""

    def __init__(self, factor):
        super().__init__()
        self.factor, self.linear = factor, nn.Linear(4, 4)

    def forward(self, x):
        return self.factor * self.linear(x).tanh()


def measured(blocks, sizes=(2,), loss=squares, options=OPTIONS, told=lambda name: None):
    samples = {b: (torch.randn(b, 4), torch.randn(b, 4)) for b in sizes}
    return measure_blocks(blocks, samples, loss, adam, options, 0.0, told)


@pytest.mark.slow
def test_every_distinct_block_is_measured_once():
    """Blocks of the same class with other attributes are others; so are those whose input does not want a gradient."""
    blocks = [Multiplied(1), Multiplied(1), Multiplied(2), Multiplied(1), Multiplied(1)]
    names = []
    found = measured(blocks, told=names.append)
    assert names == ["0", "1", "2", "4"]
    assert [block.kind for block in found] == [
        "Multiplied",
        "Multiplied 2",
        "Multiplied 3",
        "Multiplied 2",
        "Multiplied 4",
    ]
    assert found[1].passes == found[3].passes


class Given(nn.Module):
    """A layer with an attribute, private or not, of any kind."""

    def __init__(self, **attributes):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        vars(self).update(attributes)


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ({"_times": 1}, {"_times": 1}, {"_times": 20}),
        ({"act": torch.tanh}, {"act": torch.tanh}, {"act": torch.relu}),
        ({"options": {"times": [1]}}, {"options": {"times": [1]}}, {"options": {"times": [20]}}),
        ({"_sizes": [1, (2,)]}, {"_sizes": [1, (2,)]}, {"_sizes": [1, (3,)]}),
        ({"_shape": GPTConfig(1, 8, 2)}, {"_shape": GPTConfig(1, 8, 2)}, {"_shape": GPTConfig(2, 8, 2)}),
        ({"mask": torch.ones(2)}, {"mask": torch.zeros(2)}, {"mask": torch.ones(3)}),
        ({"_anything": OPTIONS.__class__}, {"_anything": OPTIONS.__class__}, {"_anything": object()}),
        ({"_anything": (it := object())}, {"_anything": it}, {"_anything": object()}),
    ],
    ids=lambda value: next(iter(value)),
)
def test_any_attribute_tells_blocks_apart(one, same, other):
    """What cannot be compared may hold anything, so only the same object is alike."""
    place, inputs = BlockPlace(False, False), {1: BlockInput(torch.zeros(1, 4), (True,))}
    kinds = [kind_of(Given(**each), place, inputs) for each in (one, same, other)]
    assert kinds[0] == kinds[1] != kinds[2]
    assert hash(kinds[0]) == hash(kinds[1])


def test_lazy_blocks_are_told_apart_without_building_them():
    built = []

    def build(width):
        built.append(width)
        return nn.Linear(4, width)

    from functools import partial

    place, inputs = BlockPlace(False, False), {1: BlockInput(torch.zeros(1, 4), (True,))}
    kinds = [
        kind_of(LazyBlock(partial(build, width), seed=seed), place, inputs) for width, seed in ((4, 0), (4, 1), (5, 0))
    ]
    assert kinds[0] == kinds[1] != kinds[2]
    assert built == []


def test_bytes_are_those_of_the_runtime():
    """A linear layer keeps its input, tanh its output; Adam has two moments and a counter for each parameter."""
    blocks = [Multiplied(1), Multiplied(3), Multiplied(1)]
    first, middle, last = measured(blocks, sizes=(2, 3))
    for size in (2, 3):
        one = size * 4 * 4
        assert (first.passes[size].output, middle.passes[size].output, last.passes[size].output) == (one, one, 0)
        assert first.passes[size].stored == middle.passes[size].stored == 2 * one
        assert middle.passes[size].late == 2 * one  # the input, and the gradient of the linear layer's output
        assert last.passes[size].stored > 2 * one
    assert middle.weights.parameters == 20 * 4
    assert middle.weights.buffer == 64 + 64  # 16 numbers and 4, each in multiples of 64 bytes
    assert middle.weights.optimizer == 2 * 20 * 4 + 2 * 4


def test_what_two_blocks_both_keep_counts_once():
    """Tanh keeps its output and the next linear layer its input, which is the same tensor."""
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    found = measured(blocks, sizes=(2, 3))
    for size in (2, 3):
        assert [block.shared[size] for block in found] == [0, *3 * [size * 4 * 4]]


def test_sums_are_consistent():
    for block in measured([Multiplied(1), Multiplied(3), Multiplied(1)]):
        figures = block.passes[2]
        assert figures.forward > 0
        assert figures.backward > 0
        assert block.weights.step > 0
        assert min(figures.halves) >= 0
        assert sum(figures.halves) > 0


def test_blocks_without_parameters_take_no_update():
    first, function, _ = measured([Multiplied(1), torch.relu, Multiplied(1)])
    assert (function.kind, function.weights.parameters, function.weights.step) == ("relu", 0, 0.0)
    assert first.weights.step > 0


def test_weights_do_not_change_what_is_measured_later():
    """The update of a measured block steps its own weights; the next block gets an output of finite numbers."""
    stage = StageTrial({"a": Multiplied(1)}, BlockPlace(True, False), Training(squares, adam, OPTIONS))
    given = BlockInput(torch.randn(2, 4))
    stage.update(given, clips=True)
    value, wants, _ = stage.output_of(given)
    assert wants == (True,)
    assert value.isfinite().all()
    assert not value.requires_grad


class Differentiated(Multiplied):
    """A layer that differentiates inside, which does not go with the hooks that halve backwards."""

    def forward(self, x):
        squares_of = torch.func.grad(lambda v: v.square().sum())
        return super().forward(x) + torch.func.vmap(squares_of)(x.detach())


def test_backwards_that_cannot_be_halved_have_no_halves():
    first, middle, _ = measured([Multiplied(1), Differentiated(1), Multiplied(1)])
    assert middle.passes[2].halves is None
    assert middle.passes[2].late is None
    assert first.passes[2].halves is not None


def test_a_measured_profile_is_read_again():
    shape = GPTConfig(layers=3, width=16, heads=2, context=8, vocabulary=20)
    tokens = torch.randint(20, (2, 9))
    samples = {b: (tokens[:b, :-1], tokens[:b, 1:]) for b in (1, 2)}
    found = measure_blocks(gpt_blocks(shape, 0), samples, language_loss, adam, OPTIONS.changed(max_grad_norm=1.0), 0.0)
    assert [block.kind for block in found] == ["Embedding", "Layer", "Layer", "Layer", "Head"]
    profile = profile_of("gpt", found, [fit([Ping(100, 2.0), Ping(200, 3.0)])], "here", {"model": {"layers": 3}})
    text = profile_text(profile)
    again = parse_profile(text, "again")
    assert profile_text(again) == text
    assert again == profile
    assert (again.links[0].latency, again.links[0].bandwidth) == (pytest.approx(1.0), pytest.approx(100.0))
    layer = again.layers[1]
    assert layer.output == [8 * 16 * 4, 2 * 8 * 16 * 4]
    assert layer.parameters == 4 * (12 * 16 * 16 + 2 * 16)


def test_what_an_update_takes_whatever_it_updates_counts_once_for_a_stage(monkeypatch):
    """Here 0.25 s, and 0.5 s for each block; the one in the middle has no parameters."""
    monkeypatch.setattr(StageTrial, "update", lambda trial, *_: 0.25 + 0.5 * len(trial.stage.module.blocks))
    found = measured([Multiplied(1), Multiplied(1), nn.Tanh(), Multiplied(1)])
    assert [block.update_shared for block in found] == [None, 0.25, None, None]
    profile = profile_of("model", found)
    assert (profile.update, [layer.step for layer in profile.layers]) == (0.25, [0.5, 0.5, 0.0, 0.5])
    assert parse_profile(profile_text(profile), "again") == profile


@pytest.mark.parametrize(("shared", "update"), [((0.25, 0.5, 0.125), 0.25), ((-0.5, -0.25, 0.5), 0.0), ((9.0,), 0.75)])
def test_what_every_update_takes_is_no_less_than_nothing_and_no_more_than_one(shared, update):
    """Measured times are not exact; the middle one counts."""
    weights = BlockFigures(8, 8, None, 0, 16, 0.75)
    nothing = {"passes": {1: PassFigures(1.0, 2.0, 8, 8)}, "shared": {1: 0}, "movable_with": {1: 0}}
    blocks = [MeasuredBlock(f"b{n}", "", weights=weights, update_shared=s, **nothing) for n, s in enumerate(shared)]
    profile = profile_of("model", blocks)
    assert (profile.update, profile.layers[0].step) == (update, 0.75 - update)


def test_a_link_is_fitted_by_relative_errors():
    exact = [Ping(n, 1e-4 + n / 2e9) for n in (256, 4096, 1 << 20, 1 << 22)]
    assert fit(exact).latency == pytest.approx(1e-4)
    assert fit(exact).bandwidth == pytest.approx(2e9)
    falling = [Ping(256, 2e-4), Ping(4096, 1e-4)]
    assert fit(falling).bandwidth == pytest.approx(1e15)


def test_the_work_of_a_message_is_fitted_by_relative_errors():
    found = fit([Ping(n, 1e-4 + n / 2e9, 5e-5 + n * 1e-9) for n in (256, 4096, 1 << 20)])
    assert (found.work, found.work_per_byte) == (pytest.approx(5e-5), pytest.approx(1e-9))


def test_a_link_is_measured_with_messages_like_those_of_the_model():
    """A burst that passes at once hides the rate of the link from small messages."""
    sizes = sizes_around([0, 1 << 16, 1 << 18])
    assert (sizes[0], sizes[-1]) == (1 << 15, 1 << 19)
    assert list(sizes) == sorted(set(sizes))

    def seconds(n):
        return 1e-4 + max(n - 8_000, 0) / 12.5e6  # of 100 Mbit/s

    assert fit([Ping(n, seconds(n)) for n in SIZES]).bandwidth > 1.3 * 12.5e6
    assert fit([Ping(n, seconds(n)) for n in sizes]).bandwidth == pytest.approx(12.5e6, rel=0.02)
    assert sizes_around([]) == SIZES
    assert len(set(sizes_around([1]))) > 1
    assert max(sizes_around([1 << 40])) == 64 << 20


def test_a_profile_says_that_its_link_is_not_that_of_its_devices():
    assert "on the cpu, not between cuda devices" in _said_of_links(torch.device("cuda", 0))


def pings(group):
    return ping(group, (64, 4096, 1 << 16), 20.0, repeats=2)


@pytest.mark.processes
def test_messages_go_there_and_back(pool):
    found, other = pool.submit(pings, ranks=2)
    assert [each.nbytes for each in found] == [64, 4096, 1 << 16]
    assert all(each.seconds > 0 and each.work > 0 for each in found + other)


@pytest.mark.processes
def test_measured_planned_and_trained(command, tmp_path):
    """From nothing to a trained model, by three commands: what was measured goes with the plan."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 50)
    profile, plan = tmp_path / "profile.yaml", tmp_path / "plan.yaml"
    model = ["model.layers=2", "model.width=16", "model.heads=2", "model.context=8", "threads=1"]
    changes = [part for change in model for part in ("--set", change)]
    run = command("profile", *changes, "--data", text, "--seconds", "0", "--microbatch-sizes", "1,2", "--out", profile)
    assert run.returncode == 0, run.stderr
    assert f"Wrote the profile {profile}.\nNext: penstock plan --profile {profile} --devices N\n" in run.stdout
    assert "layers.0 .. layers.1 (2, each)" in run.stdout
    found = yaml.safe_load(profile.read_text())
    assert found["settings"]["model"] == {"layers": 2, "width": 16, "heads": 2, "context": 8}
    assert found["links"][0]["bandwidth"] > 0
    assert found["source"].endswith("; link: gloo between two processes of this machine, on the cpu")
    arguments = ["--devices", "2", "--global-batch", "8", "--out", plan, "--json"]
    run = command("plan", "--profile", profile, *arguments)
    assert run.returncode == 0, run.stderr
    best, written = json.loads(run.stdout)["plans"][0], yaml.safe_load(plan.read_text())
    assert best["settings"].items() <= written.items()
    assert written["predicted"]["batch"] == pytest.approx(best["seconds_per_batch"], rel=1e-5)
    short = ["batches=8", "validation_samples=2", "sample_length=4", f"out={tmp_path / 'runs'}"]
    run = command("train", "--plan", plan, *(part for change in short for part in ("--set", change)))
    assert run.returncode == 0, run.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    took = measured_batch(read_timeline(folder))
    assert f"A batch took {took:.4g} s, planned {best['seconds_per_batch']:.4g} s (" in run.stdout
    told = [int(stage) for stage in re.findall(r"^stage (\d+): passes ", run.stdout, re.MULTILINE)]
    assert told == list(range(len(written["predicted"].get("passes", []))))  # none on a single core
    assert ("idle, of the time of all ranks: " in run.stdout) == ("idle" in written["predicted"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "piper"], "--from goes with reading a profile, not with measuring"),
        (["--microbatch-sizes", "2,1"], "must be positive and ascend"),
        (["--microbatch-sizes", "2,x"], "--microbatch-sizes takes whole numbers"),
        (["--set", "device=cuda:99"], "device is 'cuda:99', but torch sees"),
        (["--set", "model.preset=tine"], "unknown model preset 'tine'"),
        (["--data", "nothing-there"], "there is no file or folder 'nothing-there'"),
        (["plan.yaml", "--rehearse", "0"], "not with --rehearse; a plan goes behind --plan"),
        (["--check", "run"], "--check compares runs with a profile; give its FILE"),
        (
            ["some.yaml", "--microbatch-sizes", "1"],
            "--microbatch-sizes goes with measuring or formulas (--cluster), not with reading a profile",
        ),
        (
            ["--out", "/nowhere/p.yaml", "--seconds", "0", "--no-links", "--data", "TEXT"],
            "cannot write '/nowhere/p.yaml'",
        ),
    ],
)
def test_what_cannot_be_measured_is_said(command, tmp_path, arguments, said):
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh " * 40)
    arguments = [text if part == "TEXT" else part for part in arguments]
    small = settings()[:-2] if "--seconds" in arguments else []
    run = command("profile", *arguments, *small)
    assert run.returncode == 2
    assert said in " ".join(run.stderr.split())


def test_a_model_that_fails_is_an_error():
    with pytest.raises(ConfigError, match="the model has no blocks"):
        measured([])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        measured([nn.Linear(5, 5)])
    assert issubclass(DataError, Exception)
