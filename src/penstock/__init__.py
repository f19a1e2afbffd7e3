"""Penstock: pipeline-parallel training that wastes neither time nor memory.

The whole public API. Names are loaded when they are first used, so that schedules can be built, proven and simulated
without torch.

    pipeline = penstock.Pipeline(
        blocks, method="2bw", stages=2, microbatches=4, loss=loss, optimizer=lambda named: torch.optim.AdamW(named)
    )
    for report in pipeline.run(loader):
        print(report.batch, report.loss)
    penstock.write_trace(pipeline.timeline(), "trace.json")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.checkpoint.manager import Checkpoints as Checkpoints
    from penstock.errors import (
        CapabilityError as CapabilityError,
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        DataError as DataError,
        PenstockError as PenstockError,
        ScheduleError as ScheduleError,
        TransportError as TransportError,
        VersionError as VersionError,
    )
    from penstock.idle_time import TimeSplit as TimeSplit, split_time as split_time
    from penstock.models.gpt import GPTConfig as GPTConfig, gpt_blocks as gpt_blocks, language_loss as language_loss
    from penstock.partition.blocks import LazyBlock as LazyBlock
    from penstock.partition.sequence_slices import Slicing as Slicing
    from penstock.runtime.execute.evaluation import Evaluating as Evaluating
    from penstock.runtime.malloc import keep_freed_memory as keep_freed_memory
    from penstock.runtime.pipeline import Pipeline as Pipeline
    from penstock.runtime.plan.method_choice import method as method
    from penstock.runtime.rank.reports import Report as Report
    from penstock.runtime.rank.snapshot import Saving as Saving, Snapshot as Snapshot
    from penstock.runtime.update.divergence import Divergence as Divergence
    from penstock.schedule.build import make_schedule as make_schedule, prove as prove
    from penstock.schedule.ir.schedule import Schedule as Schedule
    from penstock.schedule.methods.combine import Combine as Combine
    from penstock.schedule.proof.check import Proof as Proof, check as check
    from penstock.schedule.text import parse_schedule as parse_schedule
    from penstock.schedule.torch_csv import from_torch_csv as from_torch_csv, to_torch_csv as to_torch_csv
    from penstock.simulate.costs import Costs as Costs, StageCost as StageCost
    from penstock.simulate.simulate import Simulation as Simulation, simulate_schedule as simulate_schedule
    from penstock.timeline import Timeline as Timeline
    from penstock.view.perfetto import write_trace as write_trace
    from penstock.view.svg import timeline_svg as timeline_svg
    from penstock.view.text import draw_timeline as draw_timeline
    from penstock.weights.corrections.registry import correction_of as correction_of
    from penstock.weights.decision import LossScale as LossScale

_HOMES = {
    # schedules: build, prove, exchange
    "make_schedule": "schedule.build",
    "prove": "schedule.build",
    "check": "schedule.proof.check",
    "Proof": "schedule.proof.check",
    "Schedule": "schedule.ir.schedule",
    "parse_schedule": "schedule.text",
    "to_torch_csv": "schedule.torch_csv",
    "from_torch_csv": "schedule.torch_csv",
    # predict
    "simulate_schedule": "simulate.simulate",
    "Simulation": "simulate.simulate",
    "Costs": "simulate.costs",
    "StageCost": "simulate.costs",
    # run
    "Pipeline": "runtime.pipeline",
    "method": "runtime.plan.method_choice",
    "correction_of": "weights.corrections.registry",
    "LossScale": "weights.decision",
    "Slicing": "partition.sequence_slices",
    "Report": "runtime.rank.reports",
    "Evaluating": "runtime.execute.evaluation",
    "Divergence": "runtime.update.divergence",
    "Saving": "runtime.rank.snapshot",
    "Snapshot": "runtime.rank.snapshot",
    "Combine": "schedule.methods.combine",
    "LazyBlock": "partition.blocks",
    "keep_freed_memory": "runtime.malloc",
    "Checkpoints": "checkpoint.manager",
    "GPTConfig": "models.gpt",
    "gpt_blocks": "models.gpt",
    "language_loss": "models.gpt",
    # look
    "Timeline": "timeline",
    "split_time": "idle_time",
    "TimeSplit": "idle_time",
    "draw_timeline": "view.text",
    "timeline_svg": "view.svg",
    "write_trace": "view.perfetto",
    # errors
    **dict.fromkeys(
        (
            "PenstockError",
            "CapabilityError",
            "CheckpointError",
            "ConfigError",
            "DataError",
            "ScheduleError",
            "TransportError",
            "VersionError",
        ),
        "errors",
    ),
}

__version__ = "0.1.0"
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"penstock.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*globals(), *_HOMES])
