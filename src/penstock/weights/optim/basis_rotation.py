"""Basis rotation: Adam in a rotated basis, in which delayed gradients remain useful.

Basis Rotation (arXiv 2602.03515, Algorithms 1 and 2; details as in the code that its authors have released). For a
matrix W with gradient G, at step t from 1:

    M <- beta1 M + (1 - beta1) G
    L <- beta2 L + (1 - beta2) G G^T,   R <- beta2 R + (1 - beta2) G^T G
    U, V: eigenvectors of L and R, refreshed at step 1 and whenever t is a multiple of `refresh`
    S <- beta2 S + (1 - beta2) (U^T G V)^2
    W <- W - lr decay W;   W <- W - lr sqrt(1 - beta2^t) / (1 - beta1^t) U [(U^T M V) / (sqrt(S) + eps)] V^T

The first U is from an eigendecomposition. A refresh orders its columns by u^T L u, the largest first, S along with
them, and computes the orthogonal factor of L U (one power iteration). With `sides="smaller"` only the shorter side is
rotated (the right one of square matrices). The estimate from the first moment (S = 1st in the paper) is not supported.

This differs from SOAP in that the first basis includes the gradient of the current step, S is updated from the first
step on, and the refresh precedes the step; SOAP's first step only initializes its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import ConfigError

Sides = Literal["both", "smaller"]


class BasisRotation(Optimizer):
    """Adam with basis rotation, for matrices.

    Args:
        params: matrices, or groups of them.
        lr: learning rate.
        betas: decay rates of the first moment, and of the second moment, L and R.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
        refresh: steps from one refresh of the bases to the next.
        sides: the sides that are rotated.

    Raises:
        ConfigError: a parameter is not a real matrix, or `refresh` is less than 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        refresh: int = 10,
        sides: Sides = "both",
    ) -> None:
        if refresh < 1:
            raise ConfigError(f"refresh must be a number of steps, at least 1; got {refresh}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"refresh": refresh, "sides": sides})
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2 or not p.is_floating_point():
                    raise ConfigError(
                        f"basis rotation needs real matrices, not a parameter of shape {tuple(p.shape)} ({p.dtype}); "
                        "step that one with another optimizer (`penstock.weights.optim.optimizer_adapters.Joined`)"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _step(parameter, parameter.grad, group, self.state[parameter])
        return loss


def _step(weight: nn.Parameter, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
    (beta1, beta2), lr = group["betas"], group["lr"]
    if not state:
        state |= {"step": 0, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        for side in _rotated(weight, group["sides"]):
            state[f"covariance_{side}"] = weight.new_zeros(weight.shape[side], weight.shape[side])
    state["step"] += 1
    t = state["step"]
    state["exp_avg"].mul_(beta1).add_(gradient, alpha=1.0 - beta1)
    for side in _rotated(weight, group["sides"]):
        rows = gradient if side == 0 else gradient.T
        state[f"covariance_{side}"].mul_(beta2).add_(rows @ rows.T, alpha=1.0 - beta2)
    if t == 1 or t % group["refresh"] == 0:
        _refresh(state, _rotated(weight, group["sides"]))
    turned, square = _turned(gradient, state), state["exp_avg_sq"]
    square.mul_(beta2).addcmul_(turned, turned, value=1.0 - beta2)
    step = _turned_back(_turned(state["exp_avg"], state) / square.sqrt().add_(group["eps"]), state)
    if group["weight_decay"]:
        weight.mul_(1.0 - lr * group["weight_decay"])
    weight.add_(step, alpha=-lr * (1.0 - beta2**t) ** 0.5 / (1.0 - beta1**t))


def _rotated(weight: Tensor, sides: Sides) -> tuple[int, ...]:
    """Return the rotated sides: 0 for the rows, rotated by U; 1 for the columns, rotated by V."""
    return (0, 1) if sides == "both" else (int(weight.shape[0] >= weight.shape[1]),)


def _refresh(state: dict[str, Any], sides: tuple[int, ...]) -> None:
    """Compute the bases by an eigendecomposition where there are none, otherwise by one power iteration."""
    for side in sides:
        basis, covariance = state.get(f"basis_{side}"), state[f"covariance_{side}"]
        if basis is None:
            state[f"basis_{side}"] = torch.linalg.eigh(covariance)[1].flip(1).contiguous()
            continue
        product = covariance @ basis
        order = (basis * product).sum(0).argsort(descending=True, stable=True)
        state["exp_avg_sq"] = state["exp_avg_sq"].index_select(side, order)
        state[f"basis_{side}"] = torch.linalg.qr(product[:, order])[0].contiguous()


def _turned(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    """Return U^T G V."""
    if "basis_0" in state:
        matrix = state["basis_0"].T @ matrix
    return matrix @ state["basis_1"] if "basis_1" in state else matrix


def _turned_back(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    """Return U N V^T."""
    if "basis_1" in state:
        matrix = matrix @ state["basis_1"].T
    return state["basis_0"] @ matrix if "basis_0" in state else matrix
