"""The tasks of comparisons: a model, its loss and its data, all functions of seeds and sample numbers.

To add a task, write a class with the members of `Task` and add it to `TASKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from penstock.checks import did_you_mean
from penstock.compare.config import ComparisonConfig
from penstock.compare.digits import DigitsTask
from penstock.errors import ConfigError
from penstock.models.gpt import gpt_blocks, language_loss
from penstock.models.gpt_shape import preset
from penstock.models.gpt_variant import as_they_are
from penstock.models.vocabulary_parallel_gpt import (
    summed_cross_entropy,
    vocabulary_parallel_gpt,
    whole_head,
    with_targets,
)
from penstock.partition.blocks import LazyBlock
from penstock.stage.blocks.loss import LossFunction
from penstock.train.data.corpus import load_corpus
from penstock.train.data.window_sampler import Windows

Sample = tuple[Tensor, Tensor]
"""Inputs and targets of several samples."""


class Task(Protocol):
    """A model with its data.

    Blocks must not have buffers that training changes (such as the statistics of BatchNorm), because held-out losses
    are computed in a copy of the model that receives the weights only.
    """

    @property
    def title(self) -> str:
        """Model and data in one line, for display."""
        ...

    @property
    def fingerprint(self) -> str:
        """Distinguishes one set of data from another."""
        ...

    @property
    def unit(self) -> str:
        """The unit that the loss is a mean over: tokens or images."""
        ...

    @property
    def units(self) -> int:
        """The number of units per sample."""
        ...

    @property
    def held_out_samples(self) -> int:
        """The number of held-out samples."""
        ...

    def blocks(self, seed: int) -> Mapping[str, LazyBlock]:
        """Make the model; its initial weights are a function of the seed."""
        ...

    def loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, float]:
        """Return the sum over all units, and their number."""
        ...

    def correct(self, output: Tensor, target: Tensor) -> int | None:
        """Count the correct units; None if the task does not define that."""
        ...

    def samples(self, seed: int, first: int, count: int) -> Sample:
        """Return the training samples first .. first + count - 1 in the order of the seed, epoch after epoch."""
        ...

    def held_out(self, first: int, count: int) -> Sample:
        """Return held-out samples, which do not depend on the seed."""
        ...


class TextTask:
    """A byte-level GPT on text: the standard library's sources, or the user's own files."""

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
            f"{corpus.described}"
        )

    def blocks(self, seed: int) -> Mapping[str, LazyBlock]:
        """Make the model."""
        return gpt_blocks(self.model, seed)

    def loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, float]:
        """Compute the cross-entropy in nats."""
        return language_loss(output, target)

    def correct(self, output: Tensor, target: Tensor) -> int | None:
        """Return None: the loss says more."""
        del output, target
        return None

    def samples(self, seed: int, first: int, count: int) -> Sample:
        """Return windows of the training text."""
        if seed not in self._windows:
            self._windows[seed] = replace(self._windows[0], seed=seed)
        return self._windows[seed].samples(first, count)

    def held_out(self, first: int, count: int) -> Sample:
        """Return windows of the held-out text."""
        return self._windows[0].validation_samples(first, count)


def _lies_in(folder: Path | None, file: Path) -> bool:
    return folder is not None and file.resolve().is_relative_to(folder.resolve())


TASKS: Mapping[str, Callable[[ComparisonConfig, Path | None], Task]] = MappingProxyType(
    {"text": TextTask, "digits": DigitsTask}
)
"""All tasks by name."""


def make_task(config: ComparisonConfig, own: Path | None = None) -> Task:
    """Make the task of a comparison.

    Args:
        config: of the comparison.
        own: the comparison's folder, whose files are not part of the data.

    Raises:
        ConfigError: unknown task, or the task does not support the configured model.
        DataError: its data are missing or too few.
    """
    if config.task not in TASKS:
        hint = did_you_mean(config.task, TASKS)
        raise ConfigError(f"unknown task {config.task!r}.{hint} Known tasks: {', '.join(TASKS)}.")
    return TASKS[config.task](config, own)


@dataclass(frozen=True)
class TrialModel:
    """The model of a task in the form that a pipeline trains.

    Attributes:
        blocks: seed -> its blocks; their initial weights are those of the task.
        loss: (output, target) -> the sum over all units, and their number.
        pair: (inputs, targets) -> what the model takes, and what the loss does.
        whole: the pipeline's weights by name -> those of the task's own blocks.
        balance: blocks of each stage; None where they are divided by cost.
    """

    blocks: Callable[[int], Mapping[str, LazyBlock]]
    loss: LossFunction
    pair: Callable[[Tensor, Tensor], Any] = as_they_are
    whole: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda weights: weights
    balance: Sequence[int] | None = None


def trial_model(task: Task, head_parts: int | None) -> TrialModel:
    """Return the model of a task.

    Args:
        task: which.
        head_parts: the number of ranks that its output layer is divided among; None for a whole one.

    Raises:
        ConfigError: its output layer cannot be divided so.
    """
    if head_parts is None:
        return TrialModel(task.blocks, task.loss)
    if not isinstance(task, TextTask):
        raise ConfigError("only the output layer of task text can be divided among the stages; compare 1f1b instead")
    shape, parts = task.model, head_parts
    balance = vocabulary_parallel_gpt(shape, parts, 0).partition
    return TrialModel(
        lambda seed: vocabulary_parallel_gpt(shape, parts, seed).blocks,
        summed_cross_entropy,
        with_targets,
        whole_head,
        balance,
    )


def training_batches(task: Task, seed: int, count: int, microbatches: int, size: int) -> Iterator[list[Sample]]:
    """Yield batches of m microbatches of `size` samples, the same for every method.

    Args:
        task: model and data.
        seed: of the order of samples.
        count: the number of batches.
        microbatches, size: m, and the samples of each.
    """
    for batch in range(count):
        first = batch * microbatches * size
        yield [task.samples(seed, first + k * size, size) for k in range(microbatches)]
