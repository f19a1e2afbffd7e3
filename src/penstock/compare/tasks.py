"""What a comparison trains on: a task is a model, its loss and its data, all functions of seeds and sample numbers.

A further task is a class with the members of `Task` and a line in `TASKS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from penstock.compare.config import ComparisonConfig
from penstock.compare.digits import DigitsTask
from penstock.errors import ConfigError
from penstock.models.gpt import gpt_blocks, language_loss, preset
from penstock.partition.blocks import LazyBlock
from penstock.train.data.corpus import load_corpus
from penstock.train.data.windows import Windows

Sample = tuple[Tensor, Tensor]
"""Inputs and targets of several samples."""


class Task(Protocol):
    """A model with its data.

    Blocks have no buffers that training changes (such as the statistics of BatchNorm): held-out losses are taken on a
    copy of the model that gets the weights alone.
    """

    @property
    def title(self) -> str:
        """Model and data in a line, for people."""
        ...

    @property
    def fingerprint(self) -> str:
        """Tells one set of data from another."""
        ...

    @property
    def unit(self) -> str:
        """What the loss is a mean over: tokens or images."""
        ...

    @property
    def units(self) -> int:
        """How many of them a sample has."""
        ...

    @property
    def held_out_samples(self) -> int:
        """How many samples are held out."""
        ...

    def blocks(self, seed: int) -> Mapping[str, LazyBlock]:
        """The model, its initial weights a function of the seed."""
        ...

    def loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, float]:
        """Sum over all units, and their number."""
        ...

    def correct(self, output: Tensor, target: Tensor) -> int | None:
        """How many units are right; None where the task does not ask for that."""
        ...

    def samples(self, seed: int, first: int, count: int) -> Sample:
        """Training samples number first .. first + count - 1, in the order of the seed; epochs follow each other."""
        ...

    def held_out(self, first: int, count: int) -> Sample:
        """The same of held-out samples, whatever the seed."""
        ...


class TextTask:
    """A byte-level GPT on text: the standard library's sources, or the user's own."""

    unit = "tokens"

    def __init__(self, config: ComparisonConfig, own: Path | None = None) -> None:
        net, corpus = config.model, load_corpus(config.data, partial(_lies_in, own))
        self.model = preset(
            "tiny",
            layers=net.layers or max(config.stages, 4),
            width=net.width or 64,
            heads=net.heads or 4,
            context=net.context or 64,
            vocabulary=corpus.vocabulary,
        )
        self._windows = {
            0: Windows(corpus, self.model.context, 0.05 if config.held_out is None else config.held_out, 0)
        }
        model = self.model
        self.units, self.fingerprint = model.context, corpus.fingerprint
        self.held_out_samples = len(self._windows[0].validation)
        self.title = (
            f"GPT {model.layers} x {model.width}, {model.parameters / 1e6:.2f} M parameters, context {model.context}; "
            f"{corpus.name}, {len(corpus.tokens) / 1e6:.1f} M tokens"
        )

    def blocks(self, seed: int) -> Mapping[str, LazyBlock]:
        """The model."""
        return gpt_blocks(self.model, seed)

    def loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, float]:
        """Cross-entropy in nats."""
        return language_loss(output, target)

    def correct(self, output: Tensor, target: Tensor) -> int | None:
        """The loss says more."""
        del output, target
        return None

    def samples(self, seed: int, first: int, count: int) -> Sample:
        """Windows of the training text."""
        if seed not in self._windows:
            self._windows[seed] = replace(self._windows[0], seed=seed)
        return self._windows[seed].samples(first, count)

    def held_out(self, first: int, count: int) -> Sample:
        """Windows of the held-out text."""
        return self._windows[0].validation_samples(first, count)


def _lies_in(folder: Path | None, file: Path) -> bool:
    return folder is not None and file.resolve().is_relative_to(folder.resolve())


TASKS: Mapping[str, Callable[[ComparisonConfig, Path | None], Task]] = MappingProxyType(
    {"text": TextTask, "digits": DigitsTask}
)
"""Every task by its name."""


def make_task(config: ComparisonConfig, own: Path | None = None) -> Task:
    """The task of a comparison.

    Args:
        config: of the comparison.
        own: the folder that it writes to, which is no part of its data.

    Raises:
        ConfigError: no such task, or it cannot have the model that is asked for.
        DataError: its data are missing or too few.
    """
    if config.task not in TASKS:
        near = difflib.get_close_matches(config.task, TASKS, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown task {config.task!r}.{hint} Known tasks: {', '.join(TASKS)}.")
    return TASKS[config.task](config, own)


def training_batches(task: Task, seed: int, count: int, microbatches: int, size: int) -> Iterator[list[Sample]]:
    """Batches of m microbatches of `size` samples, the same for every method.

    Args:
        task: whose.
        seed: of the order of samples.
        count: how many batches.
        microbatches, size: m, and samples in each.
    """
    for batch in range(count):
        first = batch * microbatches * size
        yield [task.samples(seed, first + k * size, size) for k in range(microbatches)]
