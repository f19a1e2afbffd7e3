"""What a comparison trains, and that it is what pipelines and references train by themselves."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.compare.config import ComparisonConfig, comparison_config
from penstock.compare.grid import Key
from penstock.compare.held_out import Gatherer, Score, Scorer
from penstock.compare.prepared_contender import make_optimizers, update_times
from penstock.compare.results import Findings
from penstock.compare.run import ComparisonRun
from penstock.compare.tasks import make_task, trial_model
from penstock.errors import ConfigError
from penstock.models.gpt import language_loss
from penstock.options.passes import Precision
from penstock.partition.blocks import cut_blocks
from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.build import prove
from penstock.simulate.costs import Costs
from penstock.train.setup.lr_schedule import rate_schedule
from penstock.weights.updates.lr_scheduler_table import by_factor
from support.comparisons import SGD, TINY, Quiet, compared, configured, curves, data
from support.own_methods import train_reference


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return compared(
        tmp_path_factory.mktemp("comparison") / "out",
        "methods=1f1b,2bw,stash,zb-h2-post,interleaved:chunks=2,newest,pipemare:reschedule=3,error-feedback",
        *SGD,
    )


def pipeline_of(config: ComparisonConfig, method: str, **more: Any) -> Pipeline:
    task = make_task(config)
    return Pipeline(
        task.blocks(0),
        prove(method, config.stages, config.microbatches),
        loss=task.loss,
        optimizer=make_optimizers(config, config.optimizer.lr),
        lr_scheduler=by_factor(rate_schedule(config.lr_schedule, config.batches)),
        precision=Precision(divisor=4 * 8),
        **more,
    )


@pytest.mark.slow
def test_rows_are_those_of_a_pipeline(found: Findings) -> None:
    """Of 2bw, which is evaluated in the run without a drain; norms are those that its stages decide by."""
    config, task = found.config, found.task
    pipeline = pipeline_of(config, "2bw", max_grad_norm=1e9)
    held_out = [[task.held_out(2 * k, 2) for k in range(4)]]
    losses, norms, evaluated = [], {}, {}
    for report in pipeline.run(data(config), evaluate=Evaluating(2, lambda: held_out)):
        losses.append(report.loss)
        norms |= {d.batch: d.norm for d in report.decided}
        evaluated |= {e.version: e.loss for e in report.evaluated}
    norms |= {d.batch: d.norm for d in pipeline.decided()}
    evaluated |= {e.version: e.loss for e in pipeline.evaluated()}
    evaluated[6] = pipeline.evaluate(held_out)[0]  # type: ignore[index]
    rows = [row for row in found.rows() if row.method == "2bw"]
    assert [row.updates for row in rows] == [0, 2, 4, 6]
    assert [row.samples for row in rows] == [0, 8, 16, 24]
    assert [row.tokens for row in rows] == [0, 64, 128, 192]
    assert [row.training_loss for row in rows] == [None, *(statistics.fmean(losses[k : k + 2]) for k in (0, 2, 4))]
    for row in rows[1:]:
        assert row.validation_loss == pytest.approx(evaluated[row.updates], rel=1e-6)
        here = statistics.fmean(norms[t] for t in (row.updates - 2, row.updates - 1))
        assert row.gradient_norm == pytest.approx(here, rel=1e-6)
    assert {(row.delay_forward, row.delay_backward) for row in rows} == {("1 1", "1 1")}


@pytest.mark.parametrize("method", ["stash", "2bw", "1f1b", "newest", "pipemare:reschedule=3", "error-feedback"])
def test_versions_in_the_midst_of_a_run_are_those_of_the_equations(found: Findings, method: str) -> None:
    """Evaluations change nothing: no drain gives stash fresh weights."""
    config, task = found.config, found.task
    blocks = {name: block.make() for name, block in task.blocks(0).items()}
    reference = train_reference(
        [{name: blocks[name] for name in part} for part in cut_blocks(task.blocks(0), 2)],
        language_loss,
        data(config),
        method=method.partition(":")[0],
        options={"reschedule": 3} if "pipemare" in method else {},
        optimizer=make_optimizers(config, config.optimizer.lr),
        rate=rate_schedule(config.lr_schedule, config.batches),
        divisor=4 * 8,
        seed=0,
    )
    result = next(result for key, result in found.results.items() if key.method == method)
    scorer = Scorer(task, 0, 8)
    scores = [scorer.score(v, reference.versions[v]) for v in (0, 2, 4, 6)]
    if ":" in method or method == "error-feedback":  # in place, which rounds otherwise
        assert list(result.losses) == pytest.approx(reference.losses, rel=1e-6)
        assert [score.loss for score in result.scores] == pytest.approx([score.loss for score in scores], rel=1e-6)
    else:
        assert list(result.losses) == reference.losses
        assert list(result.scores) == scores


def test_all_begin_alike_and_synchronous_ones_stay_so(found: Findings) -> None:
    losses = {key.method: result.losses for key, result in found.results.items()}
    assert len({found[0] for found in losses.values()}) == 1
    assert len({result.scores[0] for result in found.results.values()}) == 1
    curve = curves(found, "updates", "training_loss", "validation_loss", "gradient_norm")
    assert curve["1f1b"] == curve["zb-h2-post"] == curve["interleaved:chunks=2"]
    assert len({str(curve[method]) for method in ("1f1b", "2bw", "stash")}) == 3
    assert [prepared.synchronous for prepared in found.contenders] == [True, False, False, True, True, *[False] * 3]


def test_a_divided_output_layer_has_the_curve_of_a_whole_one(tmp_path: Path) -> None:
    found = compared(tmp_path / "out", "methods=1f1b,vocabulary-1f1b", "batches=3", "evaluate.every=2")
    curve = curves(found, "training_loss", "validation_loss", "gradient_norm")
    assert len(curve["1f1b"]) == len(curve["vocabulary-1f1b"]) == 3
    for whole, divided in zip(curve["1f1b"][1:], curve["vocabulary-1f1b"][1:], strict=True):  # after some updates
        assert divided == pytest.approx(whole, rel=1e-5)
    assert [prepared.synchronous for prepared in found.contenders] == [True, True]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("methods=vocabulary-1f1b:sync=2",), "sync: the method has no delay"),
        (("methods=vocabulary-1f1b", "stages=3"), "2 layers and 256 tokens cannot be divided among 3 stages"),
    ],
)
def test_what_a_divided_output_layer_is_not_compared_with(tmp_path: Path, changes: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compared(tmp_path / "out", *changes)


def test_only_a_language_model_has_an_output_layer_to_divide() -> None:
    another: Any = object()
    with pytest.raises(ConfigError, match="only the output layer of task text can be divided among the stages"):
        trial_model(another, 2)


def test_a_method_after_synchronous_batches(tmp_path: Path) -> None:
    """Batches 0 and 1 read the newest weights; then W(t) is updated at W(t - 1), the first two both at W(2)."""
    found = compared(tmp_path / "out", "methods=1f1b,2bw:sync=2", "evaluate.every=3")
    config, task, prepared = found.config, found.task, found.contenders[1]
    model = torch.nn.Sequential(*(block.make() for block in task.blocks(0).values()))
    optimizer = make_optimizers(config, config.optimizer.lr)(list(model.named_parameters()))
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
    assert [score.updates for score in result.scores] == [0, 3, 6]
    assert prepared.times[:3] == (0, 15, 30)
    assert (len(prepared.times), prepared.times[6]) == (7, 30 + 4 * 12 + 3)


def test_a_delay_of_ones_own(tmp_path: Path) -> None:
    """One update late under 1f1b: the numbers of 2bw, in the time of 1f1b."""
    found = compared(tmp_path / "out", "methods=1f1b,2bw,1f1b:delays=1,gpipe:delays=3")
    curve = curves(found, "updates", "training_loss", "validation_loss", "gradient_norm")
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


def test_norms_of_a_run_are_gathered_once_however_long_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each batch took longer than training thousands of them."""
    calls, norms = list[int](), Gatherer.norms

    def counted(gatherer: Gatherer) -> dict[int, float]:
        calls.append(len(found := norms(gatherer)))
        return found

    monkeypatch.setattr(Gatherer, "norms", counted)
    compared(tmp_path / "out", "methods=1f1b", "batches=3")
    assert calls == [3]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_blocks_have_the_curve_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_of_torch = list[nn.Module](), nn.Module.compile

    def counted(block: nn.Module, **options: Any) -> None:
        compiled.append(block)
        compile_of_torch(block, backend="eager", **options)  # other compilers take minutes

    monkeypatch.setattr(nn.Module, "compile", counted)
    one, losses = ("methods=stash", "batches=3"), ("training_loss", "validation_loss", "gradient_norm")
    plain = compared(tmp_path / "plain", *one)
    assert not compiled
    ours = compared(tmp_path / "compiled", *one, "compile=true")
    assert {type(block).__name__ for block in compiled} == {"Embedding", "Layer", "Head"}
    torch.testing.assert_close(curves(ours, *losses), curves(plain, *losses))


def test_digits_have_an_accuracy_and_no_tokens(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    changes = [change for change in TINY if not change.startswith(("model.", "data="))]
    config = comparison_config(
        [*changes, "model.width=4", "batches=2", "held_out=0.01"], {"task": "digits", "methods": "1f1b,2bw"}
    )
    findings = ComparisonRun(config, tmp_path / "out", Quiet()).run()
    rows = findings.rows()
    assert findings.task.held_out_samples == 18
    assert {row.tokens for row in rows} == {None}
    assert all(row.accuracy is not None and (8 * row.accuracy).is_integer() for row in rows)
    assert rows[0].validation_loss == rows[2].validation_loss


def test_digits_do_not_depend_on_how_they_are_read() -> None:
    pytest.importorskip("sklearn")
    task = make_task(comparison_config([], {"task": "digits"}))
    together, apart = task.samples(1, 1430, 16), [task.samples(1, first, 4) for first in (1430, 1434, 1438, 1442)]
    assert all(
        torch.equal(whole, torch.cat(parts)) for whole, parts in zip(together, zip(*apart, strict=True), strict=True)
    )
    epoch = {tuple(image.flatten().tolist()) for image in task.samples(0, 0, 1438)[0]}
    assert epoch == {tuple(image.flatten().tolist()) for image in task.samples(5, 1438, 1438)[0]}
    assert not epoch & {tuple(image.flatten().tolist()) for image in task.held_out(0, task.held_out_samples)[0]}


def test_a_block_with_statistics_is_refused() -> None:
    task = make_task(configured())
    blocks = {**task.blocks(0)}
    blocks["norm"] = type(blocks["head"])(lambda: torch.nn.BatchNorm1d(4), seed=0)
    task.blocks = lambda seed: blocks  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"norm\.num_batches_tracked; use a norm without statistics"):
        Scorer(task, 0, 8)


def test_files_hold_all_there_is(found: Findings, tmp_path: Path) -> None:
    compared(tmp_path / "out", "methods=2bw", *SGD)
    (path,) = (tmp_path / "out/runs").iterdir()
    (result,) = [result for key, result in found.results.items() if key.method == "2bw"]
    kept = json.loads(path.read_text())
    assert (tuple(kept["losses"]), tuple(kept["norms"])) == (result.losses, result.norms)
    assert [Score(**score) for score in kept["scores"]] == list(result.scores)


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
    limit = 1.2 * free.scores[0].loss
    lasting = [t + 1 for t in range(1, 20) if statistics.fmean(free.losses[t - 1 : t + 1]) > limit]
    assert held.diverged == lasting[0]  # evaluations come a batch later
    assert held.losses == free.losses[: held.diverged]
