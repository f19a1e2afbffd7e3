"""What the blocks of a stage do in their first forwards that would be lost, or would not be the same in every stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from penstock.errors import CapabilityError, ConfigError
from penstock.stage.checks.released_weight_placeholders import AbsentWeight

_WRITTEN = "modified by an inplace operation"  # torch's words of a tensor that a backward needs
_TWICE = "backward through the graph a second time"


class ForwardWrites:
    """Looks at weights and shared buffers before a forward and after it.

    Args:
        where: the stage in messages.
        bound: the weights that the forward computes with.
        shared: buffers that other stages have as well, and which ones those are, by name.
        blocks: of the stage.
        inputs: what the stage has received and wants gradients of.
    """

    def __init__(
        self,
        where: str,
        bound: Mapping[str, Tensor] | None,
        shared: Mapping[str, str],
        blocks: Mapping[str, Any],
        inputs: Iterable[Tensor] = (),
    ) -> None:
        self._where, self._shared = where, shared
        kept = {name: leaf for name, leaf in (bound or {}).items() if not isinstance(leaf, AbsentWeight)}
        self._leaves = [(name, leaf, leaf.data_ptr()) for name, leaf in kept.items()]
        self._gradients = [(leaf, _gradient(leaf)) for leaf in (*kept.values(), *inputs)]
        self._buffers = _buffers(blocks, shared)
        self._versions = {name: buffer._version for name, buffer in self._buffers.items()}

    def check(self) -> None:
        """Make sure that weights are where they were, and gradients and shared buffers as they were.

        Raises:
            CapabilityError: a forward has assigned to a weight's data, which the next one would not read.
            ConfigError: it has made a backward, or has written into a buffer that another stage reads.
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
        for name, buffer in self._buffers.items():
            if buffer._version != self._versions[name]:
                raise ConfigError(
                    f"{self._where}: a forward has written into {name}, one buffer that {self._shared[name]} has as "
                    "well, which other microbatches go through at the same time, and in processes of their own have a "
                    "copy of; give each stage a buffer of its own (tensor.clone()), or let only one stage have it"
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


def _buffers(blocks: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return buffers by name."""
    if not names:
        return {}
    modules = [(prefix, block) for prefix, block in blocks.items() if isinstance(block, nn.Module)]
    found = {name: buffer for prefix, block in modules for name, buffer in block.named_buffers(prefix=prefix)}
    return {name: found[name] for name in names if name in found}
