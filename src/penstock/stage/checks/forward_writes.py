"""What the blocks of a stage do in their first forwards that would be lost, or would spoil an update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from penstock.errors import CapabilityError, ConfigError
from penstock.stage.checks.released_weight_placeholders import AbsentWeight

_WRITTEN = "modified by an inplace operation"  # torch's words of a tensor that a backward needs
_TWICE = "backward through the graph a second time"


class ForwardWrites:
    """Looks at weights and gradients before a forward and after it.

    Args:
        where: the stage in messages.
        bound: the weights that the forward computes with.
        inputs: what the stage has received and wants gradients of.
    """

    def __init__(self, where: str, bound: Mapping[str, Tensor] | None, inputs: Iterable[Tensor] = ()) -> None:
        self._where = where
        kept = {name: leaf for name, leaf in (bound or {}).items() if not isinstance(leaf, AbsentWeight)}
        self._leaves = [(name, leaf, leaf.data_ptr()) for name, leaf in kept.items()]
        self._gradients = [(leaf, _gradient(leaf)) for leaf in (*kept.values(), *inputs)]

    def check(self) -> None:
        """Make sure that weights are where they were, and gradients as they were.

        Raises:
            CapabilityError: a forward has assigned to a weight's data, which the next one would not read.
            ConfigError: it has made a backward.
        """
        for name, leaf, place in self._leaves:
            if leaf.data_ptr() != place:
                raise CapabilityError(
                    f"{self._where}: a forward has assigned other memory to {name} (as by {name.rpartition('.')[2]}"
                    ".data = ...), which no other forward and no update would know of; write into the weights before "
                    "the pipeline is made, between two runs, or after each update in a hook of the optimizer "
                    "(optimizer.register_step_post_hook); or compute what is to be used from them in the forward"
                )
        if any(_gradient(leaf) != before for leaf, before in self._gradients):
            raise ConfigError(
                f"{self._where}: the loss or a block has called backward(), which adds to gradients of this stage "
                "alone; the pipeline makes the backward itself. Leave it out; a gradient that the loss needs is "
                "torch.autograd.grad(loss, output, create_graph=True)"
            )


def explain_backward(error: RuntimeError, where: str) -> None:
    """Raise an error with the reason if torch refuses a backward because of what happened to a tensor that it needs.

    Raises:
        CapabilityError: it was written, or belongs to the graph of another backward.
    """
    if _TWICE in str(error):
        raise CapabilityError(
            f"{where}: a block, or a hook, has kept a tensor with its graph for another block, for the loss or for the "
            "next microbatch, but that graph has had its backward. Let the blocks between hand it on, as in (x, kept), "
            "or detach it; within a stage recompute='stage' runs all blocks together, where 'block' does not"
        ) from error
    if _WRITTEN in str(error) and not isinstance(error, CapabilityError):
        said = str(error).partition(". Hint")[0]
        raise CapabilityError(
            f"{where}: {said}. Between a forward and its backward other microbatches run, and the loop over reports; "
            "so what a block writes in place (a teacher that follows in the forward), or the loop (statistics that are "
            "reset), must be no tensor that a graph needs: let the forward use a copy of it (tensor.clone()), or write "
            "between two runs"
        ) from error


def _gradient(leaf: Tensor) -> tuple[int, int] | None:
    """Return what changes where a backward adds to the gradient of a leaf."""
    return None if leaf.grad is None else (id(leaf.grad), leaf.grad._version)
