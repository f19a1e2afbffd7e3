"""Blocks are compiled once, though the weights that they read are in another buffer with each version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from penstock import make_schedule
from penstock.errors import CapabilityError, ConfigError
from penstock.models.gpt import GPTConfig, gpt_blocks, language_loss
from penstock.options.all_options import PipelineOptions
from penstock.runtime.from_checked_plan import pipeline_of
from penstock.runtime.plan.plan import PipelinePlan, UnprovenPlan
from penstock.schedule.text_parser import parse_schedule
from support.own_methods import correction_of

SHAPE = GPTConfig(layers=2, width=16, heads=2, context=8, vocabulary=32)
M, BATCHES = 4, 4


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """What torch compiles, which then runs as it is; compilers take minutes."""
    graphs: list[object] = []
    whole = nn.Module.compile

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph  # type: ignore[no-any-return]

    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: whole(self, backend=backend, **given))
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    yield graphs
    torch._dynamo.reset()  # type: ignore[no-untyped-call]


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def losses(method: str, m: int, options: PipelineOptions, graphs: list[object]) -> tuple[list[float | None], list[int]]:
    """The losses of a run, and after each batch how many graphs have been compiled."""
    sharding = options.data_parallel.sharding or "none"
    plan = PipelinePlan.make(gpt_blocks(SHAPE, 0), make_schedule(method, 2, m, sharding=sharding), options)
    pipeline = pipeline_of(plan, gpt_blocks(SHAPE, 0), loss=language_loss, optimizer=adamw)
    torch.manual_seed(1)
    size = 2 * m * options.data_parallel.width
    data = [(torch.randint(32, (size, 8)), torch.randint(32, (size, 8))) for _ in range(BATCHES)]
    found: list[float | None] = []
    counts: list[int] = []
    for report in pipeline.run(data):
        found.append(report.loss)
        counts.append(len(graphs))
    return found, counts


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own look at inputs
@pytest.mark.parametrize(
    ("method", "m", "options"),
    [
        ("1f1b", M, {}),
        ("2bw", M, {}),
        ("2bw", M, {"precision": "bf16"}),
        ("stash", 1, {}),
        ("2bw", M, {"recompute": "block"}),
        ("1f1b", M, {"width": 2, "sharding": "full"}),
        ("1f1b", M, {"width": 2, "sharding": "full", "precision": "bf16"}),
        ("2bw", M, {"width": 2, "sharding": "gradients"}),
        ("2bw-layered", M, {"width": 2, "sharding": "full"}),
    ],
)
def test_no_version_is_compiled_for(compiled: list[object], method: str, m: int, options: dict[str, Any]) -> None:
    """Nothing is compiled after the first batch, and the losses are those of blocks as they are."""
    plain, none = losses(method, m, PipelineOptions().changed(**options), compiled)
    assert none == [0] * BATCHES
    found, counts = losses(method, m, PipelineOptions().changed(**options, compile=True), compiled)
    assert found == plain
    assert counts[0] > 0
    assert counts == [counts[0]] * BATCHES


PARKS = """schedule parks
rule flush
microbatches 2
nodes 0@0 1@1
rank 0: F0^t F1^t OFFLOAD1 B0^t FETCH1 B1^t STEP[t]
rank 1: F0^t F1^t B0^t B1^t STEP[t]
"""


@pytest.mark.parametrize(
    ("schedule", "options", "reason"),
    [
        (lambda: make_schedule("newest", 2, 1), {}, "newest: backwards read other weights than their forward"),
        (
            lambda: make_schedule("pipemare", 2, 1),
            {"correction": correction_of("pipemare", reschedule=0)},
            "backwards read other weights",
        ),
        (lambda: make_schedule("1f1b", 2, 2), {"backward_delays": 1}, "backwards read other weights"),
        (lambda: make_schedule("zb-h1", 2, 4), {}, "in two halves run uncompiled; leave compile out"),
        (lambda: parse_schedule(PARKS), {}, "cannot be moved away"),
        (lambda: make_schedule("seq1f1b", 2, 4), {}, "slices of sequences, which is not what is compiled"),
    ],
)
def test_it_is_refused_where_it_does_not_go(schedule: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(CapabilityError, match=reason):
        UnprovenPlan.of(gpt_blocks(SHAPE, 0), schedule(), PipelineOptions().changed(**options, compile=True))


def test_it_is_refused_for_the_method_that_follows() -> None:
    plan = PipelinePlan.make(gpt_blocks(SHAPE, 0), make_schedule("1f1b", 2, 4), PipelineOptions().changed(compile=True))
    with pytest.raises(CapabilityError, match="zb-h1: blocks whose backward comes in two halves"):
        plan.followed_by(make_schedule("zb-h1", 2, 4), None)


def test_what_is_no_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="compile must be True or False; got 'yes'"):
        PipelineOptions().changed(compile="yes")
