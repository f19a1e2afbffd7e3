"""Whatever a user meets shows itself in a line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock


def everything(folder: Path) -> dict[str, Any]:
    """What the calls of a script return, and what is passed to them."""
    pipeline = penstock.Pipeline(
        [nn.Linear(3, 4), nn.Linear(4, 2)],
        method="2bw",
        stages=2,
        microbatches=2,
        loss=F.mse_loss,
        optimizer=torch.optim.AdamW,
        max_grad_norm=1.0,
    )
    torch.manual_seed(0)
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(5)]
    run = pipeline.run(batches, evaluate=penstock.Evaluating(2, batches))
    reports = list(run)
    schedule = penstock.make_schedule("1f1b", 8, 16)
    simulation = schedule.simulate()
    return {
        "pipeline": pipeline,
        "stages": next(iter(pipeline.stages.values())),
        "grid": pipeline.grid,
        "run": run,
        "report": reports[-1],
        "decision": reports[-1].decided[0],
        "evaluated": pipeline.evaluations[0],
        "trouble": penstock.Trouble(3, "the loss is nan"),
        "timeline": pipeline.timeline(),
        "split": penstock.split_time(pipeline.timeline()),
        "bubble": pipeline.timeline().bubble(),
        "snapshot": pipeline.snapshots()[0],
        "checkpoints": penstock.Checkpoints(pipeline, folder / "mine"),
        "saving": penstock.Checkpoints(pipeline, folder).every(2),
        "evaluating": penstock.Evaluating(2, batches),
        "method": penstock.method("pipemare", reschedule=500),
        "correction": penstock.correction_of("pipemare", reschedule=500),
        "schedule": schedule,
        "plain schedule": schedule.schedule,
        "simulation": simulation,
        "costs": penstock.Costs.uniform(schedule.schedule, latency=0.5),
        "options": penstock.DataParallel(2, combine=penstock.Combine("average", every=8)),
        "precision": penstock.Precision("fp16", loss_scale=penstock.LossScale(initial=2.0**12)),
        "partition": penstock.Partition(balance=[1, 1]),
        "staleness": penstock.Staleness(delays=2),
        "recompute": penstock.Recompute("stage", segments=2),
        "slicing": penstock.Slicing(),
        "divergence": penstock.Divergence(spike=2.0),
        "lazy block": penstock.LazyBlock(nn.Identity, seed=3),
    }


SHOWN = {
    "report": "Report(batch=4, loss=",
    "decision": "Decision(batch=2, loss=",
    "evaluated": "Evaluated(version=2, loss=",
    "stages": "<stage 0 on rank 0: blocks 0; 16 trained parameters>",
    "grid": "<RankGrid of 1 x 2 ranks, all in this process>",
    "run": "<TrainingRun, begun>",
    "saving": "Saving(every=2)",
    "evaluating": "Evaluating(every=2, data=<list>)",
    "costs": "<Costs of 8 x StageCost(forward=1.0, backward_input=1.0, backward_weight=1.0), latency=0.5>",
    "slicing": "Slicing()",
    "method": "MethodChoice(name='pipemare', correction={'reschedule': 500})",
}


def test_everything_that_a_user_meets_shows_itself_in_a_line(tmp_path: Path) -> None:
    found = {name: repr(value) for name, value in everything(tmp_path).items()}
    assert {name: text for name, text in found.items() if len(text) > 150 or " at 0x" in text or "\n" in text} == {}
    assert {name: text for name, text in SHOWN.items() if not found[name].startswith(text)} == {}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, "Decision(batch=1, loss=2.5, weight=8, norm=0.1235)"),
        ({"loss": math.nan, "norm": math.nan}, "Decision(batch=1, weight=8)"),
        ({"loss": math.nan, "finite": False}, "Decision(batch=1, loss=nan, weight=8, norm=0.1235)"),
        ({"factor": 0.0}, "Decision(batch=1, loss=2.5, weight=8, norm=0.1235, skipped)"),
        ({"scale": 512.0, "stop": True}, "Decision(batch=1, loss=2.5, weight=8, norm=0.1235, scale=512, stop)"),
    ],
)
def test_a_decision_shows_what_is_not_as_usual(changes: dict[str, Any], shown: str) -> None:
    assert repr(penstock.Decision(1, 2.5, 8.0, 0.12345678, 1.0, True, 0.5)._replace(**changes)) == shown
