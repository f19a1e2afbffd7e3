"""Runs with chosen delays, and their sequential form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.runtime.rank.snapshot import Saving, Snapshot
from support.cases import (
    BALANCE,
    LOSSES,
    OPTIMIZERS,
    Case,
    Outcome,
    Recording,
    assert_equal_tensors,
    cut,
    finish,
    make_batches,
    make_blocks,
    make_pipeline,
    parts_of,
)
from support.snapshots import Kept

VARIED = {"table": 5, "first": 0, "norm": 2, "second": 2, "head": 1}  # of the blocks of `mixed`; "tanh" has no weights


UPDATES = 22


def long_case(method: str = "1f1b", depth: int = 2, m: int = 2, **changes: Any) -> Case:
    return Case(method, depth, m, **({"spans": (UPDATES,), "skips": (), "rate": False} | changes))


@dataclass
class Sequential:
    """What delayed training says, batch by batch, written without the library."""

    history: list[dict[str, Tensor]]
    losses: list[float] = field(default_factory=list)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)


def sequential(
    case: Case,
    delays: dict[str, int],
    clip: float | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    backward: dict[str, int] | None = None,
) -> Sequential:
    """One microbatch after the other, through one model whose weights are set before each forward and each backward.

    What autograd keeps of weights is their memory, so a formula finds in it what was written there last.
    """
    (blocks,) = cut(make_blocks(case.model), BALANCE[1])
    modules = {name: block for name, block in blocks.items() if isinstance(block, nn.Module)}
    read = {f"{name}.{key}": p for name, module in modules.items() for key, p in module.named_parameters()}
    behind = {name: delays.get(name.split(".")[0], 0) for name in read}
    late = {name: (delays if backward is None else backward).get(name.split(".")[0], 0) for name in read}
    mine = {name: nn.Parameter(p.detach().clone()) for name, p in read.items()}
    optimizer = OPTIMIZERS[case.optimizer](list(mine.items()))
    for module in modules.values():
        module.to(dtype)
    result = Sequential([{name: p.detach().clone() for name, p in mine.items()}])
    constant = 7.0 if dtype == torch.float32 else 8.0

    def turn_to(t: int, by: dict[str, int]) -> None:
        with torch.no_grad():
            for name, p in read.items():
                p.copy_(result.history[max(t - by[name], 0)][name])

    for t, batch in enumerate(make_batches(case)):
        total = weight = 0.0
        sums: list[dict[str, Tensor]] = []
        for part in parts_of(case):
            sums.append({})
            for tokens, targets in (batch[k] for k in part):
                value: Any = tokens
                turn_to(t, behind)
                with saved_tensors_hooks(lambda x: x.detach(), lambda x: x):  # autograd would refuse what it sees
                    for block in blocks.values():
                        value = block(value)
                loss, count = LOSSES[case.loss](value, targets)
                total, weight = total + float(loss.detach()), weight + count
                turn_to(t, late)
                loss.backward(torch.ones_like(loss) / constant * scale)
                for name, p in read.items():
                    assert p.grad is not None
                    found = p.grad.float()
                    sums[-1][name] = sums[-1][name] + found if name in sums[-1] else found
                    p.grad = None
        for name, p in mine.items():
            p.grad = sum((part[name] for part in sums[1:]), sums[0][name]) * (constant / weight / scale)
        if clip is not None:
            nn.utils.clip_grad_norm_(mine.values(), clip)
        optimizer.step()
        result.history.append({name: p.detach().clone() for name, p in mine.items()})
        result.losses.append(total / weight)
    result.state = {name: optimizer.state[p] for name, p in mine.items()}
    return result


def assert_trained(found: Outcome, wanted: Sequential) -> None:
    """To the bit."""
    losses = [loss for _, loss, _ in found.reports]
    assert losses == wanted.losses[-len(losses) :] != []
    assert_equal_tensors({name: found.weights[name] for name in wanted.history[-1]}, wanted.history[-1], "weights")
    for name, state in wanted.state.items():
        assert_equal_tensors(found.state[name], state, f"optimizer state of {name}")


def snapshots(case: Case, batch: int, delays: Any, **changes: Any) -> Kept:
    found: list[Snapshot] = []
    pipeline = make_pipeline(case, delays=delays, **changes)
    list(pipeline.run(make_batches(case), save=Saving(batch, found.append)))
    return Kept([snapshot for snapshot in found if snapshot.batch == batch])


def go_on(case: Case, kept: Any, delays: Any, **changes: Any) -> Outcome:
    recording = Recording(OPTIMIZERS[case.optimizer])
    blocks = make_blocks(case.model, seed=99)
    pipeline = make_pipeline(case, optimizer=recording, blocks=blocks, delays=delays, **changes)
    pipeline.load(kept)
    outcome = Outcome()
    for r in pipeline.run(make_batches(case)[pipeline.batches :]):
        outcome.reports.append((r.batch, r.loss, r.weight))
    return finish(outcome, pipeline, recording)
