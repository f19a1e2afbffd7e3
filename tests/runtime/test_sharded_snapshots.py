"""Saved states of sharded pipelines: rows by rows on disk, read at any width, depth and sharding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.checkpoint.manager import Checkpoints
from penstock.errors import CheckpointError
from penstock.options.parallelism import DataParallel
from penstock.runtime.execute import executor
from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.runtime.update.gathers_and_reduce_scatters import GradientPlaces
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.weights.optim.optimizer_adapters import ByParameter
from support.cases import (
    Case,
    Outcome,
    add_decisions,
    assert_equal_tensors,
    expected,
    make_batches,
    make_blocks,
    make_pipeline,
)
from support.examples import examples
from support.pool import Pool
from support.schedules import make_schedule
from support.sharded import assert_as_whole, joined, parts_of_state
from support.snapshots import Kept


def saved_by(case: Case, level: str, batch: int) -> Kept:
    """The snapshots that a run takes on the way."""
    found: list[Snapshot] = []
    for _ in make_pipeline(case, sharding=level).run(make_batches(case), save=Saving(batch, found.append)):
        pass
    return Kept([snapshot for snapshot in found if snapshot.batch == batch])


def others(case: Case) -> dict[str, Any]:
    return make_blocks(case.model, seed=99)


@pytest.mark.parametrize(
    ("method", "optimizer", "before", "after"),
    [
        *(
            (method, optimizer, before, after)
            for method, optimizer in (("1f1b", "adamw"), ("2bw", "adamw"), ("2bw", "configured soap"))
            for before, after in (("gradients", "none"), ("none", "optimizer"), ("optimizer", "gradients"))
        ),
        *(("1f1b", "adamw", *change) for change in (("full", "none"), ("none", "full"), ("full", "full"))),
        *(("1f1b", "adafactor", *change) for change in (("full", "optimizer"), ("gradients", "full"))),
    ],
)
def test_a_run_goes_on_under_another_sharding(method: str, optimizer: str, before: str, after: str) -> None:
    case = Case(method, 2, 2, "mixed", optimizer, width=2, spans=(7,), clip=0.4, skips=())
    kept, wanted = saved_by(case, before, 4), expected(case)
    pipeline = make_pipeline(case, sharding=after, blocks=others(case))
    pipeline.load(kept)
    outcome = Outcome()
    for report in pipeline.run(make_batches(case)[4:]):
        add_decisions(outcome, case, report.decided)
    add_decisions(outcome, case, pipeline.decided())
    outcome.weights = pipeline.state_dict()
    outcome.decided = [*wanted.decided[:4], *outcome.decided]
    if after != "none":
        assert_as_whole(outcome, [parts_of_state(pipeline)], wanted)
    assert repr(outcome.decided) == repr(wanted.decided)
    assert_equal_tensors({n: outcome.weights[n] for n in wanted.weights}, wanted.weights, "weights")


def test_passes_that_wait_for_gathers_take_no_snapshot_away() -> None:
    """As with fewer places for full-size gradients than gradients."""
    case = Case("breadth-first", 1, 2, width=2, spans=(3,), options=(("chunks", 2),))
    limited, free = (saved_by(case, level, 2).tensors for level in ("gradients:gradients=1", "gradients"))
    assert any(name.startswith("weights/") for name in free)
    assert_equal_tensors(limited, free, "state")


@pytest.mark.parametrize("places", [1, 2])
def test_ranks_have_as_many_places_for_full_size_gradients_as_were_proven(
    monkeypatch: pytest.MonkeyPatch, places: int
) -> None:
    given: list[int] = []

    class Recorded(GradientPlaces):
        def __init__(self, places: int) -> None:
            given.append(places)
            super().__init__(places)

    monkeypatch.setattr(executor, "GradientPlaces", Recorded)
    case = Case("breadth-first", 1, 2, width=2, spans=(1,), options=(("chunks", 3),))
    saved_by(case, f"gradients:gradients={places}", 1)
    assert set(given) == {places}


SHAPES = [(2, 2, "gradients"), (1, 1, "none"), (3, 1, "none"), (2, 4, "gradients"), (1, 3, "optimizer"), (2, 2, "none")]
FULL = [(2, 2, "full"), (1, 1, "none"), (3, 1, "none"), (2, 4, "full"), (1, 2, "optimizer"), (1, 3, "full")]


@pytest.mark.parametrize(("method", "shapes"), [("2bw", SHAPES), ("1f1b", FULL)])
def test_any_depth_width_and_sharding_reads_any_other(method: str, shapes: list[tuple[int, int, str]]) -> None:
    """A state goes through all shapes and comes back as it was."""
    first = Case(method, *(2, 2), width=2, spans=(5,), clip=0.4)
    wanted = kept = saved_by(first, shapes[0][2], 3)
    assert any(name.startswith("weights@") for name in wanted.names) is (shapes is FULL)
    for depth, width, level in [*shapes[1:], shapes[0]]:
        case = Case(method, depth, 4, width=width, spans=(5,), clip=0.4)
        pipeline = make_pipeline(case, sharding=level, blocks=others(case))
        pipeline.load(kept)
        kept = Kept(pipeline.snapshots())
    tensors = {n: t for n, t in kept.tensors.items() if not n.startswith("fixed")}
    assert_equal_tensors(tensors, {n: t for n, t in wanted.tensors.items() if not n.startswith("fixed")}, "state")
    assert any("@" in name for name in tensors)


class Counted(Kept):
    """Counts the bytes of moments that are read."""

    read = 0

    def tensor(self, name: str) -> torch.Tensor:
        found = super().tensor(name)
        self.read += found.nbytes if name.startswith("optimizer/exp_avg") else 0
        return found


def test_a_holder_reads_the_moments_that_it_steps() -> None:
    """Those parts of two that four holders have rows of: about half of all for each."""
    kept = saved_by(Case("1f1b", 1, 2, width=2, spans=(3,)), "full", 2)
    whole = sum(t.nbytes for n, t in kept.tensors.items() if n.startswith("optimizer/exp_avg"))
    for width, level, most in ((4, "full", 2.6), (2, "optimizer", 1.0), (1, "none", 1.0)):
        counted = Counted([])
        counted.tensors, counted.facts = kept.tensors, kept.facts
        case = Case("1f1b", 1, 2, width=width, spans=(3,))
        make_pipeline(case, sharding=level, blocks=others(case)).load(counted)
        assert whole <= counted.read <= most * whole, width


def test_each_pipeline_saves_its_own_rows_and_the_first_one_the_rest() -> None:
    case = Case("2bw", 1, 2, width=3, spans=(2,))
    pipeline = make_pipeline(case, sharding="gradients")
    for _ in pipeline.run(make_batches(case)):
        pass
    first, *rest = sorted(pipeline.snapshots(), key=lambda snapshot: snapshot.place)
    assert {name for name in first.tensors if "exp_avg/" in name} == set()
    assert first.tensors["optimizer/exp_avg@0/table.weight"].shape == (5, 8)
    for place, other in enumerate(rest, 1):
        assert all(name.startswith(("optimizer/exp_avg", "fixed.")) for name in other.tensors)
        assert other.tensors[f"optimizer/exp_avg_sq@{5 * place}/table.weight"].shape == (5 if place == 1 else 3, 8)
    assert sum(s.nbytes for s in rest) < first.nbytes


@pytest.mark.parametrize("lost", [0, 5, 10])
@pytest.mark.parametrize(("level", "kind"), [("gradients", "optimizer/exp_avg"), ("full", "weights")])
def test_rows_that_are_missing_in_a_saved_state(lost: int, level: str, kind: str) -> None:
    case = Case("1f1b", 1, 2, width=3, spans=(2,))
    kept = saved_by(case, level, 2)
    del kept.tensors[f"{kind}@{lost}/table.weight"]
    with pytest.raises(CheckpointError, match=rf"lacks (the first rows|rows \d+ to \d+) of {kind}/table"):
        make_pipeline(case, blocks=others(case)).load(kept)


def test_averages_and_evaluations_of_a_sharded_run() -> None:
    """The average moves when a version is whole; hooks see whole weights; evaluations read them."""
    many = (("breadth-first", (("chunks", 3),)),)  # more stages than are whole at once
    for method, options in (("1f1b", ()), ("2bw", ()), ("interleaved", (("chunks", 2),)), *many):
        case = Case(method, 2, 2, width=2, spans=(6,), clip=0.4, options=options)
        held = make_batches(case)[:1]
        seen = []
        for level in ("none", "gradients", *(["full"] if method != "2bw" else [])):
            pipeline = make_pipeline(case, sharding=level, ema_decay=0.9)
            shown: dict[str, torch.Tensor] = {}
            pipeline.on_update(lambda n, w, shown=shown: shown.update({f"{k} {n}": v.clone() for k, v in w.items()}))
            evaluated = []
            for report in pipeline.run(make_batches(case), evaluate=Evaluating(2, held)):
                evaluated += report.evaluated
            evaluated += pipeline.evaluated()
            seen.append((shown, evaluated, pipeline))
        (plain, plainly, whole), *others_ = seen
        assert len(plainly) == 3
        for sharded, too, divided in others_:
            assert_equal_tensors(sharded, plain, "what hooks see")
            assert too == plainly
            assert divided.evaluate(held) == whole.evaluate(held)
            assert divided.evaluate(held, averaged=True) == whole.evaluate(held, averaged=True)
            average = divided.full_state_dict(averaged=True)
            assert_equal_tensors(average, whole.full_state_dict(averaged=True), "average")


def save_on_ranks(group: dist.ProcessGroup, case: Case, level: str, folder: str) -> Any:
    pipeline = make_pipeline(case, group, sharding=level)
    checkpoints = Checkpoints(pipeline, folder)
    for _ in pipeline.run(make_batches(case)[:3], save=checkpoints.every(3)):
        pass
    checkpoints.wait()
    return parts_of_state(pipeline)


@pytest.mark.parametrize(("method", "divided"), [("2bw", "gradients"), ("1f1b", "full")])
def test_a_checkpoint_of_processes_is_read_in_one(pool: Pool, tmp_path: Path, method: str, divided: str) -> None:
    case = Case(method, 2, 2, width=2, spans=(6,), clip=0.4, skips=())
    parts = pool.submit(save_on_ranks, case, divided, str(tmp_path), ranks=4)
    for level, width in (("none", 1), ("optimizer", 4)):
        here = Case(method, 1, 4 // width, width=width, spans=(6,), clip=0.4, skips=())
        pipeline: Pipeline = make_pipeline(here, sharding=level, blocks=others(here))
        loaded = Checkpoints(pipeline, tmp_path).load()
        assert loaded is not None
        assert loaded.batch == 3
        wanted, found = joined(parts), joined([parts_of_state(pipeline)])
        for name, state in wanted.items():
            assert_equal_tensors(found[name], state, name)


def test_methods_change_within_a_sharded_run() -> None:
    case = Case("1f1b", 2, 3, width=2, spans=(9,), clip=0.4)
    batches, found = make_batches(case), []
    for level in ("none", "gradients"):
        pipeline = make_pipeline(case, sharding=level)
        losses = []
        for first, method in enumerate(("1f1b", "2bw", "gpipe")):
            if first:
                pipeline.switch(make_schedule(method, 2, 3))
            losses += [repr(report.loss) for report in pipeline.run(batches[3 * first : 3 * first + 3])]
        found.append((losses, {name: weight.clone() for name, weight in pipeline.state_dict().items()}))
        assert pipeline.schedule.sharding.level == level
    (losses, weights), (others_, sharded) = found
    assert losses == others_
    assert_equal_tensors(sharded, weights, "weights")


class OddShapes(nn.Module):
    """A layer with parameters of shapes that few think of."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.odd = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        for parameter in self.odd:
            y = y + 0.1 * parameter.sum()
        return y.tanh()


ODD = [(0,), (0, 3), (3, 0), (), (1,), (1, 3), (2, 5), (3,)]
LEVELS: list[tuple[str, str]] = [("1f1b", "none"), ("2bw", "optimizer"), ("1f1b", "gradients"), ("1f1b", "full")]
LEVELS += [("2bw-ahead", "gradients"), ("2bw-layered", "full"), ("2bw", "gradients"), ("layered", "full")]


@pytest.mark.parametrize(("method", "level"), LEVELS)
@settings(max_examples=examples(3))
@given(
    shapes=st.lists(st.sampled_from(ODD), min_size=1, max_size=4),
    width=st.integers(2, 3),
    depth=st.integers(1, 3),
    low=st.booleans(),
    whole=st.booleans(),
)
@example(shapes=ODD, width=3, depth=2, low=False, whole=False)
@example(shapes=ODD, width=2, depth=1, low=True, whole=True)
def test_what_save_writes_load_reads_for_every_shape(
    method: str, level: str, shapes: Sequence[tuple[int, ...]], width: int, depth: int, low: bool, whole: bool
) -> None:
    """To the bit, weights and optimizer state, also after one more update; `whole`: the optimizer takes no rows."""

    def made() -> Pipeline:
        torch.manual_seed(0)
        by_whole = lambda named: ByParameter(torch.optim.Adam(named, lr=0.05), rehearsed=True)  # noqa: E731
        return Pipeline(
            [OddShapes(shapes) for _ in range(6)], method=method, stages=depth, microbatches=2, loss=F.mse_loss,
            optimizer=by_whole if whole and method != "2bw-ahead" else lambda named: torch.optim.AdamW(named, lr=0.05),
            data_parallel=DataParallel(width, sharding=level), precision="bf16" if low else "fp32",
        )  # fmt: skip

    data = [(torch.full((2 * width, 4), float(i)), torch.ones(2 * width, 4)) for i in range(3)]
    first, second = made(), made()
    list(first.run(data[:2]))
    with TemporaryDirectory() as folder:
        Checkpoints(first, folder).save()
        Checkpoints(second, folder).load()
        for _ in range(2):
            for one, other in zip(first.stages.values(), second.stages.values(), strict=True):
                assert isinstance(one.weights, TrainedWeights)
                assert isinstance(other.weights, TrainedWeights)
                assert_equal_tensors(
                    other.weights.store.newest_tensors(), one.weights.store.newest_tensors(), "weights"
                )
                states = [each.weights.updater.state() for each in (one, other)]
                assert states[0].keys() == states[1].keys()
                for key, value in states[0].items():
                    assert value.equal(states[1][key]) if isinstance(value, Tensor) else value == states[1][key], key
            list(first.run(data[2:]))
            list(second.run(data[2:]))
