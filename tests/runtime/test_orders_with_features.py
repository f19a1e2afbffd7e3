"""Chunks, directions, halves of a backward and graphs together with snapshots, evaluations and the rest."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from penstock.errors import ConfigError, ScheduleError
from penstock.options.run import Group
from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.schedule.build import prove
from penstock.schedule.ir.schedule import Edge
from penstock.schedule.machine.evaluation_without_draining_check import border_fault
from penstock.schedule.orders.stage_graph import over
from support.cases import Case, assert_same, expected, make_batches, make_pipeline, token_loss, train
from support.graph_cases import SHAPES, Join, data, layer, sgd, squares
from support.order_cases import PAIRS, case_of
from support.pool import Pool
from support.schedules import make_schedule
from support.snapshots import Kept

SEVERAL = [
    ("interleaved", 2, 4, ()), ("zb-v", 2, 4, ()), ("chimera", 2, 4, ()), ("chimera", 4, 4, PAIRS),
    ("dualpipe", 2, 4, ()), ("zb-h1", 3, 4, ()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "p", "m", "options"), SEVERAL)
def test_snapshots_and_evaluations_change_nothing(name: str, p: int, m: int, options: Any) -> None:
    """And what is saved on the way is where another run goes on, bit for bit, at another depth and method, too."""
    case = replace(case_of(name, p, m), spans=(5,), model="restless", seed=4, options=options)
    batches, saved = make_batches(case), list[Snapshot]()
    pipeline = make_pipeline(case)
    evaluate = Evaluating(2, lambda: batches[:1])
    for _ in pipeline.run(batches, save=Saving(3, saved.append), evaluate=evaluate):
        pass
    alone = make_pipeline(case)
    for _ in alone.run(batches):
        pass
    for key, value in alone.state_dict().items():
        assert torch.equal(pipeline.state_dict()[key], value), key
    assert len(saved) == len(case.schedule.stages)
    again = make_pipeline(case)
    again.load(Kept(saved))
    for _ in again.run(batches[3:]):
        pass
    for key, value in alone.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    other = make_pipeline(Case("1f1b", 3, m, model="restless", seed=4))
    other.load(Kept(saved))


def test_double_buffers_on_several_nodes_are_drained_for_an_evaluation() -> None:
    """Their stages are updated at different places of a batch, so none has one version at its border."""
    proof = prove("interleaved", 2, 4, rule="double-buffer", order="interleaved")
    assert "updated only after another" in str(border_fault(proof.lowered))
    case = Case("interleaved", 2, 4, spans=(4,))
    pipeline = make_pipeline(case, method=proof)
    batches, found = make_batches(case), []
    for report in pipeline.run(batches, evaluate=Evaluating(2, lambda: batches[:1])):
        found += report.evaluated
    found += pipeline.evaluated()
    assert [evaluation.version for evaluation in found] == [2, 4]


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_weights_that_are_not_put_off_before_and_behind_others(name: str, recompute: Any) -> None:
    """The way back of what is put off does not lead into the graph that has gone."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            x += self.by
            return x

    def blocks() -> list[nn.Module]:
        torch.manual_seed(3)
        parts = [(nn.Linear(8, 8), Shift(), nn.PReLU(), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)]
        return [nn.Sequential(*part) for part in parts]

    g = torch.Generator().manual_seed(1)
    batch = [(torch.randn(5, 8, generator=g), torch.randn(5, 8, generator=g)) for _ in range(4)]
    states = []
    for method in ("1f1b", name):
        schedule = make_schedule(method, 2, 4)
        pipeline = Pipeline(blocks(), schedule, loss=squares, optimizer=sgd, recompute=recompute)
        for _ in pipeline.run([batch] * 3):
            pass
        states.append({key: value.clone() for key, value in pipeline.state_dict().items()})
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-5, atol=1e-6)


def test_weights_that_a_forward_makes_die_with_it() -> None:
    """No collector is needed for them."""
    made: list[weakref.ref[Tensor]] = []

    class Noted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = weight_norm(nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            w = self.map.weight
            made.append(weakref.ref(w))
            return torch.tanh(nn.functional.linear(x, w, self.map.bias))

    batch = [(torch.randn(5, 8), torch.randn(5, 8)) for _ in range(3)]
    pipeline = Pipeline([Noted(), Noted()], make_schedule("zb-h1", 2, 3), loss=squares, optimizer=sgd)
    gc.collect()
    gc.disable()
    try:
        for _ in pipeline.run([batch] * 3):
            pass
        assert len(made) >= 18
        assert not [ref for ref in made if ref() is not None]
    finally:
        gc.enable()


def test_frozen_stages_are_saved_too() -> None:
    schedule = make_schedule(over([(0, 1), (1, 2)], [0]), 3, 2)

    def make() -> Pipeline:
        torch.manual_seed(6)
        front = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False)
        return Pipeline([front, layer(), layer()], schedule, loss=squares, optimizer=sgd, seed=1)

    g = torch.Generator().manual_seed(1)
    batches = [[(torch.randn(4, 6, generator=g), torch.randn(4, 6, generator=g)) for _ in range(2)] for _ in range(6)]
    saved: list[Snapshot] = []
    pipeline = make()
    for _ in pipeline.run(batches, save=Saving(2, saved.append)):
        pass
    assert sorted((s.batch, s.stage) for s in saved) == [(batch, index) for batch in (2, 4, 6) for index in range(3)]
    again = make()
    again.load(Kept([s for s in saved if s.batch == 4]))
    for _ in again.run(batches[4:]):
        pass
    for key, value in pipeline.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


def test_a_frozen_last_stage_and_frozen_joins() -> None:
    """The loss may be behind what is not trained; and nothing is kept for gradients that never come back."""
    torch.manual_seed(6)
    blocks = {"a": layer(), "b": layer(), "judge": layer().requires_grad_(False)}
    order = over([Edge(0, 1), Edge(1, 2, False)], frozen=[2])
    pipeline = Pipeline(blocks, make_schedule(order, 3, 2), loss=squares, optimizer=sgd)
    g = torch.Generator().manual_seed(1)
    batches = [[(torch.randn(4, 6, generator=g), torch.randn(4, 6, generator=g)) for _ in range(2)] for _ in range(2)]
    assert len([report for report in pipeline.run(batches) if report.loss is not None]) == 2
    with pytest.raises(
        ScheduleError, match="no gradient passes the frozen stage 1, so stage 0 before it would get none"
    ):
        make_schedule(over([(0, 1), (1, 2)], frozen=[1]), 3, 2)
    with pytest.raises(ScheduleError, match="more than one edge from stage 0 to stage 1"):
        make_schedule(over([(0, 1), (0, 1)]), 2, 2)
    assert make_schedule(over([]), 2, 2).edges == ()
    torch.manual_seed(6)
    joined = over([(0, 2), (1, 2), (2, 3)], frozen=[0, 1, 2])
    fronts = {name: part.requires_grad_(False) for name, part in {"a": layer(), "b": layer(), "c": Join(2)}.items()}
    towers = Pipeline({**fronts, "d": layer()}, make_schedule(joined, 4, 5), loss=squares, optimizer=sgd)
    pairs = [[((x[0].float(), x[1].float()), y.float()) for x, y in batch] for batch in data(SHAPES["two towers"], 3)]
    executors: list[Any] = []
    setup = towers._spans._setup
    make: Any = setup.trainers
    setup.trainers = lambda: executors.append(make()) or executors[-1]  # type: ignore[method-assign, func-returns-value]
    for _ in towers.run(pairs):
        pass
    assert all(not s.routes._sizes for executor in executors[0] for s in executor._span.stages.values())


def other_data(group: dist.ProcessGroup, rank: int, batches: int) -> str:
    """What is said where a tower sees other samples, or fewer."""
    shape = SHAPES["two towers"]
    pipeline = Pipeline(shape.blocks(), make_schedule(shape.order, 4, 5), loss=squares, optimizer=sgd,
                        group=Group(group, 10.0))  # fmt: skip
    mine = data(shape)
    if dist.get_rank(group) == rank:
        mine = data(shape, 2) if batches else [[((x[0], x[1] + 1), y) for x, y in batch] for batch in mine]
    try:
        for _ in pipeline.run(mine):
            pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("batches", "telling"), [(0, "is not the same sample"), (1, "is the last on one of them only")]
)
def test_towers_that_see_other_data(pool: Pool, batches: int, telling: str) -> None:
    said = pool.submit(partial(other_data, rank=1, batches=batches), ranks=4, fresh=True)
    assert any(text.startswith("DataError") and telling in text for text in said), said
    assert all(said)


def test_slices_need_a_weight() -> None:
    def mean(output: Tensor, target: Tensor) -> Tensor:
        return token_loss(output, target)[0]

    blocks = {"table": nn.Embedding(13, 8), "head": nn.Linear(8, 13)}
    pipeline = Pipeline(blocks, make_schedule("seq1f1b", 2, 1), loss=mean, optimizer=sgd)
    tokens = torch.randint(13, (2, 6))
    with pytest.raises(ConfigError, match=r"with slices of sequences the loss must return \(sum, weight\)"):
        list(pipeline.run([[(tokens, tokens)]]))


def test_buffers_are_those_that_evaluations_read() -> None:
    """Of two directions, the first one's; also in the user's own modules."""
    case = case_of("chimera", 2, 4)
    case = replace(case, model="restless", seed=4)
    pipeline = make_pipeline(case)
    for _ in pipeline.run(make_batches(case)):
        pass
    state = pipeline.state_dict()
    for stage, runtime in pipeline.stages.items():
        if not stage.direction:
            for key, value in runtime.module.tensors.state().items():
                assert torch.equal(state[key], value), key


def test_all_of_them_with_everything_else() -> None:
    for name in ("zb-v", "chimera", "interleaved"):
        case = replace(
            case_of(name, 2, 4), precision="bf16", clip=0.6, recompute="stage", model="mixed", tied=True, width=2
        )
        assert_same(train(None, case), expected(case))
