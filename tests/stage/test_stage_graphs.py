"""Stages that do not form a chain: joins, branches, skips, several entrances and ends, frozen parts, local losses."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ConfigError, DataError
from penstock.options.run import Group
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.build import prove
from penstock.schedule.orders.stage_graph import over
from penstock.schedule.text_parser import parse_schedule
from support.graph_cases import SHAPES, M, Shape, data, layer, sgd, squares
from support.pool import Pool
from support.schedules import make_schedule


def losses_of(shape: Shape) -> dict[int, Any]:
    return {shape.num_stages - 1: squares, **shape.losses}


def plain(shape: Shape) -> tuple[dict[str, Tensor], list[float]]:
    """As everybody writes it."""
    blocks, reported = shape.blocks(), []
    optimizer = sgd([p for block in blocks.values() for p in block.parameters() if p.requires_grad])
    for batch in data(shape):
        total = torch.zeros((), dtype=torch.float64)
        last, weight = 0.0, 0.0
        for given, target in batch:
            made: dict[int, Tensor] = {}
            for index in range(shape.num_stages):
                incoming = [e for e in shape.joined if e.target == index]
                parts = tuple(made[e.source] if e.backward else made[e.source].detach() for e in incoming)
                if not parts:
                    parts = (given[shape.entrances.index(index)] if isinstance(given, tuple) else given,)
                made[index] = blocks[f"c{index}"](parts if len(parts) > 1 else parts[0])
            for index, loss in losses_of(shape).items():
                sum_, n = loss(made[index], target)
                total = total + sum_
                if index == shape.num_stages - 1:
                    last, weight = last + float(sum_.detach()), weight + n
        (total / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        reported.append(last / weight)
    state = {f"{name}.{key}": value for name, block in blocks.items() for key, value in block.state_dict().items()}
    return state, reported


def trained(group: dist.ProcessGroup | None, name: str, **more: Any) -> tuple[dict[str, Tensor], list[float]]:
    shape = SHAPES[name]
    schedule = make_schedule(shape.order, shape.num_stages, M)
    pipeline = Pipeline(
        shape.blocks(), schedule, loss=losses_of(shape), optimizer=sgd, group=Group(group, 20.0), **more
    )
    losses = [report.loss for report in pipeline.run(data(shape)) if report.loss is not None]
    for stage in pipeline.stages.values():
        assert not stage.passes.flights
    assert all(live.get("activations", 0) == 0 for live in pipeline.live_bytes().values())
    return {key: value.clone() for key, value in pipeline.state_dict().items()}, losses


def assert_close(found: tuple[dict[str, Tensor], list[float]], name: str) -> None:
    state, losses = plain(SHAPES[name])
    assert found[0].keys() == state.keys()
    for key, value in state.items():
        torch.testing.assert_close(found[0][key], value, rtol=1e-11, atol=1e-13)
    assert found[1] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("recompute", ["none", "block", "stage"])
def test_stage_graphs_in_one_process(name: str, recompute: Any) -> None:
    assert_close(trained(None, name, recompute=recompute), name)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name for name, shape in SHAPES.items() if shape.num_stages <= 4]
)  # processes of the pool
def test_stage_graphs_on_ranks(pool: Pool, name: str) -> None:
    shape = SHAPES[name]
    parts = pool.submit(partial(trained, max_grad_norm=50.0), name, ranks=shape.num_stages)
    together = {key: value for state, _ in parts for key, value in state.items()}
    assert_close((together, parts[-1][1]), name)
    alone, losses = trained(None, name, max_grad_norm=50.0)
    assert losses == parts[-1][1]
    assert all(torch.equal(together[key], value) for key, value in alone.items())


@pytest.mark.parametrize("name", ["two towers", "skip", "encoder and decoder", "a frozen front", "local losses"])
def test_backwards_in_two_halves(name: str) -> None:
    """All W of a rank come last, so that every one waits."""
    shape = SHAPES[name]
    lines = str(make_schedule(shape.order, shape.num_stages, M)).splitlines()
    for place, line in enumerate(lines):
        if line.startswith("rank") and "B0" in line:
            row, step = re.sub(r"\bB", "I", line).split(" STEP")
            late = " ".join(f"W{k}^t" for k in range(M))
            lines[place] = f"{row} {late} STEP{step}"
    schedule = parse_schedule("\n".join(lines))
    pipeline = Pipeline(shape.blocks(), schedule, loss=losses_of(shape), optimizer=sgd)
    losses = [report.loss for report in pipeline.run(data(shape)) if report.loss is not None]
    assert_close((pipeline.state_dict(), losses), name)


def test_evaluation_goes_through_the_graph() -> None:
    shape = SHAPES["encoder and decoder"]
    pipeline = Pipeline(shape.blocks(), make_schedule(shape.order, shape.num_stages, M), loss=squares, optimizer=sgd)
    found = pipeline.evaluate(data(shape, 1))
    assert found is not None
    assert found[0] == pytest.approx(plain(shape)[1][0], rel=1e-12)


def test_the_pipeline_is_as_deep_as_the_graph() -> None:
    """Branches run side by side: a stage has as many microbatches under way as the longest way on is long."""
    for name, wanted in (("branches", [3, 2, 2, 1]), ("two towers", [3, 3, 2, 1]), ("skip", [4, 3, 2, 1])):
        proof = prove(SHAPES[name].order, 4, 8)
        assert [int(held) for held in proof.activations] == wanted


def test_what_does_not_fit_a_stage_graph() -> None:
    towers = SHAPES["two towers"]
    pipeline = Pipeline(towers.blocks(), make_schedule(towers.order, 4, M), loss=squares, optimizer=sgd)
    with pytest.raises(DataError, match=r"data enters at stages 0, 1, .* a part for each of them, got Tensor"):
        list(pipeline.run(data(SHAPES["skip"])))
    heads = SHAPES["two heads"]
    with pytest.raises(ConfigError, match=r"stage 1 has a loss of its own, but the dict has one only for \[2\]"):
        Pipeline(heads.blocks(), make_schedule(heads.order, 3, M), loss={2: squares}, optimizer=sgd)
    with pytest.raises(ConfigError, match=r"stage 0 on rank 0 is frozen in the schedule, but c0\.0\.weight wants"):
        Pipeline(SHAPES["skip"].blocks() | {"c0": layer()}, make_schedule(over([(0, 1), (1, 2), (2, 3)], [0]), 4, M),
                 loss=squares, optimizer=sgd)  # fmt: skip
