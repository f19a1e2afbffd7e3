"""Muon ("Muon: An optimizer for hidden layers in neural networks", Jordan et al., 2024), in a precision of choice.

torch's Muon orthogonalizes in bfloat16, for which CPUs without AVX-512 and GPUs older than Ampere have no instructions:
there it can take longer than the passes. The equations, the state and all settings are torch's; only the precision of
the iteration's products can be chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from penstock.errors import ConfigError


class Muon(optim.Muon):
    """torch's Muon whose Newton-Schulz iteration runs in bfloat16 or in float32.

    Args:
        params, lr, settings: as of `torch.optim.Muon`.
        ns_dtype: "float32", or "bfloat16", whose updates are those of torch's Muon to the bit (unless the momentum
            is bfloat16, too, and `nesterov` False: there torch's iteration changes the momentum); None: float32 for
            parameters on a CPU, bfloat16 for those on an accelerator. A group of parameters may have its own.

    The state of torch's Muon can be loaded; the iteration goes on in the `ns_dtype` chosen here.

    Raises:
        ConfigError: an `ns_dtype` is none of these.
        ValueError: as by `torch.optim.Muon`.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, *, ns_dtype: str | None = None, **settings: Any
    ) -> None:
        super().__init__(params, lr=lr, **settings)
        self.defaults["ns_dtype"] = ns_dtype
        for group in self.param_groups:
            _check_precision(group.setdefault("ns_dtype", ns_dtype))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # torch's Muon saves none
            group.setdefault("ns_dtype", self.defaults["ns_dtype"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have gradients."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            rate = float(group["lr"])
            found: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
            self._init_group(group, *found)
            for parameter, gradient, momentum in zip(*found, strict=True):
                momentum.lerp_(gradient, 1 - group["momentum"])
                ahead = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(orthogonalized(ahead, group), alpha=-rate * rate_factor(parameter, group))
        return loss


def orthogonalized(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return about U V^T of a matrix U S V^T, in the matrix's precision.

    Args:
        matrix: the momentum.
        group: its parameter group. One of `torch.optim.Muon` has no `ns_dtype`; it iterates in bfloat16.
    """
    chosen = group.get("ns_dtype", "bfloat16") or ("float32" if matrix.device.type == "cpu" else "bfloat16")
    coefficients, steps, eps = group["ns_coefficients"], group["ns_steps"], group["eps"]
    if chosen == "bfloat16":
        own = matrix.clone() if matrix.dtype == torch.bfloat16 else matrix  # torch divides what is bfloat16 in place
        return _zeropower_via_newtonschulz(own, coefficients, steps, eps).to(matrix.dtype)
    return _newton_schulz(matrix.float(), coefficients, steps, eps).to(matrix.dtype)


def rate_factor(matrix: Tensor, group: Mapping[str, Any]) -> float:
    """Return by what the learning rate of a matrix is multiplied, according to its shape."""
    return float(_adjust_lr(1.0, group["adjust_lr_fn"], matrix.shape))


def _check_precision(ns_dtype: object) -> None:
    if ns_dtype not in ("float32", "bfloat16", None):
        raise ConfigError(f"ns_dtype of Muon must be 'float32', 'bfloat16' or None; got {ns_dtype!r:.80}")


def _newton_schulz(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Iterate X <- a X + (b A + c A A) X with A = X X^T from M / |M|, on the side on which A is small."""
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
