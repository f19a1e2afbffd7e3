"""What to write in place of names that other libraries for pipelines have, and Penstock has not."""

from __future__ import annotations

_SCHEDULES = {
    "Schedule1F1B": "1f1b",
    "ScheduleGPipe": "gpipe",
    "ScheduleInterleaved1F1B": "interleaved",
    "ScheduleLoopedBFS": "breadth-first",
    "ScheduleInterleavedZeroBubble": "zb-interleaved",
    "ScheduleZBVZeroBubble": "zb-v",
    "ScheduleDualPipeV": "dualpipe-v",
}
_PIPELINE = (
    'penstock.Pipeline(blocks, method="1f1b", stages=2, microbatches=4, loss=loss, optimizer=optimizer) has the model, '
    "its stages and their optimizers; for report in pipeline.run(loader) trains it"
)
_PIPELINES = (
    "PipelineStage", "PipelineModule", "PipelineEngine", "initialize", "pipeline", "pipe", "Pipe", "build_stage",
    "SplitPoint", "pipe_split", "LayerSpec", "GPipe", "Accelerator", "prepare", "DeepSpeedEngine",
)  # fmt: skip


def instead_of(name: str) -> str | None:
    """Return what to write in place of a name of another library; None for other names."""
    if name in _SCHEDULES:
        method = _SCHEDULES[name]
        return f'penstock.make_schedule("{method}", stages, microbatches), or Pipeline(..., method="{method}")'
    return _PIPELINE if name in _PIPELINES else None
