"""A schedule as users hold it: its facts, its drawing, and its way to a file and back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import ConfigError

ORDER = "def order(stages, microbatches):\n    return ['F0 F1 B0 B1'] * stages\n"


def test_facts_are_given_per_rank() -> None:
    asynchronous, synchronous = penstock.make_schedule("2bw", 4, 8), penstock.make_schedule("1f1b", 4, 8)
    assert (asynchronous.versions, asynchronous.delays) == ((2,) * 4, (1.0,) * 4)
    assert (synchronous.versions, synchronous.delays) == ((1,) * 4, (0.0,) * 4)
    assert list(asynchronous.activations) == list(synchronous.activations) == [4, 3, 2, 1]
    assert penstock.make_schedule("pipemare", 4, 8).delays == (0.375, 0.25, 0.125, 0.0)
    assert len(penstock.make_schedule(penstock.method("interleaved", chunks=3), 2, 4).delays) == 2


def test_a_drawing_is_that_of_its_simulation() -> None:
    schedule = penstock.make_schedule("1f1b", 2, 2)
    drawn = schedule.draw(60, batches=2)
    assert drawn.plain == penstock.draw_timeline(schedule.simulate(batches=2).timeline, 60).plain
    assert str(schedule.draw()).count("rank") == 2
    slow = penstock.Costs.uniform(schedule.schedule, forward=5.0)
    assert schedule.draw(costs=slow).plain != schedule.draw().plain


@pytest.mark.parametrize("suffix", ["txt", "csv"])
def test_what_was_saved_is_loaded_without_numbers(tmp_path: Path, suffix: str) -> None:
    schedule = penstock.make_schedule("1f1b", 3, 4)
    schedule.save(tmp_path / f"mine.{suffix}")
    found = penstock.load_schedule(tmp_path / f"mine.{suffix}")
    assert found.schedule.programs == schedule.schedule.programs
    assert (found.schedule.num_stages, found.schedule.microbatches) == (3, 4)


@pytest.mark.parametrize("suffix", ["txt", "csv"])
@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"stages": 3}, "leave 'stages' out"),
        ({"stages": 2, "microbatches": 16, "chunks": 7}, "leave 'stages', 'microbatches' and 'chunks' out"),
        ({"chunks": 7}, "leave 'chunks' out"),
    ],
    ids=str,
)
def test_a_finished_schedule_takes_no_numbers(tmp_path: Path, suffix: str, numbers: Any, said: str) -> None:
    penstock.make_schedule("1f1b", 3, 4).save(tmp_path / f"mine.{suffix}")
    with pytest.raises(ConfigError, match=rf"mine.{suffix} holds a finished schedule; {said}"):
        penstock.load_schedule(tmp_path / f"mine.{suffix}", **numbers)


def test_what_is_proven_is_a_schedule_to_check() -> None:
    proven = penstock.make_schedule("1f1b", stages=2, microbatches=2)
    assert penstock.check(proven) is proven
    assert str(penstock.check(proven.schedule)) == str(penstock.check(str(proven))) == str(proven)
    for other in (5, None, [proven]):
        with pytest.raises(ConfigError, match="check takes a schedule, or its text form; got "):
            penstock.check(other)  # type: ignore[arg-type]


def test_a_function_in_a_file_needs_numbers(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(ORDER)
    with pytest.raises(ConfigError, match=r"mine.py' is a function .*load_schedule\('.*mine.py', stages=4, microbatch"):
        penstock.load_schedule(path)
    assert penstock.load_schedule(path, 1, 2).schedule.microbatches == 2


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (
            penstock.make_schedule("2bw", 2, 4),
            "<ProvenSchedule of <Schedule 2bw: 2 stages on 2 ranks, 4 microbatches>>",
        ),
        (penstock.make_schedule("1f1b", 2, 4).simulate().bubble, "<Bubble of 0.2000: makespan 15 on 2 ranks>"),
    ],
    ids=["schedule", "bubble"],
)
def test_they_show_themselves_in_a_line(value: Any, shown: str) -> None:
    assert repr(value) == shown


def test_no_torch_is_needed_to_study_a_schedule() -> None:
    code = (
        "import sys, penstock; plan = penstock.make_schedule('2bw', 2, 4); plan.draw(); plan.simulate(); plan.delays; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
