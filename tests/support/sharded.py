"""Runs whose state is sharded over parallel pipelines, put together to be compared with runs that hold all of it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.comm.collective.shard_exchange import LocalShards
from penstock.comm.core.ticket import Ticket
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.update.update_step import Updates
from penstock.schedule.ir.schedule import Stage
from penstock.stage.trained_stage_weights import TrainedWeights
from support.cases import (
    OPTIMIZERS,
    Case,
    Outcome,
    assert_equal_tensors,
    make_pipeline,
    run_spans,
)

Parts = dict[str, list[tuple[int, dict[str, Any]]]]
"""Of each parameter, the optimizer's state at the holders that have some, with the number of the copy of the stage."""


class Scaled(nn.Module):
    """Parameters of which some pipelines have no row: one without dimensions, one of two rows, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.two = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(2, 8))
        self.fixed = nn.Parameter(torch.randn(8), requires_grad=False)

    def forward(self, x: Any) -> Any:
        return self.scale * x + self.two.sum(0) + self.fixed


def parts_of_state(pipeline: Pipeline) -> Parts:
    """The optimizers' state in this process."""
    found: Parts = {}
    for rank in pipeline._ranks:
        for stage in rank.stages.values():
            weights = stage.weights
            if not isinstance(weights, TrainedWeights) or weights.updater.optimizer is None:
                continue
            for name in weights.updater.own:
                parameter = weights.updater.parameters[name]
                state = weights.updater.optimizer.state.get(parameter, {})
                found.setdefault(name, []).append((stage.place, dict(state)))
    return found


def joined(parts: Sequence[Parts]) -> dict[str, dict[str, Any]]:
    """The state of whole parameters, from that of all processes; numbers that are not divided are the same in all."""
    by_name: Parts = {}
    for part in parts:
        for name, states in part.items():
            by_name.setdefault(name, []).extend(states)
    whole: dict[str, dict[str, Any]] = {}
    for name, states in by_name.items():
        rows = [state for _, state in sorted(states, key=lambda each: each[0])]
        whole[name] = {kind: _join([state[kind] for state in rows]) for kind in rows[0]}
    return whole


def _join(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Tensor) and values[0].dim():
        return torch.cat(list(values))
    for other in values[1:]:
        if not (isinstance(other, Tensor) and other.dim()):  # a shard without a number of one that has no dimensions
            assert other == values[0]
    return values[0]


def train_sharded(
    group: dist.ProcessGroup | None, case: Case, level: str, **changes: Any
) -> tuple[Outcome, Parts, dict[int, dict[str, int]]]:
    """Run a case; what one process knows, and the bytes that its ranks hold at the end."""
    pipeline = make_pipeline(case, group, optimizer=OPTIMIZERS[case.optimizer], sharding=level, **changes)
    outcome = run_spans(pipeline, case)
    outcome.weights = {name: w.clone() for name, w in pipeline.state_dict().items()}
    return outcome, parts_of_state(pipeline), pipeline.live_bytes()


def assert_as_whole(outcome: Outcome, parts: Sequence[Parts], wanted: Outcome) -> None:
    """Decisions (with losses and norms), weights and the optimizers' state are those of a run without sharding."""
    assert repr(outcome.decided) == repr(wanted.decided)
    assert_equal_tensors({name: outcome.weights[name] for name in wanted.weights}, wanted.weights, "final weights")
    state = joined(parts)
    assert state.keys() == wanted.state.keys()
    for name, found in wanted.state.items():
        assert_equal_tensors(state[name], found, f"optimizer state of {name}")


def with_late_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank joins a sum when it comes to the next one, or to the updates, so that sums go on while passes run."""
    scatter, wait = LocalShards.scatter, Updates.wait
    late: dict[tuple[int, int], Any] = {}

    def join(pipeline: int, rank: int) -> None:
        late.pop((pipeline, rank), lambda: None)()

    def joins_later(self: LocalShards, members: Any, me: Any, batch: int, shards: Any) -> Ticket:
        join(me.pipeline, me.stage.rank)
        ticket = Ticket("a sum")

        def later() -> None:
            real = scatter(self, members, me, batch, shards)
            real.then(lambda: ticket.complete(error=real.error))

        late[me.pipeline, me.stage.rank] = later
        return ticket

    def waits(self: Updates, stage: Stage, *rest: Any) -> Any:
        join(self._pipeline, stage.rank)
        return wait(self, stage, *rest)

    monkeypatch.setattr(LocalShards, "scatter", joins_later)
    monkeypatch.setattr(Updates, "wait", waits)


def storages_of(nbytes: int) -> int:
    """Count the storages of this size among all tensors that Python knows of."""
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) is Tensor or type(each) is nn.Parameter:
            storage = each.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(size == nbytes for size in found.values())
