"""The blocks of one stage, and its loss, as functions of inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.comm.core.devices import current_device, on_device
from penstock.comm.core.tensor_group import explain_lost_peer
from penstock.comm.p2p.trees import detached, open_dataclasses, without_marks
from penstock.options.all_options import PipelineOptions
from penstock.partition.replay.model_stages import ModelStage
from penstock.partition.tensor_parallel import Division, whole_output
from penstock.stage.autograd.forward_graph import open_inputs
from penstock.stage.blocks.block_tensors import BlockTensors
from penstock.stage.blocks.loss import LossFunction, WeighedLoss
from penstock.stage.blocks.precision_casts import cast, check_formats, in_full
from penstock.stage.blocks.rng import BlockRng, RngKey

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
        whole: its loss gets whole batches.

    Attributes:
        modules: the blocks that are modules, by canonical name.
        tensors: their parameters and buffers.
        precision: the dtype that passes compute in; None for that of the parameters.
        device: on which it computes.
        division: what of its parameters other processes share.
        last: the name of the last block.
        weighed: the loss, as sums and weights; None where there is none.
        rng: the random numbers of blocks and loss.
    """

    def __init__(
        self,
        blocks: Mapping[str, Any],
        loss: LossFunction | None,
        where: str,
        options: PipelineOptions,
        hands_on: bool = False,
        device: torch.device | None = None,
        whole: bool = False,
    ) -> None:
        self.blocks = dict(blocks)
        self.modules = {name: block for name, block in self.blocks.items() if isinstance(block, nn.Module)}
        self.division = Division()
        self.last = list(self.blocks)[-1]
        self.loss, self.hands_on = loss, hands_on
        self.weighed = None if loss is None else WeighedLoss(loss, where, whole, options.partition.slicing)
        self.where, self.precision = where, options.precision.low
        self.tensors = BlockTensors(self.modules, where, self.precision)
        devices = self.tensors.devices
        self.device = next(iter(devices), device or current_device())
        options.precision.kernels.check_device(self.device)
        drawing = [*self.blocks.items(), *([] if loss is None else [(LOSS, loss)])]
        self.rng = BlockRng(options.run.seed, devices, drawing)
        for block in self.blocks.values():
            if isinstance(block, ModelStage):
                block.precision = self.precision
                block.note = None if self.weighed is None else self.weighed.frame.note

    def take(self, value: Any) -> Any:
        """Return the model's own input on the device of the stage, in the precision of its passes.

        It is cut off from graphs of the caller; tensors that required a gradient are leaves that require one.
        """
        open_dataclasses(value)
        value, wants = detached(without_marks(value))
        value = cast(on_device(value, self.device), self.precision)
        return open_inputs(value, wants)[0] if any(wants) else value

    def run(self, names: Sequence[str], value: Any, key: RngKey) -> Any:
        """Run some of the blocks in a row."""
        drawing, blocks = self.rng.drawing, self.blocks
        for name in names:
            if name in drawing:
                self.rng.seed_block(name, key)
            try:
                block = blocks[name]
                if isinstance(block, ModelStage):
                    value = block.run(value, partial(self.rng.seed_block, key=key))
                else:
                    value = block(value)
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
        modes = [(m, m.training) for block in self.modules.values() for m in block.modules()]
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
        self, output: Any, target: Any, key: RngKey, piece: tuple[int, int] | None = None
    ) -> tuple[Tensor, float | Tensor]:
        """Compute the loss sum of a microbatch and its weight (`penstock.stage.blocks.loss`), in float32 at least.

        Targets are counted where the data are, so that a GPU is not waited for.

        Raises:
            ConfigError: the loss function returned something else; or, for a slice of a sequence, it returned no
                weight, so that the share of the slice in the whole sequence is unknown.
        """
        assert self.weighed is not None
        if LOSS in self.rng.drawing:
            self.rng.seed_block(LOSS, key)
        open_dataclasses(target)
        given, wants = detached(target)
        with self.weighed.frame:
            output = self.returned(output, parts=getattr(self.loss, "takes_parts", False))
        target = open_inputs(on_device(given, self.device), wants)[0]
        return self.weighed(output, target, piece=piece)

    def returned(self, output: Any, *, parts: bool = False) -> Any:
        """Return an output of the model as one process has it, in float32 at least; or (`parts`) what of it is here."""
        return in_full(whole_output(output) if self.division.splits and not parts else output, self.precision)

    def refresh(self) -> None:
        """Follow what was changed on the blocks between two runs: frozen parameters, and which blocks may draw."""
        self.tensors.refresh()
        self.rng.inspect()
