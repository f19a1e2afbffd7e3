"""`penstock.verify.verify` passes where nothing is wrong, and sees what is planted, where it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, VersionError
from penstock.models import gpt_variant
from penstock.models.gpt_shape import GPTConfig
from penstock.options import passes as passes_module
from penstock.partition.blocks import LazyBlock
from penstock.schedule.methods.table import METHODS
from penstock.stage.blocks.module import StageModule
from penstock.train.config.load import load_config
from penstock.verify import baseline_runs, verify as verify_module
from penstock.verify.differences import KINDS
from penstock.verify.report import Verification
from penstock.verify.verify import TOLERANCE, verify
from penstock.weights.decision import LossScale
from support import verify_faults
from support.offered_methods import OFFERED
from support.own_methods import FILES, chosen

TINY = (
    "microbatches=3", "microbatch_size=1", "model.layers=2", "model.width=16", "model.heads=2", "model.context=8",
    "lr_schedule.warm_up=2", "optimizer.lr=0.01", "max_grad_norm=0.5", "threads=1",
)  # fmt: skip
FLUSH = [name for name, row in METHODS.items() if row.rule in ("flush", "provisional")]
MOMENTUM = ["optimizer.name=sgd", "optimizer.nesterov=false", "optimizer.weight_decay=0"]
NADAM = ["optimizer.name=nadam"]
NEEDS = {
    "gap-aware": [*MOMENTUM, "microbatches=1"],
    "nag-pp": NADAM,
    "nag-pp-no-stash": NADAM,
    "wpipe": ["max_grad_norm=null"],
}
LATER = [
    "spike",
    "spike-lwp",
    "spike-lwp-weights",
    "error-feedback",
]  # they finish an update after the optimizer's step
REMEMBERED = {"sgd": 1, "nadam": 4}  # by each optimizer, per parameter; 3 by Adam: two moments and the number of steps
PASSES = ["losses", "decisions", "gradients", "weights"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return str(path)


def verified(text: str, *changes: str, count: int = 4) -> Verification:
    return verify(load_config(None, [*TINY, f"data={text}", *changes]), count)


clean = cache(verified)
"""Without a plant; many plants share a configuration."""


def first(found: Verification) -> tuple[int, list[str]]:
    """In which batch it differs from the reference first, and in what."""
    wrong = {row.kind: row.reference.first for row in found.rows if row.reference.first is not None}
    batch = min(place.batch for place in wrong.values())
    return batch, [kind for kind, place in wrong.items() if place.batch == batch]


def place(found: Verification, kind: str) -> str:
    (row,) = [row for row in found.rows if row.kind == kind]
    assert row.reference.first is not None
    return row.reference.first.name


# --- nothing is wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted({*OFFERED, *FILES} - set(LATER)))
def test_every_method_passes_verification(text: str, method: str) -> None:
    both = 2 if method in ("chimera", "dualpipe", "bitpipe") else 1  # directions, each with a copy of the model
    needs = NEEDS.get(method, [])
    found = clean(text, chosen(method), f"microbatches={4 if 'pipe' in method else 3}", *needs)
    assert found.agrees, found.verdict
    counts = {row.kind: row.reference.compared for row in found.rows}
    parameters = 2 * 6 + 3
    assert counts == {
        "losses": 2 * 4,
        "decisions": 0 if "max_grad_norm=null" in needs else 3 * 4,
        "gradients": 4 * parameters * both,
        "weights": 4 * parameters * both,
        "optimizer state": REMEMBERED.get(needs[0].removeprefix("optimizer.name=") if needs else "", 3)
        * parameters
        * both,
        "final state": parameters,
    }
    assert tuple(counts) == KINDS
    assert (found.left_out is None) == (method in FLUSH)
    for row in found.rows:
        assert (row.plain is not None) == (method in FLUSH)
        assert row.plain is None or row.plain.compared == row.reference.compared


@pytest.mark.parametrize(
    "changes",
    [
        ("method=pipemare", "recompute=block"),
        ("method=pipemare", "recompute=stage", "segments=2", "stages=4", "model.layers=4"),
        ("method=newest", "recompute=stage", "precision=bf16"),
        ("method=timeprest", "options.ahead=3"),
    ],
    ids=" ".join,
)
def test_what_the_reference_is_told_about_an_order(text: str, changes: tuple[str, ...]) -> None:
    """When forwards are run again, on other weights than before, and how far a stage is ahead."""
    clean(text, *changes)


@pytest.mark.parametrize("method", LATER)
def test_updates_that_end_after_the_optimizer_s_step_are_refused(text: str, method: str) -> None:
    needs = [] if method == "error-feedback" else MOMENTUM
    with pytest.raises(ConfigError, match="changes weights after the optimizer's step"):
        clean(text, chosen(method), "microbatches=3", *needs)


def test_slices_in_low_precision_are_refused(text: str) -> None:
    """Their sums round by percents."""
    with pytest.raises(ConfigError, match="verify it with precision=fp32"):
        clean(text, "method=seq1f1b", "precision=bf16")


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("2bw", ["width=2"]),
        ("2bw", ["width=3", "sharding=gradients"]),
        ("1f1b", ["width=2", "sharding=optimizer", "model.tied=true"]),
        ("layered", ["width=2", "stages=2"]),
        ("stash", ["width=2"]),
        ("1f1b", ["precision=bf16"]),
        ("2bw", ["precision=fp16"]),
        ("stash", ["recompute=block"]),
        ("2bw", ["recompute=stage"]),
        ("1f1b", ["model.tied=true"]),
        ("2bw", ["model.tied=true", "stages=1"]),
        ("interleaved", ["model.tied=true", "stages=1"]),
        ("1f1b", ["max_grad_norm=null"]),
        ("2bw", ["max_grad_norm=null", "width=3", "balance=[1,3]"]),
        ("1f1b", ["stages=4", "optimizer.name=sgd"]),
        ("vocabulary-1f1b", []),
        ("vocabulary-1f1b", ["stages=4", "model.layers=4", "recompute=block"]),
        ("vocabulary-1f1b", ["width=2", "sharding=full"]),  # whose gradients are added up in several pieces
        ("vocabulary-1f1b", ["precision=bf16", "width=2", "sharding=gradients"]),
        ("zb-h2-post", ["max_grad_norm=1e9"]),
        ("zb-h2-post", ["max_grad_norm=1.2"]),
        ("zb-h2-post", ["precision=fp16", "width=2", "stages=3"]),
        ("zb-h2-post", ["undo=in-place"]),
        (
            "2bw",
            ["model.tied=true", "width=2", "recompute=stage", "precision=fp16", "stages=3", "optimizer.name=nadam"],
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)
def test_every_choice_passes(text: str, method: str, changes: list[str]) -> None:
    found = clean(text, f"method={method}", *changes)
    assert found.agrees, found.verdict
    assert all(row.reference.compared for row in found.rows if row.kind != "decisions")
    low = any(change in ("precision=bf16", "precision=fp16") for change in changes)
    assert (found.left_out is None) == (method in FLUSH and not low)


def test_every_pipeline_shows_its_updates(text: str) -> None:
    one, two = clean(text, "method=2bw"), clean(text, "method=2bw", "width=2")
    for kind, single, double in zip(KINDS, one.rows, two.rows, strict=True):
        times = 2 if kind in ("gradients", "weights", "optimizer state") else 1
        assert double.reference.compared == times * single.reference.compared


@pytest.mark.long
def test_plain_torch_stays_as_near_after_many_batches(text: str) -> None:
    """In one long run, rounding would grow a hundredfold in ten batches here."""
    found = verified(text, "method=1f1b", "optimizer.name=nadam", count=12)
    assert found.agrees, found.verdict
    worst = [row.plain.worst.relative for row in found.rows if row.plain is not None and row.plain.worst is not None]
    assert 0 < max(worst) < TOLERANCE / 10


@pytest.mark.long
def test_skipped_updates(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss scale that is too high at first."""
    for module in (passes_module, baseline_runs):
        monkeypatch.setattr(module, "LossScale", partial(LossScale, initial=2.0**21))
    found = verified(text, "precision=fp16", count=8)
    assert found.agrees, found.verdict
    updates = found.rows[KINDS.index("gradients")].reference.compared / 15
    assert 2 <= updates <= 6  # some were skipped
    verify_faults.overflows_ignored(monkeypatch)
    found = verified(text, "precision=fp16", count=8)
    assert not found.agrees
    assert found.error is None
    assert first(found)[1][0] == "decisions"
    assert place(found, "decisions") == "skipped"
    extra = found.rows[KINDS.index("weights")].reference.worst
    assert extra is not None
    assert extra.absolute == math.inf


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_a_run_that_becomes_nan_is_said_to_show_nothing(text: str, method: str) -> None:
    """Plain torch, too, skips updates whose norm is not finite."""
    found = verified(text, f"method={method}", "optimizer.lr=1e12", "lr_schedule.warm_up=0")
    assert found.agrees, found.verdict
    assert "of them are NaN, which proves nothing" in found.verdict
    assert "NaN" not in verified(text, f"method={method}").verdict


class Restless(nn.Module):
    """Draws random numbers and changes buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.norm(x.flatten(0, -2)).view_as(x))
        return y


def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model in place of the GPT."""

    def blocks(config: GPTConfig, seed: int) -> dict[str, Any]:
        width, vocabulary = config.width, config.vocabulary
        makers: dict[str, Callable[[], nn.Module]] = {
            "embedding": partial(nn.Embedding, vocabulary, width),
            "a": partial(Restless, width),
            "b": partial(Restless, width),
            "head": partial(nn.Linear, width, vocabulary),
        }
        return {name: LazyBlock(make, seed=seed + i) for i, (name, make) in enumerate(makers.items())}

    monkeypatch.setattr(gpt_variant, "gpt_blocks", blocks)


def test_buffers_and_random_numbers(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    restless(monkeypatch)
    found = verified(text, "recompute=block")
    assert found.agrees, found.verdict
    assert found.rows[-1].reference.compared == 1 + 2 * (2 + 3) + 2  # each norm has three buffers
    verify_faults.buffers_changed_twice(monkeypatch)
    found = verified(text, "recompute=block")
    assert first(found) == (4, ["final state"])
    assert "norm" in place(found, "final state")


def test_the_process_is_left_as_it_was(text: str) -> None:
    torch.manual_seed(4)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    verified(text, "method=1f1b", f"threads={threads + 1}", count=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


# --- planted faults ---------------------------------------------------------------------------------------------------

PLANTS: dict[str, tuple[Any, list[str], int, list[str]]] = {
    "off by one, 2bw": (verify_faults.older_copies, [], 2, PASSES),
    "off by one, stash": (verify_faults.older_copies, ["method=stash"], 1, PASSES),
    "off by one, flush": (verify_faults.older_copies, ["method=1f1b"], 1, PASSES),
    "no delay": (verify_faults.another_rule("1f1b"), [], 1, PASSES),
    "a delay": (verify_faults.another_rule("2bw"), ["method=eager"], 1, PASSES),
    "another delay": (verify_faults.another_rule("stash"), ["method=2bw"], 1, PASSES),
    "recompute on the newest": (verify_faults.newest_in_recompute, ["recompute=stage"], 1, PASSES[1:]),
    "stale casts": (verify_faults.stale_casts, ["precision=bf16"], 2, PASSES),
    "dropped microbatch": (verify_faults.dropped_microbatch, [], 0, PASSES[1:]),
    "dropped microbatch, flush": (verify_faults.dropped_microbatch, ["method=gpipe"], 0, PASSES[1:]),
    "dropped microbatch, no clip": (verify_faults.dropped_microbatch, ["max_grad_norm=null"], 0, PASSES[2:]),
    "doubled norm share": (verify_faults.doubled_norm_share, [], 0, PASSES[1:]),
    "doubled norm share, flush": (verify_faults.doubled_norm_share, ["method=1f1b"], 0, PASSES[1:]),
    "doubled norm share, no effect": (verify_faults.doubled_norm_share, ["max_grad_norm=1000.0"], 0, ["decisions"]),
    "ties count twice": (verify_faults.ties_count_twice, ["model.tied=true"], 0, PASSES[1:]),
    "no ties": (verify_faults.no_ties, ["model.tied=true"], 0, PASSES[1:]),
    "scaled by m": (verify_faults.changed_decisions(m=3), [], 0, PASSES[2:]),
    "scaled by m, sgd": (
        verify_faults.changed_decisions(m=3),
        ["optimizer.name=sgd", "max_grad_norm=null"],
        0,
        PASSES[2:],
    ),
    "not clipped": (verify_faults.changed_decisions(clip=None), [], 0, PASSES[2:]),
    "rate of the next update": (verify_faults.next_rate, [], 0, PASSES[3:]),
    "batches mixed": (verify_faults.swapped({2: 3, 3: 2}), [], 0, PASSES),
    "order of microbatches": (verify_faults.swapped({1: 2, 2: 1}), [], 0, PASSES[1:]),
    "no reduction": (verify_faults.no_reduction, ["width=2"], 0, PASSES[1:]),
    "pipelines drift apart": (verify_faults.sum_for_the_first_only, ["width=2"], 0, PASSES[2:]),
    "forgetful optimizer": (verify_faults.forgetful_optimizer, [], 4, ["optimizer state"]),
    "older state dict": (verify_faults.older_state_dict, [], 4, ["final state"]),
    "never rejected": (verify_faults.never_rejected, ["method=zb-h2-post"], 0, PASSES[2:]),
    "undone by half": (verify_faults.undone_by_half, ["method=zb-h2-post", "max_grad_norm=1.2"], 0, PASSES[3:]),
    "wrong loss": (verify_faults.wrong_loss, [], 0, ["losses"]),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_seen_where_it_is(text: str, name: str) -> None:
    plant, changes, batch, kinds = PLANTS[name]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        found = verified(text, *changes)
    assert not found.agrees
    assert found.error is None
    assert first(found) == (batch, kinds)
    assert f"it differs first {'at the end' if batch == 4 else f'in batch {batch}'}, in {kinds[0]} (" in found.verdict
    assert clean(text, *changes).agrees


def test_the_stage_is_named(text: str) -> None:
    """Where clipping spreads a fault, the parameters that differ most are those that have it (stage 1 is the head)."""
    for plant, kind, stage in (
        (verify_faults.dropped_microbatch, "gradients", ("embedding.", "layers.")),
        (verify_faults.no_ties, "weights", ("embedding.", "head.out.")),
    ):
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            assert place(verified(text, "model.tied=true"), kind).startswith(stage)


def test_the_pipeline_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verify_faults.sum_for_the_first_only(monkeypatch)
    assert place(verified(text, "width=2"), "gradients").endswith(" of pipeline 1")


@pytest.mark.long
def test_plain_torch_sees_it_too(text: str) -> None:
    """What both it and the reference see in gradients and norms; the order of microbatches is rounding to it."""
    for plant, kinds in (
        (verify_faults.older_copies, PASSES),
        (verify_faults.dropped_microbatch, PASSES[1:]),
        (verify_faults.doubled_norm_share, PASSES[1:]),
        (verify_faults.swapped({1: 2, 2: 1}), []),
    ):
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            found = verified(text, "method=1f1b")
        assert not found.agrees
        seen = [row.kind for row in found.rows if row.plain is not None and not row.plain.agrees]
        assert set(seen) >= set(kinds)
        assert bool(seen) == bool(kinds)


def test_plain_torch_alone_may_disagree(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would of 2BW, whose delay it does not have."""
    monkeypatch.setattr(verify_module, "_no_plain", lambda _: None)
    found = verified(text, "method=2bw")
    assert not found.agrees
    assert all(row.reference.agrees for row in found.rows)
    assert "agree on 2bw, but plain torch does not: it differs first in batch 1, in losses (loss: " in found.verdict


@pytest.mark.parametrize("method", ["2bw", "stash"])
def test_what_safety_nets_catch_is_a_failure_with_their_message(
    text: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify_faults.older_versions(monkeypatch)
    found = verified(text, f"method={method}")
    assert not found.agrees
    assert isinstance(found.error, VersionError)
    assert f"the pipeline of {method} ended with VersionError, raised by B" in found.verdict
    assert "needs version 0 of the weights" in found.verdict


def test_any_error_of_the_pipeline_is_a_failure(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: StageModule, *_: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(StageModule, "run", run)
    found = verified(text, "method=1f1b")
    assert not found.agrees
    assert isinstance(found.error, ZeroDivisionError)
    assert all(row.reference.agrees for row in found.rows)  # what was not trained is not said to differ


def test_mistakes_in_the_configuration_are_raised(text: str) -> None:
    with pytest.raises(ConfigError, match="must hold 2 positive numbers"):
        verified(text, "balance=[4]")


def test_a_gpu_may_round_in_another_order(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums depend on how their terms lie in memory; on the CPU every bit must be the same."""
    assert {row.reference.tolerance for row in verified(text, "method=1f1b", count=1).rows} == {0.0}
    monkeypatch.setattr(verify_module, "is_accelerator", lambda device: device.type == "cpu")
    assert {row.reference.tolerance for row in verified(text, "method=1f1b", count=1).rows} == {TOLERANCE}
