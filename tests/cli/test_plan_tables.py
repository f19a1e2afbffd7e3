"""The tables of `penstock plan` at every width: no number is cut, and columns are left out as a whole."""

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from penstock.cli.plans.plan_tables import planning_tables
from penstock.plan.planners.pipedream import Choices
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.profile.schema import Profile, ProfiledLayer
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.view.tables import UNBOUNDED


@pytest.fixture(scope="module")
def planning():
    layers = [
        ProfiledLayer(
            name=f"layers.{n}", forward=0.00012345 * (n + 1), backward=0.00023456, output=100.0, parameters=9e5
        )
        for n in range(5)
    ]
    profile = Profile(format="penstock profile 1", name="tower", layers=layers)
    devices = Devices((DeviceLevel(2, 1e6),))
    return make_plan(
        PlanRequest(profile, devices, "default", "simulated", None, 8, Choices(straight=False), None, None)
    )


def lines_at(planning, width):
    console = Console(file=StringIO(), width=width)
    console.print(planning_tables(planning, width))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def rows(lines, title):
    """The rows of a table that begin with a number, as cells; the first one has the headings."""
    at = next(n for n, line in enumerate(lines) if line.startswith(title))
    table = lines[at + 1 :]
    end = next(n for n, line in enumerate(table) if not line.startswith(" "))
    return [re.split(r"\s{2,}", line.strip()) for line in table[:end] if line[:6].strip()]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_columns_are_whole_or_left_out(planning, width):
    """What is shown at any width is what is shown without a limit."""
    lines, whole = lines_at(planning, width), lines_at(planning, UNBOUNDED)
    assert not [line for line in lines if "…" in line]
    for title in ("tower on 2", "stages of plan 1"):
        shown, everything = rows(lines, title), rows(whole, title)
        assert shown[0][:2] == everything[0][:2]
        numbers = [n for n, head in enumerate(everything[0]) if head not in ("layers", "limited by")]
        columns = {everything[0][n]: [row[n] for row in everything[1:]] for n in numbers}
        for n, heading in enumerate(shown[0]):
            if heading in columns:
                assert [row[n] for row in shown[1:] if len(row) > n] == columns[heading]
    named = {heading for title in ("tower on 2", "stages of plan 1") for heading in rows(lines, title)[0]}
    assert {"plan", "method", "s per sample", "stage", "layers", "s", "memory"} <= named
    said = " ".join(lines)
    missing = {heading for title in ("tower on 2", "stages of plan 1") for heading in rows(whole, title)[0]} - named
    assert all(re.search(f"Left out at this width: [^()]*{heading}", said) for heading in missing)
    assert bool(missing) == ("Left out at this width" in said)


def test_sizes_have_the_unit_that_fits(planning):
    text = "\n".join(lines_at(planning, UNBOUNDED))
    assert re.search(r"\d\.\d MB\n", text)
    assert "GiB" not in text


@pytest.mark.parametrize(("count", "said"), [(1, "Skipped, 1 class of"), (2, "Skipped, 2 classes of")])
def test_skipped_classes_are_counted_in_good_english(planning, count, said):
    assert len(planning.skipped) >= count
    assert said in "\n".join(lines_at(replace(planning, skipped=planning.skipped[:count]), UNBOUNDED))
