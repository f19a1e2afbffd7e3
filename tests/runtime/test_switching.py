"""One run under several methods, one after the other: the numbers, the memory, and what is refused."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import CapabilityError, ConfigError, PenstockError
from penstock.options.divergence import Divergence
from penstock.runtime.execute.evaluation import Evaluating
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.update.divergence import DivergenceDetector, Trouble
from penstock.runtime.update.events import Evaluated
from penstock.schedule.ir.schedule import Schedule
from penstock.stage.stage_weights import TrainedWeights
from penstock.train.setup.early_stopping import known_after
from penstock.verify.reference import Scaling, run
from penstock.verify.reference.methods import DOUBLE_BUFFER, method_options
from penstock.verify.reference.predictions import ReferencePrediction
from penstock.verify.reference.stage import ReferenceReading, step
from penstock.weights.corrections.pipemare import PipeMare
from penstock.weights.corrections.registry import correction_of
from penstock.weights.decision import Decision
from penstock.weights.memory.buffers import Buffer
from support import cases
from support.cases import (
    OPTIMIZERS,
    VOCABULARY,
    Case,
    Outcome,
    Recording,
    add_decisions,
    assert_same,
    expected,
    finish,
    make_batches,
    make_blocks,
    make_pipeline,
    together,
    token_loss,
)
from support.pool import Pool
from support.schedules import make_schedule
from support.snapshots import Kept

Phases = Sequence[tuple[str, int]]  # method, batches
OPTIONS = {"pipemare": {"reschedule": 12}}
RESTLESS = Scaling(2.0**4, 2.0, 0.5, 2)


def case_of(phases: Phases, depth: int, m: int, **more: Any) -> Case:
    return Case(phases[0][0], depth, m, spans=tuple(count for _, count in phases), **({"skips": ()} | more))


def schedule(case: Case, method: str, **more: Any) -> Schedule:
    return make_schedule(method, case.depth, case.m, **more)


def train_phases(group: dist.ProcessGroup | None, case: Case, phases: Phases) -> Outcome:
    """Run a case with the pipeline, under one method after the other."""
    recording = Recording(OPTIMIZERS[case.optimizer])
    pipeline, outcome, batches = make_pipeline(case, group, optimizer=recording), Outcome(), make_batches(case)
    for (method, _), (first, end) in zip(phases, pairwise((0, *accumulate(case.spans))), strict=True):
        if first:
            pipeline.switch(schedule(case, method), correction=correction_of(method, **OPTIONS.get(method, {})))
        run_on(pipeline, case, outcome, batches[first:end])
    return finish(outcome, pipeline, recording)


def run_on(pipeline: Pipeline, case: Case, outcome: Outcome, batches: Sequence[Any]) -> None:
    for r in pipeline.run(batches):
        if case.width == 1:
            outcome.reports.append((r.batch, r.loss, r.weight))
        add_decisions(outcome, case, r.decided)
    add_decisions(outcome, case, pipeline.decided())


def expected_of(case: Case, phases: Phases, patch: pytest.MonkeyPatch) -> Outcome:
    """The reference, which is told before every batch by whose equations it goes on.

    With double buffering batch t reads W(t-1), but the first two after another rule both read what that has left.
    """
    starts = dict(zip((0, *accumulate(count for _, count in phases)), (method for method, _ in phases), strict=False))
    train, version = run.Run.train, run.version_read
    since = 0

    def train_one(self: Any, t: int, batch: Any) -> None:
        nonlocal since
        if t in starts:
            if not (starts[t] in DOUBLE_BUFFER and self.method in DOUBLE_BUFFER):
                since = t
            self.method, self.options = starts[t], method_options(starts[t], OPTIONS.get(starts[t], {}))
            for stage in self.stages:
                stage.reading, stage.step, stage.made = (
                    ReferenceReading(),
                    step,
                    False,
                )  # what was known of motion is forgotten
            self.begin(len(batch))
            for stage in self.stages:
                if isinstance(stage.reading, ReferencePrediction):  # it counts versions from its first one on
                    stage.reading.ahead[:0] = [{}] * t
        train(self, t, batch)

    def version_of(method: str, t: int, *where: Any) -> int:
        return max(t - 1, since) if method in DOUBLE_BUFFER else version(method, t, *where)

    with patch.context() as planted:
        planted.setattr(run.Run, "train", train_one)
        planted.setattr(run, "version_read", version_of)
        return expected(case)


THERE_AND_BACK = [("1f1b", 3), ("2bw", 4), ("gpipe", 2), ("stash", 3), ("2bw", 2), ("1f1b", 1)]
RUNS: list[tuple[Phases, Case]] = [
    (phases, case_of(phases, depth, m, **more))
    for phases, depth, m, more in (
        (THERE_AND_BACK, 1, 2, {"optimizer": "nadam"}),
        (THERE_AND_BACK, 3, 4, {"model": "restless", "clip": 0.6, "skips": (4,)}),
        ([("1f1b", 2), ("stash", 4), ("vertical-sync", 3), ("2bw", 3)], 4, 3, {"optimizer": "sgd"}),
        (
            [("2bw", 3), ("2bw-eager", 3), ("1f1b", 2), ("2bw-eager", 2)],
            3,
            4,
            {"optimizer": "muon", "model": "matrices"},
        ),
        ([("1f1b", 3), ("2bw", 3), ("1f1b", 3)], 2, 2, {"model": "half", "optimizer": "sgd", "scaling": RESTLESS}),
        ([("2bw", 3), ("1f1b", 2), ("stash", 3)], 2, 3, {"precision": "bf16", "clip": 0.6}),
        ([("1f1b", 2), ("2bw", 3), ("gpipe", 2)], 3, 3, {"model": "faint", "tied": True, "clip": 0.6}),
        (
            [("2bw", 2), ("1f1b", 2), ("2bw", 2)],
            3,
            2,
            {"recompute": "stage", "spikes": (1,), "loss": "spiky", "clip": 0.6},
        ),
        ([("1f1b", 2), ("2bw", 3), ("gpipe", 2), ("2bw", 2)], 2, 3, {"width": 2, "optimizer": "sgd"}),
        ([("zb-h1", 2), ("1f1b", 2), ("zb-h2-post", 3), ("2bw", 2)], 2, 4, {"model": "restless"}),
    )
]


def name_of(which: tuple[Phases, Case]) -> str:
    return f"{'-'.join(method for method, _ in which[0])}-{which[1].depth}-{which[1].model}-{which[1].precision}"


@pytest.mark.parametrize("which", RUNS, ids=name_of)
def test_switching_in_one_process(which: tuple[Phases, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    phases, case = which
    assert_same(train_phases(None, case, phases), expected_of(case, phases, monkeypatch))


@pytest.mark.parametrize("which", [RUNS[1], RUNS[4], RUNS[7]], ids=name_of)
def test_switching_on_ranks(which: tuple[Phases, Case], monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    phases, case = which
    outcomes = pool.submit(train_phases, case, phases, ranks=case.depth)
    assert_same(together(outcomes), expected_of(case, phases, monkeypatch))


@pytest.mark.parametrize(
    ("phases", "optimizer"),
    [
        ([("1f1b", 3), ("pipemare", 5), ("gpipe", 2), ("pipemare", 3)], "adamw"),
        ([("1f1b", 2), ("spectrain", 3), ("2bw", 3), ("pipeoptim", 3)], "sgd"),
    ],
)
def test_corrections_come_and_go_with_their_methods(
    phases: Phases, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(phases, 3, 2, optimizer=optimizer, clip=0.6)
    found, wanted = train_phases(None, case, phases), expected_of(case, phases, monkeypatch)
    assert_same(found, wanted)
    uncorrected = expected_of(case, [("1f1b", phases[0][1]), ("newest", 11)], monkeypatch).weights
    assert not all(torch.allclose(found.weights[name], w, rtol=0, atol=1e-4) for name, w in uncorrected.items())


def test_the_rates_of_a_correction_begin_where_it_does() -> None:
    """T1 of the first of four stages, three updates behind: a third of the rate at its own first update."""
    case = case_of([("1f1b", 5)], 4, 1, optimizer="sgd", rate=False)
    pipeline = make_pipeline(case)
    batches = make_batches(case)
    list(pipeline.run(batches[:3]))
    pipeline.switch(schedule(case, "pipemare"), correction=correction_of("pipemare", reschedule=4))
    list(pipeline.run(batches[3:4]))
    rates = [optimizer.param_groups[0]["lr"] for optimizer in pipeline.optimizers().values()]
    assert rates[0] == pytest.approx(0.1 / 3)
    list(pipeline.run(batches[4:5]))
    rates = [optimizer.param_groups[0]["lr"] for optimizer in pipeline.optimizers().values()]
    assert rates[0] == pytest.approx(0.1 / 3**0.75)


def test_a_correction_gives_back_what_it_took() -> None:
    """Buffers of its own, copies, scratch, and settings of the optimizer that it has changed."""
    case = case_of([("stash", 2)], 3, 3, optimizer="nadam")
    pipeline = make_pipeline(case)
    stages = [stage for stage in pipeline.stages.values() if isinstance(stage.weights, TrainedWeights)]

    def held() -> list[Any]:
        return [
            (n.weights.bytes_by_role(), n.weights.updater.nbytes, n.weights.updater.optimizer.param_groups[0]["betas"])
            for n in stages
        ]

    pipeline.switch(schedule(case, "1f1b"))
    plain = held()
    for method in ("pipemare", "nag-pp-no-stash", "lwp-weights"):
        options = {} if method == "lwp-weights" else {"reschedule": 4}
        pipeline.switch(schedule(case, method), correction=correction_of(method, **options))
        assert held() != plain
        pipeline.switch(schedule(case, "1f1b"))
        assert held() == plain


def test_the_reference_notices_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests above mean something."""
    phases = [("1f1b", 3), ("2bw", 4)]
    case = case_of(phases, 2, 2)
    head = "head.weight"
    whole = [expected(replace(case, method=method)).weights[head] for method in ("1f1b", "2bw")]
    found = expected_of(case, phases, monkeypatch).weights[head]
    assert not any(found.equal(weights) for weights in whole)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_buffers_are_as_many_as_the_method_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed means freed: nobody keeps a buffer alive that is not counted."""
    made: list[weakref.ref[Buffer]] = []
    init = Buffer.__init__

    def note(self: Buffer, *arguments: Any) -> None:
        init(self, *arguments)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Buffer, "__init__", note)
    phases = [("1f1b", 2), ("2bw", 3), ("1f1b", 2), ("stash", 4), ("gpipe", 1)]
    case = case_of(phases, 3, 2, spikes=(4,), loss="spiky", clip=1.0)
    pipeline, batches = make_pipeline(case), make_batches(case)
    for (method, _), (first, end) in zip(phases, pairwise((0, *accumulate(case.spans))), strict=True):
        if first:
            pipeline.switch(schedule(case, method))
        list(pipeline.run(batches[first:end]))
        wanted = sum(
            pipeline.proof.stages[place].buffers
            for place, n in pipeline.stages.items()
            if isinstance(n.weights, TrainedWeights)
        )
        gc.collect()
        alive = [buffer for known in made if (buffer := known()) is not None]
        assert len(alive) == wanted, method
        storages = {
            s
            for stage in pipeline.stages.values()
            if isinstance(stage.weights, TrainedWeights)
            for s in stage.weights.store.storages
        }
        assert storages == {s for buffer in alive for s in buffer.storages}
        counted = {"weights", "gradients", "idle buffers"}
        live = sum(n for kinds in pipeline.live_bytes().values() for kind, n in kinds.items() if kind in counted)
        assert live == sum(buffer.nbytes for buffer in alive), method
        del alive
        for stage in pipeline.stages.values():  # what the optimizer steps is what passes read
            if isinstance(stage.weights, TrainedWeights):
                for name, parameter in stage.weights.updater.parameters.items():
                    assert parameter.data_ptr() in {
                        b.views[name].data_ptr() for b in stage.weights.store.versions.values()
                    }


def test_the_memory_of_buffers_is_freed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their flat tensors: a view of one, in an optimizer or a leaf, would keep it."""
    flats: list[weakref.ref[Any]] = []
    init = Buffer.__init__

    def note(self: Buffer, *arguments: Any) -> None:
        init(self, *arguments)
        flats.extend(weakref.ref(flat.untyped_storage()) for flat in self.flats)

    case = case_of([("2bw", 3)], 2, 2, spikes=(2,), loss="spiky", clip=1.0)
    monkeypatch.setattr(Buffer, "__init__", note)
    pipeline, batches = make_pipeline(case), make_batches(case)
    list(pipeline.run(batches))
    assert sum(known() is not None for known in flats) == 6
    pipeline.switch(schedule(case, "1f1b"))
    gc.collect()
    assert sum(known() is not None for known in flats) == 4


def test_the_scratch_of_rotating_updates_goes_and_comes() -> None:
    case = case_of([("2bw", 2)], 2, 2)
    pipeline = make_pipeline(case)
    updaters = [
        stage.weights.updater for stage in pipeline.stages.values() if isinstance(stage.weights, TrainedWeights)
    ]
    rotating = [updater.nbytes for updater in updaters]
    assert all(rotating)
    pipeline.switch(schedule(case, "1f1b"))
    assert [updater.nbytes for updater in updaters] == [0, 0]
    pipeline.switch(schedule(case, "2bw"))
    assert [updater.nbytes for updater in updaters] == rotating


# --- snapshots ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [2, 4])
def test_a_run_goes_on_from_a_snapshot_before_or_at_a_switch(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    phases = [("2bw", 4), ("1f1b", 3)]
    case = case_of(phases, 2, 3, model="restless", clip=0.6)
    batches, first = make_batches(case), make_pipeline(case)
    list(first.run(batches[:at]))
    second, outcome = make_pipeline(case), Outcome()
    second.load(Kept(first.snapshots()))
    run_on(second, case, outcome, batches[at:4])
    second.switch(schedule(case, "1f1b"))
    run_on(second, case, outcome, batches[4:])
    wanted = expected_of(case, phases, monkeypatch)
    assert outcome.reports == wanted.reports[at:]
    assert all(w.equal(wanted.weights[name]) for name, w in second.state_dict().items())


# --- evaluations ----------------------------------------------------------------------------------------------------


def evaluated_by_hand(case: Case, weights: dict[str, Tensor]) -> tuple[float, float]:
    """Loss sum and weight on the first two batches."""
    blocks, total, weight = make_blocks(case.model), 0.0, 0.0
    for name, block in blocks.items():
        if isinstance(block, nn.Module):
            own = {key: weights[f"{name}.{key}"] for key, _ in block.named_parameters()}
            block.load_state_dict(own)
            block.eval()
    for batch in make_batches(case)[:2]:
        for x, target in batch:
            for block in blocks.values():
                x = block(x)
            loss, count = token_loss(x, target)
            total, weight = total + float(loss.detach()), weight + count
    return total, weight


def test_evaluations_at_a_switch_are_checked() -> None:
    pipeline = make_pipeline(Case("1f1b", 2, 2, spans=(2,), skips=()))
    for evaluate, said in (
        (Evaluating(0, list), "evaluate: every must be a whole number of at least 1, got 0"),
        (Evaluating(1, iter([])), "evaluate: data is a list_iterator, which the first evaluation would use up"),
        ([], "evaluate must be penstock.Evaluating"),
    ):
        with pytest.raises(ConfigError, match=said):
            pipeline.switch("gpipe", evaluate=evaluate)  # type: ignore[arg-type]
    assert pipeline.schedule.name == "1f1b"


def train_and_evaluate(group: dist.ProcessGroup | None, case: Case, phases: Phases) -> list[tuple[int, float, float]]:
    pipeline, batches = make_pipeline(case, group), make_batches(case)
    plan = Evaluating(1, lambda: batches[:2])
    found: list[Evaluated] = []
    for (method, _), (first, end) in zip(phases, pairwise((0, *accumulate(case.spans))), strict=True):
        if first:
            pipeline.switch(schedule(case, method), evaluate=plan)
        for report in pipeline.run(batches[first:end], evaluate=plan):
            found += report.evaluated
        found += pipeline.evaluated()
    assert list(pipeline.evaluations) == found
    return [tuple(evaluated) for evaluated in found]


AROUND = [("1f1b", 2), ("2bw", 2), ("stash", 2), ("1f1b", 2), ("stash", 1), ("2bw", 3), ("2bw-eager", 3), ("gpipe", 2)]


def test_no_version_is_left_out_or_evaluated_twice(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    """Each rule has its own border for the evaluation of a version: a batch later, or with the pipeline drained."""
    phases = [*AROUND, ("1f1b", 1)]
    drained = [
        part for method, count in phases for part in ([(method, 1)] * count if method == "stash" else [(method, count)])
    ]
    case, drains = case_of(phases, 2, 3, clip=1.0), case_of(drained, 2, 3, clip=1.0)
    found = train_and_evaluate(None, case, phases)
    with monkeypatch.context() as patch:
        versions: list[dict[str, Tensor]] = []
        real = run.train_reference

        def train(*arguments: Any, **more: Any) -> Any:
            result = real(*arguments, **more)
            versions.extend(result.versions)
            return result

        patch.setattr(cases, "train_reference", train)
        expected_of(drains, drained, patch)
    last = sum(case.spans) - 1
    assert [v for v, _, _ in found] == list(range(1, last + 1))
    for v, total, weight in found:
        wanted = evaluated_by_hand(case, versions[v])
        assert (total, weight) == (pytest.approx(wanted[0], rel=1e-5), wanted[1]), v
    assert pool.submit(train_and_evaluate, case, phases, ranks=2) == [found, found]


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes", "says"),
    [
        ("1f1b", {"m": 4}, r"microbatches per batch \(3 and 4\)"),
        ("1f1b", {"depth": 3}, r"differ in stages \(2 and 3\)"),
        ("interleaved", {"options": {"chunks": 2}, "m": 4}, "microbatches"),
        ("zb-v", {}, "differ in stages"),
        ("seq1f1b", {}, "slices of a sequence"),
    ],
)
def test_another_placement_is_refused(method: str, changes: dict[str, Any], says: str) -> None:
    case = case_of([("2bw", 2)], 2, 3)
    pipeline, batches = make_pipeline(case), make_batches(case)
    sizes = {"depth": 2, "m": 3, "options": {}} | changes
    with pytest.raises(ConfigError, match=says):
        pipeline.switch(make_schedule(method, sizes["depth"], sizes["m"], options=sizes["options"]))
    assert len(list(pipeline.run(batches))) == 2  # nothing has changed


def test_what_the_runtime_or_an_optimizer_does_not_offer_is_refused() -> None:
    case = case_of([("2bw", 2)], 2, 4, optimizer="nadam")
    pipeline = make_pipeline(case)
    with pytest.raises(ConfigError, match="nothing says how they are predicted"):
        pipeline.switch(schedule(case, "spectrain"))
    with pytest.raises(ConfigError, match="'pipemare' goes with version rule newest"):
        pipeline.switch(schedule(case, "1f1b"), correction=PipeMare(4))
    with pytest.raises(CapabilityError, match="undone in place"):
        pipeline.switch(schedule(case, "zb-h2", rule="provisional-in-place"))
    assert len(list(pipeline.run(make_batches(case)))) == 2


def test_chosen_delays_stay_with_their_schedule() -> None:
    case = case_of([("1f1b", 2)], 2, 4)
    for given in ({"delays": 1}, {"backward_delays": 1}):
        with pytest.raises(ConfigError, match="leave delays out"):
            make_pipeline(case, **given).switch(schedule(case, "gpipe"))


def test_in_the_midst_of_a_run_it_is_refused() -> None:
    case = case_of([("2bw", 3)], 2, 2)
    pipeline = make_pipeline(case)
    for _ in pipeline.run(make_batches(case)):
        with pytest.raises(PenstockError, match="under way"):
            pipeline.switch(schedule(case, "1f1b"))


def switch_apart(group: dist.ProcessGroup, case: Case) -> str:
    pipeline = make_pipeline(case, group)
    try:
        pipeline.switch(schedule(case, ("1f1b", "gpipe")[dist.get_rank(group)]))
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_that_disagree_are_told(pool: Pool) -> None:
    for said in pool.submit(switch_apart, case_of([("2bw", 2)], 2, 2), ranks=2):
        assert "ranks build different pipelines: this one " in said


# --- divergence -----------------------------------------------------------------------------------------------------

LOOKING = Divergence(spike=2.0, window=3)


def decision(batch: int, loss: float, finite: bool = True, weight: float = 1.0) -> Decision:
    return Decision(batch, loss, weight, 1.0, 1.0, finite, 1.0)


@pytest.mark.parametrize(
    ("losses", "trouble"),
    [
        ([3, 3, 3, 5.9, 6], None),
        ([3, 3, 3, 6.1, 1], 3),
        ([9, 1, 9, 3], None),
        ([1, 1, 9], None),
        ([1, math.nan, 1], 1),
        ([1, 1, 1, 1, math.inf], 4),
    ],
)
def test_what_is_a_divergence(losses: list[float], trouble: int | None) -> None:
    detector = DivergenceDetector(LOOKING, scaled=False)
    detector.watch_from(0)
    for t, loss in enumerate(losses):
        detector.observe(decision(t, loss))
    assert (detector.trouble and detector.trouble.batch) == trouble


def test_an_overflow_under_a_loss_scale_is_none() -> None:
    for scaled in (False, True):
        detector = DivergenceDetector(LOOKING, scaled)
        detector.watch_from(0)
        detector.observe(decision(0, 1.0, finite=False))
        detector.observe(decision(1, math.nan, weight=0.0))  # a batch of nothing
        assert (detector.trouble is None) == scaled


def test_a_lookout_remembers_what_a_snapshot_holds() -> None:
    losses = [1, 1, 2, 1, 3, 1, 9, 1]
    whole = DivergenceDetector(LOOKING, scaled=False)
    whole.watch_from(4)
    for t, loss in enumerate(losses):
        other = DivergenceDetector(LOOKING, scaled=False)
        other.load(whole.state())
        other.watch_from(4)
        for later in range(t, len(losses)):
            other.observe(decision(later, losses[later]))
        whole.observe(decision(t, loss))
        assert other.trouble == Trouble(4, "the loss was 3, 3 times the median of the 3 batches before")
    whole.watch_from(5)
    assert whole.trouble is None


def poisoned_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """Not a number where the first target says so."""
    total, weight = token_loss(logits, targets.clamp(max=VOCABULARY - 1))
    return total * (math.nan if targets[0, 0] == VOCABULARY else 1.0), weight


def watch(group: dist.ProcessGroup | None, case: Case) -> tuple[Trouble | None, int, bool]:
    """Train, and let any rank that hears of trouble end the run."""
    pipeline = make_pipeline(case, group, loss=poisoned_loss, divergence=Divergence())
    pipeline.look_out()
    for _ in pipeline.run(make_batches(case)):
        if pipeline.trouble is not None:
            pipeline.stop()
    pipeline.switch(schedule(case, "1f1b"))
    list(pipeline.run(make_batches(case)[pipeline.batches :]))
    return pipeline.trouble, pipeline.batches, pipeline.is_finite()


def test_all_ranks_hear_of_the_same_trouble(pool: Pool) -> None:
    case = case_of([("2bw", 12)], 2, 2, spikes=(3,), clip=1.0)
    found = (Trouble(3, "the loss was nan"), 12, True)
    assert watch(None, case) == found
    assert pool.submit(watch, case, ranks=2) == [found, found]


@pytest.mark.parametrize(
    ("method", "depth", "m", "more"),
    [
        ("1f1b", 4, 2, 0),
        ("gpipe", 2, 1, 0),
        ("2bw", 4, 3, 0),
        ("2bw-eager", 4, 6, 0),
        ("stash", 4, 1, 0),
        ("vertical-sync", 3, 1, 0),
        ("stash", 2, 1, 11),
        ("vertical-sync", 3, 2, 9),
    ],
)
def test_whoever_reads_data_hears_of_trouble_in_time(method: str, depth: int, m: int, more: int) -> None:
    """So that a run may end before the same batch everywhere: on the first and the last stage."""
    options = (("in_flight", depth + more),) if more else ()
    case = case_of([(method, 24)], depth, m, spikes=(3,), clip=1.0, options=options)
    pipeline, heard = make_pipeline(case, loss=poisoned_loss, divergence=Divergence()), []
    pipeline.look_out()
    limit = 3 + known_after(depth + more, m)

    def data() -> Iterator[Any]:
        for number, batch in enumerate(make_batches(case)):
            troubles = [pipeline._ranks[rank].decisions.detector.trouble for rank in (0, depth - 1)]
            if all(trouble is not None and trouble.batch == 3 for trouble in troubles):
                heard.append(number)
            yield batch

    list(pipeline.run(data()))
    assert heard == list(range(heard[0], 24))
    assert 3 < heard[0] <= limit


def test_divergence_needs_stages_that_decide_together() -> None:
    case = case_of([("2bw", 2)], 2, 2)
    with pytest.raises(ConfigError, match="set max_grad_norm"):
        make_pipeline(case, divergence=Divergence())
    with pytest.raises(ConfigError, match="spike must be above 1"):
        make_pipeline(replace(case, clip=1.0), divergence=Divergence(spike=0.5))
