"""A player of the equations of PipeMare's recompute variant, which knows neither schedules nor the runtime.

A stage s of d runs, in slot k: F(k); R(k - (d-1-s) + n), where n stages of its segment follow; B(k - (d-1-s)); and an
update when a batch is complete. Each reads what is newest then, or w - (updates since the forward) delta.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from support.cases import (
    LENGTH,
    OPTIMIZERS,
    VOCABULARY,
    WIDTH,
    Case,
    Outcome,
    add_state,
    make_batches,
    token_loss,
)
from support.own_methods import correction_of

K, D, C = 4, 0.135, 7.0
Blocks = dict[str, Any]


def elementary() -> Blocks:
    """16 blocks whose gradients keep only their input, so that the gradient at any weights is known from that."""
    maps: Blocks = {}
    for i in range(6):
        maps |= {f"map{i}": nn.Linear(WIDTH, WIDTH), f"tanh{i}": torch.tanh}
    begin = {"table": nn.Embedding(VOCABULARY, WIDTH), "begin": nn.LayerNorm(WIDTH)}
    return {**begin, **maps, "end": nn.LayerNorm(WIDTH), "head": nn.Linear(WIDTH, VOCABULARY)}


class Twice(nn.Module):
    """A block that keeps more than its input: what comes between two maps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(torch.tanh(self.first(x)))
        return y


def composed() -> Blocks:
    middle = {f"twice{i}": Twice() for i in range(14)}
    return {"table": nn.Embedding(VOCABULARY, WIDTH), **middle, "head": nn.Linear(WIDTH, VOCABULARY)}


def made(model: str) -> Blocks:
    torch.manual_seed(5)
    return {"elementary": elementary, "composed": composed}[model]()


# --- the equations --------------------------------------------------------------------------------------------------


@dataclass
class Microbatch:
    """Of a stage."""

    version: int
    inputs: list[Any]  # of the blocks, as a backward sees them
    batch: int


@dataclass
class Stage:
    """One stage; `lag` is d-1-s, `follow` how many stages of its segment follow, None without recompute in actions."""

    blocks: Blocks
    lag: int
    follow: int | None
    first: bool  # of its segment
    m: int
    optimizer_name: str
    low: torch.dtype | None
    weights: dict[str, nn.Parameter] = field(init=False)
    delta: dict[str, Tensor] = field(init=False)
    version: int = 0
    updates: int = 0
    flights: dict[int, Microbatch] = field(default_factory=dict)
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = {
            f"{block}.{name}": nn.Parameter(w.detach().clone())
            for block, module in self.blocks.items()
            if isinstance(module, nn.Module)
            for name, w in module.named_parameters()
        }
        self.delta = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.optimizer = OPTIMIZERS[self.optimizer_name](list(self.weights.items()))
        self.rate = self.optimizer.param_groups[0]["lr"]
        self.tau = self.lag / self.m

    def estimate(self, updates: int) -> dict[str, Tensor]:
        """What was read so many updates ago, as is thought now."""
        if not updates:
            return {name: w.detach().to(self.low) for name, w in self.weights.items()}
        return {name: (w.detach() - updates * self.delta[name]).to(self.low) for name, w in self.weights.items()}

    def apply(self, name: str, x: Any, weights: Mapping[str, Tensor]) -> Any:
        block = self.blocks[name]
        if not isinstance(block, nn.Module):
            return block(x)
        own = {key.removeprefix(f"{name}."): w for key, w in weights.items() if key.startswith(f"{name}.")}
        return functional_call(block, own, (x,))

    def run(self, x: Any, weights: Mapping[str, Tensor]) -> tuple[list[Any], Any]:
        inputs = []
        with torch.no_grad():
            for name in self.blocks:
                inputs.append(x)
                x = self.apply(name, x, weights)
        return inputs, x

    def forward(self, k: int, batch: int, x: Any) -> Any:
        inputs, y = self.run(x, self.estimate(0))
        self.flights[k] = Microbatch(self.version, inputs, batch)
        return y

    def recompute(self, k: int, x: Any) -> Any:
        """From the input that was kept, or what has come again."""
        flight = self.flights[k]
        flight.inputs, y = self.run(flight.inputs[0] if self.first else x, self.estimate(self.version - flight.version))
        return y

    def backward(self, k: int, gradient: Any) -> Any:
        """`gradient`: of the output, or what makes a loss of it."""
        flight = self.flights.pop(k)
        weights = self.estimate(self.version - flight.version)
        total = self.gradients.setdefault(flight.batch, {})
        for name, x in reversed(list(zip(self.blocks, flight.inputs, strict=True))):
            leaves = {key: w.requires_grad_() for key, w in weights.items() if key.startswith(f"{name}.")}
            x = x.detach().requires_grad_(x.is_floating_point())
            y = self.apply(name, x, leaves)
            seed = None if callable(gradient) else gradient
            wanted = [*([x] if x.requires_grad else []), *leaves.values()]
            found = list(torch.autograd.grad(gradient(y) if callable(gradient) else y, wanted, seed))
            gradient = found.pop(0) if x.requires_grad else None
            for key, g in zip(leaves, found, strict=True):
                total[key] = total[key] + g if key in total else g.float()
        return gradient

    def step(self, batch: int, weight: float, c: float) -> dict[str, Tensor]:
        """The update of a batch, and T2's mean; what the optimizer was handed."""
        self.version += 1
        gradients = self.gradients.pop(batch)
        if not weight:
            return {}
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * max(self.tau, 1.0) ** -(1.0 - min(self.updates / K, 1.0))
        before = {name: w.detach().clone() for name, w in self.weights.items()}
        for name, w in self.weights.items():
            w.grad = gradients[name] * (c / weight)
        handed = {name: g.clone() for name, w in self.weights.items() if (g := w.grad) is not None}
        self.optimizer.step()
        self.updates += 1
        if self.tau:
            gamma = D ** (1 / self.tau)
            for name, w in self.weights.items():
                self.delta[name] = gamma * self.delta[name] + (1 - gamma) * (w.detach() - before[name])
        return handed

    def events(self, batches: int) -> Iterator[tuple[str, int]]:
        """What it does in a span."""
        count = batches * self.m
        for slot in range(count + self.lag):
            k = slot - self.lag
            if slot < count:
                yield "F", slot
            if self.follow is not None and 0 <= k + self.follow < count:
                yield "R", k + self.follow
            if k >= 0:
                yield "B", k
                if (k + 1) % self.m == 0:
                    yield "STEP", k // self.m


def segments_of(depth: int, length: int) -> list[tuple[int, bool]]:
    """Per stage that recomputes, how many of its segment follow, and whether it is the first; not the last stage."""
    groups = [range(a, min(a + length, depth - 1)) for a in range(0, depth - 1, length)]
    return [(group[-1] - s, s == group[0]) for group in groups for s in group]


class Player:
    """All stages; an event runs as soon as what it needs is there."""

    def __init__(self, case: Case, model: str, segments: int | None) -> None:
        blocks = list(made(model).items())
        size = len(blocks) // case.depth
        again = [(n, first) for n, first in segments_of(case.depth, segments)] if segments else []
        low = torch.bfloat16 if case.precision == "bf16" else None
        self.c = 8.0 if low else C
        self.stages = [
            Stage(
                dict(blocks[s * size : (s + 1) * size]),
                case.depth - 1 - s,
                *(again[s] if s < len(again) else (None, True)),
                case.m,
                case.optimizer,
                low,
            )
            for s in range(case.depth)
        ]
        self.outcome, self.done = Outcome(), 0

    def span(self, batches: list[list[tuple[Tensor, Tensor]]]) -> None:
        there: dict[tuple[str, int, int], Any] = {}
        samples = [sample for batch in batches for sample in batch]
        weights = [sum(token_loss(torch.zeros(2, LENGTH, VOCABULARY), y)[1] for _, y in batch) for batch in batches]
        sums = [0.0] * len(batches)
        handed: list[dict[str, Tensor]] = [{} for _ in batches]
        waiting = [list(stage.events(len(batches)))[::-1] for stage in self.stages]
        while any(waiting):
            before = sum(map(len, waiting))
            for s, stage in enumerate(self.stages):
                while waiting[s]:
                    what, k = waiting[s][-1]
                    batch = k if what == "STEP" else k // stage.m
                    if what == "F" and (s == 0 or ("F", s - 1, k) in there):
                        x = samples[k][0] if s == 0 else there["F", s - 1, k]
                        y = there["F", s, k] = stage.forward(k, batch, x)
                        if s == len(self.stages) - 1:
                            sums[batch] += float(token_loss(y, samples[k][1])[0])
                    elif what == "R" and (stage.first or ("R", s - 1, k) in there):
                        there["R", s, k] = stage.recompute(k, there.get(("R", s - 1, k)))
                    elif what == "B" and s == len(self.stages) - 1:
                        target = samples[k][1]
                        there["B", s, k] = stage.backward(k, lambda y, t=target: token_loss(y, t)[0] / self.c)
                    elif what == "B" and ("B", s + 1, k) in there:
                        there["B", s, k] = stage.backward(k, there["B", s + 1, k])
                    elif what == "STEP":
                        handed[batch] |= stage.step(batch, weights[batch], self.c)
                    else:
                        break
                    waiting[s].pop()
            assert sum(map(len, waiting)) < before, "they would wait for ever"
        for total, weight in zip(sums, weights, strict=True):
            self.outcome.reports.append((self.done, total / weight if weight else None, weight))
            self.done += 1
        self.outcome.gradients += [gradients for gradients in handed if gradients]

    def finish(self) -> Outcome:
        for stage in self.stages:
            self.outcome.weights |= {name: w.detach() for name, w in stage.weights.items()}
            add_state(self.outcome, stage.optimizer.state_dict())
        return self.outcome


def played(case: Case, model: str, segments: int | None) -> Player:
    """`segments`: None where nothing is run again, or block by block, whose inputs are those of the forward."""
    player, batches = Player(case, model, segments), make_batches(case)
    for length in case.spans:
        player.span(batches[player.done : player.done + length])
    player.finish()
    return player


# --- the same numbers -----------------------------------------------------------------------------------------------


def case_of(depth: int, m: int, **changes: Any) -> Case:
    """21 updates in two spans, one of them skipped."""
    correction = correction_of("pipemare", reschedule=K)
    case = Case("pipemare", depth, m, spans=(13, 9), rate=False, correction=correction)
    return replace(case, **changes)


def changes_of(case: Case, model: str, segments: int | str = 1) -> dict[str, Any]:
    return {"blocks": made(model), "balance": (16 // case.depth,) * case.depth, "segments": segments}
