"""Delays by choice: batch t reads W(max(t - delay, 0)) of each block, and its gradient updates W(t)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock.checkpoint.manager import Checkpoints
from penstock.errors import CheckpointError, ConfigError, VersionError
from penstock.options.passes import Staleness
from penstock.partition.blocks import LazyBlock
from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.methods.corrections import CORRECTIONS
from penstock.weights.corrections.pipemare import PipeMare
from penstock.weights.decision import LossScale
from penstock.weights.memory.emulated_delay_buffers import OlderVersions
from penstock.weights.store import VersionStore
from support.cases import (
    BALANCE,
    LOSSES,
    OPTIMIZERS,
    Case,
    Outcome,
    Recording,
    assert_equal_tensors,
    assert_same,
    finish,
    make_batches,
    make_blocks,
    make_pipeline,
    run_spans,
    together,
    train,
)
from support.delay_cases import VARIED, assert_trained, go_on, long_case, sequential, snapshots
from support.pool import Pool
from support.schedules import make_schedule
from support.snapshots import Kept

IN_A_ROW = [5, 0, 0, 2, 2, 1]


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_every_depth_trains_what_the_equations_of_block_delays_say(depth: int, optimizer: str) -> None:
    """SGD has momentum here. The delays differ within a stage."""
    case = long_case(depth=depth, optimizer=optimizer)
    assert_trained(train(None, case, delays=VARIED), sequential(case, VARIED))


@pytest.mark.parametrize(
    "given",
    [IN_A_ROW, VARIED.get, lambda name: VARIED.get(name, 9)],
    ids=["by position", "a function", "a function that also delays what has no weights"],
)
def test_delays_may_be_given_in_several_forms(given: Any) -> None:
    case = long_case(spans=(8,))
    if callable(given):
        given = lambda name, function=given: function(name) or 0  # noqa: E731
    assert_same(train(None, case, delays=given), train(None, case, delays=VARIED))


def test_one_number_delays_all_blocks_and_a_profile_those_of_its_stages() -> None:
    case = long_case(depth=1)
    assert_trained(train(None, case, delays=3), sequential(case, dict.fromkeys(make_blocks("mixed"), 3)))
    stages = dict(zip(make_blocks("mixed"), (3, 3, 2, 1, 1, 0), strict=True))  # six blocks on four stages
    assert_trained(train(None, case, delays="1f1b:4"), sequential(case, stages))


@pytest.mark.parametrize(
    "case",
    [
        long_case("gpipe", 3, 3),
        long_case("sequential", 1, 1),
        long_case("zb-h1", 2, 3),  # backwards in two halves
        long_case("interleaved", 2, 2, options=(("chunks", 2),)),  # several stages on a rank
        long_case("chimera", 2, 2),  # two copies of each stage
        long_case(recompute="stage"),
        long_case(recompute="block", optimizer="adamw"),
        long_case(width=2),
    ],
    ids=lambda case: f"{case.method}-{case.recompute}-{case.width}",
)
def test_orders_recompute_and_width_change_nothing(case: Case) -> None:
    case = replace(case, spans=(9,))
    assert_trained(train(None, case, delays=VARIED), sequential(case, VARIED))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_low_precision_the_cast_versions_are_kept(precision: Any) -> None:
    case, scale = long_case(precision=precision, spans=(9,)), 64.0 if precision == "fp16" else 1.0
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    loss_scale = LossScale(initial=scale) if precision == "fp16" else None
    found = train(None, case, delays=VARIED, loss_scale=loss_scale)
    assert_trained(found, sequential(case, VARIED, scale=scale, dtype=dtype))


def test_clipping_and_averages() -> None:
    case = long_case(clip=0.3)
    pipeline = make_pipeline(case, delays=VARIED, ema_decay=0.9)
    list(pipeline.run(make_batches(case)))
    wanted = sequential(case, VARIED, clip=0.3)
    state, averaged = pipeline.state_dict(), pipeline.state_dict(averaged=True)
    for name in wanted.history[-1]:
        assert torch.allclose(state[name], wanted.history[-1][name], rtol=1e-4, atol=1e-6), name
        average = wanted.history[0][name]
        for version in wanted.history[1:]:
            average = 0.9 * average + 0.1 * version[name]
        assert torch.allclose(averaged[name], average, rtol=1e-4, atol=1e-6), name


def test_a_skipped_update_counts() -> None:
    """Version 3 is a copy of version 2, and one behind version 4 is version 3, not version 2."""
    case = long_case(spans=(6,), skips=(2,))
    pipeline = make_pipeline(case, delays=2)
    versions = []
    losses = []
    for report in pipeline.run(make_batches(case)):
        losses.append(report.loss)
    short = make_pipeline(case, delays=2)
    for batch in make_batches(case):
        versions.append({name: w.clone() for name, w in short.state_dict().items()})
        list(short.run([batch]))
    assert_equal_tensors(versions[3], versions[2], "the copy")
    blocks = make_blocks(case.model)
    for t in (0, 1, 3, 4, 5):
        for name, block in blocks.items():
            if isinstance(block, nn.Module):
                own = {key: w for key, w in versions[max(t - 2, 0)].items() if key.startswith(f"{name}.")}
                block.load_state_dict({key.removeprefix(f"{name}."): w for key, w in own.items()})
        parts = []
        for value, targets in make_batches(case)[t]:
            for block in blocks.values():
                value = block(value)
            parts.append(LOSSES["tokens"](value, targets))
        assert losses[t] == sum(float(s.detach()) for s, _ in parts) / sum(n for _, n in parts)


@pytest.mark.parametrize("depth", [2, 4])
def test_tied_embeddings_stay_equal(depth: int) -> None:
    case = long_case(depth=depth, tied=True, spans=(9,))
    pipeline = make_pipeline(case, delays={"table": 3, "first": 1, "head": 3})
    list(pipeline.run(make_batches(case)))
    state = pipeline.state_dict()
    assert torch.equal(state["head.weight"], state["table.weight"])
    alone = make_pipeline(replace(case, depth=1), delays={"table": 3, "first": 1, "head": 3})
    list(alone.run(make_batches(case)))
    for name, weight in alone.state_dict().items():  # on one stage autograd adds up in its own order
        assert torch.allclose(state[name], weight, rtol=1e-4, atol=1e-6), name


def test_block_delays_of_sequence_slices() -> None:
    """Of a GPT, in two slices, whose keys and values are carried from one to the next: as without slices."""
    case = long_case(model="gpt", spans=(7,))
    delays = {"embedding": 2, "layers.1": 3, "layers.3": 1}
    whole = train(None, case, delays=delays)
    sliced = train(None, replace(case, method="seq1f1b", options=(("slices", 2),)), delays=delays)
    for name, weight in whole.weights.items():
        assert torch.allclose(sliced.weights[name], weight, rtol=1e-4, atol=1e-6), name


# --- without delays nothing changes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [0, [0] * 6, {}, {"head": 0}, lambda _: 0, "1f1b:1"],
    ids=["number", "list", "none", "dict", "function", "name"],
)
@pytest.mark.parametrize(
    "case", [long_case(clip=0.5), long_case(depth=1, optimizer="sgd", precision="bf16")], ids=["fp32", "bf16"]
)
def test_no_delay_is_synchronous_training_to_the_bit(case: Case, given: Any) -> None:
    case = replace(case, spans=(3, 3))
    recording = Recording(OPTIMIZERS[case.optimizer])
    plain, pipeline = make_pipeline(case), make_pipeline(case, optimizer=recording, delays=given)
    found = finish(run_spans(pipeline, case), pipeline, recording)
    assert_same(found, train(None, case))
    list(plain.run(make_batches(case)))
    assert pipeline.live_bytes() == plain.live_bytes()


# --- engines, spans, resume -------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("case", [long_case(), long_case(depth=1, width=2, optimizer="sgd")], ids=["depth", "width"])
def test_block_delays_between_processes(pool: Pool, case: Case) -> None:
    found = together(pool.submit(train_delayed, case, ranks=2))
    assert_same(found, train(None, case, delays=VARIED))


def train_delayed(group: dist.ProcessGroup, case: Case) -> Outcome:
    return train(group, case, delays=VARIED)


def test_a_drain_changes_nothing() -> None:
    case = long_case(spans=(2, 1, 4, 2))
    assert_trained(train(None, case, delays=VARIED), sequential(case, VARIED))


@pytest.mark.parametrize("batch", [1, 3, 7])  # while there are fewer versions than the longest delay, and later
@pytest.mark.parametrize(("depth", "other"), [(2, 2), (1, 4), (4, 1)])
def test_a_run_with_block_delays_goes_on_bit_for_bit(batch: int, depth: int, other: int) -> None:
    case = long_case(depth=depth, spans=(12,))
    kept = snapshots(case, batch, VARIED)
    assert_trained(go_on(replace(case, depth=other), kept, VARIED), sequential(case, VARIED))


def test_a_run_in_low_precision_goes_on_bit_for_bit() -> None:
    case = long_case(precision="bf16", spans=(9,))
    kept = snapshots(case, 4, VARIED)
    assert kept.tensors["delayed.2/norm.weight"].dtype == torch.bfloat16
    assert_trained(go_on(case, kept, VARIED), sequential(case, VARIED, dtype=torch.bfloat16))


def test_checkpoints_hold_the_older_versions(tmp_path: Path) -> None:
    case = long_case(spans=(9,))
    pipeline = make_pipeline(case, delays=VARIED)
    checkpoints = Checkpoints(pipeline, tmp_path)
    list(pipeline.run(make_batches(case)[:5], save=checkpoints.every(4)))
    checkpoints.wait()
    blocks, recording = make_blocks(case.model, seed=99), Recording(OPTIMIZERS[case.optimizer])
    other = make_pipeline(case, optimizer=recording, blocks=blocks, delays=VARIED)
    assert Checkpoints(other, tmp_path).load() is not None
    assert other.batches == 4
    outcome = Outcome()
    for r in other.run(make_batches(case)[4:]):
        outcome.reports.append((r.batch, r.loss, r.weight))
    assert_trained(finish(outcome, other, recording), sequential(case, VARIED))


def test_a_checkpoint_without_older_versions_begins_with_the_newest() -> None:
    """As at the start of training: what batch t reads is not older than the checkpoint."""
    case = replace(long_case(spans=(9,)), optimizer="sgd")
    kept = snapshots(case, 3, None)
    found = go_on(case, kept, VARIED)
    more = Kept([])
    more.facts, more.tensors = kept.facts, dict(kept.tensors)
    for name in ("table.weight",):  # the same, said with versions that are all the newest one
        more.tensors |= {f"delayed.{back}/{name}": kept.tensors[f"weights/{name}"].clone() for back in range(1, 6)}
    assert_same(go_on(case, more, VARIED), found)
    assert "delayed.1/table.weight" not in kept.tensors
    wrong = Kept([])
    wrong.facts, wrong.tensors = kept.facts, kept.tensors | {"delayed.1/table.weight": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=re.escape("table.weight has shape (3,) in the checkpoint")):
        go_on(case, wrong, VARIED)


def test_evaluations_read_the_newest_version() -> None:
    case = long_case(spans=(8,))
    held_out = make_batches(replace(case, spans=(2,)))
    pipeline = make_pipeline(case, delays=VARIED, max_grad_norm=1e9)
    found = []
    for report in pipeline.run(make_batches(case), evaluate=Evaluating(3, lambda: held_out)):
        found += report.evaluated
    found += pipeline.evaluated()
    assert [e.version for e in found] == [3, 6]
    for evaluation in found:
        other = make_pipeline(case, delays=VARIED, max_grad_norm=1e9)
        list(other.run(make_batches(case)[: evaluation.version]))
        plain = make_pipeline(case, blocks=make_blocks(case.model, seed=99), max_grad_norm=1e9)
        plain.load(Kept(other.snapshots()))
        evaluated = plain.evaluate(held_out)
        assert evaluated is not None
        assert evaluation.loss == pytest.approx(evaluated[0], rel=1e-12)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_block_keeps_as_many_versions_as_it_is_late(depth: int) -> None:
    case = long_case(depth=depth, spans=(3,))
    pipeline = make_pipeline(case, delays=VARIED)
    list(pipeline.run(make_batches(case)))
    blocks, names = make_blocks(case.model), iter(make_blocks(case.model))
    for rank, count in enumerate(BALANCE[depth]):
        wanted = 0
        for name in [next(names) for _ in range(count)]:
            parameters = blocks[name].parameters() if isinstance(blocks[name], nn.Module) else ()
            padded = sum(-(-p.nbytes // 64) * 64 for p in parameters)  # every parameter begins at 64 bytes
            wanted += VARIED.get(name, 0) * padded
        assert pipeline.live_bytes()[rank].get("delayed weights", 0) == wanted


def test_low_precision_halves_it() -> None:
    sizes = []
    for precision in ("fp32", "bf16"):
        case = long_case(model="matrices", precision=precision, spans=(2,))
        pipeline = make_pipeline(case, delays=4)
        list(pipeline.run(make_batches(case)))
        sizes.append(sum(roles["delayed weights"] for roles in pipeline.live_bytes().values()))
    assert sizes[1] <= 0.6 * sizes[0]  # small parameters are padded


def test_older_weights_do_not_count_as_activations() -> None:
    """From a snapshot on, because the first batch of all, which tells how much a graph keeps, reads no older ones."""
    case = long_case(spans=(8,))
    kept, peaks = snapshots(case, 4, VARIED), []
    for delays in (None, VARIED):
        pipeline = make_pipeline(case, delays=delays)
        pipeline.load(kept)
        list(pipeline.run(make_batches(case)[4:]))
        peaks.append({rank: roles["activations"] for rank, roles in pipeline.peak_bytes().items()})
    assert peaks[0] == peaks[1]


def test_nothing_is_read_that_has_been_overwritten() -> None:
    weights = {"a": torch.zeros(2), "b": torch.zeros(3)}
    store = VersionStore(weights, 2, "here")
    older = OlderVersions(weights, {"a": 2}, "here")
    for version in range(4):
        handle = older.read(store.read(version))
        handle.check("a backward")
        assert float(handle.buffer.leaves["a"].detach()[0]) == max(version - 2, 0)
        assert float(handle.buffer.leaves["b"].detach()[0]) == version
        older.keep(version, store.versions[version].views)
        if version > 1:  # the place of what is read is given to what has been read by all
            with pytest.raises(VersionError, match="a backward needs version .* but buffer of delayed weights"):
                handle.check("a backward")
        store.versions[version + 1] = store.versions.pop(version)
        store.versions[version + 1].load({name: torch.full_like(w, version + 1) for name, w in weights.items()})


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"haed": 3}, "delays: the model has no block 'haed'. Did you mean 'head'?"),
        ({"zzz": 3}, "delays: the model has no block 'zzz'. Blocks: table, first, tanh"),
        ({"tanh": 3}, "delays: block 'tanh' has no trained parameters, so a delay of 3 updates has no effect"),
        ([1] * 6, "delays: block 'tanh' has no trained parameters"),
        ([1] * 5, "delays: 5 numbers were given, but the model has 6 blocks"),
        ({"head": -1}, "delays: the delay of block 'head', in updates, must be a whole number of at least 0, got -1"),
        ({"head": 1.5}, "the delay of block 'head', in updates, must be a whole number of at least 0, got 1.5"),
        ({"head": True}, "the delay of block 'head', in updates, must be a whole number of at least 0, got True"),
        (True, "got True"),
        (2.5, "delays must be a number, a profile such as '1f1b:8', a list, a dict or a function, got 2.5"),
        ("1f1b:7", "profile '1f1b:7' has 7 stages, but the model has only 6 blocks"),
        ("1f1b", "there is no profile '1f1b'"),
    ],
    ids=str,
)
def test_what_is_no_delay_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_pipeline(long_case(), delays=given)


@pytest.mark.parametrize("method", ["2bw", "stash", "vertical-sync", "zb-h2-post"])
def test_other_version_rules_are_refused(method: str) -> None:
    case = long_case(method, 2, 3)
    with pytest.raises(ConfigError, match=r"delays need version rule 'flush'.*; rule '.*' chooses versions itself"):
        make_pipeline(case, delays={"head": 1})
    make_pipeline(case, delays=0)


def test_corrections_are_refused() -> None:
    """They go by the schedule's delays, which are none; each has rules of its own, and flush is not among them."""
    assert all(spec.rules and "flush" not in spec.rules for name, spec in CORRECTIONS.items() if name != "none")
    with pytest.raises(ConfigError, match="correction 'pipemare' goes with version rule newest"):
        make_pipeline(long_case(), delays=1, correction=PipeMare(reschedule=5))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_shared_parameter_has_one_delay(depth: int) -> None:
    message = r"blocks 'table' \(3 updates\) and 'head' \(1\) share a parameter, which can have only one delay"
    with pytest.raises(ConfigError, match=message):
        make_pipeline(long_case(depth=depth, tied=True), delays={"table": 3, "head": 1})
    blocks = make_blocks("mixed")
    blocks["head"].weight = blocks["table"].weight
    with pytest.raises(ConfigError, match=message):
        make_pipeline(long_case(depth=depth), blocks=blocks, delays={"table": 3, "head": 1})


def test_a_block_that_is_made_late_is_looked_at_then() -> None:
    blocks = {"a": LazyBlock(lambda: nn.Linear(2, 2), seed=1), "b": LazyBlock(nn.Tanh, seed=2, cost=0.0)}
    arguments: dict[str, Any] = {
        "method": make_schedule("1f1b", 1, 1),
        "loss": lambda output, _: output.sum(),
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
    }
    with pytest.raises(ConfigError, match="block 'b' has no trained parameters"):
        Pipeline(blocks, staleness=Staleness(delays={"b": 1}), **arguments)
    assert Pipeline(blocks, staleness=Staleness(delays=1), **arguments).delays == {"a": 1, "b": 1}
