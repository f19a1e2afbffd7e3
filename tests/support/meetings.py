"""Parallel pipelines that meet now and then, one after the other, written from the equations alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from penstock.runtime.pipeline import Pipeline
from penstock.schedule.methods.data_parallel_sync import Combine
from support.cases import BALANCE, VOCABULARY, cut, make_blocks

LENGTH = 4
Batch = list[tuple[Tensor, Tensor]]


def precise_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """Sum over the tokens that count, and their number, in the precision of the model."""
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=-100)
    return total, float((targets != -100).sum())


def precise_blocks(model: str = "mixed", seed: int = 5) -> dict[str, Any]:
    blocks = make_blocks(model, seed=seed)
    return {name: block.double() if isinstance(block, nn.Module) else block for name, block in blocks.items()}


def even_batches(count: int, microbatches: int) -> list[Batch]:
    """Every token counts."""
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (count, microbatches, 2, LENGTH + 1), generator=g)
    return [[(t[:, :-1].clone(), t[:, 1:].clone()) for t in batch] for batch in tokens]


def uneven_batches(count: int, m: int, width: int, nothing: Sequence[tuple[int, int]] = ()) -> list[Batch]:
    """Some tokens count, and none of the (batch, pipeline) in `nothing`."""
    g, batches = torch.Generator().manual_seed(4), even_batches(count, m * width)
    for t, batch in enumerate(batches):
        for k, (_, targets) in enumerate(batch):
            ignored = torch.rand(targets.shape, generator=g) < 0.4
            targets[... if (t, k // m) in nothing else ignored] = -100
    return batches


@dataclass
class State:
    """What there is of one pipeline: weights, optimizers' state by parameter, what pipelines share, the loss scale."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)
    model: dict[str, Tensor] = field(default_factory=dict)
    motion: dict[str, Tensor] = field(default_factory=dict)
    scale: float = 1.0


def states_of(pipeline: Pipeline) -> dict[int, State]:
    """Of every pipeline that this process has a part of."""
    found: dict[int, State] = {}
    for rank in pipeline._ranks:
        state = found.setdefault(rank.key.pipeline, State())
        state.scale = rank.decisions.scaler.scale
        for stage in rank.stages.values():
            weights = stage.weights
            if weights.agreement is None:
                continue
            state.weights |= weights.store.newest_copies()
            assert weights.updater.optimizer is not None
            for name, parameter in weights.updater.parameters.items():
                state.optimizer[name] = copy.deepcopy(dict(weights.updater.optimizer.state.get(parameter, {})))
            for place, buffer in ((state.model, weights.agreement.model), (state.motion, weights.agreement.motion)):
                place |= {} if buffer is None else {name: view.clone() for name, view in buffer.views.items()}
    return found


class _Stage:
    def __init__(self, blocks: Mapping[str, Any], factory: Callable[..., torch.optim.Optimizer]) -> None:
        self.blocks = copy.deepcopy(dict(blocks))
        modules = {name: block for name, block in self.blocks.items() if isinstance(block, nn.Module)}
        self.parameters = {f"{name}.{own}": p for name, block in modules.items() for own, p in block.named_parameters()}
        self.optimizer = factory(list(self.parameters.items())) if self.parameters else None
        self.versions = [self.copies()]

    def copies(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def run(self, x: Any, weights: Mapping[str, Tensor]) -> Any:
        for name, block in self.blocks.items():
            own = {key.removeprefix(f"{name}."): w for key, w in weights.items() if key.startswith(f"{name}.")}
            x = functional_call(block, own, (x,)) if own else block(x)
        return x


class Reference:
    """All pipelines, by their equations.

    Args:
        reads: (batch, microbatch, stage) -> version.
        clip: largest norm of a pipeline's gradient of its own mean loss.
    """

    def __init__(
        self,
        combine: Combine,
        width: int,
        m: int,
        depth: int,
        factory: Callable[..., torch.optim.Optimizer],
        reads: Callable[[int, int, int], int],
        clip: float | None,
        model: str = "mixed",
    ) -> None:
        self.combine, self.width, self.m, self.reads, self.clip = combine, width, m, reads, clip
        parts = cut(precise_blocks(model), BALANCE[depth])
        self.pipelines = [[_Stage(part, factory) for part in parts] for _ in range(width)]
        initial = {name: w for stage in self.pipelines[0] for name, w in stage.copies().items()}
        self.model, self.motion = initial, {name: torch.zeros_like(w) for name, w in initial.items()}
        self.begun = dict(initial)

    def train(self, t: int, batch: Batch) -> None:
        for r, stages in enumerate(self.pipelines):
            self._update(t, stages, batch[r * self.m : (r + 1) * self.m])
        if (t + 1) % self.combine.every == 0:
            self._meet()
        for stages in self.pipelines:
            for stage in stages:
                stage.versions.append(stage.copies())

    def _update(self, t: int, stages: list[_Stage], part: Batch) -> None:
        gradients = {name: torch.zeros_like(p) for stage in stages for name, p in stage.parameters.items()}
        weight = 0.0
        for k, (x, target) in enumerate(part):
            leaves = {}
            for s, stage in enumerate(stages):
                own = {n: w.clone().requires_grad_() for n, w in stage.versions[self.reads(t, k, s)].items()}
                leaves |= own
                x = stage.run(x, own)
            total, count = precise_loss(x, target)
            weight += count
            for name, g in zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True):
                gradients[name] += g
        if not weight:
            return
        for stage in stages:
            for name, p in stage.parameters.items():
                p.grad = gradients[name] / weight
        if self.clip is not None:
            nn.utils.clip_grad_norm_([p for stage in stages for p in stage.parameters.values()], self.clip)
        for stage in stages:
            if stage.optimizer is not None:
                stage.optimizer.step()

    @torch.no_grad()
    def _meet(self) -> None:
        c, w = self.combine, self.width
        for s, stage in enumerate(self.pipelines[0]):
            for name in stage.parameters:
                own = [pipeline[s].parameters[name] for pipeline in self.pipelines]
                mean = sum(p.clone() for p in own) / w
                if c.kind == "average":
                    new = [mean] * w
                elif c.kind == "bmuf":
                    eta = 1 - 1 / w if c.momentum is None else c.momentum
                    gained = self.begun[name] - mean
                    self.motion[name] = eta * self.motion[name] + c.step * gained
                    self.model[name] = self.model[name] - self.motion[name]
                    self.begun[name] = self.model[name] - (eta * self.motion[name] if c.nesterov else 0.0)
                    new = [self.begun[name]] * w
                else:
                    alpha = 0.9 / w if c.pull is None else c.pull
                    z = self.model[name]
                    new = [p - alpha * (p - z) for p in own]
                    self.model[name] = (1 - w * alpha) * z + w * alpha * mean
                for p, value in zip(own, new, strict=True):
                    p.copy_(value)
                self._states(s, name)

    def _states(self, s: int, name: str) -> None:
        optimizers = [stages[s].optimizer for stages in self.pipelines]
        found = [o.state[stages[s].parameters[name]] for o, stages in zip(optimizers, self.pipelines, strict=True) if o]
        if self.combine.optimizer_state == "reset":
            for state in found:
                state.clear()
        elif self.combine.optimizer_state == "average" and all(found):
            for key, value in found[0].items():
                if isinstance(value, Tensor) and value.shape == self.pipelines[0][s].parameters[name].shape:
                    mean = sum(state[key].clone() for state in found) / self.width
                    for state in found:
                        state[key].copy_(mean)

    def states(self) -> dict[int, State]:
        found = {}
        for r, stages in enumerate(self.pipelines):
            state = found[r] = State()
            for stage in stages:
                state.weights |= stage.copies()
                for name, p in stage.parameters.items():
                    assert stage.optimizer is not None
                    state.optimizer[name] = dict(stage.optimizer.state.get(p, {}))
            state.model = self.model if self.combine.kind != "average" else {}
            state.motion = self.motion if self.combine.kind == "bmuf" else {}
        return found


def assert_close(found: Mapping[int, State], wanted: Mapping[int, State], tolerance: float) -> None:
    """Every number of every pipeline; with a tolerance of zero, every bit."""
    assert found.keys() == wanted.keys()
    for r, state in wanted.items():
        assert found[r].scale == state.scale
        for what in ("weights", "model", "motion"):
            _same(getattr(found[r], what), getattr(state, what), tolerance, f"{what} of pipeline {r}")
        assert found[r].optimizer.keys() == state.optimizer.keys()
        for name, own in state.optimizer.items():
            _same(found[r].optimizer[name], own, tolerance, f"optimizer of pipeline {r}, {name}")


def _same(found: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float, what: str) -> None:
    assert found.keys() == wanted.keys(), what
    for name, value in wanted.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(
                found[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{what}, {n}: {text}"
            )
        else:
            assert found[name] == value, f"{what}, {name}"
