"""Random numbers that do not depend on where the model is cut, or on who runs when.

Before a block runs, torch's generators are seeded with a hash of (seed, block name, batch, microbatch, slice), so that
dropout falls alike at every depth, in every order, and again when a forward is recomputed. Outside the passes torch's
generators are as the user left them. Python's and numpy's generators are not touched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Generator


class Draw(NamedTuple):
    """Which pass draws.

    Attributes:
        batch: counted from the start of training; -1 in an evaluation.
        microbatch: within the batch, counted through all parallel pipelines (in an evaluation through the span).
        piece: the slice of the sequence.
    """

    batch: int
    microbatch: int
    piece: int = 0


class Randomness:
    """The generators of one stage.

    Args:
        seed: of the whole run.
        devices: where its parameters are; a stage without any is taken to compute on torch's current device.
    """

    def __init__(self, seed: int, devices: Iterable[torch.device]) -> None:
        self._seed = seed
        self._generators: list[Generator] = [torch.default_generator]
        found = set(devices)
        if not found and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found = {torch.device("cuda", torch.cuda.current_device())}
        for index in sorted({device.index or 0 for device in found if device.type == "cuda"}):
            self._generators.append(torch.cuda.default_generators[index])

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Afterwards the generators are as they were."""
        states = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)

    def begin(self, block: str, draw: Draw) -> None:
        """Seed the generators for a block's pass."""
        seed = seed_of(self._seed, block, draw)
        for generator in self._generators:
            generator.manual_seed(seed)


def seed_of(seed: int, block: str, draw: Draw) -> int:
    """BLAKE2b, 8 bytes, little-endian, without the highest bit, of "seed/block/batch/microbatch/piece"."""
    text = f"{seed}/{block}/{draw.batch}/{draw.microbatch}/{draw.piece}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
