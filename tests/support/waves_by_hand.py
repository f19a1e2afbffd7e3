"""Wave-synchronous pipelines one after the other: a loop over batches and waves with plain torch optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from support.cases import BALANCE, cut, make_blocks, mean_loss
from support.meetings import State

Weights = dict[str, Tensor]
Reads = Callable[[int, int, int, int], int]
"""(batch, microbatch, stage, batch that the pipeline was last drained before) -> version."""


def reads_of(method: str, depth: int, m: int) -> Reads:
    """From the papers: 1F1B reads the newest weights, 2BW those before, stashing what is there at a forward."""
    if method == "2bw":
        return lambda t, _k, _s, _drained: max(t - 1, 0)
    if method == "stash":
        return lambda t, k, s, drained: max(drained, (t * m + k - (depth - 1 - s)) // m)
    return lambda t, _k, _s, _drained: t


class Waved:
    """All pipelines.

    Args:
        lags: of the updates of each pipeline.
        every: H, batches of a wave.
        share: what updates of others count.
        drains: numbers of batches trained by then.
        model: whose blocks.
        record: lags by pipeline/stage and batch, instead.
    """

    def __init__(
        self,
        lags: Sequence[int],
        every: int,
        share: float,
        drains: Collection[int],
        m: int,
        depth: int,
        factory: Callable[..., torch.optim.Optimizer],
        reads: Reads,
        model: str = "mixed",
        record: Mapping[str, Mapping[int, Sequence[int]]] | None = None,
    ) -> None:
        self.lags, self.every, self.share, self.m, self.reads = lags, every, share, m, reads
        self.drains, self.drained, self.done, self.record = set(drains), 0, 0, record
        self.stages = [dict(part) for part in cut(make_blocks(model), BALANCE[depth])]
        self.names = [
            [f"{n}.{own}" for n, b in part.items() if isinstance(b, nn.Module) for own, _ in b.named_parameters()]
            for part in self.stages
        ]
        initial = {
            f"{n}.{own}": p.detach().clone()
            for part in self.stages
            for n, b in part.items()
            if isinstance(b, nn.Module)
            for own, p in b.named_parameters()
        }
        width = len(lags)
        self.weights = [{name: nn.Parameter(w.clone()) for name, w in initial.items()} for _ in range(width)]
        self.optimizers = [
            [factory([(n, own[n]) for n in names]) for names in self.names if names] for own in self.weights
        ]
        self.versions = [[self._copy(r)] for r in range(width)]
        self.world = {name: w.clone() for name, w in initial.items()}  # W_g
        self.begun = [self._copy(r) for r in range(width)]
        self.updates: list[list[Weights]] = []  # by wave since the last drain, by pipeline
        self.added: list[set[tuple[int, int, str]]] = [set() for _ in range(width)]

    def _copy(self, r: int) -> Weights:
        return {name: p.detach().clone() for name, p in self.weights[r].items()}

    def train(self, batches: Sequence[Any]) -> None:
        for batch in batches:
            t = self.done
            for r in range(len(self.lags)):
                self._update(t, r, batch[r * self.m : (r + 1) * self.m])
            self.done += 1
            drains = self.done in self.drains
            if drains or self.done % self.every == 0:
                self._end_wave(drains)
            for r, versions in enumerate(self.versions):
                versions.append(self._copy(r))
            if drains:
                self.drained = self.done

    def _update(self, t: int, r: int, part: Sequence[tuple[Tensor, Tensor]]) -> None:
        gradients: Weights = {}
        for k, (x, target) in enumerate(part):
            leaves: Weights = {}
            for s, (blocks, names) in enumerate(zip(self.stages, self.names, strict=True)):
                version = self.versions[r][self.reads(t, k, s, self.drained)]
                own = {name: version[name].clone().requires_grad_() for name in names}
                leaves |= own
                for n, block in blocks.items():
                    mine = {key.removeprefix(f"{n}."): w for key, w in own.items() if key.startswith(f"{n}.")}
                    x = functional_call(block, mine, (x,)) if mine else block(x)
            found = torch.autograd.grad(mean_loss(x, target) / self.m, list(leaves.values()))
            for name, g in zip(leaves, found, strict=True):
                gradients[name] = gradients[name] + g if name in gradients else g
        for name, p in self.weights[r].items():
            p.grad = gradients[name]
        for optimizer in self.optimizers[r]:
            optimizer.step()

    @torch.no_grad()
    def _end_wave(self, drains: bool) -> None:
        width, c = len(self.lags), len(self.updates)
        self.updates.append([{n: p - self.begun[r][n] for n, p in self.weights[r].items()} for r in range(width)])
        for r in range(width):
            for s, names in enumerate(self.names):
                lags = self.lags if self.record is None or drains else self.record[f"{r}/{s}"][self.done - 1]
                for wave, q, n in product(range(c + 1), range(width), names):
                    visible = q != r and (drains or wave <= c - lags[q])
                    if visible and (wave, q, n) not in self.added[r]:
                        self.added[r].add((wave, q, n))
                        p = self.weights[r][n]
                        p.copy_(torch.add(p, self.updates[wave][q][n], alpha=self.share))
        if drains:
            for wave in self.updates:
                for changed in wave:
                    self.world = {n: w + changed[n] for n, w in self.world.items()}
            self.updates.clear()
            for r in range(width):
                self.added[r].clear()
                if self.share == 1:
                    for n, p in self.weights[r].items():
                        p.copy_(self.world[n])
        self.begun = [self._copy(r) for r in range(width)]

    def states(self) -> Mapping[int, State]:
        found = {}
        for r, own in enumerate(self.weights):
            state = found[r] = State(self._copy(r), model=self.world)
            for optimizer in self.optimizers[r]:
                for group in optimizer.param_groups:
                    for name, p in zip(group["param_names"], group["params"], strict=True):
                        state.optimizer[name] = copy.deepcopy(dict(optimizer.state.get(p, {})))
            assert state.optimizer.keys() == own.keys()
        return found
