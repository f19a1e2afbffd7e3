"""Steps of an optimizer on memory of the pipeline, as in plain torch also for optimizers that do more than write there.

An optimizer may assign new tensors to its parameters (`p.data = ...`): their values are copied to where the weights
are. It may keep the gradient tensors for its next step: their memory is used again here, so an optimizer of another
library (or one with step hooks) steps on copies at first, and goes on to do so if it keeps any of them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from penstock.errors import CapabilityError
from penstock.weights.optim.optimizer_adapters import is_separable, name_of
from penstock.weights.optim.step_hooks import step_hooks


class OptimizerStep:
    """Makes the steps of one optimizer.

    Args:
        optimizer: the optimizer; None for a stage without parameters.
        parameters: by name, as the optimizer has them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, nn.Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._copies = True  # of gradients, as long as nobody knows whether they are kept

    def point(self, names: Iterable[str], weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Point parameters at these weights and gradients."""
        for name in names:
            parameter = self._parameters[name]
            parameter.data = weights[name]
            parameter.grad = gradients[name]

    def make(self, names: Iterable[str], weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Step some parameters, in the memory of `weights`.

        Raises:
            CapabilityError: the optimizer has kept a gradient, whose memory is about to be used again, or has given a
                parameter another shape.
        """
        optimizer = self._optimizer
        if optimizer is None:
            return
        trusted = is_separable(optimizer) and not step_hooks(optimizer)
        copies = not trusted and self._copies
        given = {name: gradients[name].clone() if copies else gradients[name] for name in names}
        before = {} if trusted else _uses(given.values())
        # Tensors of their own for an optimizer that may keep them, so that each counts.
        self.point(names, weights, given if trusted else {name: tensor.detach() for name, tensor in given.items()})
        optimizer.step()
        drop_gradients(optimizer)
        if not trusted:
            kept = _rose(before, given.values())
            if self._copies:
                self._copies = kept
            elif kept:
                self._check_kept(before, given.values())
        self._take_over(names, weights)

    def _check_kept(self, before: Mapping[int, int], gradients: Iterable[Tensor]) -> None:
        """Raise an error unless only garbage held a gradient."""
        gc.collect()
        if _rose(before, gradients):
            name = "?" if self._optimizer is None else name_of(self._optimizer)
            raise CapabilityError(
                f"{name} keeps the gradient of its step (or a hook of it does), which it did not in its first one, so "
                "the gradient was not copied for it; its memory is used again after the step: keep p.grad.clone()"
            )

    def _take_over(self, names: Iterable[str], weights: Mapping[str, Tensor]) -> None:
        """Copy what the optimizer has assigned to parameters to the memory of the weights."""
        for name in names:
            parameter, place = self._parameters[name], weights[name]
            if parameter.data_ptr() == place.data_ptr():
                continue
            if parameter.shape != place.shape:
                assert self._optimizer is not None
                raise CapabilityError(
                    f"{name_of(self._optimizer)} has given {name} a tensor of shape {tuple(parameter.shape)}, but it "
                    f"has shape {tuple(place.shape)}; an optimizer may change the values of parameters only"
                )
            with torch.no_grad():
                place.copy_(parameter)
            parameter.data = place


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Take the gradients from the parameters of an optimizer, as its `zero_grad` does."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad()  # of a class of one's own, which may do more; as before the first step, none has any


def _uses(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return how many tensors there are on each of the storages of some tensors."""
    found = {tensor.untyped_storage()._cdata for tensor in tensors}
    return {address: torch._C._storage_Use_Count(address) for address in found}


def _rose(before: Mapping[int, int], tensors: Iterable[Tensor]) -> bool:
    """Return whether there are more tensors on one of the storages than before."""
    return any(uses > before[address] for address, uses in _uses(tensors).items())
