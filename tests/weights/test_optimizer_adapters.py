"""`ByParameter` gives an optimizer what it has when it steps all parameters at once, or refuses it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import penstock
from penstock.errors import CapabilityError
from penstock.weights.optim.optimizer_adapters import ByParameter
from penstock.weights.optim.optimizer_state import copy_state, restore_state

SHAPES = ((6, 5), (6,), (4, 12), (), (3, 0), (9, 9))


class Awkward(Optimizer):
    """Stands for optimizers of other libraries."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {"lr": 0.1} | settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> float | None:  # type: ignore[override]
        self.begin()
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.sub_(self.change(p, p.grad, group, i), alpha=group.get("lr", 0.1))
        return None

    def begin(self) -> None:
        """Begin an update."""

    def change(self, p: Tensor, g: Tensor, group: dict[str, Any], i: int) -> Tensor:
        raise NotImplementedError


class OwnCount(Awkward):
    def change(self, p: Tensor, g: Tensor, group: dict[str, Any], i: int) -> Tensor:
        self.state[p]["step"] = self.state[p].get("step", 0) + 1
        return g / self.state[p]["step"]


class BothCounts(OwnCount):
    def begin(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 10) + 2

    def change(self, p: Tensor, g: Tensor, group: dict[str, Any], i: int) -> Tensor:
        return super().change(p, g, group, i) * group["step"]


class CountOnItself(Awkward):
    def begin(self) -> None:
        self.count: int = getattr(self, "count", 0) + 1

    def change(self, p: Tensor, g: Tensor, group: dict[str, Any], i: int) -> Tensor:
        return g / self.count


class TensorCount(Awkward):
    """Counts in place, in tensors on itself and in its groups, and returns a value."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, count=torch.zeros(()))
        self.count = torch.zeros(())

    def step(self, closure: Any = None) -> float | None:  # type: ignore[override]
        super().step()
        return 3.0

    def begin(self) -> None:
        self.count += 1
        for group in self.param_groups:
            group["count"] += 1

    def change(self, p: Tensor, g: Tensor, group: dict[str, Any], i: int) -> Tensor:
        return g / (self.count + 2 * group["count"])


class ListInGroup(Awkward):
    def begin(self) -> None:
        for group in self.param_groups:
            group.setdefault("seen", []).append(1)

    def change(self, p: Tensor, g: Tensor, group: dict[str, Any], i: int) -> Tensor:
        return g / len(group["seen"])


class ChangesGroups(Awkward):
    def begin(self) -> None:
        for group in self.param_groups:
            group["decay"] = 0.5 * group.get("decay", 1.0)

    def change(self, p: Tensor, g: Tensor, group: dict[str, Any], i: int) -> Tensor:
        return g * group["decay"]


class ByPlace(Awkward):
    def change(self, p: Tensor, g: Tensor, group: dict[str, Any], i: int) -> Tensor:
        kept = self.state.setdefault(i, {})  # type: ignore[call-overload]
        kept["sum"] = kept.get("sum", 0.0) + g
        return kept["sum"]  # type: ignore[no-any-return]


class ByIdentity(Awkward):
    def begin(self) -> None:
        self.sums: dict[int, Tensor] = getattr(self, "sums", {})

    def change(self, p: Tensor, g: Tensor, group: dict[str, Any], i: int) -> Tensor:
        self.sums[id(p)] = self.sums.get(id(p), torch.zeros(())) + g
        return self.sums[id(p)]


class GlobalNorm(Awkward):
    def change(self, p: Tensor, g: Tensor, group: dict[str, Any], i: int) -> Tensor:
        return g / torch.stack([q.grad.norm() for q in group["params"]]).norm()


class LateNorm(Awkward):
    """Keeps what involves all parameters, but does not use it at first."""

    def begin(self) -> None:
        for group in self.param_groups:
            group["norm"] = sum(float(q.grad.norm()) for q in group["params"])

    def change(self, p: Tensor, g: Tensor, group: dict[str, Any], i: int) -> Tensor:
        self.state[p]["t"] = self.state[p].get("t", 0) + 1
        return g / group["norm"] if self.state[p]["t"] > 100 else g


class OwnRate(Awkward):
    def begin(self) -> None:
        for group in self.param_groups:
            group["lr"] *= 0.9

    def change(self, p: Tensor, g: Tensor, group: dict[str, Any], i: int) -> Tensor:
        return g


class FixedState(Awkward):
    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.kept

    @state.setter
    def state(self, value: Any) -> None:
        if "kept" in vars(self):
            raise AttributeError("state is fixed")
        self.kept = value

    def change(self, p: Tensor, g: Tensor, group: dict[str, Any], i: int) -> Tensor:
        return g


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def library(name: str, **settings: Any) -> Callable[[list[nn.Parameter]], Optimizer]:
    return lambda given: getattr(importlib.import_module("pytorch_optimizer"), name)(given, lr=0.03, **settings)


TAKEN = [OwnCount, BothCounts, CountOnItself, TensorCount, ChangesGroups, torch.optim.Adam, torch.optim.NAdam]
LIBRARY = ["Lion", "Lamb", "LARS", "AdaBelief", "Tiger", "AdaBound", "ScheduleFreeAdamW", "Ranger", "AdEMAMix", "AdamP"]


@pytest.mark.parametrize("make", [*TAKEN, *map(library, LIBRARY)], ids=[*(kind.__name__ for kind in TAKEN), *LIBRARY])
def test_one_parameter_at_a_time_is_all_at_once(make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    """Bit for bit; in the middle it goes on in another process, from what a snapshot holds."""
    shapes = slice(None, None if make in TAKEN else 3)  # not all of the library take every shape
    plain, apart = parameters()[shapes], parameters()[shapes]
    optimizer, adapted = make(plain), ByParameter(make(apart))
    random = torch.Generator().manual_seed(3)
    for update in range(9):
        if update == 5:
            names = {str(i): p for i, p in enumerate(apart)}
            state = copy_state(adapted, names)
            adapted = ByParameter(make(apart))
            restore_state(adapted, names, state.items())
        for p, q in zip(plain, apart, strict=True):
            p.grad = torch.randn(p.shape, generator=random)
            q.grad = p.grad.clone()
        optimizer.step()
        adapted.step()
        for p, q in zip(plain, apart, strict=True):
            assert torch.equal(p, q), (update, p.shape)


REFUSED = [
    (ByPlace, "keeps state by 0, not by parameter"),
    (ByIdentity, "a weight would be another"),
    (GlobalNorm, "a weight would be another"),
    (LateNorm, "group.norm would be another"),
    (OwnRate, "sets lr itself"),
    (ListInGroup, "it keeps a list in group.seen, which no checkpoint holds"),
    (FixedState, "state is fixed"),
    (library("Prodigy"), "group.d_de_nom would be another"),
    (library("DAdaptAdam"), "group.numerator_weighted would be another"),
    (library("MADGRAD"), "keeps state by 'k'"),
]


@pytest.mark.parametrize(("make", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_involves_several_parameters_is_refused_when_it_is_made(make: Any, why: str) -> None:
    given = parameters()[:3]
    before = [p.detach().clone() for p in given]
    with pytest.raises(CapabilityError, match=f"one parameter at a time .*{why}.*pass it without ByParameter"):
        ByParameter(make(given))
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(given, before, strict=True))


class NoRate(Awkward):
    def __init__(self, params: Any) -> None:
        Optimizer.__init__(self, params, {"momentum": 0.5})

    def change(self, p: Tensor, g: Tensor, group: dict[str, Any], i: int) -> Tensor:
        return g * group["momentum"]


def test_groups_without_a_rate_are_refused_with_a_line_that_works() -> None:
    def made(factory: Any) -> penstock.Pipeline:
        return penstock.Pipeline(
            [nn.Linear(3, 3), nn.Linear(3, 3)], method="1f1b", stages=2, microbatches=2, loss=nn.functional.mse_loss,
            optimizer=factory,
        )  # fmt: skip

    def with_rate(named: list[tuple[str, nn.Parameter]]) -> Optimizer:
        optimizer = NoRate(named)
        for group in optimizer.param_groups:
            group.setdefault("lr", 1.0)
        return optimizer

    with pytest.raises(CapabilityError, match=r"NoRate .* without lr \(it has momentum\).*setdefault\('lr', 1.0\)"):
        made(NoRate)
    list(made(with_rate).run([(torch.ones(4, 3), torch.ones(4, 3))]))
