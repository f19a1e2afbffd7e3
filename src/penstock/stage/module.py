"""One stage: blocks in a row as a function of parameters and inputs, and what its backward needs.

A version of the weights is bound by putting its leaf tensors in the place of the modules' parameters. The modules'
own `Parameter` objects never enter a graph; they are put back, over the newest weights, when a run ends. A graph keeps
its leaves, so binding another version does not touch it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from penstock.errors import CapabilityError, ConfigError
from penstock.stage.autograd.activation_offload import Parking
from penstock.stage.autograd.deferred_weight_grads import Late
from penstock.stage.rng import Draw, Randomness

_TRAINABLE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
LossFunction = Callable[[Any, Any], Any]
"""(output, target) -> (sum, weight), or a scalar, which counts as a sum of weight 1."""


@dataclass
class Graph:
    """What autograd keeps of a pass through some blocks.

    Attributes:
        inputs: the received leaves that want a gradient, with their places in the input's tree.
        leaves: how many leaves the input's tree has.
        outputs: where gradients enter the graph: the outputs, without keeping their memory, or the loss.
        seed: the gradient of the loss, on the last stage.
        nbytes: bytes that it keeps alive.
        late: where its backward comes in two halves, what the second half works on.
        late_nbytes: those of the bytes that live until then.
        parking: moves what it keeps away and back.
    """

    inputs: dict[int, Tensor]
    leaves: int
    outputs: list[GradientEdge | None]
    seed: Tensor | None
    nbytes: int
    late: Late | None = None
    late_nbytes: int = 0
    parking: Parking | None = None


class StageModule:
    """The blocks of one stage.

    Args:
        blocks: canonical name -> module or plain function; each takes what the one before returned.
        loss: for the last stage.
        where: for messages, such as "stage 0 on rank 0".
        seed: of the random numbers that blocks draw.
        precision: what passes compute in; None for that of the parameters.
        hands_on: other stages take its output, also where it has a loss.
    """

    def __init__(
        self,
        blocks: Mapping[str, Any],
        loss: LossFunction | None,
        where: str,
        seed: int,
        precision: torch.dtype | None = None,
        hands_on: bool = False,
    ) -> None:
        self.blocks = dict(blocks)
        self.last = list(self.blocks)[-1]
        self.loss, self.hands_on = loss, hands_on
        self.where = where
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        self._originals: dict[str, nn.Parameter] = {}
        self._bound: Mapping[str, Tensor] | None = None
        self._aliases: set[str] = set()  # further names of shared parameters
        names: dict[int, str] = {}
        for prefix, block in self.blocks.items():
            if not isinstance(block, nn.Module):
                continue
            for path, module in block.named_modules(prefix=prefix):
                for key, parameter in module._parameters.items():
                    if parameter is None:
                        continue
                    name = names.setdefault(id(parameter), f"{path}.{key}")
                    if name != f"{path}.{key}":
                        self._aliases.add(f"{path}.{key}")
                    self._places.setdefault(name, []).append((module, key))
                    self._originals[name] = parameter
                    self._check_dtype(name, parameter)
        self._frozen = {
            name: p.detach().to(precision)
            for name, p in self._originals.items()
            if precision is not None and not p.requires_grad and p.dtype == torch.float32
        }
        self.precision = precision
        self.randomness = Randomness(seed, {p.device for p in self._originals.values()})

    def _check_dtype(self, name: str, parameter: nn.Parameter) -> None:
        if parameter.requires_grad and parameter.dtype not in _TRAINABLE:
            raise CapabilityError(
                f"{self.where}: {name} is {parameter.dtype}, but gradients must accumulate in float32: keep parameters "
                "in float32, and pass precision='bf16' or 'fp16' to compute in less"
            )

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that want gradients, by canonical name; a shared one appears once."""
        return {name: p for name, p in self._originals.items() if p.requires_grad}

    @property
    def modules(self) -> list[nn.Module]:
        """The blocks that are modules."""
        return [block for block in self.blocks.values() if isinstance(block, nn.Module)]

    def state(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by canonical name, as the modules hold them now; shared ones once."""
        state: dict[str, Tensor] = {}
        for prefix, block in self.blocks.items():
            if isinstance(block, nn.Module):
                state.update(block.state_dict(prefix=f"{prefix}."))
        return {name: tensor for name, tensor in state.items() if name not in self._aliases}

    def unversioned(self) -> dict[str, Tensor]:
        """What no optimizer steps, by canonical name: frozen parameters and persistent buffers."""
        buffers = {f"{prefix}.{name}" for prefix, block in self.named_modules() for name, _ in block.named_buffers()}
        state = {name: tensor for name, tensor in self.state().items() if name in buffers}
        return state | {name: p.detach() for name, p in self._originals.items() if not p.requires_grad}

    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """The blocks that are modules, with their names."""
        return [(name, block) for name, block in self.blocks.items() if isinstance(block, nn.Module)]

    @property
    def fixed(self) -> list[Tensor]:
        """Frozen parameters and module buffers."""
        frozen: list[Tensor] = [p for p in self._originals.values() if not p.requires_grad]
        frozen += self._frozen.values()
        return frozen + [buffer for module in self.modules for buffer in module.buffers()]

    # --- versions ---------------------------------------------------------------------------------------------------

    def bind(self, leaves: Mapping[str, Tensor]) -> None:
        """Let the modules compute with these tensors."""
        if self._bound is leaves:
            return
        if self._bound is None:
            self._place(self._frozen)
        self._place(leaves)
        self._bound = leaves

    def _place(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            for module, key in self._places[name]:
                module._parameters[key] = tensor  # type: ignore[assignment]  # a leaf tensor, not a Parameter

    def refresh(self) -> None:
        """Cast frozen parameters again, which may have been written into."""
        with torch.no_grad():
            for name, tensor in self._frozen.items():
                tensor.copy_(self._originals[name])

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put the modules' own parameters back, over the memory of `tensors`."""
        for name, tensor in tensors.items():
            self._originals[name].data = tensor
        self._place({name: self._originals[name] for name in (*tensors, *self._frozen)})
        self._bound = None

    # --- passes -----------------------------------------------------------------------------------------------------

    def run(self, names: Sequence[str], value: Any, draw: Draw) -> Any:
        """Run some of the blocks in a row."""
        for name in names:
            self.randomness.begin(name, draw)
            value = self.blocks[name](value)
        return value

    def run_slice(self, names: Sequence[str], value: Any, carry: Mapping[str, Any], draw: Draw) -> tuple[Any, Any]:
        """The same on a slice of a sequence; also returns what is carried on to the next one, by block."""
        made: dict[str, Any] = {}
        for name in names:
            self.randomness.begin(name, draw)
            block = self.blocks[name]
            if hasattr(block, "forward_slice"):
                value, made[name] = block.forward_slice(value, carry.get(name))
            else:
                value = block(value)
        return value, made

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Meanwhile the modules are in evaluation mode; not for longer than a pass, because stages may share some."""
        modes = [(m, m.training) for block in self.modules for m in block.modules()]
        for module, _ in modes:
            module.training = False
        try:
            yield
        finally:
            for module, mode in reversed(modes):
                module.training = mode

    @property
    def has_loss(self) -> bool:
        """Whether it has a loss: the last stage, and others to which no gradient comes back."""
        return self.loss is not None

    def evaluate_loss(self, output: Any, target: Any, draw: Draw, sliced: bool = False) -> tuple[Tensor, float]:
        """The loss sum and its weight.

        Raises:
            ConfigError: the loss function returned something else, or of a slice no weight, so that nobody knows what
                part of the whole it is.
        """
        assert self.loss is not None
        self.randomness.begin("loss", draw)
        result = self.loss(output, target)
        if isinstance(result, tuple) and len(result) == 2:
            total, weight = result
            weight = float(weight)
        elif sliced:
            raise ConfigError(
                f"{self.where}: with slices of sequences the loss must return (sum, weight), such as the sum over the "
                "tokens and their number; it returned a scalar"
            )
        else:
            total, weight = result, 1.0
        if not isinstance(total, Tensor) or total.numel() != 1:
            what = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
            raise ConfigError(f"{self.where}: the loss must be a scalar, or (sum, weight); got {what}")
        if not weight >= 0:
            raise ConfigError(f"{self.where}: the weight of a loss must not be negative, got {weight}")
        return total, weight


def open_inputs(value: Any, wants_gradient: Sequence[bool]) -> tuple[Any, dict[int, Tensor], int]:
    """Make the received leaves that want a gradient into leaves of a new graph.

    Returns:
        The tree, the leaves by place, and the number of all leaves.
    """
    leaves, spec = pytree.tree_flatten(value)
    opened: dict[int, Tensor] = {}
    for i, wants in enumerate(wants_gradient):
        if wants:
            leaves[i] = opened[i] = leaves[i].detach().requires_grad_()
    return pytree.tree_unflatten(leaves, spec), opened, len(leaves)


def edges_of(value: Any) -> list[GradientEdge | None]:
    """Where gradients enter the graph of each leaf of a tree; None for leaves without one."""
    return [
        get_gradient_edge(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None
        for leaf in pytree.tree_leaves(value)
    ]


def trained_leaves(value: Any) -> Iterator[Tensor]:
    """Every tensor in whose `.grad` a backward from the leaves of `value` would accumulate."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
    yield from (t for t in tensors if t.grad_fn is None)
    yield from (node.variable for node in graph_nodes(value) if type(node).__name__ == "AccumulateGrad")


def graph_nodes(value: Any) -> Iterator[Any]:
    """Every node of the graph behind the leaves of `value`."""
    rest: list[Any] = [leaf.grad_fn for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    seen: set[Any] = {None}
    while rest:
        node = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        rest += [following for following, _ in node.next_functions]


def run_backward(graph: Graph, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Backward through some blocks; weight gradients go where the leaves' `.grad` points.

    Args:
        graph: of the blocks.
        gradients: per output leaf; None where nothing came back.

    Returns:
        The gradients of all input leaves, None where none is wanted.
    """
    pairs = [(e, g) for e, g in zip(graph.outputs, gradients, strict=True) if e is not None and g is not None]
    raw: dict[int, Tensor] = {}
    hooks = [
        leaf.register_hook(partial(_keep_raw, raw, place, leaf.stride()))  # type: ignore[no-untyped-call]
        for place, leaf in graph.inputs.items()
    ]
    if pairs:
        torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
    result: list[Tensor | None] = [None] * graph.leaves
    for (place, leaf), hook in zip(graph.inputs.items(), hooks, strict=True):
        result[place] = raw.get(place, leaf.grad)
        leaf.grad = None
        hook.remove()
    return result


def _keep_raw(raw: dict[int, Tensor], place: int, strides: tuple[int, ...], gradient: Tensor) -> None:
    """Keep a gradient that autograd would lay in memory as its leaf: without a cut it would have gone on as it is."""
    if gradient.stride() != strides:
        raw[place] = gradient
