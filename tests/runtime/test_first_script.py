"""First scripts of people who know torch: a method by name, a DataLoader; and what is said where that does not do."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import penstock
from penstock.errors import CapabilityError, ConfigError
from support.pool import Pool


def make_blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]


def make_adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def make_pipeline(*schedule: Any, blocks: Any = None, **options: Any) -> penstock.Pipeline:
    return penstock.Pipeline(
        make_blocks() if blocks is None else blocks,
        *schedule,
        **{"loss": F.mse_loss, "optimizer": make_adamw, **options},
    )


def make_loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    inputs, targets = torch.randn(48, 3, generator=generator), torch.randn(48, 2, generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=8)


@pytest.mark.parametrize("method", ["2bw", "PipeDream-Flush", penstock.method("interleaved", chunks=2)], ids=str)
def test_a_method_by_name_is_its_schedule(method: Any) -> None:
    name = method if isinstance(method, str) else method.name
    schedule = penstock.make_schedule(name, 2, 4, options={} if isinstance(method, str) else {"chunks": 2})
    by_name, by_schedule = make_pipeline(method=method, stages=2, microbatches=4), make_pipeline(schedule)
    assert by_name.schedule == by_schedule.schedule
    losses = [[report.loss for report in pipeline.run(make_loader())] for pipeline in (by_name, by_schedule)]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_a_method_brings_its_correction() -> None:
    chosen = penstock.method("pipemare", reschedule=20, decay=0.3)
    by_name = make_pipeline(method=chosen, stages=2, microbatches=4)
    correction = penstock.correction_of("pipemare", reschedule=20, decay=0.3)
    by_schedule = make_pipeline(penstock.make_schedule("pipemare", 2, 4), staleness=correction)
    losses = [[report.loss for report in pipeline.run(make_loader())] for pipeline in (by_name, by_schedule)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("chosen", ["2bw", penstock.method("pipemare", reschedule=20)], ids=str)
def test_a_method_is_given_by_name_or_by_position(chosen: Any) -> None:
    first = make_pipeline(method=chosen, stages=2, microbatches=4)
    second = make_pipeline(chosen, stages=2, microbatches=4)
    losses = [[report.loss for report in pipeline.run(make_loader())] for pipeline in (first, second)]
    assert losses[0] == losses[1]
    first.switch("1f1b")
    second.switch(method="1f1b")
    assert first.schedule == second.schedule


def test_another_method_by_name_brings_its_correction() -> None:
    first, second = (make_pipeline(method="1f1b", stages=2, microbatches=4) for _ in range(2))
    chosen = penstock.method("pipemare", reschedule=20, decay=0.3)
    correction = penstock.correction_of("pipemare", reschedule=20, decay=0.3)
    for pipeline in (first, second):
        list(pipeline.run(make_loader()))
    first.switch(chosen)
    second.switch(penstock.make_schedule("pipemare", 2, 4).schedule, correction=correction)
    assert first.schedule == second.schedule
    assert [r.loss for r in first.run(make_loader())] == [r.loss for r in second.run(make_loader())]
    for pipeline, given in ((first, "1f1b"), (second, penstock.make_schedule("1f1b", 2, 4))):
        pipeline.switch(given)
    assert [r.loss for r in first.run(make_loader())] == [r.loss for r in second.run(make_loader())]
    first.switch(penstock.make_schedule(chosen, 2, 4))
    assert [r.loss for r in first.run(make_loader())] != [r.loss for r in second.run(make_loader())]
    with pytest.raises(ConfigError, match="a method brings its correction"):
        first.switch("2bw", correction=correction)


def alone(group: dist.ProcessGroup, caught: bool) -> list[str]:
    """Which warnings a pipeline without a group gives; a group of a single process is enough to know of others."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    try:
        make_pipeline(method="1f1b", stages=2, microbatches=4, group=None if caught else group)
    finally:
        logging.getLogger("penstock").removeHandler(handler)
    return records


def test_a_forgotten_group_is_noticed(pool: Pool) -> None:
    """All processes would train the whole model, each by itself."""
    said = pool.submit(alone, True, ranks=2)
    assert all("the pipeline has no group, so each of the processes runs all of its ranks" in one for (one,) in said)
    assert pool.submit(alone, False, ranks=2) == [[], []]
    assert alone(None, True) == []  # type: ignore[arg-type]


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "method": (
        {"method": "2bw"},
        r"this one 1f1b \(flush\), .*; rank 1 2bw \(double-buffer\), 2 stages, 4 microbatches",
    ),
    "microbatches": ({"microbatches": 2}, "4 microbatches, 5 blocks; rank 1 1f1b .* 2 microbatches, 5 blocks"),
    "blocks": ({"blocks": [*make_blocks(), nn.Tanh()]}, "5 blocks; rank 1 .* 6 blocks"),
    "options": ({"max_grad_norm": 1.0}, r"this one has max_grad_norm=None, rank 1 has max_grad_norm=1; give"),
    "partition": (
        {"partition": [1, 4]},
        "have 1f1b .* but not the same order of passes, names of blocks",
    ),
}


def build_differently(group: dist.ProcessGroup, what: str) -> str:
    """Rank 1 has another idea of the pipeline."""
    options = {"method": "1f1b", "microbatches": 4, "group": group, "partition": [2, 3]}
    changes = DIFFERENT[what][0] if dist.get_rank(group) else {}
    if what == "blocks":
        options["partition"] = None
    with pytest.raises(ConfigError) as caught:
        make_pipeline(**options | changes)
    return str(caught.value)


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_build_different_pipelines_all_hear_of_it(pool: Pool, what: str) -> None:
    first, second = pool.submit(build_differently, what, ranks=2)
    assert re.search(DIFFERENT[what][1], first), first
    assert "ranks build different pipelines: this one" in second


def train_on_group(group: dist.ProcessGroup, width: int) -> tuple[int, int, list[float | None]]:
    pipeline = make_pipeline(method="1f1b", microbatches=4 // width, group=group, data_parallel=width)
    return pipeline.schedule.num_stages, pipeline.grid.width, [report.loss for report in pipeline.run(make_loader())]


@pytest.mark.parametrize("width", [1, 2])
def test_a_group_says_how_many_stages(pool: Pool, width: int) -> None:
    found = pool.submit(train_on_group, width, ranks=2)
    assert {(stages, wide) for stages, wide, _ in found} == {(2 // width, width)}
    assert [loss for loss in found[-1][2] if loss is None] == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "missing 1 required positional argument: 'method'"),
        ({"method": None}, "method must be a name, .*, not None"),
        ({"schedule": penstock.make_schedule("2bw", 2, 4)}, "unexpected keyword argument 'schedule'"),
        ({"method": "2bw", "stages": 2}, "Give microbatches="),
        ({"method": "2bw", "microbatches": 4}, "Give stages="),
        ({"method": "2wb", "stages": 2, "microbatches": 4}, "unknown method '2wb'. Did you mean '2bw'"),
        ({"method": "pipemare", "stages": 2, "microbatches": 4}, "reschedule=500.*; 0 for none"),
        ({"method": 3, "stages": 2, "microbatches": 4}, "method must be a name"),
        (
            {"method": "pipemare", "stages": 2, "microbatches": 4, "staleness": penstock.correction_of("spectrain")},
            "a method brings its correction",
        ),
        ({"method": penstock.make_schedule("2bw", 2, 4), "stages": 2}, "leave stages and microbatches out"),
        ({"method": "2bw", "stages": 4, "microbatches": 1}, "raise microbatches to 3"),
        ({"method": 7}, "method must be .* what make_schedule, check or load_schedule returned, not 7"),
        ({"method": "2bw", "stages": 2, "microbatches": "4"}, "microbatches must be a whole number .* got '4'"),
        ({"method": "2bw", "stages": 2.0, "microbatches": 4}, "stages must be a whole number .* got 2.0"),
        ({"method": "2bw", "microbatches": 4, "group": "gloo"}, "group must be a process group, .*; got 'gloo'"),
        ({"method": "2bw", "microbatches": 4, "group": dist.GroupMember.NON_GROUP_MEMBER}, "not a member of the group"),
    ],
    ids=str,
)
def test_what_is_missing_or_twice_there_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, penstock.ScheduleError, TypeError), match=said):
        make_pipeline(**options)


@pytest.mark.parametrize("method", ["pipemare"])
def test_an_option_that_a_method_needs_is_written_as_the_message_says(method: str) -> None:
    with pytest.raises(ConfigError, match=rf"{method}: over how many updates") as refused:
        make_pipeline(method=method, stages=2, microbatches=4)
    written = re.findall(r"method=('[^']+'|penstock\.method\([^)]*\))", str(refused.value))
    assert written == [f"'{method}:reschedule=500'", f"penstock.method('{method}', reschedule=500)"]
    for code in written:
        pipeline = make_pipeline(method=eval(code), stages=2, microbatches=4)
        assert pipeline._plan.options.staleness.spec.name == method


def test_an_option_that_a_method_does_not_have() -> None:
    with pytest.raises(
        ConfigError,
        match=r"method interleaved has no option 'chunk'; it has chunks, group, in_flight\. Did you mean 'chunks'",
    ):
        penstock.method("interleaved", chunk=4)
    with pytest.raises(ConfigError, match="method gpipe has no option 'chunks'; it has none"):
        penstock.method("gpipe", chunks=4)


def test_an_optimizer_that_exists_already() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    said = r"(?s)optimizer is an instance of AdamW, but.*lambda named: torch.optim.AdamW\(named"
    with pytest.raises(ConfigError, match=said):
        make_pipeline(method="1f1b", stages=2, microbatches=4, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_what_makes_no_optimizer(optimizer: Any) -> None:
    with pytest.raises(ConfigError, match="optimizer must be a function"):
        make_pipeline(method="1f1b", stages=2, microbatches=4, optimizer=optimizer)


def test_a_factory_that_forgets_to_return() -> None:
    with pytest.raises(CapabilityError, match="returned NoneType, not a torch optimizer; did it forget return"):
        make_pipeline(method="1f1b", stages=2, microbatches=4, optimizer=lambda named: None)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.map = nn.Linear(3, 4)
        self.layers = nn.ModuleList([nn.Tanh(), nn.Linear(4, 4), nn.Tanh()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        x = self.map(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_whole_model_is_taken_as_its_blocks_are() -> None:
    model = Model()
    pipeline = make_pipeline(method="1f1b", stages=3, microbatches=4, blocks=model, example=torch.zeros(1, 3))
    assert [report.loss for report in pipeline.run(make_loader())] == [r.loss for r in made("1f1b").run(make_loader())]
    other = Model()
    other.load_state_dict(pipeline.full_state_dict())
    assert torch.equal(other.map.weight, model.map.weight)
    assert other.map.weight.ne(Model().map.weight).any()


def made(method: str) -> penstock.Pipeline:
    return make_pipeline(method=method, stages=2, microbatches=4)
