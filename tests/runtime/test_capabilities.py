"""What the runtime does not offer is refused before anything runs, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from penstock.errors import CapabilityError, ConfigError, ScheduleError
from penstock.runtime.plan.capabilities import check_offered
from penstock.schedule.text_parser import parse_schedule
from support.cases import Case, assert_same, expected, make_pipeline, train
from support.pool import Pool
from support.schedules import make_schedule

OFFERED = (
    "chimera", "dualpipe_v", "frozen_front", "interleaved", "local_losses", "offload", "seq1f1b", "two_branches",
    "zb_h1", "breadth_first", "post_validation", "parked", "zb_v", "xpipe", "nf1b", "blend", "pipemare_recompute",
    "swapped",
)  # fmt: skip
GOLDEN = sorted((Path(__file__).parent.parent / "golden").glob("*.txt"))


def wrong_group(group: dist.ProcessGroup) -> str:
    with pytest.raises(ConfigError) as caught:
        make_pipeline(Case("1f1b", 3, 2), group)
    return str(caught.value)


def test_a_group_of_the_wrong_size(pool: Pool) -> None:
    (said,) = set(pool.submit(wrong_group, ranks=2))
    assert said.startswith("the schedule has 3 ranks, the process group 2; start 3 processes (torchrun")


@pytest.mark.parametrize("divisor", [0.0, -1.0, float("nan")])
def test_a_divisor_that_is_not_positive(divisor: float) -> None:
    with pytest.raises(ConfigError, match="divisor must be positive"):
        make_pipeline(Case("1f1b", 2, 2), divisor=divisor)


@pytest.mark.parametrize("path", [path for path in GOLDEN if path.stem not in OFFERED], ids=lambda path: path.stem)
def test_schedules_that_the_runtime_does_not_offer(path: Path) -> None:
    schedule = parse_schedule(path.read_text())
    with pytest.raises(CapabilityError, match=f"{schedule.name}: the runtime"):
        make_pipeline(Case("1f1b", 4, 1), method=schedule, balance=None)


@pytest.mark.parametrize("path", [path for path in GOLDEN if path.stem in OFFERED], ids=lambda path: path.stem)
def test_schedules_that_it_offers(path: Path) -> None:
    check_offered(parse_schedule(path.read_text()))


@pytest.mark.parametrize("passes", ["F0^t F1^t I0..1^t W0^t W1^t", "F0..1^t B0^t B1^t"])
def test_units_of_several_microbatches_are_not_run_in_part(passes: str) -> None:
    text = f"schedule several\nrule flush\nmicrobatches 2\nnodes 0@0\nrank 0: {passes} STEP[t]\n"
    with pytest.raises(CapabilityError, match="several: the runtime"):
        make_pipeline(Case("1f1b", 1, 2), method=parse_schedule(text))


def test_fused_pairs_are_run_one_after_the_other() -> None:
    case = Case("1f1b", 1, 2)
    text = "schedule 1f1b\nrule flush\nmicrobatches 2\nnodes 0@0\nrank 0: F0^t [B0^t+F1^t] B1^t STEP[t]\n"
    assert_same(train(None, case, method=parse_schedule(text)), expected(case))


def test_a_drain_of_several_microbatches_is_not_run_in_part() -> None:
    """Whatever the books count has run."""
    text = """
        schedule stash
        rule stash
        microbatches 2
        nodes 0@0
        rank 0: F0^t-1 B-2^t-2 F1^t-1 B-1^t-2 STEP[t-1]
        drain 0: B-2..-1^t-2 STEP[t-1]
    """
    late = Case("stash", 1, 2)
    assert_same(train(None, late, method=parse_schedule(text)), expected(Case("2bw", 1, 2)))  # a delay of one


def test_periods_of_the_batch_before_are_not_run() -> None:
    """Their messages would say too late that the data has ended."""
    row = "F-1^t-1 B-1^t-1 STEP[t-1]"
    text = f"rule stash\nmicrobatches 1\nnodes 0@0\nrank 0: {row}\ndrain 0: {row}\n"
    with pytest.raises(CapabilityError, match="periods that begin the forwards of their own batch"):
        make_pipeline(Case("1f1b", 1, 1), method=parse_schedule(text))


@pytest.mark.parametrize("schedule", [["F0 B0"], 3])
def test_what_is_no_schedule(schedule: Any) -> None:
    with pytest.raises(ConfigError, match="method must be .* make_schedule, check or load_schedule returned"):
        make_pipeline(Case("1f1b", 1, 2), method=schedule)


def test_a_schedule_that_is_wrong_is_not_run() -> None:
    """A schedule is proven before anything runs, whoever made it."""
    text = str(make_schedule("1f1b", 2, 2))
    assert "B1^t" in text
    with pytest.raises(ScheduleError, match="microbatch 0"):
        make_pipeline(Case("1f1b", 2, 2), method=parse_schedule(text.replace("B1^t", "B0^t")))
