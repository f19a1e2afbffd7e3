"""Where something may be run between two batches without a drain, and where not."""

from dataclasses import replace

import pytest

from penstock.schedule.build import prove
from penstock.schedule.ir.schedule import Op
from penstock.schedule.lowering.lower import lower
from penstock.schedule.machine.evaluation_without_draining_check import border_fault
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.text_parser import parse_schedule
from support.smallest_batch import least

RUN = ("sequential", "gpipe", "1f1b", "eager", "2bw", "2bw-eager")


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("method", RUN)
def test_flushed_and_double_buffered_methods_need_no_drain(method: str, depth: int) -> None:
    for m in {least(method, depth), depth, depth + 3, 3 * depth}:
        if m >= least(method, depth):
            assert border_fault(prove(method, depth, m).lowered) is None
            assert border_fault(prove(method, depth, m, decides=True).lowered) is None


@pytest.mark.parametrize("method", ["stash", "vertical-sync"])
def test_stages_of_others_differ_there(method: str) -> None:
    fault = border_fault(prove(method, 3, 4).lowered)
    assert fault == f"with rule '{method}' stages have different newest versions where a batch begins"


def delayed(rank: int, places: int) -> Lowered:
    """2BW on three stages, whose rank runs its first forwards so many places later."""
    schedule = prove("2bw", 3, 6).schedule
    program = schedule.programs[rank]
    period = list(program.period)
    first = next(i for i, a in enumerate(period) if a.op is Op.F)
    backwards = [i for i, a in enumerate(period) if a.op is Op.B][:places]
    for place, i in enumerate(backwards):
        period.insert(first + place, period.pop(i))
    programs = [replace_period(p, period) if r == rank else p for r, p in enumerate(schedule.programs)]
    return lower(replace(schedule, programs=tuple(programs)))


def replace_period(program, period):
    return program._replace(period=tuple(period))


def test_a_rank_that_needs_what_comes_after_the_border_of_another() -> None:
    """Of the backwards that rank 0 owes the batch before, rank 1 has made the first by then, and not the second."""
    assert border_fault(delayed(0, 1)) is None
    fault = border_fault(delayed(0, 2))
    assert fault == "rank 0 needs gradient -1 before a batch begins, and rank 1 sends it afterwards"


def test_too_many_messages_under_way() -> None:
    """With a window of none, the gradient that crosses is one too many."""
    proof = prove("2bw", 3, 4)
    assert border_fault(replace(proof.lowered, window=1)) is None
    fault = border_fault(replace(proof.lowered, window=0))
    assert fault is not None
    assert fault.startswith("1 messages are under way on the gradient lane from rank 1 to rank 0")


def test_what_crosses_is_counted_over_several_batches() -> None:
    """Eager 1F1B keeps two gradients under way between neighbours."""
    lowered = prove("2bw-eager", 4, 6).lowered
    assert border_fault(replace(lowered, window=2)) is None
    assert "2 messages are under way" in (border_fault(replace(lowered, window=1)) or "")


def test_a_schedule_of_one_rank_has_no_messages() -> None:
    text = "schedule alone\nrule flush\nmicrobatches 2\nnodes 0@0\nrank 0: F0 B0 F1 B1 STEP0"
    assert border_fault(lower(parse_schedule(text))) is None
