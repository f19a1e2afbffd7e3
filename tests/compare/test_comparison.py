"""What a comparison trains, and that it is what pipelines and references train by themselves."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.compare.config import ComparisonConfig
from penstock.compare.contender_run import Key, read_result
from penstock.compare.prepared_contender import update_times
from penstock.compare.results import Findings
from penstock.errors import ConfigError
from penstock.models.gpt import language_loss
from penstock.options.passes import Precision
from penstock.partition.blocks import cut_blocks
from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.build import prove
from penstock.simulate.costs import Costs
from penstock.train.evaluation_of_copies import CopiedVersions
from penstock.train.setup.lr_schedule import rate_schedule
from penstock.train.setup.optimizers import optimizer_factory
from penstock.weights.updates.lr_scheduler_table import by_factor
from support.comparisons import SGD, compared, curves, data, task_of
from support.own_methods import train_reference
from support.schedules import make_schedule


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return compared(
        tmp_path_factory.mktemp("comparison") / "out",
        "methods=1f1b,2bw,stash,zb-h2-post,interleaved:chunks=2,newest,pipemare:reschedule=3,error-feedback",
        *SGD,
    )


def pipeline_of(config: ComparisonConfig, method: str, **more: Any) -> Pipeline:
    model, _ = task_of(config)
    return Pipeline(
        model.blocks,
        prove(method, config.stages, config.microbatches),
        loss=model.loss,
        optimizer=optimizer_factory(config.optimizer),
        lr_scheduler=by_factor(rate_schedule(config.lr_schedule, config.batches)),
        precision=Precision(divisor=4 * 8),
        **more,
    )


def held_out_loss(config: ComparisonConfig, weights: Any) -> float:
    """The mean of all held-out samples in a plain model."""
    model, windows = task_of(config)
    plain = nn.Sequential(*(block.make() for block in model.blocks.values()))
    names = dict(zip(dict(plain.named_parameters()), weights.values(), strict=True))
    inputs, targets = windows.validation_samples(0, 8)
    total, count = language_loss(torch.func.functional_call(plain, names, (inputs,)), targets)
    return float(total.detach()) / count


@pytest.mark.slow
def test_rows_are_those_of_a_pipeline(tmp_path: Path) -> None:
    """Of 2bw, which is evaluated in the run without a drain; norms are those that its stages decide by."""
    found = compared(tmp_path / "out", "methods=2bw", "max_grad_norm=1e9", *SGD)
    config, (_, windows) = found.config, task_of(found.config)
    pipeline = pipeline_of(config, "2bw", max_grad_norm=1e9)
    held_out = [[windows.validation_samples(4 * batch + k, 1) for k in range(4)] for batch in range(2)]
    losses, norms, evaluated = [], {}, {}
    for report in pipeline.run(data(config), evaluate=Evaluating(2, lambda: held_out)):
        losses.append(report.loss)
        norms |= {d.batch: d.norm for d in report.decided}
        evaluated |= {e.version: e.loss for e in report.evaluated}
    norms |= {d.batch: d.norm for d in pipeline.decided()}
    evaluated |= {e.version: e.loss for e in pipeline.evaluated()}
    rows = found.rows()
    assert [row.updates for row in rows] == [2, 4, 6]
    assert [row.samples for row in rows] == [8, 16, 24]
    assert [row.tokens for row in rows] == [64, 128, 192]
    assert [row.training_loss for row in rows] == [statistics.fmean(losses[k : k + 2]) for k in (0, 2, 4)]
    assert [row.validation_loss for row in rows] == [evaluated[row.updates] for row in rows]
    assert [row.gradient_norm for row in rows] == [statistics.fmean((norms[k], norms[k + 1])) for k in (0, 2, 4)]
    assert {(row.delay_forward, row.delay_backward) for row in rows} == {("1 1", "1 1")}


@pytest.mark.parametrize("method", ["stash", "2bw", "1f1b", "newest", "pipemare:reschedule=3", "error-feedback"])
def test_versions_in_the_midst_of_a_run_are_those_of_the_equations(found: Findings, method: str) -> None:
    """Evaluations change nothing: no drain gives stash fresh weights."""
    config, (model, _) = found.config, task_of(found.config)
    blocks = {name: block.make() for name, block in model.blocks.items()}
    reference = train_reference(
        [{name: blocks[name] for name in part} for part in cut_blocks(model.blocks, 2)],
        language_loss,
        data(config),
        method=method.partition(":")[0],
        options={"reschedule": 3} if "pipemare" in method else {},
        optimizer=optimizer_factory(config.optimizer),
        rate=rate_schedule(config.lr_schedule, config.batches),
        divisor=4 * 8,
        seed=0,
    )
    result = next(result for key, result in found.results.items() if key.method == method)
    in_place = ":" in method or method == "error-feedback"  # which rounds otherwise
    assert list(result.losses) == (pytest.approx(reference.losses, rel=1e-6) if in_place else reference.losses)
    assert [score.updates for score in result.scores] == [2, 4, 6]
    for score in result.scores:
        assert score.loss == pytest.approx(held_out_loss(config, reference.versions[score.updates]), rel=1e-6)


def test_all_begin_alike_and_synchronous_ones_stay_so(found: Findings) -> None:
    losses = {key.method: result.losses for key, result in found.results.items()}
    assert len({found[0] for found in losses.values()}) == 1
    curve = curves(found, "updates", "training_loss", "validation_loss")
    assert curve["1f1b"] == curve["zb-h2-post"] == curve["interleaved:chunks=2"]
    assert len({str(curve[method]) for method in ("1f1b", "2bw", "stash")}) == 3
    assert [prepared.synchronous for prepared in found.contenders] == [True, False, False, True, True, *[False] * 3]


def test_a_divided_output_layer_has_the_curve_of_a_whole_one(tmp_path: Path) -> None:
    found = compared(tmp_path / "out", "methods=1f1b,vocabulary-1f1b", "batches=3", "evaluate.every=2")
    curve = curves(found, "training_loss", "validation_loss")
    assert len(curve["1f1b"]) == len(curve["vocabulary-1f1b"]) == 2
    for whole, divided in zip(curve["1f1b"], curve["vocabulary-1f1b"], strict=True):
        assert divided == pytest.approx(whole, rel=1e-5)
    assert [prepared.synchronous for prepared in found.contenders] == [True, True]


def test_an_output_layer_that_cannot_be_divided_is_said_of_its_contender(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocabulary-1f1b: .*2 layers .* cannot be divided among 3 stages"):
        compared(tmp_path / "out", "methods=vocabulary-1f1b", "stages=3")


def test_a_method_after_synchronous_batches(tmp_path: Path) -> None:
    """Batches 0 and 1 read the newest weights; then W(t) is updated at W(t - 1), the first two both at W(2)."""
    found = compared(tmp_path / "out", "methods=1f1b,2bw:sync=2", "evaluate.every=3")
    config, (task, _), prepared = found.config, task_of(found.config), found.contenders[1]
    model = torch.nn.Sequential(*(block.make() for block in task.blocks.values()))
    optimizer = optimizer_factory(config.optimizer)(list(model.named_parameters()))
    rates, rate = [group["lr"] for group in optimizer.param_groups], rate_schedule(config.lr_schedule, config.batches)
    versions, losses = [], []
    for t, batch in enumerate(data(config)):
        versions.append([p.detach().clone() for p in model.parameters()])
        read = [old.requires_grad_() for old in versions[t if t < 2 else max(t - 1, 2)]]
        weights = dict(zip(dict(model.named_parameters()), read, strict=True))
        found_losses = [task.loss(torch.func.functional_call(model, weights, (x,)), target) for x, target in batch]
        loss, count = sum(one for one, _ in found_losses), sum(units for _, units in found_losses)
        for p, gradient in zip(model.parameters(), torch.autograd.grad(loss / count, read), strict=True):
            p.grad = gradient
        losses.append(float(loss.detach()) / count)
        for group, initial in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = initial * rate(t)
        optimizer.step()
    result = found.results[Key("2bw:sync=2", 0, config.optimizer.lr)]
    assert list(result.losses) == pytest.approx(losses, rel=1e-5)
    assert losses[:3] == pytest.approx(list(found.results[Key("1f1b", 0, config.optimizer.lr)].losses[:3]), rel=1e-5)
    assert [score.updates for score in result.scores] == [3, 6]
    assert prepared.times[:3] == (0, 15, 30)
    assert (len(prepared.times), prepared.times[6]) == (7, 30 + 4 * 12 + 3)


def test_a_delay_of_ones_own(tmp_path: Path) -> None:
    """One update late under 1f1b: the numbers of 2bw, in the time of 1f1b."""
    found = compared(tmp_path / "out", "methods=1f1b,2bw,1f1b:delays=1,gpipe:delays=3")
    curve = curves(found, "updates", "training_loss", "validation_loss")
    assert curve["1f1b:delays=1"] == curve["2bw"] != curve["1f1b"]
    assert curve["gpipe:delays=3"] not in (curve["2bw"], curve["1f1b"])
    base, _, one, three = found.contenders
    assert one.times == base.times
    assert [set(e.delays_forward) | set(e.delays_backward) for e in (base, one, three)] == [{0.0}, {1.0}, {3.0}]


def test_simulated_time_is_that_of_closed_forms(found: Findings) -> None:
    """F = 1 and B = 2: a flushed batch takes (m + p - 1) (F + B), and without a flush one more takes m (F + B)."""
    times = {prepared.label: prepared.times for prepared in found.contenders}
    assert times["1f1b"] == tuple(15.0 * v for v in range(7))
    assert times["2bw"][4] - times["2bw"][3] == times["stash"][6] - times["stash"][5] == 12.0
    assert times["2bw"][6] == times["stash"][6] == 6 * 12 + 3


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash", "zb-h2-post", "interleaved"])
def test_the_midst_of_a_long_simulation_is_filled_in(method: str) -> None:
    proof = prove(method, 3, 6)
    costs = Costs.uniform(proof.schedule, 1.0, 1.0, 1.0)
    assert update_times(proof, costs, 40, limit=16) == update_times(proof, costs, 40)


def test_seeds_and_rates_differ_and_clipping_is_counted_before(tmp_path: Path) -> None:
    findings = compared(tmp_path / "out", "methods=1f1b", "seeds=2", "lr=0.01,0.001", "batches=2", "max_grad_norm=0.5")
    results = findings.results
    assert list(results) == [Key("1f1b", s, lr) for s in (0, 1) for lr in (0.01, 0.001)]
    losses = {key: result.losses[0] for key, result in results.items()}
    assert losses[Key("1f1b", 0, 0.01)] == losses[Key("1f1b", 0, 0.001)] != losses[Key("1f1b", 1, 0.01)]
    assert all(norm > 0.5 for result in results.values() for norm in result.norms)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_blocks_have_the_curve_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_of_torch = list[nn.Module](), nn.Module.compile

    def counted(block: nn.Module, **options: Any) -> None:
        compiled.append(block)
        compile_of_torch(block, backend="eager", **options)  # other compilers take minutes

    monkeypatch.setattr(nn.Module, "compile", counted)
    one, losses = ("methods=stash", "batches=3"), ("training_loss", "validation_loss")
    plain = compared(tmp_path / "plain", *one)
    assert not compiled
    ours = compared(tmp_path / "compiled", *one, "compile=true")
    assert {type(block).__name__ for block in compiled} == {"Embedding", "Layer", "Head"}
    torch.testing.assert_close(curves(ours, *losses), curves(plain, *losses))


def test_a_model_whose_statistics_change_is_not_evaluated_by_copies() -> None:
    blocks = {"norm": nn.BatchNorm1d(4), "out": nn.Linear(4, 1)}
    one, other = (
        Pipeline(
            {name: block.requires_grad_() for name, block in made.items()},
            make_schedule("1f1b", 2, 2),
            loss=nn.functional.mse_loss,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        )
        for made in (blocks, {"norm": nn.BatchNorm1d(4), "out": nn.Linear(4, 1)})
    )
    copies, batch = CopiedVersions(one, other, 1, 3), (torch.randn(8, 4), torch.randn(8, 1))
    for _ in one.run([batch] * 3):
        pass
    with pytest.raises(ConfigError, match=r"norm\.num_batches_tracked is not; use a norm without statistics"):
        list(copies.evaluated(lambda: [batch], over=True))


def test_folders_hold_all_there_is(found: Findings, tmp_path: Path) -> None:
    compared(tmp_path / "out", "methods=2bw", *SGD)
    (folder,) = (tmp_path / "out/runs").iterdir()
    assert {"config.yaml", "metrics.jsonl", "weights"} <= {path.name for path in folder.iterdir()}
    (key,) = [key for key in found.results if key.method == "2bw"]
    kept = read_result(tmp_path / "out/runs", key)
    assert (kept.losses, kept.scores) == (found.results[key].losses, found.results[key].scores)


@pytest.mark.parametrize(("method", "changes"), [("2bw", []), ("1f1b", ["max_grad_norm=1e9"])])
def test_a_run_that_diverges_is_a_result(tmp_path: Path, method: str, changes: list[str]) -> None:
    changes = [f"methods={method}", "optimizer.name=sgd", "lr=1e8", "batches=20", *changes]
    (result,) = compared(tmp_path / "out", *changes).results.values()
    assert result.diverged is not None
    assert result.diverged < 20
    again = compared(tmp_path / "out", *changes)
    (row,) = [row for row in again.rows() if row.diverged]
    assert row == again.rows()[-1]
    (summary,) = again.summaries()
    assert (summary.diverged, summary.loss, summary.verdict) == (
        1,
        None,
        "baseline" if method == "1f1b" else "diverged",
    )


def test_a_spike_counts_once_it_lasts_from_one_evaluation_to_the_next(tmp_path: Path) -> None:
    changes = ["methods=1f1b", "lr=1", "batches=20"]
    (free,) = compared(tmp_path / "free", *changes, "spike=1e30").results.values()
    assert free.diverged is None
    (held,) = compared(tmp_path / "held", *changes, "spike=1.2").results.values()
    limit = 1.2 * free.losses[0]
    lasting = [t + 1 for t in range(1, 20) if statistics.fmean(free.losses[t - 1 : t + 1]) > limit]
    assert held.diverged == lasting[0]  # evaluations come a batch later
    assert held.losses == free.losses[: held.diverged]
