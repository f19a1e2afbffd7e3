"""PipeMare's recompute variant has the numbers of its equations; what it does not go with is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.add_options import extend
from penstock.schedule.text_parser import parse_schedule
from penstock.schedule.transforms.recompute import with_recompute
from penstock.stage.autograd.recompute import RecomputeMode
from penstock.train.config.load import validate_config
from penstock.train.prepare.prepare_run import prepare
from penstock.weights.corrections.pipemare import PipeMare
from support import snapshots as snapshots_in_memory
from support.cases import (
    Case,
    Outcome,
    assert_same,
    expected,
    make_batches,
    make_pipeline,
    together,
    train,
)
from support.own_methods import correction_of, prove
from support.pipemare_player import K, Player, Stage, case_of, changes_of, played
from support.pool import Pool
from support.schedules import make_schedule
from support.smallest_batch import least

SHAPES = [
    (1, 1, 1, "momentum"), (2, 1, 1, "adamw"), (4, 1, 2, "momentum"), (4, 3, 3, "adamw"), (8, 1, 3, "momentum"),
    (8, 1, 7, "adamw"),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("depth", "m", "segments", "optimizer"), SHAPES)
def test_stages_recompute_on_estimates(depth: int, m: int, segments: int, optimizer: str) -> None:
    case = case_of(depth, m, recompute="stage", optimizer=optimizer)
    wanted = played(case, "elementary", segments).outcome
    assert_same(train(None, case, **changes_of(case, "elementary", segments)), wanted)


def test_blocks_recompute_on_estimates() -> None:
    """Each on the input that its forward had, and on the estimate that its backward reads as well."""
    case = case_of(4, 1, recompute="block", optimizer="adamw")
    found = train(None, case, **changes_of(case, "composed"))
    assert_same(found, played(case, "composed", None).outcome)
    kept = train(None, replace(case, recompute="none"), **changes_of(case, "composed"))
    assert any(not torch.equal(w, kept.weights[name]) for name, w in found.weights.items())


@pytest.mark.parametrize(("recompute", "m"), [("none", 3), ("block", 1), ("stage", 1)])
def test_estimates_in_low_precision(recompute: RecomputeMode, m: int) -> None:
    """Made of the weights in fp32, and cast once."""
    case = case_of(4, m, recompute=recompute, precision="bf16", optimizer="momentum", spans=(6, 3))
    segments = 2 if recompute == "stage" else 1
    wanted = played(case, "elementary", segments if recompute == "stage" else None).outcome
    assert_same(train(None, case, **changes_of(case, "elementary", segments)), wanted)


@pytest.mark.parametrize("depth", [2, 4])
def test_what_a_stage_has_received_may_be_cast(depth: int) -> None:
    """In low precision a norm casts its input, which is no weight."""
    case = Case("newest", depth, 2, model="gpt", precision="bf16")
    assert_same(train(None, case), expected(case))


def on_rank(group: dist.ProcessGroup, case: Case) -> Outcome:
    return train(group, case, **changes_of(case, "elementary", 3))


def test_pipemare_recompute_on_ranks_as_in_one_process(pool: Pool) -> None:
    case = case_of(4, 1, recompute="stage", clip=0.6, spans=(3, 4))
    wanted = train(None, case, **changes_of(case, "elementary", 3))
    assert_same(together(pool.submit(on_rank, case, ranks=4)), wanted)


def test_a_schedule_that_places_its_own_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of docs/ir.md: the first stage recomputes far ahead, and the last one, too."""
    case = case_of(2, 2, correction=PipeMare(K), optimizer="momentum")
    schedule = parse_schedule((Path(__file__).parents[1] / "golden" / "pipemare_recompute.txt").read_text())
    player = Player(case, "elementary", None)
    (first, last), batches = player.stages, make_batches(case)
    first.follow, last.follow, last.first = 1, 0, False

    def events(stage: Stage, count: int) -> Iterator[tuple[str, int]]:
        for t in range(count):
            k = 2 * t
            if stage is last:
                yield from [("F", k), ("R", k), ("B", k), ("F", k + 1), ("R", k + 1), ("B", k + 1), ("STEP", t)]
                continue
            yield from [("F", k), *([("B", k - 1), ("STEP", t - 1)] if t else [])]
            yield from [("R", k), ("F", k + 1), ("B", k), ("R", k + 1)]
        if stage is first:
            yield from [("B", 2 * count - 1), ("STEP", count - 1)]

    monkeypatch.setattr(Stage, "events", events)
    for length in case.spans:
        player.span(batches[player.done : player.done + length])
    changes = changes_of(case, "elementary") | {"method": schedule}
    assert_same(train(None, case, **changes), player.finish())


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "zb-h1", "2bw", "2bw-eager", "stash", "vertical-sync"])
def test_segments_change_no_number(method: str) -> None:
    """Where backwards read what their forwards read: dropout, batch statistics and clipping included."""
    case = Case(method, 3, least(method, 3) + 1, model="restless", spans=(3, 2), recompute="stage", clip=0.6)
    for segments in (2, 3):
        assert_same(train(None, case, segments=segments), expected(case))


# --- what else ------------------------------------------------------------------------------------------------------


def test_a_switch_makes_room_for_estimates_and_lets_go_of_it() -> None:
    case = case_of(4, 2, recompute="stage", method="1f1b", correction=None)
    pipeline, batches = make_pipeline(case, **changes_of(case, "elementary", 2)), make_batches(case)
    copies = []
    for method, correction in (("1f1b", None), ("pipemare", PipeMare(K)), ("newest", None)):
        pipeline.switch(prove(method, 4, 2), correction=correction)
        assert pipeline.schedule.segments == ((0, 1),)
        list(pipeline.run(batches[:3]))
        copies.append([live.get("copies", 0) > 0 for live in pipeline.live_bytes().values()])
    assert copies == [[False] * 4, [True] * 3 + [False], [False] * 4]  # the last stage has no delay


def test_a_load_leaves_no_estimate_of_other_weights() -> None:
    """Of the same version and gap, but of another run."""
    case = case_of(4, 1, recompute="stage", spans=(9,), skips=())
    source = make_pipeline(case, **changes_of(case, "elementary", 2))
    list(source.run(make_batches(case)[:4]))
    snapshots, ends = snapshots_in_memory.Kept(source.snapshots()), []
    for before in ((), (4, 2)):  # the last estimate is that of the first backward after a load that is late
        other = make_pipeline(case, **changes_of(case, "elementary", 2))
        for length in before:
            list(other.run(make_batches(case)[::-1][:length]))
        other.load(snapshots)
        list(other.run(make_batches(case)[4:]))
        ends.append({name: tensor.clone() for name, tensor in other.state_dict().items()})
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("2bw", {"segments": 2}, "segments=2 is for recompute='stage'.*recompute is 'none'"),
        ("2bw", {"recompute": "block", "segments": "auto"}, "recompute is 'block'"),
        ("2bw", {"recompute": "stage", "segments": 5}, "from 1 to 4 here, or 'auto'; got 5"),
        ("2bw", {"recompute": "stage", "segments": 0}, "got 0"),
        ("2bw", {"recompute": "stage", "segments": True}, "got True"),
        ("spectrain", {"recompute": "stage", "segments": 2}, "needs an order that places its own recomputes"),
        ("seq1f1b", {"recompute": "stage", "segments": 2}, "need backwards of one whole microbatch"),
        ("chimera", {"recompute": "stage", "segments": 3}, "segments of 3 stages .* do not go with this order"),
    ],
)
def test_what_segments_do_not_go_with_is_refused(method: str, changes: dict[str, Any], message: str) -> None:
    case = Case(method, 4, 4, correction=correction_of(method) if method == "spectrain" else None)
    with pytest.raises((ConfigError, ScheduleError), match=message):
        make_pipeline(case, **changes)


def test_a_schedule_with_recomputes_has_its_own_segments() -> None:
    schedule = with_recompute(make_schedule("2bw", 4, 4), 2)
    with pytest.raises(ConfigError, match="recomputes of its own, so leave segments=3 out"):
        extend(schedule, recomputes=True, segments=3)
    assert extend(schedule, recomputes=True).schedule == schedule


def test_the_configuration_is_checked_before_anything_runs(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be: that is the question. " * 200)
    values = {"method": "pipemare", "stages": 4, "microbatches": 2, "recompute": "stage", "data": str(text)}
    model = {"layers": 4, "width": 8, "heads": 2, "context": 8}
    prepare(validate_config({**values, "segments": "auto", "model": model}))
    for changes, message in (
        ({"segments": 9}, "from 1 to 4 here"),
        ({"segments": 2, "recompute": "none"}, "is for recompute='stage'"),
        ({"segments": 3, "method": "chimera", "microbatches": 4}, "do not go with this order"),
    ):
        with pytest.raises((ConfigError, ScheduleError), match=message):
            prepare(validate_config({**values, **changes, "model": model}))
