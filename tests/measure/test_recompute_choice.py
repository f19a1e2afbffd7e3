"""What stages recompute under a limit: as little as fits, foretold to the byte, and without changing a bit."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml

import penstock
from penstock.errors import ConfigError
from penstock.measure.recompute_choice import _groups, _ways, choose_for, choose_recompute
from penstock.options.all_options import PipelineOptions
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.train.config.load import load_config
from penstock.train.prepare.prepare_run import prepare
from penstock.train.setup.run_folder import make_run_folder
from support.command_line import TINY
from support.grouped import grouped
from support.predicted_memory import SAMPLES, TOKENS, WIDTH, blocks_for, optimizer_for, squared, squares
from support.schedules import make_schedule

M = 5


def sample():
    torch.manual_seed(0)
    return tuple(torch.randn(2, SAMPLES, WIDTH))  # of one storage, as those of `trained`


def choose(limit, method="1f1b", stages=4, blocks=4, **changes):
    options = PipelineOptions().changed(balance=[2] * blocks, **changes)
    return choose_recompute(
        blocks_for(blocks),
        sample(),
        limit,
        method=method,
        stages=stages,
        microbatches=M,
        loss=squared,
        optimizer=optimizer_for("1f1b"),
        options=options,
    )


def trained(recompute, method="1f1b", stages=4, blocks=4):
    torch.manual_seed(3)
    data = [[tuple(torch.randn(2, SAMPLES, WIDTH)) for _ in range(M)] for _ in range(4)]
    pipeline = Pipeline(
        blocks_for(blocks),
        method=method,
        stages=stages,
        microbatches=M,
        loss=squared,
        optimizer=optimizer_for("1f1b"),
        partition=[2] * blocks,
        recompute=recompute,
    )
    losses = [report.loss for report in pipeline.run(data)]
    peaks = tuple(kinds["total"] for _, kinds in sorted(pipeline.peak_bytes().items()))
    return losses, pipeline.state_dict(), peaks


@pytest.mark.slow
def test_what_fits_recomputes_nothing():
    found = choose(1e9)
    assert found.recompute == ("none",) * 4
    assert found.peaks == found.without == trained("none")[2]


def test_the_least_that_fits_is_chosen_and_its_peaks_are_those_of_a_run():
    """Every limit between two possible peaks: no way with fewer recomputes fits on any rank."""
    by_mode = {mode: trained(mode)[2] for mode in ("none", "stage", "block")}
    losses, weights, _ = trained("none")
    limits = sorted({peak for peaks in by_mode.values() for peak in peaks})
    tried = 0
    for limit in limits:
        if any(min(by_mode[mode][rank] for mode in by_mode) > limit for rank in range(4)):
            continue
        tried += 1
        found = choose(limit)
        same_losses, same_weights, peaks = trained(found.recompute)
        assert found.peaks == peaks
        assert max(peaks) <= limit
        for rank, mode in enumerate(found.recompute):
            assert (mode == "none") == (by_mode["none"][rank] <= limit)
        assert same_losses == losses
        assert all(torch.equal(same_weights[name], tensor) for name, tensor in weights.items())
    assert tried >= 2


@pytest.mark.long
def test_a_rank_with_two_stages_recomputes_the_cheaper_one_if_that_is_enough():
    """Breadth-first, 2 ranks with 2 chunks each: all ways of rank 0 are tried by hand."""
    method, modes = "breadth-first:chunks=2", ("none", "stage", "block")
    tried = {(a, b): trained((a, "none", b, "none"), method, 2)[2] for a, b in product(modes, repeat=2)}
    peaks, without = {way: found[0] for way, found in tried.items()}, tried["none", "none"]
    assert {found[1] for found in tried.values()} == {without[1]}, "what rank 0 does is nothing to rank 1"
    assert without[1] < without[0]
    cost = [sum(p.numel() for p in block.parameters()) for name, block in blocks_for(4).items() if "layer" in name]

    def work(way):
        return sum(cost[index] for index, mode in zip((0, 2), way, strict=True) if mode != "none")

    for limit in sorted(peak for peak in set(peaks.values()) if peak >= without[1]):
        found = choose(limit, method, 2)
        own = found.recompute[0], found.recompute[2]
        assert found.recompute[1::2] == ("none", "none")
        assert found.peaks[0] == peaks[own] <= limit
        assert work(own) == min(work(way) for way, peak in peaks.items() if peak <= limit)


def test_a_limit_that_nothing_meets_is_refused_with_the_least():
    with pytest.raises(ConfigError, match=r"rank 0 takes at least \d+\.\d\d KiB, but memory_limit is \d+ B") as refused:
        choose(1.0)
    rest = r"[\d.]+ \w+ inputs of microbatches in flight, and [\d.]+ \w+ what .* [\d.]+ \w+ is the optimizer's state"
    assert re.search(rest, str(refused.value))


def test_slices_of_sequences_are_recomputed_by_stage():
    torch.manual_seed(0)
    sample, blocks = tuple(torch.randn(2, SAMPLES, TOKENS, WIDTH)), blocks_for(2, slices=True)
    given = {"method": "seq1f1b", "stages": 2, "microbatches": 3, "loss": squares, "optimizer": optimizer_for("1f1b")}
    without = choose_recompute(blocks, sample, 1e6, **given).without
    found = choose_recompute(blocks, sample, max(without) - 1, **given)
    assert set(found.recompute) == {"none", "stage"}
    assert max(found.peaks) < max(without)
    with pytest.raises(ConfigError, match=r"takes at least .* take .stage. or .none.\)\. Of that are .* inputs"):
        choose_recompute(blocks, sample, 1.0, **given)


def test_copies_of_a_stage_choose_together():
    assert sorted(map(sorted, _groups(make_schedule("chimera", 4, 4)))) == [[0, 3], [1, 2]]
    assert sorted(map(sorted, _groups(make_schedule("interleaved", 2, 4)))) == [[0, 2], [1, 3]]


def test_cheaper_ways_come_first_and_stages_before_blocks():
    modes = {0: ["none", "stage", "block"], 2: ["none", "block"]}
    ways = _ways({0, 2}, modes, [3.0, 0.0, 1.0])
    assert ways[:3] == [{0: "none", 2: "block"}, {0: "stage", 2: "none"}, {0: "block", 2: "none"}]
    many = {index: ["none", "stage", "block"] for index in range(8)}
    assert len(_ways(set(many), many, [1.0] * 8)) == 2


def test_blocks_of_the_user_are_left_alone():
    blocks = blocks_for(4)
    before = {name: block.state_dict() for name, block in blocks.items() if isinstance(block, torch.nn.Module)}
    before = {name: {key: x.clone() for key, x in state.items()} for name, state in before.items()}
    given, random = sample(), torch.random.get_rng_state()
    options = PipelineOptions().changed(balance=[2] * 4)
    choose_recompute(
        blocks, given, 1e9, method="1f1b", stages=4, microbatches=M, loss=squared, optimizer=optimizer_for("1f1b"),
        options=options,
    )  # fmt: skip
    for name, state in before.items():
        assert all(torch.equal(blocks[name].state_dict()[key], x) for key, x in state.items())
    assert torch.equal(torch.random.get_rng_state(), random)


def test_methods_whose_numbers_depend_on_it_are_refused():
    with pytest.raises(ConfigError, match="which only you should choose"):
        choose(1e9, "pipemare:reschedule=4")


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("layered:chunks=2", {}),
        ("1f1b", {"ema_decay": 0.9}),
        ("1f1b", {"combine": Combine("average", every=2)}),
        pytest.param("2bw", {"combine": Combine("average", every=5)}, marks=pytest.mark.long),
        pytest.param("1f1b", {"combine": Combine("bmuf", every=3, nesterov=True)}, marks=pytest.mark.long),
        pytest.param("2bw-layered:chunks=2", {"precision": "bf16"}, marks=pytest.mark.long),
        pytest.param("1f1b", {"sharding": "gradients"}, marks=pytest.mark.long),
    ],
)
def test_with_sharded_state_and_averages_too(method, changes):
    """A limit just below the peak without recompute: the choice has the peaks of a run, and they fit."""
    stages, width = (2 if "layered" in method else 4), 2

    def peaks_of(recompute):
        torch.manual_seed(3)
        data = [[tuple(torch.randn(2, SAMPLES, WIDTH)) for _ in range(M * width)] for _ in range(6)]
        options = {"width": width, "recompute": recompute, "balance": [2] * 4, **changes}
        arguments = {"method": method, "stages": stages, "microbatches": M, "loss": squared}
        pipeline = Pipeline(blocks_for(4), **grouped({"optimizer": optimizer_for("1f1b"), **arguments, **options}))
        list(pipeline.run(data))
        peaks = [kinds["total"] for _, kinds in sorted(pipeline.peak_bytes().items())]
        return tuple(map(max, peaks[:stages], peaks[stages:]))

    without = choose(1e9, method, stages, width=width, **changes).without
    limit = max(without) - 1
    found = choose(limit, method, stages, width=width, **changes)
    assert set(found.recompute) != {"none"}
    assert found.peaks == peaks_of(found.recompute)
    assert max(found.peaks) <= limit


def test_it_is_public():
    assert penstock.choose_recompute is choose_recompute


SMALL = [*TINY, "stages=2", "microbatches=6", "model.context=64", f"data={Path(__file__).parents[2] / 'LICENSE'}"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_configuration_keeps_what_was_chosen(tied, tmp_path):
    """The run folder says what was chosen, so a run that goes on from there chooses nothing."""
    changes = [*SMALL, f"model.tied={str(tied).lower()}", f"out={tmp_path}", "recompute=auto"]
    large = prepare(load_config(None, [*changes, "memory_limit=1e12"]), choose=choose_for)
    assert large.config.recompute == ["none", "none"]
    peak = float(re.search(r"\(([\d.]+) MiB on the fullest rank", large.recompute)[1])
    tight = prepare(load_config(None, [*changes, f"memory_limit={2**20 * (peak - 0.1)}"]), choose=choose_for)
    assert tight.config.recompute == ["stage", "none"]
    assert "on the fullest rank" in tight.recompute
    assert tight.plan.schedule.recomputed == {0}
    folder = make_run_folder(tight.config)
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["recompute"] == ["stage", "none"]
    again = prepare(load_config(folder / "config.yaml", []))
    assert again.config.recompute == tight.config.recompute
    assert again.recompute == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["recompute=auto"], "needs memory_limit"),
        (["memory_limit=1e9"], "leave one of them out"),
        (["recompute=[none]"], "recompute has 1 entries, but there are 2 stages"),
        (["recompute=[none,auto]"], "none, block, stage or auto, or a list"),
        (["recompute=auto", "memory_limit=1000"], "takes at least"),
        (["recompute=auto", "memory_limit=1e9", "segments=2"], "is for recompute='stage'"),
    ],
)
def test_wrong_limits_are_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        prepare(load_config(None, [*SMALL, *changes]), choose=choose_for)


def test_words_of_a_choice():
    found = choose(1e9)
    assert str(found).startswith(f"none, none, none, none ({max(found.peaks) / 1024:.1f} KiB on the fullest rank")
    assert "without recompute" in str(replace(found, peaks=(1, 2, 3, 4)))
