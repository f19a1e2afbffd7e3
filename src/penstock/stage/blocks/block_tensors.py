"""The parameters and buffers of the blocks of one stage, by name, and which tensors stand in their places.

A version of the weights is bound by putting its leaf tensors in the place of the modules' parameters. The modules'
own `Parameter` objects never enter a graph; they are put back, over the newest weights, when a run ends. A graph keeps
its leaves, so binding another version does not affect it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import CapabilityError, ConfigError
from penstock.options.passes import NAMES, Precision
from penstock.partition.parameter_names import prefix_of
from penstock.partition.replay.specs import kept_full
from penstock.stage.checks.changes_between_runs import check_changes, find_parameters, take_over_values
from penstock.stage.checks.released_weight_placeholders import hide

_TRAINABLE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class BlockTensors:
    """The parameters and buffers of the blocks of one stage.

    Args:
        modules: the blocks that are modules, by canonical name.
        where: the stage in messages, such as "stage 0 on rank 0".
        precision: the dtype that passes compute in; None for that of the parameters.

    Attributes:
        where: as given.
        full: parameters that are not cast to the precision (`penstock.partition.replay.specs.kept_full`).
        bound: the tensors that the modules compute with; None where these are their own parameters.
    """

    def __init__(self, modules: Mapping[str, nn.Module], where: str, precision: torch.dtype | None) -> None:
        self._modules, self.where = modules, where
        self.bound: Mapping[str, Tensor] | None = None
        self._found = find_parameters(modules)
        for name, parameter in self._originals.items():
            self._check_dtype(name, parameter)
            for module, _ in self._found.places[name]:
                self._check_max_norm(name, module, parameter)
        self._steps = frozenset(name for name, p in self._originals.items() if p.requires_grad)
        full = {id(p) for module in modules.values() for p in kept_full(module)}
        self.full = {name for name, p in self._originals.items() if id(p) in full}
        self._frozen = {
            name: p.detach().to(precision)
            for name, p in self._originals.items()
            if precision is not None and not p.requires_grad and p.dtype == torch.float32 and name not in self.full
        }

    def _check_dtype(self, name: str, parameter: nn.Parameter) -> None:
        if parameter.requires_grad and parameter.dtype not in _TRAINABLE:
            raise CapabilityError(
                f"{self.where}: {name} is {parameter.dtype}, but gradients must accumulate in float32: keep parameters "
                "in float32, and pass precision='bf16' or 'fp16' to compute in less"
            )

    def _check_max_norm(self, name: str, module: nn.Module, parameter: nn.Parameter) -> None:
        if parameter.requires_grad and getattr(module, "max_norm", None) is not None:
            raise CapabilityError(
                f"{self.where}: {name} belongs to an embedding with max_norm, whose forward writes into its weights "
                "while other microbatches read them; leave max_norm out, and limit the rows after each update, in a "
                "hook of the optimizer (optimizer.register_step_post_hook)"
            )

    # --- by name ----------------------------------------------------------------------------------------------------

    @property
    def _originals(self) -> dict[str, nn.Parameter]:
        """The modules' own parameters, by canonical name."""
        return self._found.originals

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that require gradients, by canonical name; a shared one appears once."""
        return {name: self._originals[name] for name in self._originals if name in self._steps}

    @property
    def devices(self) -> list[torch.device]:
        """Where the parameters are, in their order."""
        return [p.device for p in self._originals.values()]

    def state(self, *, detached: bool = True) -> dict[str, Tensor]:
        """Parameters and persistent buffers by canonical name, with their present values; shared ones once.

        Args:
            detached: from their graphs, which takes weights that are there.
        """
        state: dict[str, Tensor] = {}
        for prefix, block in self._modules.items():
            state.update(block.state_dict(prefix=prefix_of(prefix, block), keep_vars=not detached))
        return {name: tensor for name, tensor in state.items() if self._found.paths.get(name, name) == name}

    def aliases(self) -> dict[str, str]:
        """Further names of shared parameters, each with the canonical one; between two runs."""
        first = {id(parameter): name for name, parameter in self._originals.items()}
        found: dict[str, str] = {}
        for prefix, block in self._modules.items():
            for name, tensor in block.state_dict(prefix=prefix_of(prefix, block), keep_vars=True).items():
                if first.get(id(tensor), name) != name:
                    found[name] = first[id(tensor)]
        return found

    def unversioned(self) -> dict[str, Tensor]:
        """Tensors that no optimizer steps, by canonical name: frozen parameters and persistent buffers."""
        named = self._modules.items()
        buffers = {f"{prefix_of(name, block)}{path}" for name, block in named for path, _ in block.named_buffers()}
        state = {name: tensor.detach() for name, tensor in self.state(detached=False).items() if name in buffers}
        return state | self.frozen()

    def frozen(self) -> dict[str, Tensor]:
        """Frozen parameters, by canonical name."""
        return {name: p.detach() for name, p in self._originals.items() if not p.requires_grad}

    @property
    def fixed(self) -> list[Tensor]:
        """Frozen parameters, their casts, and buffers."""
        frozen: list[Tensor] = [p for p in self._originals.values() if not p.requires_grad]
        frozen += self._frozen.values()
        return frozen + [buffer for module in self._modules.values() for buffer in module.buffers()]

    # --- in their places --------------------------------------------------------------------------------------------

    def bind(self, leaves: Mapping[str, Tensor]) -> None:
        """Make the modules compute with these tensors instead of their own parameters."""
        if self.bound is None:
            self._place(self._frozen)
        self._place(leaves)
        self.bound = leaves

    def _place(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensor.__dict__ = self._originals[name].__dict__  # attributes that anybody has set or is going to set
            for module, key in self._found.places[name]:
                module._parameters[key] = tensor  # type: ignore[assignment]  # a leaf tensor, not a Parameter

    def replaced(self) -> str | None:
        """Return the name of a parameter in whose place something else stands than was bound."""
        for name, leaf in (self.bound or {}).items():
            for module, key in self._found.places[name]:
                if key not in module._parameters or module._parameters[key] is not leaf:
                    return name
        return None

    def hide(self) -> None:
        """Let the modules' own trained parameters have no values: their memory goes while weights are rows."""
        for parameter in self.trained.values():
            hide(parameter)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put the modules' own parameters back, over the memory of `tensors`."""
        for name, tensor in tensors.items():
            self._originals[name].data = tensor
        self._place({name: self._originals[name] for name in (*tensors, *self._frozen)})
        self.bound = None

    # --- between two runs -------------------------------------------------------------------------------------------

    def adopt(self, trained: Mapping[str, Tensor]) -> None:
        """Take over parameters that were replaced, or given other memory, between two runs.

        Args:
            trained: the newest weights, to which their values are copied.

        Raises:
            ConfigError: parameters have come or gone, or are no longer of the kind that they were.
        """
        now = find_parameters(self._modules)
        check_changes(self._found, now, trained, self.where)
        moved = take_over_values(now, trained)
        replaced = any(now.originals[name] is not self._originals[name] for name in self._originals)
        self._found = now
        if moved or replaced:
            self.restore(trained)

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast frozen parameters again, into which may have been written between two runs."""
        for name, tensor in self._frozen.items():
            tensor.copy_(self._originals[name])


def cast(value: Any, precision: torch.dtype | None) -> Any:
    """Cast the float32 tensors of a tree; None leaves all as they are."""
    if precision is None:
        return value
    return pytree.tree_map(
        lambda x: x.to(precision) if isinstance(x, Tensor) and x.dtype == torch.float32 else x, value
    )


def in_full(value: Any, precision: torch.dtype | None) -> Any:
    """Cast the tensors of a tree that are of a lower precision to float32, as autocast does before losses.

    A mean over many classes or tokens has three digits in bfloat16; so have the gradients that begin with it.
    """
    if precision is None:
        return value
    return pytree.tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype == precision else x, value)


def check_formats(error: RuntimeError, where: str, value: Any, precision: torch.dtype | None) -> None:
    """Explain what a block has raised, if it was given float32 where its weights are of a lower precision.

    Args:
        error: what it has raised.
        where: the block.
        value: what it was given.
        precision: of its weights; None for their own.

    Raises:
        CapabilityError: that is the reason.
    """
    said = str(error)
    mixed = any(isinstance(x, Tensor) and x.dtype == torch.float32 for x in pytree.tree_leaves(value))
    if precision is None or not mixed or not ("dtype" in said or "scalar type" in said):
        return
    low = str(precision).removeprefix("torch.")
    raise CapabilityError(
        f"{where}: the block before it returned float32, but with precision={NAMES[precision]!r} its weights are "
        f"{low}, and torch does not compute with both ({said}). Only the inputs of the model are cast, not at every "
        "operation as under torch.autocast: let the block before end with .to(x.dtype), x being its input, or let this "
        f"one begin with .to(torch.{low})"
    ) from error


def check_casts(parameters: Mapping[str, Tensor], precision: Precision, where: str) -> None:
    """Make sure that a lower precision has something to act on, where there are parameters.

    Args:
        parameters: all of a stage, by name.
        precision: of its passes.
        where: the stage in messages.

    Raises:
        ConfigError: all are float64, which stay as they are.
    """
    wanted = "precision" if precision.low is not None else "boundary_gradients" if precision.between_stages else None
    if wanted is None or not parameters or {each.dtype for each in parameters.values()} != {torch.float64}:
        return
    raise ConfigError(
        f"{where}: {wanted}={getattr(precision, wanted)!r} is for float32, but all {len(parameters)} parameters here "
        f"are float64 ({', '.join(list(parameters)[:3])}{', ...' * (len(parameters) > 3)}), which is never cast: make "
        f"the model float32 (model.float(), and its inputs), or leave {wanted} out"
    )
