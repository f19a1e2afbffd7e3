"""Hooks that users have registered on parameters, applied to the tensors that stand in for these in graphs.

As in plain torch where gradients accumulate, hooks run at every backward: for each microbatch. A hook of
`register_hook` gets the gradient of the loss sum of the microbatch divided by the constant c (`Precision.divisor`; with
c = the weight of a batch that is what plain torch gives), before it is added to the others; one of
`register_post_accumulate_grad_hook` finds the sum so far in `grad`. Hooks of the node of torch's own accumulation
(`p.expand_as(p).grad_fn.next_functions[0][0]`), to which graphs do not lead here, are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from penstock.errors import CapabilityError, ConfigError

_LOG = logging.getLogger(__name__)
_OF_SEVERAL = "register_multi_grad_hook.<locals>.get_inner_hook.<locals>.inner_hook"
"""What `torch.autograd.graph.register_multi_grad_hook` registers on each tensor."""


def warn_of_scale(parameters: Mapping[str, nn.Parameter], divisor: float | None) -> None:
    """Say in which scale hooks see gradients, if there are any, and the user has not chosen it.

    Args:
        parameters: of a stage.
        divisor: c, as the user has given it.
    """
    hooked = [name for name, p in parameters.items() if p._backward_hooks]
    if hooked and divisor is None:
        _LOG.warning(
            "a hook on %s sees, for each microbatch, the gradient of its sum over samples divided by the number of "
            "microbatches, not that of a mean as in plain torch. That matters for hooks that are not linear, such as "
            "clamps: pass precision=Precision(divisor=N) with N samples (or weights of your loss) in a batch",
            hooked[0] if len(hooked) == 1 else f"{hooked[0]} (and {len(hooked) - 1} more)",
        )


class ParameterHooks:
    """The hooks on the parameters of a stage, as they are when its run begins.

    Args:
        parameters: by name, those of the modules.
        where: the stage in messages.

    Raises:
        ConfigError: a hook waits for the gradients of several parameters, or for torch's own accumulation of them.

    Attributes:
        before: names of the parameters with hooks on their gradients.
        after: names of those with hooks on accumulated gradients.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], where: str) -> None:
        self.before = [name for name, p in parameters.items() if p._backward_hooks]
        self.after = [name for name, p in parameters.items() if p._post_accumulate_grad_hooks]
        self._parameters, self._where = parameters, where
        for name, parameter in parameters.items():
            if _has_hooks_on_node(parameter):
                raise ConfigError(
                    f"{where}: {name} has a hook on the node that accumulates its gradients (register_hook or "
                    "register_prehook of grad_fn.next_functions[0][0]), which would never be called: here they are "
                    "added to buffers; use register_post_accumulate_grad_hook, or register_hook, on the parameter"
                )
        for name in self.before:
            own = (parameters[name]._backward_hooks or {}).values()
            if any(getattr(hook, "__qualname__", "") == _OF_SEVERAL for hook in own):
                raise ConfigError(
                    f"{where}: {name} has a hook of register_multi_grad_hook, which would never be called: it waits "
                    "for torch's own accumulation of gradients, and here they are added to buffers; use register_hook "
                    "on each parameter, or Pipeline.on_update for what belongs to an update"
                )

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.before or self.after)

    def gradient(self, name: str, found: Tensor) -> Tensor:
        """Return what the hooks of a parameter make of the gradient of a microbatch, in its own precision."""
        parameter = self._parameters[name]
        result = found.to(parameter.dtype)
        for hook in tuple((parameter._backward_hooks or {}).values()):
            made = hook(result)
            result = result if made is None else made
        return result.to(found.dtype)

    def accumulated(self, name: str, weights: Tensor, gradient: Tensor) -> None:
        """Call the hooks on an accumulated gradient.

        Args:
            name: of the parameter.
            weights: that the pass read.
            gradient: the sum so far, which hooks may change.

        Raises:
            CapabilityError: a hook has written into the weights, or dropped the gradient.
        """
        parameter = self._parameters[name]
        data, before = parameter.data, parameter._version
        parameter.data, parameter.grad = weights.detach().to(parameter.dtype), gradient
        try:
            for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(parameter)
            if parameter._version != before or parameter.grad is None:
                what = "dropped the gradient" if parameter._version == before else "written into the weights"
                raise CapabilityError(
                    f"{self._where}: a hook on {name} has {what} in a backward, as optimizers that step there do; the "
                    "update is the pipeline's, which makes it when all microbatches have read the weights: leave the "
                    "hook out"
                )
            if parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
        finally:
            parameter.data, parameter.grad = data, None


def _has_hooks_on_node(parameter: nn.Parameter) -> bool:
    """Return whether what accumulates a parameter's gradients in plain torch has hooks."""
    if not parameter.requires_grad:
        return False
    with torch.inference_mode(mode=False):
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    found = []
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)  # torch shows the others to it
        found.append(len(handle.hooks_dict_ref() or ()) > 1)
        handle.remove()
    return any(found)
