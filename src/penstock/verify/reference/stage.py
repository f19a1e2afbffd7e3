"""A stage of the reference: consecutive blocks, all versions of their weights, and the optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

Block = Callable[[Any], Any]
Factory = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]
Weights = dict[str, Tensor]


class ReferenceReading:
    """Which weights the passes of a stage read: here the version, for forward and backward; subclasses differ.

    Attributes:
        repeats: whether it is defined what recomputed forwards read.
    """

    repeats = True

    def on_version(self, stage: ReferenceStage) -> None:
        """Take note of a new version: the first one, or the next, by an update (`stage.made`) or a skipped one."""

    def read(self, stage: ReferenceStage, version: int) -> tuple[Weights, Weights | None]:
        """Return the weights of a forward that runs when `version` is the newest, and of its backward (None: the same).

        Backwards run when all updates before that of their own batch are made.
        """
        return stage.versions[version], None

    def again(self, stage: ReferenceStage, version: int, moment: int) -> Weights | None:
        """Return that forward's weights when it is recomputed while `moment` is the newest version; None: the same."""

    def before_microbatch(self, t: int, part: int, place: int, divisor: float, weights: Sequence[float]) -> None:
        """Take note of what comes before a microbatch of batch t is read.

        Args:
            t: the batch.
            part: the pipeline.
            place: number of the microbatch among those of this pipeline since the span began.
            divisor: of its loss.
            weights: of the losses of the batches before.
        """

    def after_microbatch(self, stage: ReferenceStage, t: int, part: int, scale: float) -> None:
        """Take note of `stage.part`, the gradient of a part of batch t so far; losses were multiplied by `scale`."""


def step(stage: ReferenceStage) -> None:
    """Make an update with the optimizer, when gradients and rates are set; corrections use other functions."""
    if stage.optimizer is not None:
        stage.optimizer.step()


class ReferenceStage:
    """One stage.

    Args:
        blocks: by name; they are copied.
        factory: makes the optimizer.

    Attributes:
        newest: the parameters that the optimizer changes, by canonical name.
        versions: their values after each batch.
        gradient: of the present batch, when its parts have been added.
        made: whether the newest version was made by an update.
        read: the version that the forward of the present batch's first microbatch read.
        rate: initial learning rate, number of updates ahead (0 by default) -> the rate in that update.
        reading, step: how weights are read and updates are made.
    """

    def __init__(self, blocks: Mapping[str, Block], factory: Factory) -> None:
        self.blocks = copy.deepcopy(dict(blocks))  # in one go, so that what blocks share remains shared
        self.names: dict[str, dict[str, str]] = {}  # block -> its own name of a parameter -> the canonical name
        self.newest: dict[str, nn.Parameter] = {}
        self.modules = {name: block for name, block in self.blocks.items() if isinstance(block, nn.Module)}
        first_name: dict[Tensor, str] = {}
        for block, module in self.modules.items():
            for own, parameter in module.named_parameters(remove_duplicate=False):
                if parameter.requires_grad:
                    name = first_name.setdefault(parameter, f"{block}.{own}")
                    self.names.setdefault(block, {})[own] = name
                    self.newest[name] = nn.Parameter(parameter.detach().clone())
        self.optimizer = factory(list(self.newest.items())) if self.newest else None
        self._given: Weights = {}
        if self.optimizer is not None:  # some optimizers work in the gradient's own memory
            self.optimizer.register_step_pre_hook(self._note_gradients)
        self.rates = [group["lr"] for group in self.optimizer.param_groups] if self.optimizer else []
        self.versions = [self.copy_newest()]
        self.made, self.read = False, 0
        self.rate: Callable[..., float] = lambda initial, _=0: initial
        self.reading: ReferenceReading = ReferenceReading()
        self.step: Callable[[ReferenceStage], None] = step
        self.parts: list[Weights] = []
        self.clear()

    def cast_frozen(self, precision: torch.dtype | None) -> None:
        """Cast parameters that are not trained, once."""
        for module in self.modules.values():
            for parameter in module.parameters():
                if not parameter.requires_grad:
                    parameter.data = to_precision(parameter.data, precision)

    def copy_newest(self) -> Weights:
        """Return a copy of the newest weights, which the next update does not change."""
        return {name: parameter.detach().clone() for name, parameter in self.newest.items()}

    def clear(self) -> None:
        """Start the gradient of one part of a batch; it is summed in at least fp32."""
        dtypes = {name: torch.promote_types(p.dtype, torch.float32) for name, p in self.newest.items()}
        self.part = {name: torch.zeros_like(p, dtype=dtypes[name]) for name, p in self.newest.items()}

    def end_part(self) -> None:
        """End a part of the batch: store its gradient with those of the parts before it."""
        self.parts.append(self.part)
        self.clear()

    def add_parts(self) -> None:
        """Set the gradient of the batch: the sum of the parts, in their order."""
        self.gradient = {name: reduce(torch.add, [part[name] for part in self.parts]) for name in self.newest}
        self.parts.clear()

    def forward(self, x: Any, leaves: Mapping[str, Tensor], draw: Callable[[str], None]) -> Any:
        """Apply the blocks in a row with the weights given; `draw` is called before each."""
        for name in self.blocks:
            x = self.apply(name, x, leaves, draw)
        return x

    def apply(self, name: str, x: Any, leaves: Mapping[str, Tensor], draw: Callable[[str], None]) -> Any:
        """Apply one block."""
        draw(name)
        own = {own: leaves[canonical] for own, canonical in self.names.get(name, {}).items()}
        return functional_call(self.modules[name], own, (x,)) if own else self.blocks[name](x)

    def update(self, factor: float, read: int) -> Weights:
        """Make one update of the newest weights.

        Args:
            factor: what the gradient is multiplied by.
            read: the version that the forward of the batch's first microbatch read.

        Returns:
            The gradient that the optimizer was given.
        """
        if self.optimizer is None:
            return {}
        for name, parameter in self.newest.items():
            g = self.gradient[name]
            parameter.grad = (g if factor == 1.0 else g * factor).to(parameter.dtype).clone()
        self.read = read
        for group, initial in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = self.rate(initial)
        self._note_gradients()  # a method may make the step itself
        with torch.no_grad():
            self.step(self)
        return self._given

    def _note_gradients(self, *_: object) -> None:
        self._given = {name: p.grad.clone() for name, p in self.newest.items() if p.grad is not None}

    def add(self, change: Weights, share: float) -> None:
        """Add a share of a change to the newest version, before any pass has read it."""
        with torch.no_grad():
            for name, parameter in self.newest.items():
                parameter.copy_(parameter + share * change[name])
        self.versions[-1] = self.copy_newest()

    def add_version(self, made: bool) -> None:
        """Append the newest weights as the next version, which an update has made or not."""
        self.made = made
        self.versions.append(self.copy_newest())


def to_precision(value: Any, precision: torch.dtype | None) -> Any:
    """Cast every tensor of higher precision to float32."""
    if precision is None:
        return value
    return tree_map(lambda x: x.to(precision) if isinstance(x, Tensor) and x.dtype == torch.float32 else x, value)
