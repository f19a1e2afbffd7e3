"""Makes optimizers by the names that a configuration may use."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from torch import nn, optim

from penstock.errors import CapabilityError
from penstock.train.config.sections import OptimizerSection
from penstock.weights.optim.basis_rotation import BasisRotation
from penstock.weights.optim.muon import Muon
from penstock.weights.optim.optimizer_adapters import ByParameter, Joined
from penstock.weights.optim.optimizer_factory import OptimizerFactory

OUTER = ("embedding", "head")
"""Blocks whose matrices hold a row per token or class; AdamW steps these, as the author of Muon recommends."""


def optimizer_factory(section: OptimizerSection) -> OptimizerFactory:
    """Return a factory of the optimizer of one stage; matrices have weight decay, vectors (norms, biases) do not.

    Muon and basis rotation step the matrices of hidden layers (`is_hidden`); AdamW steps all other parameters with the
    same rate, betas and decay.

    Raises:
        CapabilityError: the library of the optimizer is not installed.
    """
    betas = (section.beta1, section.beta2)
    rate: dict[str, Any] = {"lr": section.lr}
    match section.name:
        case "adamw":
            return partial(_by_shape, section, partial(optim.AdamW, **rate, betas=betas))
        case "adam":
            return partial(_by_shape, section, partial(optim.Adam, **rate, betas=betas))
        case "nadam":
            return partial(_by_shape, section, partial(optim.NAdam, **rate, betas=betas, decoupled_weight_decay=True))
        case "sgd":
            nesterov = section.nesterov and section.beta1 > 0
            return partial(_by_shape, section, partial(optim.SGD, **rate, momentum=section.beta1, nesterov=nesterov))
        case "adan":
            three = (section.beta1, section.difference, section.beta2)
            return partial(_by_shape, section, partial(_foreign, _library("Adan"), **rate, betas=three))
        case "soap":
            return partial(
                _by_shape,
                section,
                partial(_foreign, _library("SOAP"), **rate, betas=betas, precondition_frequency=section.refresh),
            )
        case "muon":
            # Scaled as in arXiv 2502.16982, so that AdamW's rate and decay suit both.
            ahead, like = section.nesterov and section.momentum > 0, "match_rms_adamw"
            settings: dict[str, Any] = {"momentum": section.momentum, "nesterov": ahead, "ns_dtype": section.ns_dtype}
            return partial(_hidden_apart, section, partial(Muon, **rate, **settings, adjust_lr_fn=like))
        case "basis-rotation":
            rotated = partial(BasisRotation, **rate, betas=betas, refresh=section.refresh, sides=section.sides)
            return partial(_hidden_apart, section, rotated)


def is_hidden(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix of a hidden layer: two dimensions, in no block of `OUTER`.

    Kernels of convolutions have more dimensions, which torch's Muon does not support, so they do not count.
    """
    return parameter.ndim == 2 and name.partition(".")[0] not in OUTER


def _by_shape(section: OptimizerSection, make: Any, named: list[tuple[str, nn.Parameter]]) -> optim.Optimizer:
    """Make one optimizer, with a group of parameters with weight decay and one without."""
    matrices = [(name, p) for name, p in named if p.ndim >= 2]
    vectors = [(name, p) for name, p in named if p.ndim < 2]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((matrices, section.weight_decay), (vectors, 0.0))
        if params
    ]
    made: optim.Optimizer = make(groups)
    return made


def _hidden_apart(section: OptimizerSection, make: Any, named: list[tuple[str, nn.Parameter]]) -> optim.Optimizer:
    """Make one optimizer for matrices of hidden layers and AdamW for the rest; only one if a stage has no others."""
    hidden = [(name, p) for name, p in named if is_hidden(name, p)]
    others = [(name, p) for name, p in named if not is_hidden(name, p)]
    parts: list[optim.Optimizer] = [make(hidden, weight_decay=section.weight_decay)] if hidden else []
    if others:
        adamw = partial(optim.AdamW, lr=section.lr, betas=(section.beta1, section.beta2))
        parts.append(_by_shape(section, adamw, others))
    return parts[0] if len(parts) == 1 else Joined(parts)


def _foreign(kind: Any, groups: list[dict[str, Any]], **settings: Any) -> ByParameter:
    """Make an optimizer of another library, whose state is kept per parameter."""
    return ByParameter(kind(groups, **settings), rehearsed=True)


def _library(name: str) -> Any:
    """Return a class of pytorch-optimizer."""
    try:
        return getattr(importlib.import_module("pytorch_optimizer"), name)
    except ImportError:
        raise CapabilityError(
            f"optimizer {name} is in the package pytorch-optimizer, which is not installed: "
            "pip install 'penstock[optimizers]'"
        ) from None
