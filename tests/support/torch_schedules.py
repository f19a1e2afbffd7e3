"""Schedules made by torch.distributed.pipelining's own classes."""

from unittest.mock import Mock

from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import _PipelineStageBase


def torch_schedule(name, ranks, microbatches, chunks=1):
    """One of torch's schedules over stages that are nothing but numbers."""
    stages = []
    for chunk in range(chunks):
        stage = Mock(spec=_PipelineStageBase)
        stage.num_stages, stage.group_size, stage.group_rank = ranks * chunks, ranks, 0
        stage.stage_index, stage.is_first, stage.is_last, stage.submod = chunk * ranks, chunk == 0, False, None
        stages.append(stage)
    made = getattr(torch_schedules, name)
    return made(stages if chunks > 1 else stages[0], microbatches, loss_fn=lambda output, target: None)
