"""The tables of `penstock plan` at every width: no number is cut, and columns are left out as a whole."""

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from penstock.byte_sizes import human_bytes
from penstock.cli.plans.plan_devices import devices_of, with_host
from penstock.cli.plans.plan_tables import memory_table, planning_tables
from penstock.errors import ConfigError
from penstock.plan.planners.pipedream import Choices
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.profile.schema import Profile, ProfiledLayer
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.plan.stages.planned import Excluded, Skipped
from penstock.view.tables import UNBOUNDED, table_console, width_to_fit


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
    assert {"plan", "method", "s per sample", "stage", "layers", "compute", "memory"} <= named
    said = " ".join(lines)
    missing = {heading for title in ("tower on 2", "stages of plan 1") for heading in rows(whole, title)[0]} - named
    assert all(re.search(f"Left out at this width: [^()]*{heading}", said) for heading in missing)
    assert bool(missing) == ("Left out at this width" in said)


def test_sizes_have_the_unit_that_fits(planning):
    text = "\n".join(lines_at(planning, UNBOUNDED))
    assert re.search(r"\d\.\d MiB\n", text)
    assert "GiB" not in text


def test_times_have_their_unit(planning):
    """Only a rating that is more than the compute of a stage has a column of its own, which the title explains."""
    title = next(line for line in lines_at(planning, UNBOUNDED) if line.startswith("stages of plan 1"))
    assert title == "stages of plan 1, in s for each microbatch of 1 sample"
    other = make_plan(replace(planning.request, planner="2bw-paper", cost=None))
    lines = lines_at(other, UNBOUNDED)
    title = next(line for line in lines if line.startswith("stages of plan 1"))
    assert title.endswith("; rating: what the cost function compares") == ("rating" in rows(lines, "stages of")[0])


def test_what_does_not_fit_is_said_in_the_units_of_devices(planning):
    tight = replace(planning.request, devices=replace(planning.request.devices, memory=2.0**20))
    found = make_plan(tight)
    assert not found.plans
    others = re.compile("does not tell the halves|takes as long as 2bw|two updates late|not known|does not know")
    bounds = [each.bound for each in found.skipped if not others.search(each.bound)]
    assert bounds
    said = r"does not fit: at least \S+ MiB per device on average, but it has 1.00 MiB"
    assert [bound for bound in bounds if not re.fullmatch(said, bound)] == []


def test_kinds_of_memory_fit_80_columns_and_add_up(planning):
    lines = lines_at(planning, 80)
    shown = rows(lines, "memory of a device at its peak by kind")
    held = [rating.memory for rating in planning.plans[0].rating.stages]
    assert shown[0] == ["kind", *(f"stage {n}" for n in range(len(held)))]
    assert shown[-1] == ["all together", *(human_bytes(each, 2) for each in held)]
    assert [row[0] for row in shown[1:3]] == ["weights and gradients", "optimizer"]


@pytest.mark.parametrize(("method", "chunks", "unit"), [("2bw", 1, "stage"), ("interleaved:chunks=2", 2, "rank")])
@pytest.mark.parametrize(("ranks", "shown"), [(4, [0, 1, 2, 3]), (6, [2, 4])])
def test_of_many_ranks_the_table_has_those_with_the_most_and_the_least(planning, method, chunks, unit, ranks, shown):
    best = planning.plans[0]
    held = [5.0, 4.0, 9.0, 3.0, 1.0, 2.0][:ranks] * chunks
    ratings = tuple(replace(best.rating.stages[0], memory=each, kinds={"activations": each}) for each in held)
    rating, settings = replace(best.rating, stages=ratings), {**best.settings, "stages": ranks}
    plan = replace(best, planner=method, rating=rating, settings=settings, chunks=chunks)
    cells = memory_table(plan).cells
    assert list(cells) == ["kind", *(f"{unit} {n}" for n in shown)]
    assert [cells[f"{unit} {n}"] for n in shown] == [[f"{held[n]:.0f} B"] * 2 for n in shown]


def test_published_costs_have_no_kinds_of_memory(planning):
    other = make_plan(replace(planning.request, planner="2bw-paper", cost=None))
    assert memory_table(other.plans[0]) is None
    assert not [line for line in lines_at(other, UNBOUNDED) if line.startswith("memory of")]


def test_memory_stands_beside_what_limits(planning):
    lines = lines_at(replace(planning, excluded=Excluded("2bw, depth 1, width 1", 0.5, 1.25)), UNBOUNDED)
    cells = [row[-1] for row in rows(lines, "tower on 2")]
    assert cells[0] == "limited by"
    assert cells[1].endswith("; memory")
    assert not cells[2].endswith("; memory")
    assert any("So does memory, which excludes 2bw, depth 1, width 1: 0.5 s per sample, 1.25 times" in x for x in lines)


def test_every_method_is_tried_on_one_stage(planning):
    """Of equally fast ones, as without messages all that flush are, the first in the list of methods stands first."""
    one = make_plan(replace(planning.request, devices=Devices((DeviceLevel(1, 1e6),))))
    assert [plan.planner for plan in one.plans] == ["1f1b", "eager", "gpipe", "2bw", "2bw-eager"]
    assert {len(plan.stages) for plan in one.plans} == {1}


@pytest.mark.parametrize("columns", [80, None])
def test_tables_for_programs_have_the_width_that_columns_says(monkeypatch, columns):
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", str(columns))
    console = Console(file=StringIO())
    assert width_to_fit(console) == columns
    assert table_console().width == (columns or UNBOUNDED)
    for nonsense in ("", "0", "-80", "wide"):
        monkeypatch.setenv("COLUMNS", nonsense)
        assert width_to_fit(console) is None


@pytest.mark.parametrize(("count", "said"), [(1, "Skipped, 1 class of"), (2, "Skipped, 2 classes of")])
def test_skipped_classes_are_counted_in_good_english(planning, count, said):
    assert len(planning.skipped) >= count
    assert said in "\n".join(lines_at(replace(planning, skipped=planning.skipped[:count]), UNBOUNDED))


def test_methods_that_are_skipped_for_one_reason_share_a_line(planning):
    """Or they would hide the others, as only some lines are printed."""
    skipped = (*(Skipped(name, "no halves") for name in ("zb-h1", "zb-v")), Skipped("1f1b", "too slow"))
    lines = [line.strip() for line in lines_at(replace(planning, skipped=skipped), UNBOUNDED)]
    assert lines[lines.index("Skipped, 3 classes of configurations:") + 1 :][:2] == [
        "zb-h1; zb-v: no halves", "1f1b: too slow",
    ]  # fmt: skip


def test_one_device_needs_no_link():
    """Whatever links the profile has."""
    known = Profile(
        format="penstock profile 1", links=[{"bandwidth": 1e9}] * 2, layers=[{"name": "a", "forward": 1, "backward": 2}]
    )
    assert devices_of([], "1", None, "16GiB", known).memory == 16 * 2**30
    with pytest.raises(ConfigError, match="give --cluster, --bandwidth, or levels"):
        devices_of([], "2", None, None, known)


def test_a_limit_of_what_is_on_the_host_needs_a_bandwidth():
    one = Devices((DeviceLevel(1, 1.0),))
    found = with_host(one, "10GB", "2GiB")
    assert (found.host, found.host_memory) == (1e10, 2 * 2.0**30)
    assert with_host(one, None, None) == one
    with pytest.raises(ConfigError, match="how fast that is; give --host-bandwidth, or --cluster"):
        with_host(one, None, "2GiB")
