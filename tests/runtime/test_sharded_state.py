"""State sharded over parallel pipelines: every number is that of the reference and of pipelines that hold all of it."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.options.parallelism import DataParallel, Partition
from penstock.runtime.pipeline import Pipeline
from penstock.verify.reference import Scaling
from support.cases import Case, Outcome, assert_equal_tensors, expected, make_batches, make_pipeline
from support.pool import Pool
from support.schedules import make_schedule
from support.sharded import Scaled, assert_as_whole, train_sharded
from support.state_bytes import state_bytes

CLIP = 0.4  # of most batches
CASES = [
    Case("1f1b", 2, 3, width=2, spans=(12, 8), clip=CLIP),
    Case("2bw", 2, 3, width=3, spans=(6, 5), clip=CLIP),
    Case("2bw", 1, 2, "mixed", "momentum", width=2, spans=(5, 6), clip=CLIP),
    Case("gpipe", 3, 2, "mixed", "sgd", width=3, spans=(8,), clip=CLIP, recompute="block"),
    Case("interleaved", 2, 2, "mixed", "nadam", width=2, spans=(7,), clip=CLIP, options=(("chunks", 2),)),
    Case("2bw", 2, 2, "faint", "adamw", width=2, spans=(5, 6), clip=0.7, tied=True),
    Case("1f1b", 2, 2, "mixed", "two rates", width=3, spans=(7,), clip=CLIP, tied=True, recompute="stage"),
    Case("2bw", 2, 2, "half", width=2, spans=(9,), scaling=Scaling(2.0**24, 2.0, 0.5, 2)),
    Case("zb-h1", 2, 4, width=2, spans=(6,)),
    Case("2bw", 2, 2, "mixed", "configured muon", width=3, spans=(6,), clip=CLIP),
    Case("1f1b", 2, 2, "mixed", "adafactor", width=2, spans=(6,), clip=CLIP),
    Case("2bw", 1, 2, "mixed", "configured soap", width=2, spans=(6,), clip=CLIP),
    Case("gpipe", 2, 2, "mixed", "configured basis-rotation", width=3, spans=(6,), clip=CLIP),
    Case("2bw", 2, 3, width=2, spans=(6, 4), clip=CLIP, precision="bf16"),
    Case("1f1b", 2, 2, "faint", width=3, spans=(6,), clip=0.7, tied=True, precision="bf16"),
    Case(
        "2bw", 2, 2, "mixed", "momentum", width=2, spans=(5,), scaling=Scaling(2.0**10, 2.0, 0.5, 2), precision="fp16"
    ),
]


said = cache(expected)
"""What the reference says, which is the same at every level."""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["optimizer", "gradients"])
@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.method}-{c.depth}-{c.width}-{c.model}-{c.optimizer}-{c.precision}"
)
def test_a_sharded_run_has_the_numbers_of_the_reference(case: Case, level: str) -> None:
    wanted = said(case)
    assert case.clip is None or sum(norm > case.clip for _, _, norm, *_ in wanted.decided) >= len(wanted.decided) / 2
    outcome, parts, _ = train_sharded(None, case, level)
    assert_as_whole(outcome, [parts], wanted)


def test_zero_rows_and_a_parameter_without_dimensions() -> None:
    """Three pipelines, of which some have no row of a small parameter; frozen parameters have no state."""

    case = Case("2bw", 2, 2, "mixed", width=3, spans=(4,), clip=CLIP)

    def blocks() -> dict[str, Any]:
        torch.manual_seed(5)
        return {
            "table": nn.Embedding(13, 8), "a": Scaled(), "b": nn.Linear(8, 8), "c": nn.Linear(8, 8), "d": Scaled(),
            "head": nn.Linear(8, 13),
        }  # fmt: skip

    optimizers = (
        lambda named: torch.optim.AdamW(named, lr=0.01),
        lambda named: torch.optim.Adagrad(
            named, lr=0.01, initial_accumulator_value=0.1
        ),  # whose state is there at once
        lambda named: torch.optim.Adafactor(named, lr=0.01),
    )
    for make in optimizers:
        plain = make_pipeline(case, blocks=blocks(), optimizer=make)
        for _ in plain.run(make_batches(case)):
            pass
        for level in ("optimizer", "gradients"):
            divided = make_pipeline(case, blocks=blocks(), optimizer=make, sharding=level)
            for _ in divided.run(make_batches(case)):
                pass
            assert_equal_tensors(divided.state_dict(), plain.state_dict(), level)


def test_whole_parameters_that_stages_share() -> None:
    """With whole sums at every holder it does not matter that their owners at two stages are different pipelines."""
    case = Case("2bw", 2, 2, "faint", "adafactor", width=2, spans=(5,), clip=0.7, tied=True)
    outcome, parts, _ = train_sharded(None, case, "optimizer")
    assert_as_whole(outcome, [parts], expected(case))


def on_rank(group: dist.ProcessGroup, case: Case, level: str) -> Any:
    return train_sharded(group, case, level)


@pytest.mark.parametrize(
    ("case", "level"),
    [
        (Case("2bw", 2, 3, width=2, spans=(12, 8), clip=CLIP), "gradients"),
        (Case("1f1b", 1, 2, "mixed", "momentum", width=3, spans=(7,), clip=CLIP), "gradients"),
        (Case("2bw", 2, 2, "faint", width=2, spans=(7,), clip=0.7, tied=True), "optimizer"),
    ],
    ids=lambda c: getattr(c, "method", c),
)
def test_processes_have_the_numbers_of_the_reference(pool: Pool, case: Case, level: str) -> None:
    results = pool.submit(on_rank, case, level, ranks=case.depth * case.width)
    outcomes, parts, _ = zip(*results, strict=True)
    whole = Outcome(decided=outcomes[0].decided)
    for place, outcome in enumerate(outcomes):
        assert repr(outcome.decided) == repr(whole.decided)
        for name, weight in outcome.weights.items():
            assert torch.equal(whole.weights.setdefault(name, weight), weight), (place, name)
    assert_as_whole(whole, parts, expected(case))


def test_a_tied_parameter_of_which_some_pipelines_have_no_row() -> None:
    class ScaledLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(3, 3), nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x) * self.scale
            return y

    def train(level: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        blocks = {"a": ScaledLayer(), "b": ScaledLayer()}
        pipeline = Pipeline(
            blocks, "1f1b", stages=2, microbatches=2, loss=nn.functional.mse_loss,
            optimizer=lambda named: torch.optim.Adam(named, lr=0.1),
            data_parallel=DataParallel(2, sharding=level), partition=Partition(tied={"b.scale": "a.scale"}),
        )  # fmt: skip
        list(pipeline.run([(torch.randn(8, 3), torch.randn(8, 3)) for _ in range(4)]))
        return pipeline.full_state_dict()

    assert_equal_tensors(train("gradients"), train("none"), "weights")


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("level", ["none", "optimizer", "gradients"])
@pytest.mark.parametrize(("method", "rest"), [("2bw", 12), ("1f1b", 8)])
def test_adam_takes_8_bytes_divided_by_the_width(method: str, rest: int, level: str, width: int) -> None:
    """The ledger is what the proof derives, byte for byte: under 2bw 12 + 8/w bytes for each parameter."""
    torch.manual_seed(0)
    pipeline = Pipeline(
        {name: nn.Linear(48, 48, bias=False) for name in "abcd"},
        make_schedule(method, 2, 2),
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.Adam(named, lr=0.01),
        data_parallel=DataParallel(width, sharding=level),
    )
    batch = torch.randn(4 * width, 48), torch.randn(4 * width, 48)
    for _ in pipeline.run([batch] * 4):
        pass
    parameters = 2 * 48 * 48
    each = rest + (8 if level == "none" else Fraction(8, width))
    counters = 2 * 4  # a number of steps for each parameter
    scratch = 0 if method == "1f1b" else 4 * parameters // (1 if level == "none" else width)
    for live in pipeline.live_bytes().values():
        roles = {role: live.get(role, 0) for role in ("weights", "gradients", "idle buffers", "optimizer")}
        assert roles["optimizer"] == (each - rest) * parameters + counters + scratch
        assert sum(roles.values()) - counters - scratch == each * parameters
    for rank in range(2):
        assert sum(state_bytes(pipeline.proof, rank, width)) == each
