"""The blocks of one stage as a function of weights and inputs.

A version of the weights is bound by putting its leaf tensors in the place of the modules' parameters. The modules'
own `Parameter` objects never enter a graph; they are put back, over the newest weights, when a run ends. A graph keeps
its leaves, so binding another version does not affect it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.comm.core.devices import current_device, on_device
from penstock.comm.core.tensor_group import explain_lost_peer
from penstock.comm.message.tree_classes import open_dataclasses
from penstock.comm.message.trees import detached
from penstock.errors import CapabilityError, ConfigError
from penstock.options.all_options import PipelineOptions
from penstock.partition.parameter_names import prefix_of
from penstock.partition.tensor_parallel import Division, whole_output
from penstock.stage.autograd.forward_graph import open_inputs
from penstock.stage.blocks.loss import LossFunction, call_loss, sum_and_weight
from penstock.stage.blocks.precision_casts import cast, check_formats, in_full, kept_full
from penstock.stage.blocks.rng import BlockRng, RngKey
from penstock.stage.checks.changes_between_runs import check_changes, find_parameters, take_over_values
from penstock.stage.checks.released_weight_placeholders import hide

_TRAINABLE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
LOSS = "loss"  # the name under which the random numbers of the loss are seeded


class StageModule:
    """The blocks of one stage.

    Args:
        blocks: canonical name -> module or plain function; each takes what the one before returned.
        loss: the loss function, on the last stage and on others to which no gradient comes back; None elsewhere.
        where: the stage in messages, such as "stage 0 on rank 0".
        options: of the pipeline.
        hands_on: other stages take its output, even if it has a loss.
        device: of a stage without parameters; torch's current one if None.
        shared_buffers: names of buffers that other stages have as well, and which stages those are.

    Attributes:
        options: of the pipeline.
        precision: the dtype that passes compute in; None for that of the parameters.
        device: on which it computes.
        division: what of its parameters other processes share.
        full: parameters that are not cast to the precision (`penstock.stage.blocks.precision_casts.kept_full`).
        bound: the tensors that the modules compute with; None where these are their own parameters.
    """

    def __init__(
        self,
        blocks: Mapping[str, Any],
        loss: LossFunction | None,
        where: str,
        options: PipelineOptions,
        hands_on: bool = False,
        device: torch.device | None = None,
        shared_buffers: Mapping[str, str] | None = None,
    ) -> None:
        self.options, self.precision = options, options.precision.low
        self.blocks, self.shared_buffers = dict(blocks), shared_buffers or {}
        self.division = Division()
        self.last = list(self.blocks)[-1]
        self.loss, self.hands_on = loss, hands_on
        self.where = where
        self.bound: Mapping[str, Tensor] | None = None
        self._found = find_parameters(self.blocks)
        for name, parameter in self._originals.items():
            self._check_dtype(name, parameter)
            for module, _ in self._found.places[name]:
                self._check_max_norm(name, module, parameter)
        self._steps = frozenset(name for name, p in self._originals.items() if p.requires_grad)
        full = {id(p) for module in self.modules for p in kept_full(module)}
        self.full = {name for name, p in self._originals.items() if id(p) in full}
        self._frozen = {
            name: p.detach().to(self.precision)
            for name, p in self._originals.items()
            if self.precision is not None and not p.requires_grad and p.dtype == torch.float32 and name not in self.full
        }
        self.device = next((p.device for p in self._originals.values()), device or current_device())
        options.precision.kernels.check_device(self.device)
        drawing = [*self.blocks.items(), *([] if loss is None else [(LOSS, loss)])]
        self.rng = BlockRng(options.run.seed, {p.device for p in self._originals.values()}, drawing)

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

    @property
    def _originals(self) -> dict[str, nn.Parameter]:
        """The modules' own parameters, by canonical name."""
        return self._found.originals

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that require gradients, by canonical name; a shared one appears once."""
        return {name: self._originals[name] for name in self._originals if name in self._steps}

    @property
    def modules(self) -> list[nn.Module]:
        """The blocks that are modules."""
        return [block for block in self.blocks.values() if isinstance(block, nn.Module)]

    def state(self, *, detached: bool = True) -> dict[str, Tensor]:
        """Parameters and persistent buffers by canonical name, with their present values; shared ones once.

        Args:
            detached: from their graphs, which takes weights that are there.
        """
        state: dict[str, Tensor] = {}
        for prefix, block in self.blocks.items():
            if isinstance(block, nn.Module):
                state.update(block.state_dict(prefix=prefix_of(prefix, block), keep_vars=not detached))
        return {name: tensor for name, tensor in state.items() if self._found.paths.get(name, name) == name}

    def aliases(self) -> dict[str, str]:
        """Further names of shared parameters, each with the canonical one; between two runs."""
        first = {id(parameter): name for name, parameter in self._originals.items()}
        found: dict[str, str] = {}
        for prefix, block in self.named_modules():
            for name, tensor in block.state_dict(prefix=prefix_of(prefix, block), keep_vars=True).items():
                if first.get(id(tensor), name) != name:
                    found[name] = first[id(tensor)]
        return found

    def unversioned(self) -> dict[str, Tensor]:
        """Tensors that no optimizer steps, by canonical name: frozen parameters and persistent buffers."""
        named = self.named_modules()
        buffers = {f"{prefix_of(name, block)}{path}" for name, block in named for path, _ in block.named_buffers()}
        state = {name: tensor.detach() for name, tensor in self.state(detached=False).items() if name in buffers}
        return state | self.frozen()

    def frozen(self) -> dict[str, Tensor]:
        """Frozen parameters, by canonical name."""
        return {name: p.detach() for name, p in self._originals.items() if not p.requires_grad}

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
        """Make the modules compute with these tensors instead of their own parameters."""
        if self.bound is None:
            self._place(self._frozen)
        self._place(leaves)
        self.bound = leaves

    def _place(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            for module, key in self._found.places[name]:
                module._parameters[key] = tensor  # type: ignore[assignment]  # a leaf tensor, not a Parameter

    def placed(self) -> list[tuple[str, Tensor | None]]:
        """Return what stands in the place of each parameter, by its name."""
        places = [(name, module, key) for name, at in self._found.places.items() for module, key in at]
        return [(name, dict(module._parameters).get(key)) for name, module, key in places]  # scripted ones lack get()

    def adopt(self, trained: Mapping[str, Tensor]) -> None:
        """Take over parameters that were replaced, or given other memory, between two runs.

        Args:
            trained: the newest weights, to which their values are copied.

        Raises:
            ConfigError: parameters have come or gone, or are no longer of the kind that they were.
        """
        now = find_parameters(self.blocks)
        check_changes(self._found, now, trained, self.where)
        moved = take_over_values(now, trained)
        replaced = any(now.originals[name] is not self._originals[name] for name in self._originals)
        self._found = now
        if moved or replaced:
            self.restore(trained)

    def refresh(self) -> None:
        """Cast frozen parameters again and look at the blocks anew: both may have been changed between two runs."""
        with torch.no_grad():
            for name, tensor in self._frozen.items():
                tensor.copy_(self._originals[name])
        self.rng.inspect()

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

    # --- passes -----------------------------------------------------------------------------------------------------

    def take(self, value: Any) -> Any:
        """Return the model's own input on the device of the stage, in the precision of its passes.

        It is cut off from graphs of the caller; tensors that required a gradient are leaves that require one.
        """
        open_dataclasses(value)
        value, wants = detached(value)
        value = cast(on_device(value, self.device), self.precision)
        return open_inputs(value, wants)[0] if any(wants) else value

    def run(self, names: Sequence[str], value: Any, key: RngKey) -> Any:
        """Run some of the blocks in a row."""
        drawing, blocks = self.rng.drawing, self.blocks
        for name in names:
            if name in drawing:
                self.rng.seed_block(name, key)
            try:
                value = blocks[name](value)
            except Exception as error:
                if isinstance(error, RuntimeError):
                    if self.division.splits:
                        explain_lost_peer(error, self.where)
                    check_formats(error, f"{self.where}, block {name!r}", value, self.precision)
                if isinstance(error, TypeError) and not isinstance(value, Tensor):
                    error.add_note(
                        f"raised in block {name!r}, which got a {type(value).__name__}: a block takes what the one "
                        "before returned; put a function between them, such as lambda pair: pair[0]"
                    )
                else:
                    error.add_note(f"raised in block {name!r}")
                raise
        return value

    def run_slice(self, names: Sequence[str], value: Any, carry: Mapping[str, Any], key: RngKey) -> tuple[Any, Any]:
        """Run some of the blocks on one slice of a sequence.

        Args:
            names: the blocks.
            value: the slice.
            carry: by block, what its `forward_slice` returned for the slice before.
            key: the pass that random numbers belong to.

        Returns:
            The output, and by block what it carries on to the next slice.
        """
        made: dict[str, Any] = {}
        for name in names:
            if name in self.rng.drawing:
                self.rng.seed_block(name, key)
            block = self.blocks[name]
            if hasattr(block, "forward_slice"):
                value, made[name] = block.forward_slice(value, carry.get(name))
            else:
                value = block(value)
        return value, made

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the modules into evaluation mode; for no longer than a pass, because stages may share modules."""
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
        """True on the last stage, and on others to which no gradient comes back."""
        return self.loss is not None

    def evaluate_loss(
        self, output: Any, target: Any, key: RngKey, sliced: bool = False, known: float | Tensor | None = None
    ) -> tuple[Tensor, float | Tensor]:
        """Compute the loss sum of a microbatch and its weight (`penstock.stage.blocks.loss`), in float32 at least.

        Targets are counted where the data are, so that a GPU is not waited for; not if the weight of a mean is known.

        Raises:
            ConfigError: the loss function returned something else; or, for a slice of a sequence, it returned no
                weight, so that the share of the slice in the whole sequence is unknown.
        """
        assert self.loss is not None
        if LOSS in self.rng.drawing:
            self.rng.seed_block(LOSS, key)
        open_dataclasses(target)
        given, wants = detached(target)
        if self.division.splits and not getattr(self.loss, "takes_parts", False):
            output = whole_output(output)
        result = call_loss(
            self.loss, in_full(output, self.precision), open_inputs(on_device(given, self.device), wants)[0]
        )
        if sliced and isinstance(result, Tensor):
            raise ConfigError(
                f"{self.where}: with slices of sequences the loss must return (sum, weight), such as the sum over the "
                "tokens and their number; it returned a scalar"
            )
        return sum_and_weight(result, self.loss, output, target, self.where, known)
