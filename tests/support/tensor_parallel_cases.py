"""A small GPT on four processes with tensor parallelism, and the same without it in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.checkpoint.manager import Checkpoints
from penstock.models.gpt import TIED_EMBEDDINGS, gpt_blocks, language_loss
from penstock.models.gpt_shape import GPTConfig
from penstock.options.parallelism import Partition
from penstock.options.run import Group
from penstock.runtime.pipeline import Pipeline

SHAPE = GPTConfig(layers=2, width=32, heads=4, context=16, vocabulary=64)


class TensorCase(NamedTuple):
    """What to train.

    Attributes:
        method: its name.
        stages, width, tensor: how many of each; together they are processes.
        microbatches: of each pipeline.
        clip: the largest norm.
        tied: input and output embedding are one.
        options: others of `Pipeline`.
    """

    method: str = "1f1b"
    stages: int = 2
    width: int = 1
    tensor: int = 2
    microbatches: int = 3
    clip: float | None = 0.7
    tied: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def alone(self) -> TensorCase:
        """The same without tensor parallelism."""
        return self._replace(tensor=1)


class Trained(NamedTuple):
    """What a process knows after a run.

    Attributes:
        losses: those of batches that are known here.
        decided: the loss and the norm of each update.
        whole: the state of the whole model, on the first rank.
        own: what is here.
        saved: of the state that it would save, by name.
    """

    losses: list[float]
    decided: list[tuple[float, float]]
    whole: dict[str, Tensor]
    own: dict[str, Tensor]
    saved: dict[str, Tensor]


def tokens(batches: int, samples: int = 6) -> list[tuple[Tensor, Tensor]]:
    """Make batches of tokens."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(SHAPE.vocabulary, (batches, samples, SHAPE.context + 1), generator=generator)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in drawn]


def gpt_pipeline(group: dist.ProcessGroup | Group | None, case: TensorCase, **changes: Any) -> Pipeline:
    """Make the pipeline of a case."""
    tied = dict(TIED_EMBEDDINGS) if case.tied else None
    options: dict[str, Any] = {
        "method": case.method,
        "stages": case.stages,
        "microbatches": case.microbatches,
        "loss": language_loss,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=3e-3, weight_decay=0.1),
        "max_grad_norm": case.clip,
        "data_parallel": case.width,
        "partition": Partition(tied=tied, tensor_parallel=case.tensor),
        "group": group,
    }
    return Pipeline(gpt_blocks(SHAPE, seed=3), **options | dict(case.options) | changes)


def train_gpt(
    group: dist.ProcessGroup | None, case: TensorCase, spans: Sequence[int] = (3,), folder: str | None = None
) -> Trained:
    """Train for some spans; with a folder go on from its newest checkpoint, and save there."""
    pipeline = gpt_pipeline(group, case)
    checkpoints = None if folder is None else Checkpoints(pipeline, Path(folder))
    if checkpoints is not None:
        checkpoints.load()
    data = tokens(pipeline.batches + sum(spans), 6 * case.width)[pipeline.batches :]
    losses, decided = list[float](), []
    for size in spans:
        for report in pipeline.run(data[:size]):
            losses += [] if report.loss is None else [report.loss]
            decided += report.decided
        decided += pipeline.decided()
        data = data[size:]
    if checkpoints is not None:
        checkpoints.save()
    saved = {n: t.clone() for snapshot in pipeline.snapshots() for n, t in snapshot.tensors.items()}
    whole = dict(pipeline.full_state_dict())
    own = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
    return Trained(losses, [(decision.loss, decision.norm) for decision in decided], whole, own, saved)
