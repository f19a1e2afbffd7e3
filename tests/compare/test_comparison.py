"""What a comparison trains, and that it is what pipelines and references train by themselves."""

from __future__ import annotations

import builtins
import json
import math
import statistics
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.compare import run
from penstock.compare.config import ComparisonConfig, comparison_config
from penstock.compare.contender import parse_contender
from penstock.compare.grid import Key, grid_of, other_settings
from penstock.compare.held_out import Score, Scorer
from penstock.compare.prepare import enter, make_optimizers, update_times
from penstock.compare.results import EvaluationRow, Findings, MethodSummary, as_csv
from penstock.compare.run import ComparisonRun
from penstock.compare.tasks import make_task, training_batches
from penstock.compare.trial import TrialResult
from penstock.errors import CapabilityError, ConfigError, DataError, ScheduleError
from penstock.models.gpt import language_loss
from penstock.options.passes import Precision
from penstock.partition.blocks import cut_blocks
from penstock.runtime.execute.evaluation import Evaluating
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.build import prove
from penstock.simulate.costs import Costs
from penstock.train.setup.lr_schedule import rate_schedule
from penstock.verify.reference import train_reference
from penstock.view.comparison_progress import caption
from penstock.weights.updates.lr_schedulers import by_factor

TEXT = Path(__file__).parents[2] / "LICENSE"  # any text that stays the same
TINY = (
    "stages=2", "microbatches=4", "microbatch_size=1", "batches=6", "seeds=1", "evaluate.every=2", "evaluate.samples=8",
    "model.layers=2", "model.width=16", "model.heads=2", "model.context=8", "lr_schedule.warm_up=2",
    "optimizer.lr=0.01",
    f"data={TEXT}",
)  # fmt: skip


SGD = ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.nesterov=false")  # spike compensation takes no other


class Quiet:
    """An observer that counts."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.last: Any = None

    def __getattr__(self, name: str) -> Any:
        def note(*arguments: Any) -> None:
            self.seen[name] += 1
            self.last = arguments

        return note


def configured(*changes: str) -> ComparisonConfig:
    return comparison_config([*TINY, *changes], {})


def compared(folder: Path, *changes: str, observer: Quiet | None = None) -> Findings:
    return ComparisonRun(configured(*changes), folder, observer or Quiet()).run()


def curves(findings: Findings, *what: str) -> dict[str, list[list[Any]]]:
    return {
        key.method: [[getattr(row, name) for name in what] for row in findings.rows() if row.method == key.method]
        for key in findings.results
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return compared(
        tmp_path_factory.mktemp("comparison") / "out",
        "methods=1f1b,2bw,stash,zb-h2-post,interleaved:chunks=2,newest,pipemare:reschedule=3,spike,error-feedback",
        *SGD,
    )


# --- what is trained --------------------------------------------------------------------------------------------------


def data(config: ComparisonConfig) -> list[Any]:
    task = make_task(config)
    return list(training_batches(task, 0, config.batches, config.microbatches, config.microbatch_size))


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


@pytest.mark.parametrize(
    "method", ["stash", "2bw", "1f1b", "newest", "pipemare:reschedule=3", "spike", "error-feedback"]
)
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
    if ":" in method or method in ("spike", "error-feedback"):  # in place, which rounds otherwise
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
    assert [entrant.synchronous for entrant in found.entrants] == [True, False, False, True, True, *[False] * 4]


def test_a_method_after_synchronous_batches(tmp_path: Path) -> None:
    """Batches 0 and 1 read the newest weights; then W(t) is updated at W(t - 1), the first two both at W(2)."""
    found = compared(tmp_path / "out", "methods=1f1b,2bw:sync=2", "evaluate.every=3")
    config, task, entrant = found.config, found.task, found.entrants[1]
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
    assert entrant.times[:3] == (0, 15, 30)
    assert (len(entrant.times), entrant.times[6]) == (7, 30 + 4 * 12 + 3)


def test_a_delay_of_ones_own(tmp_path: Path) -> None:
    """One update late under 1f1b: the numbers of 2bw, in the time of 1f1b."""
    found = compared(tmp_path / "out", "methods=1f1b,2bw,1f1b:delays=1,gpipe:delays=3")
    curve = curves(found, "updates", "training_loss", "validation_loss", "gradient_norm")
    assert curve["1f1b:delays=1"] == curve["2bw"] != curve["1f1b"]
    assert curve["gpipe:delays=3"] not in (curve["2bw"], curve["1f1b"])
    base, _, one, three = found.entrants
    assert one.times == base.times
    assert [set(e.delays_forward) | set(e.delays_backward) for e in (base, one, three)] == [{0.0}, {1.0}, {3.0}]


def test_simulated_time_is_that_of_closed_forms(found: Findings) -> None:
    """F = 1 and B = 2: a flushed batch takes (m + p - 1) (F + B), and without a flush one more takes m (F + B)."""
    times = {entrant.label: entrant.times for entrant in found.entrants}
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


# --- divergence -------------------------------------------------------------------------------------------------------


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


# --- going on ---------------------------------------------------------------------------------------------------------


def test_an_interrupted_comparison_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, real, begun = ["methods=1f1b,2bw", "seeds=2", "batches=2"], run.run_trial, []
    expected = compared(tmp_path / "at once", *changes)

    def interrupted(config: Any, task: Any, entrant: Any, key: Key, tell: Any) -> TrialResult:
        begun.append(key)
        if len(begun) == 3:
            tell = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731 - in the midst of a run
        return real(config, task, entrant, key, tell)

    monkeypatch.setattr(run, "run_trial", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compared(tmp_path / "out", *changes)
    assert len(list((tmp_path / "out/runs").iterdir())) == 2
    observer = Quiet()
    findings = compared(tmp_path / "out", *changes, observer=observer)
    assert begun == [*grid_of(configured(*changes))][:3] + [*grid_of(configured(*changes))][2:]
    assert (observer.seen["began"], observer.seen["finished"], observer.seen["progress"]) == (2, 2, 4)
    assert as_csv(findings.rows(), EvaluationRow) == as_csv(expected.rows(), EvaluationRow)


def test_rates_are_tried_with_some_seeds_alone(tmp_path: Path) -> None:
    changes, observer = ("methods=1f1b,2bw", "batches=3", "seeds=3", "lr=0.3,0.01,0.0001"), Quiet()
    everything = compared(tmp_path / "all", *changes)
    findings = compared(tmp_path / "some", *changes, "tune=1", observer=observer)
    assert observer.seen["finished"] == 2 * (3 + 2)
    chosen = {}
    for entrant in findings.entrants:
        ends = {k.lr: r.scores[-1].loss for k, r in everything.results.items() if k[:2] == (entrant.label, 0)}
        chosen[entrant.label] = min(ends, key=lambda lr: ends[lr])
        assert findings.by_rate(entrant).keys() == {0.3, 0.01, 0.0001}
        assert [(r.key.seed, r.key.lr) for r in findings.at_best_rate(entrant)] == [
            (seed, chosen[entrant.label]) for seed in range(3)
        ]
    assert {k for k in findings.results if k.seed} == {Key(m, seed, lr) for m, lr in chosen.items() for seed in (1, 2)}
    for key, result in findings.results.items():
        assert result.losses == everything.results[key].losses
    again = Quiet()
    compared(tmp_path / "some", *changes, "tune=1", observer=again)
    assert again.seen["began"] == 0


def test_seeds_may_be_added_with_the_best_rate_alone(tmp_path: Path) -> None:
    first = ("methods=1f1b", "batches=2", "lr=0.01,0.1")
    compared(tmp_path, *first, "seeds=1")
    observer = Quiet()
    findings = compared(tmp_path, *first, "seeds=2", "tune=1", observer=observer)
    assert (observer.seen["finished"], len(findings.results)) == (1, 3)


def test_methods_seeds_and_rates_may_be_added(tmp_path: Path) -> None:
    compared(tmp_path, "methods=1f1b", "batches=2")
    observer = Quiet()
    findings = compared(tmp_path, "methods=2bw,1f1b", "batches=2", "seeds=2", "lr=0.01,0.1", observer=observer)
    assert (observer.seen["finished"], len(findings.results)) == (7, 8)


def keys(findings: Findings) -> list[tuple[str, int, float]]:
    return [tuple(key) for key in findings.results]


def test_what_is_not_named_stays_as_it_is(tmp_path: Path) -> None:
    """Methods come behind those that are there; seeds and rates are for all of them."""
    few = [change for change in TINY if not change.startswith(("seeds=", "optimizer.lr="))] + ["batches=2"]

    def again(*changes: str) -> tuple[Findings, int]:
        observer = Quiet()
        return ComparisonRun(comparison_config([*few, *changes], {}), tmp_path, observer).run(), observer.seen["began"]

    again("methods=2bw,1f1b", "seeds=1", "lr=0.01,0.1")
    found, began = again("methods=stash,pipedream-2bw")
    assert [entrant.label for entrant in found.entrants] == ["2bw", "1f1b", "stash"]
    assert keys(found) == [(m, 0, lr) for lr in (0.01, 0.1) for m in ("2bw", "1f1b", "stash")]
    assert began == 2
    assert json.loads((tmp_path / "comparison.json").read_text())["methods"] == ["2bw", "1f1b", "stash"]
    found, began = again()
    assert (keys(found), began) == ([(m, 0, lr) for lr in (0.01, 0.1) for m in ("2bw", "1f1b", "stash")], 0)
    found, began = again("seeds=2", "tune=1", "methods=2bw")
    assert (began, len(found.results)) == (3, 9)
    assert again()[1] == 0  # without the seeds that all rates are tried with, either
    assert again("seeds=1")[0].config.seeds == 2
    found, began = again("optimizer.lr=0.2")
    assert found.config.rates == (0.01, 0.1, 0.2)
    assert {key[0] for key in keys(found) if key[2] == 0.2} == {"2bw", "1f1b", "stash"}
    assert again("tune=null")[0].config.tune is None


def test_a_paper_s_other_setting_is_told(tmp_path: Path) -> None:
    """All methods have one optimizer, so a method may not be as its paper has it."""
    said = "nag-pp: its paper has optimizer.beta1=0.99, here all methods have 0.9"
    nadam, decay = "optimizer.name=nadam", "optimizer.weight_decay=0.01"
    assert other_settings(configured("methods=1f1b,stash,nag-pp", nadam, decay)) == [said]
    assert not other_settings(configured("methods=1f1b,stash,nag-pp", nadam, decay, "optimizer.beta1=0.99"))
    assert f"{said}." in caption(compared(tmp_path, "methods=1f1b,nag-pp", nadam, "seeds=1", "batches=1"))


def test_another_comparison_is_refused_before_its_methods_are_looked_at(tmp_path: Path) -> None:
    """Or the message would be about one that the command does not name."""
    compared(tmp_path, "methods=2bw", "batches=2", "stages=4", "model.layers=4")
    with pytest.raises(ConfigError, match="holds another comparison: microbatches is 4 there and 2 now"):
        compared(tmp_path, "methods=1f1b", "batches=2", "stages=4", "model.layers=4", "microbatches=2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["batches=3"], "batches is 2 there and 3 now"),
        (["max_grad_norm=1.0"], "max_grad_norm is not set there and 1.0 now"),
        (["optimizer.beta2=0.9", "model.width=8"], "model.width is 16 there and 8 now; optimizer.beta2 is 0.95 there"),
        (["data=pyproject.toml"], "data found is .* tokens, .* there and"),
    ],
)
def test_another_comparison_is_refused(tmp_path: Path, changes: list[str], message: str) -> None:
    """Before anything is trained, and what is there stays as it is."""
    compared(tmp_path, "methods=1f1b,2bw", "batches=2")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    with pytest.raises(ConfigError, match=message):
        ComparisonRun(configured("methods=1f1b,2bw", "batches=2", *changes), tmp_path, Quiet())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="has other files in it but no comparison"):
        compared(tmp_path)
    with pytest.raises(ConfigError, match="cannot write to --out"):
        compared(tmp_path / "thesis.txt/out")


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is damaged"), ('{"schema": 1}', "is damaged"), ("[]", "has schema None")]
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    compared(tmp_path, "methods=1f1b", "batches=2")
    (path,) = (tmp_path / "runs").iterdir()
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        compared(tmp_path, "methods=1f1b", "batches=2")
    assert path.name in str(caught.value)


def test_own_files_are_no_data(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT.read_text())
    changes = ["methods=1f1b", "batches=1", f"data={tmp_path}"]
    compared(tmp_path / "out", *changes)
    observer = Quiet()
    compared(tmp_path / "out", *changes, observer=observer)
    assert observer.seen["began"] == 0


# --- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["methods=1f1b,2bv"], "unknown method '2bv'. Did you mean"),
        (
            ["methods=interleaved:chunks=2.5"],
            "interleaved:chunks=2.5: chunks is an option of an order, so it must be a whole number",
        ),
        (
            ["methods=pipemare:chunks=2"],
            "pipemare:chunks=2: method pipemare has no option 'chunks'; it has in_flight, reschedule, decay",
        ),
        (
            ["methods=pipemare:rescedule=4"],
            "method pipemare has no option 'rescedule'; it has in_flight, reschedule, decay. Did you mean 'reschedule'",
        ),
        (["methods=interleaved:chunk=2.5"], "method interleaved has no option 'chunk'; .* Did you mean 'chunks'"),
        (["methods=i-timeprest:beta=null"], "i-timeprest:beta=null: .*beta takes a number; got null"),
        (["methods=2bw:sync=1.5"], "sync is the number of batches"),
        (["methods=1f1b:delays=-1"], "delays is the number of updates that weights are late by"),
        (["methods=2bw:delays=1"], "2bw:delays=1: delays need version rule 'flush'"),
        (["methods=1f1b:delays=1:sync=2"], "delays and sync cannot be combined; leave one of them out"),
        (["methods=2bw:sync=6"], "2bw:sync=6: sync: 1f1b would train the first 6 batches"),
        (["methods=zb-h1:sync=2"], "zb-h1:sync=2: sync: the method has no delay"),
        (
            ["methods=wpipe:sync=2", "model.layers=4"],
            "1f1b cannot be followed by wpipe: they differ in stages",
        ),
        (["methods=nag-pp", "optimizer.name=sgd"], "nag-pp: .*NAdam"),
        (["methods=2bw,pipedream-2bw"], "2bw is given twice"),
        (["methods=interleaved:chunks=two"], "a name may be followed by options"),
        (["methods=1f1b:chunks=2"], "1f1b:chunks=2: method 1f1b has no option 'chunks'; it has in_flight"),
        (["methods=interleaved:chunks=8"], "interleaved:chunks=8: the model has 4 blocks"),
        (["methods=2bw", "stages=4", "microbatches=2"], "2bw: .*needs at least 3 microbatches"),
        (["task=speech"], "unknown task 'speech'"),
        (["task=digits"], "belongs to task text"),
        (["lr=fast"], "lr takes comma-separated numbers"),
        (["batchs=3"], "unknown configuration key 'batchs'; did you mean 'batches'"),
        (["model.tied=true"], "unknown configuration key 'model.tied'"),
        (["seeds=0"], "seeds: .*greater than or equal to 1"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, changes: list[str], message: str) -> None:
    with pytest.raises((CapabilityError, ConfigError, ScheduleError), match=message):
        compared(tmp_path / "out", *changes)
    assert not (tmp_path / "out").exists()


def test_options_win_over_changes_and_lists_are_read() -> None:
    config = comparison_config(
        ["batches=3", "methods=gpipe", "lr=0.1"], {"batches": 5, "methods": " 1f1b , 2bw", "lr": None}
    )
    assert (config.batches, config.methods, config.rates) == (5, ["1f1b", "2bw"], (0.1,))
    assert comparison_config([], {"lr": "1e-3,3e-3"}).rates == (0.001, 0.003)
    assert parse_contender("Megatron:chunks=4").label == "interleaved:chunks=4"
    assert Key("interleaved:chunks=4", 2, 0.001).file == "interleaved+chunks=4-seed-2-lr-0.001.json"


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[digits\]'"):
        make_task(comparison_config([], {"task": "digits"}))


# --- what is made of it -----------------------------------------------------------------------------------------------


@cache
def entrants() -> tuple[Any, ...]:
    config = configured()
    return (
        config,
        make_task(config),
        [enter(config, make_task(config), parse_contender(name)) for name in ("2bw", "1f1b")],
    )


def summarised(ends: dict[tuple[str, int, float], float | None]) -> dict[str, MethodSummary]:
    """The summary of runs that end with these losses; None where they diverge."""
    config, task, methods = entrants()
    results = {}
    for place, end in ends.items():
        key, diverged = Key(*place), 3 if end is None else None
        scores = (Score(0, 5.0, None), *(() if end is None else (Score(6, end, None),)))
        results[key] = TrialResult(key, scores, (5.0,) * 3, (1.0,) * 3, diverged, 1.0)
    two_seeds = config.model_copy(update={"seeds": 2})
    return {summary.method: summary for summary in Findings(two_seeds, task, methods, results).summaries()}


def test_differences_are_those_of_the_same_seeds() -> None:
    """Seeds are far apart, and 2bw is 1 or 2 % worse on each of them."""
    found = summarised({("1f1b", 0, 0.1): 2.0, ("1f1b", 1, 0.1): 3.0, ("2bw", 0, 0.1): 2.02, ("2bw", 1, 0.1): 3.06})
    assert found["1f1b"].verdict == "baseline"
    assert (found["2bw"].loss, found["2bw"].spread) == pytest.approx((2.54, statistics.stdev([2.02, 3.06])))
    assert (found["2bw"].difference, found["2bw"].difference_spread) == pytest.approx((1.5, math.sqrt(0.5)))
    assert found["2bw"].verdict == "worse"


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (1.98, 2.96, "better"),
        (2.02, 2.98, "not resolved"),
        (2.0, 3.0, "equal"),
        (None, None, "diverged"),
        (2.2, None, "not resolved"),
    ],
)
def test_verdicts(first: float | None, second: float | None, verdict: str) -> None:
    base = {("1f1b", 0, 0.1): 2.0, ("1f1b", 1, 0.1): 3.0}
    assert summarised({**base, ("2bw", 0, 0.1): first, ("2bw", 1, 0.1): second})["2bw"].verdict == verdict


def test_one_seed_resolves_nothing_and_without_a_baseline_there_is_no_difference() -> None:
    assert summarised({("1f1b", 0, 0.1): 2.0, ("2bw", 0, 0.1): 4.0})["2bw"].verdict == "not resolved"
    alone = summarised({("2bw", 0, 0.1): 4.0, ("2bw", 1, 0.1): 4.0})["2bw"]
    assert (alone.verdict, alone.difference) == ("-", None)


def test_the_best_rate_diverges_least_then_ends_lowest() -> None:
    found = summarised(
        {
            ("1f1b", 0, 0.1): 3.0, ("1f1b", 1, 0.1): 3.0, ("1f1b", 0, 0.2): 2.5, ("1f1b", 1, 0.2): 3.4,
            ("2bw", 0, 0.1): 3.2, ("2bw", 1, 0.1): 3.2, ("2bw", 0, 0.2): 2.0, ("2bw", 1, 0.2): None,
            ("2bw", 0, 0.3): 1.0,  # not all seeds yet
        }
    )  # fmt: skip
    assert (found["1f1b"].lr, found["2bw"].lr) == (0.2, 0.1)


def test_files_hold_all_there_is(found: Findings, tmp_path: Path) -> None:
    compared(tmp_path / "out", "methods=2bw", *SGD)
    (path,) = (tmp_path / "out/runs").iterdir()
    (result,) = [result for key, result in found.results.items() if key.method == "2bw"]
    kept = json.loads(path.read_text())
    assert (tuple(kept["losses"]), tuple(kept["norms"])) == (result.losses, result.norms)
    assert [Score(**score) for score in kept["scores"]] == list(result.scores)
