"""Random numbers of blocks, independent of where the model is cut and of which rank runs what when.

Before a block runs, torch's generators are seeded with a hash of (seed, block name, batch, microbatch, slice), so that
dropout is the same at every pipeline depth, in every order, and when a forward is recomputed. Outside the passes the
generators are as the user left them. Python's and numpy's generators, and generators of your own, go on from pass to
pass in the order in which passes run; a recomputed forward draws from them what the first one did.

Seeding, saving and restoring generators costs more than a small block does, so it is left out for blocks that cannot
draw: torch's own deterministic layers and functions (`may_draw`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Generator, nn
from torch.nn import functional as F

_NOTHING: AbstractContextManager[object] = nullcontext()


class RngKey(NamedTuple):
    """The pass that random numbers belong to.

    Attributes:
        batch: counted from the start of training; -1 in an evaluation.
        microbatch: within the batch, counted through all parallel pipelines (in an evaluation through the span).
        piece: the slice of the sequence.
    """

    batch: int
    microbatch: int
    piece: int = 0


class BlockRng:
    """Seeds torch's generators for the blocks of one stage and gives them back as they were.

    Args:
        seed: of the whole run.
        devices: where the stage's parameters are; a stage without any is taken to compute on torch's current device.
        blocks: names and callables that are seeded, the loss among them.

    Attributes:
        drawing: the names that are seeded in the present pass, because they may draw random numbers.
    """

    def __init__(
        self, seed: int, devices: Iterable[torch.device], blocks: Sequence[tuple[str, Callable[..., Any]]]
    ) -> None:
        self._seed = seed
        self._generators: list[Generator] = [torch.default_generator]
        found = set(devices)
        if not found and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found = {torch.device("cuda", torch.cuda.current_device())}
        for index in sorted({device.index or 0 for device in found if device.type == "cuda"}):
            self._generators.append(torch.cuda.default_generators[index])
        self._blocks = blocks
        self._draws: _Draws | None = None  # where somebody wants to know of draws
        self.inspect()

    def inspect(self) -> None:
        """Find out which blocks may draw; called again before every run, as modules may have changed since."""
        self._suspects = frozenset(name for name, block in self._blocks if may_draw(block))
        self.drawing = self._suspects
        cleared = [block for name, block in self._blocks if name not in self._suspects]
        modules = [module for block in cleared if isinstance(block, nn.Module) for module in block.modules()]
        # Submodules and hooks may also come in the middle of a run. Equal dicts compare by identity of their values.
        self._watched = [d for m in modules for d in (m._modules, m._forward_hooks, m._forward_pre_hooks)]
        self._watched += _global_hooks()
        self._inspected = [dict(watched) for watched in self._watched]

    def preserved(self) -> AbstractContextManager[object]:
        """A context for one pass, after which the generators are as they were before it."""
        if self._watched != self._inspected:
            self.inspect()
        self.drawing = self._suspects
        return _PreservedStates(self._generators) if self._suspects else _NOTHING

    def seed_block(self, block: str, key: RngKey) -> None:
        """Seed the generators for one block (or the loss) in one pass."""
        seed = seed_of(self._seed, block, key)
        draws = self._draws
        if draws is not None:
            draws.look()
        for generator in self._generators:
            generator.manual_seed(seed)
        if draws is not None:
            draws.begin()

    @contextmanager
    def noticing_draws(self) -> Iterator[Callable[[], bool]]:
        """A context that yields a function, which returns whether anything has drawn from the generators in it."""
        self._draws = draws = _Draws(self._generators)
        try:
            yield draws.look
        finally:
            self._draws = None


class _Draws:
    """Finds out whether generators have been drawn from since they were seeded."""

    def __init__(self, generators: list[Generator]) -> None:
        self._generators, self._any = generators, False
        self.begin()

    def begin(self) -> None:
        """Look from here on."""
        self._states = [generator.get_state() for generator in self._generators]

    def look(self) -> bool:
        """Return whether anything has drawn from them so far."""
        present = [generator.get_state() for generator in self._generators]
        self._any |= not all(map(torch.equal, self._states, present))
        return self._any


class _PreservedStates:
    """Restores the states of generators on exit."""

    def __init__(self, generators: list[Generator]) -> None:
        self._generators = generators

    def __enter__(self) -> None:
        self._states = [generator.get_state() for generator in self._generators]

    def __exit__(self, *failure: object) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)


def may_draw(block: Callable[..., Any]) -> bool:
    """Return True unless the type of a block shows that running it draws no random numbers.

    A module is cleared if it and all of its submodules are deterministic layers of `torch.nn`, of exactly these types,
    with no forward of their own and no forward hooks; a function, if it is one of torch's elementwise ones.
    """
    if not isinstance(block, nn.Module):
        return not any(block is function for function in _DETERMINISTIC_FUNCTIONS)
    if any(_global_hooks()):
        return True
    return not all(
        type(module) in _DETERMINISTIC_LAYERS
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
        for module in block.modules()
    )


def _global_hooks() -> list[dict[int, Any]]:
    """Torch's hooks that run with every module's forward."""
    return [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]


def seed_of(seed: int, block: str, key: RngKey) -> int:
    """BLAKE2b, 8 bytes, little-endian, without the highest bit, of "seed/block/batch/microbatch/piece"."""
    text = f"{seed}/{block}/{key.batch}/{key.microbatch}/{key.piece}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


_DETERMINISTIC_FUNCTIONS = (torch.tanh, torch.relu, torch.sigmoid, F.relu, F.gelu, F.silu, F.cross_entropy, F.mse_loss)
_DETERMINISTIC_LAYERS = frozenset(
    getattr(nn, name)
    for name in (
        "Sequential", "Identity", "Flatten", "Unflatten", "Linear", "Bilinear", "Embedding",
        "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d",
        "LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d",
        "ReLU", "ReLU6", "LeakyReLU", "PReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Sigmoid", "Tanh",
        "Softplus", "Softsign", "Hardtanh", "Hardswish", "Hardsigmoid", "Softmax", "LogSoftmax",
        "MaxPool1d", "MaxPool2d", "AvgPool1d", "AvgPool2d", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d",
        "CrossEntropyLoss", "MSELoss", "L1Loss", "NLLLoss", "SmoothL1Loss", "HuberLoss", "BCEWithLogitsLoss",
    )
)  # fmt: skip
