"""Exchange with `torch.distributed.pipelining`: its own loader reads what we write, we read what its classes make."""

import csv
import io
from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from penstock.errors import ScheduleError
from penstock.schedule.ir.schedule import Op, passes
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from penstock.schedule.torch_csv import from_torch_csv, to_torch_csv
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from support.schedules import make_schedule
from support.torch_schedules import torch_schedule

GOLDEN = Path(__file__).parents[1] / "golden"

MULTI = {  # class -> does it place stages in a V?
    "ScheduleInterleaved1F1B": False,
    "ScheduleLoopedBFS": False,
    "ScheduleInterleavedZeroBubble": False,
    "ScheduleZBVZeroBubble": True,
    "ScheduleDualPipeV": True,
}


def table_of(schedule, comms=False):
    """torch's table in torch's own print, as its `_dump_csv` writes it."""
    out = io.StringIO()
    writer = csv.writer(out)
    table = schedule.pipeline_order_with_comms if comms else schedule.pipeline_order
    for rank in sorted(table):
        writer.writerow(table[rank])
    return out.getvalue()


def compute_actions(program):
    """(operation, stage, microbatch) of every pass of a program."""
    return [(p.op.value, p.stage.index, p.unit.first) for a in program.period if a.op is not Op.STEP for p in passes(a)]


def torch_actions(row):
    cells = [torch_schedules._Action.from_str(cell) for cell in row.split(",") if cell]
    flat = [part for cell in cells for part in cell.sub_actions or (cell,)]
    return [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in flat]


# --- ours read by torch ----------------------------------------------------------------------------------------------

WRITTEN = ["interleaved", "zb_v", "dualpipe_v"]


@pytest.mark.parametrize("name", WRITTEN)
def test_torchs_loader_reads_our_file(name, tmp_path):
    """`_load_csv` also validates the table and works out which stage is where."""
    ours = parse_schedule((GOLDEN / f"{name}.txt").read_text())
    (tmp_path / "ours.csv").write_text(to_torch_csv(ours))
    theirs = torch_schedule("ScheduleInterleaved1F1B", 2, ours.microbatches, chunks=2)
    theirs._load_csv(tmp_path / "ours.csv")
    for rank, program in enumerate(ours.programs):
        flat = [part for action in theirs.pipeline_order[rank] for part in action.sub_actions or (action,)]
        assert [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in flat] == compute_actions(program)
    assert theirs.stage_index_to_group_rank == {stage.index: stage.rank for stage in ours.stages}


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "eager", "sequential"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 3), (4, 2), (4, 6)])
def test_torch_reads_each_cell_of_our_methods(method, stages, microbatches):
    ours = make_schedule(method, stages, microbatches)
    rows = to_torch_csv(ours).splitlines()
    assert [torch_actions(row) for row in rows] == [compute_actions(program) for program in ours.programs]


def test_the_file_is_plain():
    assert to_torch_csv(make_schedule("1f1b", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


# --- torch's read by us ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 6), (4, 8)])
def test_we_read_and_prove_torchs_tables(name, ranks, microbatches):
    table = table_of(torch_schedule(name, ranks, microbatches, chunks=2))
    schedule = from_torch_csv(table, name)
    assert schedule.microbatches == microbatches
    assert [compute_actions(p) for p in schedule.programs] == [torch_actions(row) for row in table.splitlines()]
    place = (lambda index: min(index, 2 * ranks - 1 - index)) if MULTI[name] else (lambda index: index % ranks)
    assert all(stage.rank == place(stage.index) for stage in schedule.stages)
    check(schedule)


@pytest.mark.parametrize("name", MULTI)
def test_a_table_survives_the_way_there_and_back(name):
    schedule = from_torch_csv(table_of(torch_schedule(name, 2, 4, chunks=2)), name)
    assert from_torch_csv(to_torch_csv(schedule), name) == schedule
    assert parse_schedule(str(schedule)) == schedule


def test_torchs_interleaved_table_is_our_golden_file():
    schedule = from_torch_csv(table_of(torch_schedule("ScheduleInterleaved1F1B", 2, 4, chunks=2)), "interleaved")
    assert schedule == parse_schedule((GOLDEN / "interleaved.txt").read_text())


@pytest.mark.parametrize("name", ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_the_file_that_torch_writes_unasked_is_read(name, tmp_path):
    """`_dump_csv(f)` writes communication, too, where torch has lowered the table."""
    theirs = torch_schedule(name, 2, 4, chunks=2)
    theirs._dump_csv(tmp_path / "theirs.csv")
    text = (tmp_path / "theirs.csv").read_text()
    assert "RECV_F" in text
    assert from_torch_csv(text, name) == from_torch_csv(table_of(theirs), name)


def test_torchs_gpipe_table_is_ours():
    """It ends with REDUCE_GRAD, which is left out."""
    table = table_of(torch_schedule("ScheduleGPipe", 3, 4))
    assert "2REDUCE_GRAD" in table
    assert from_torch_csv(table, "gpipe") == make_schedule("gpipe", 3, 4)


def test_torchs_1f1b_table_is_refused_for_its_known_defect():
    """Its last rank lists F1..Fm instead of F0..F(m-1): torch runs its own loop, the printed table is wrong."""
    table = table_of(torch_schedule("Schedule1F1B", 3, 4))
    assert table.splitlines()[-1] == "2F1,2B0,2F2,2B1,2F3,2B2,2F4,2B3,2REDUCE_GRAD"
    with pytest.raises(ScheduleError, match="rank 2, B0@2: this rank runs no forward of microbatch 0"):
        from_torch_csv(table, "1f1b")
    mended = table.replace("2F1,2B0,2F2,2B1,2F3,2B2,2F4,2B3", "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3")
    assert from_torch_csv(mended, "1f1b") == make_schedule("1f1b", 3, 4)


SHAPES = [(p, m) for p in (2, 3, 4, 8) for m in (1, 2, 3, 4, 6, 8, 12, 16)]
TABLES = {  # class -> how many of these shapes (and chunks) it takes
    "ScheduleInterleaved1F1B": 62,
    "ScheduleLoopedBFS": 64,
    "ScheduleInterleavedZeroBubble": 62,
    "ScheduleZBVZeroBubble": 32,
    "ScheduleDualPipeV": 13,
}


@pytest.mark.parametrize("name", TABLES)
def test_every_table_of_a_grid_is_read_and_proven(name):
    """In both forms, also where a lane has to hold more than two messages."""
    read, widest = 0, 0
    for p, m in SHAPES:
        for chunks in (2,) if MULTI[name] else (2, 3):
            try:
                theirs = torch_schedule(name, p, m, chunks=chunks)
            except ValueError:
                continue  # torch's own rules: so many microbatches per round, or at least twice as many as ranks
            schedule = from_torch_csv(table_of(theirs), name)
            assert from_torch_csv(table_of(theirs, comms=True), name) == schedule
            widest = max(widest, check(schedule).lowered.window)
            read += 1
    assert read == TABLES[name]
    assert (widest > 2) == (not MULTI[name])


def test_torchs_breadth_first_waits_for_no_room():
    """Eight ranks, sixteen microbatches: 58.5 forwards, where two messages per lane would make it 66."""
    schedule = from_torch_csv(table_of(torch_schedule("ScheduleLoopedBFS", 8, 16, chunks=2)))
    spans = [simulate_schedule(schedule, Costs.uniform(schedule), window=w).bubble.makespan for w in (2, None)]
    assert spans == [66, 58.5]


TWO_RANKS = "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RESHARD\n"


@pytest.mark.parametrize(
    ("right", "wrong", "telling"),
    [
        ("0SEND_F0,", "", "line 1 has no 0SEND_F0, which its passes need (messages missing: 1)"),
        ("0SEND_F0,", "0SEND_F0,0SEND_F0,", "line 1, 0SEND_F0: this message is there twice"),
        ("0F0,0SEND_F0", "0SEND_F0,0F0", "line 1, 0SEND_F0 stands before the pass that makes what it sends"),
        ("0RECV_B0,0B0", "0B0,0RECV_B0", "line 1, 0RECV_B0 stands behind the pass that needs what it receives"),
        ("1RECV_F0", "1RECV_F1", "line 2, 1RECV_F1: no pass of this rank gives or needs such a message"),
        ("1SEND_B0", "1SEND_F0", "line 2, 1SEND_F0: no pass of this rank gives or needs such a message"),
        ("1SEND_B0", "1SEND_B", "line 2: '1SEND_B' does not say of which microbatch"),
        ("1RESHARD", "1RESHARD0", "line 2: RESHARD in '1RESHARD0' is neither a pass on a microbatch"),
        ("1UNSHARD", "1GATHER", "line 2: GATHER in '1GATHER' is neither a pass on a microbatch"),
    ],
)
def test_messages_of_a_table_are_those_that_its_passes_need(right, wrong, telling):
    assert from_torch_csv(TWO_RANKS) == from_torch_csv("0F0,0B0\n1F0,1B0\n")
    with pytest.raises(ScheduleError) as caught:
        from_torch_csv(TWO_RANKS.replace(right, wrong))
    assert telling in str(caught.value)


# --- what the form cannot say ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "telling"),
    [
        ("chimera", "cannot hold a stage on several ranks"),
        ("frozen_front", "only a chain of stages that are all trained"),
        ("two_branches", "only a chain"),
        ("local_losses", "only a chain"),
        ("evaluation", "only whole single training microbatches, not Fe0"),
        ("seq1f1b", "only whole single training microbatches, not F0:0/2"),
        ("nf1b", "this schedule never drains"),
        ("xpipe", "this schedule never drains"),
        ("blend", "this schedule never drains"),
        ("post_validation", "this schedule never drains"),
        ("pipemare_recompute", "this schedule never drains"),
        ("breadth_first", "has no GATHER (GATHER[0]@0"),
        ("offload", "has no OFFLOAD (OFFLOAD2@0)"),
        ("periodic_averaging", "has no AVERAGE (AVERAGE[0]%4@0)"),
    ],
)
def test_what_torchs_form_cannot_hold_is_refused_by_name(name, telling):
    with pytest.raises(ScheduleError) as caught:
        to_torch_csv(parse_schedule((GOLDEN / f"{name}.txt").read_text()))
    assert telling in str(caught.value)


@pytest.mark.parametrize("method", ["2bw", "stash", "newest", "vertical-sync"])
def test_endless_methods_are_refused(method):
    with pytest.raises(ScheduleError, match=r"one flushed batch; this schedule never drains"):
        to_torch_csv(make_schedule(method, 2, 2))


def test_a_recompute_is_refused():
    text = "microbatches 1\nnodes 0@0\nrank 0: F0^t R0^t B0^t STEP[t]\n"
    with pytest.raises(ScheduleError, match=r"has no R \(R0@0\^0\)"):
        to_torch_csv(parse_schedule(text))


def test_a_pair_that_torch_does_not_fuse_is_refused():
    text = "microbatches 2\nnodes 0@0\nrank 0: F0^t [F1^t+I0^t] W0^t B1^t STEP[t]\n"
    with pytest.raises(ScheduleError, match="torch fuses one F and one B"):
        to_torch_csv(parse_schedule(text))


# --- what has no meaning here ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "telling"),
    [
        ("", "the CSV is empty"),
        ("\n\n", "the CSV is empty"),
        (",,\n", "the CSV is empty"),
        ("0F0,0B0,x\n", "line 1: cannot read 'x'"),
        ("0F0,0B0\n1F0,F1\n", "line 2: cannot read 'F1'"),
        ("0UNSHARD,0RESHARD\n", "line 1 holds no pass, so rank 0 would have no stage"),
        ("0F0,0B0,0SEND_F0\n", "line 1, 0SEND_F0: no pass of this rank gives or needs such a message"),
        ("0F0,0B\n", "line 1: B in '0B' is neither a pass"),
        ("0F0,0B0\n0F1,0B1\n", "line 2, 0F1: stage 0 is already on rank 0"),
        ("0F0,0B0\n2F0,2B0\n", "stages must be numbered from 0 without gaps; found [0, 2]"),
        ("0F0,(0B0;)OVERLAP_F_B\n", "line 1: cannot read ''"),
        ("0F0,(0B0;0F1\n", "line 1: cannot read '(0B0;0F1'"),
    ],
)
def test_what_cannot_be_read_is_refused_with_line_and_cell(text, telling):
    with pytest.raises(ScheduleError) as caught:
        from_torch_csv(text)
    assert telling in str(caught.value)


@pytest.mark.parametrize("cell", ["(0F0)OVERLAP_F_B,0B0", "(0F0;0F1)OVERLAP_F_B,0B0,0B1"])
def test_an_overlap_of_other_than_one_forward_and_one_backward_is_refused(cell):
    with pytest.raises(ScheduleError, match="OVERLAP"):
        from_torch_csv(cell + "\n")


def test_a_rank_without_work_is_refused_and_does_not_move_the_others():
    """A blank line is rank 1's: skipping it would put rank 2's stage on rank 1."""
    for text in ("0F0,0B0\n\n1F0,1B0\n", "0F0,0B0\n,\n1F0,1B0\n"):
        with pytest.raises(ScheduleError, match=r"rank 1|line 2"):
            check(from_torch_csv(text))


def test_idle_cells_and_spaces_mean_nothing():
    assert from_torch_csv("0F0,,0B0,\r\n, 1F0 ,1B0,\r\n") == from_torch_csv("0F0,0B0\n1F0,1B0\n")


def test_a_missing_pass_is_found_by_the_proof():
    with pytest.raises(ScheduleError, match="microbatch 1, stage 1 has 0 forwards per batch"):
        check(from_torch_csv("0F0,0F1,0B0,0B1\n1F0,1B0\n"))
