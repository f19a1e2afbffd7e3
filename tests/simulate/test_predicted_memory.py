"""Predicted memory is that of the runtime's ledger, byte for byte, in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import CapabilityError, DeadlockError
from penstock.schedule.build import prove
from penstock.schedule.ir.schedule import Op
from penstock.schedule.lowering.lower import lower
from penstock.schedule.machine.instructions import Lowered, LoweredProgram
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.schedule.methods.table import METHODS
from penstock.schedule.transforms.batch_ops import with_averages
from penstock.simulate.memory.held import Held, HeldKind, Holdings, most_bytes
from penstock.simulate.memory.memory_simulation import most_held
from penstock.simulate.memory.predicted import MemoryOptions, peak_bytes
from penstock.simulate.memory.snapshots import Snapshots
from penstock.simulate.memory.stage_sizes import SnapshotBytes, StageBytes
from support.predicted_memory import Run, peaks_of_a_run
from support.schedules import make_schedule

SHARDED = ("layered", "depth-first-full", "2bw-layered")  # by themselves, so they take several pipelines
EVEN = ("bitpipe", "chimera", "dualpipe", "dualpipe-v")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_predicted_peak_is_that_of_the_ledger(method: str) -> None:
    """Every method on three ranks, or on two; the campaign `make memory` has the other sizes and options."""
    sharded = method in SHARDED
    predicted, found = peaks_of_a_run(Run(method, 2 if sharded or method in EVEN else 3, 4, width=1 + sharded))
    assert predicted == found


PAIRS = (
    Run("1f1b", 2, 3, recompute="block", precision="bf16", clip=1.0),
    Run("1f1b", 3, 2, recompute="stage", width=2, sharding="optimizer"),
    Run("2bw", 2, 4, recompute="block", width=2),
    Run("2bw", 3, 3, precision="bf16", width=2, clip=0.1),
    Run("2bw", 2, 2, width=2, sharding="gradients", clip=1.0),
    Run("chimera", 2, 4, sharding="gradients"),  # both directions divide it
    Run("bitpipe", 2, 4, width=2, precision="bf16", sharding="optimizer"),
    Run("gpipe", 4, 4, recompute="stage", precision="bf16"),
    Run("eager", 4, 7, recompute="block", clip=1.0),
    Run("zb-h1", 3, 5, recompute="stage"),
    Run("zb-h1", 4, 4, recompute="block", precision="bf16"),
    Run("zb-v", 2, 4, precision="bf16", width=2),
    Run("interleaved", 2, 4, recompute="block", sharding="gradients", width=2),
    Run("stash", 4, 2, recompute="stage", precision="bf16"),
    Run("pipemare", 3, 2, recompute="block"),
    Run("pipemare", 3, 2, precision="bf16"),
    Run("error-feedback", 2, 3, precision="bf16", clip=1.0),
    Run("zb-h2-post", 2, 4, precision="bf16", clip=1.0),
    Run("sequential", 1, 2, recompute="block"),
    Run("2bw", 2, 3, precision="bf16", width=2, sharding="gradients", clip=1.0),
    Run("1f1b", 2, 2, precision="bf16", width=3, sharding="optimizer", recompute="block"),
    Run("2bw", 3, 3, width=2, tied=True),
    Run("2bw-ahead", 2, 3, motion=True),
    Run("2bw-ahead", 2, 3, precision="bf16", muon=True),
    Run("2bw-ahead", 2, 3, width=2, sharding="optimizer", clip=1.0),
    Run("2bw-ahead", 2, 3, width=3, sharding="gradients"),
    Run("2bw-ahead", 3, 2, width=2, sharding="gradients", motion=True, recompute="stage"),
    Run("2bw-ahead", 2, 2, width=2, sharding="gradients", muon=True),
    Run("2bw-ahead", 2, 3, precision="bf16", width=2, sharding="gradients", clip=1.0),
    Run("2bw-ahead", 2, 3, precision="bf16", width=3, sharding="optimizer", motion=True),
    Run("vocabulary-1f1b", 2, 5, recompute="block", precision="bf16", width=2, sharding="gradients", clip=1.0),
)


@pytest.mark.parametrize("run", PAIRS, ids=str)
def test_also_with_other_options(run: Run) -> None:
    """Pairs of options; `make memory` runs their product."""
    predicted, found = peaks_of_a_run(run)
    assert predicted == found


FULL = (
    Run("2bw-layered", 2, 3, precision="bf16", width=2, recompute="block"),
    Run("depth-first-full", 1, 3, precision="bf16", width=3, sharding="full:weights=1:gradients=1", chunks=3),
    Run("2bw", 2, 3, precision="bf16", width=2, sharding="gradients:gradients=1"),
    Run("1f1b", 2, 2, precision="bf16", width=3, sharding="full", clip=0.1),
    # A gradient in parts: its memory is taken again after another stage's action has reported that it was free.
    Run("vocabulary-1f1b", 3, 4, recompute="stage", width=2, sharding="full:weights=1:gradients=1"),
)
MORE_FULL = (
    Run("layered", 2, 4, recompute="stage", width=4, chunks=3),
    Run("layered", 2, 4, precision="bf16", width=2, muon=True),
    Run("layered", 2, 4, width=2, tied=True, recompute="block"),
    Run("interleaved", 2, 4, width=2, sharding="gradients", tied=True, clip=0.1),
    Run("zb-v", 3, 4, tied=True),
    Run("layered", 3, 3, width=2, sharding="full:weights=2:gradients=2:cache=direct", chunks=4),
    Run("depth-first-full", 2, 8, recompute="stage", precision="bf16", width=2, chunks=4),
    Run("2bw-layered", 2, 4, recompute="stage", width=3, chunks=3, clip=0.1),
    Run("2bw-layered", 3, 5, precision="bf16", width=2, sharding="full:weights=4:gradients=1", muon=True),
    Run("gpipe", 3, 2, recompute="block", width=2, sharding="full:weights=1:gradients=1"),
    Run("interleaved", 2, 4, width=2, sharding="full", recompute="stage"),
    Run("zb-v", 2, 4, precision="bf16", width=2, sharding="full"),
    Run("zb-h2", 3, 5, width=3, sharding="full", clip=0.1),
    Run("eager", 2, 4, precision="bf16", recompute="stage", width=2, sharding="full"),
    Run("interleaved", 2, 4, precision="bf16", width=2, sharding="gradients:gradients=1"),
)


@pytest.mark.parametrize("run", [*FULL, *(pytest.param(run, marks=pytest.mark.long) for run in MORE_FULL)], ids=str)
def test_also_where_weights_and_gradients_are_whole_for_a_while(run: Run) -> None:
    """Level full, and fewer places for gradients than gradients."""
    predicted, found = peaks_of_a_run(run)
    assert predicted == found


MOVED = (
    Run("bpipe", 4, 6, precision="bf16", width=2, sharding="gradients"),
    Run("seq1f1b", 2, 3, recompute="stage", precision="bf16", slices=3),
    Run("seq1f1b", 2, 2, halved=True),
)
MORE_MOVED = (
    Run("seq1f1b", 2, 2, own="parked slices"),
    Run("seq1f1b", 2, 2, own="parked slices", halved=True, recompute="stage"),
    Run("terapipe", 3, 2, halved=True, slices=3, precision="bf16"),
    Run("seq1f1b", 3, 4, halved=True, recompute="stage", width=2, sharding="full"),
    Run("bpipe", 4, 6, halved=True, precision="bf16", width=2, sharding="gradients"),
    Run("bpipe", 4, 6, halved=True, recompute=("none", "block", "none", "none")),
    Run("bpipe", 4, 7, recompute="block"),
    Run("bpipe", 4, 8, recompute="stage", clip=1.0),
    Run("bpipe", 4, 6, recompute=("none", "block", "none", "none")),
    Run("seq1f1b", 4, 5, width=2, sharding="full"),
    Run("terapipe", 3, 2, recompute="stage", slices=4, clip=1.0),
    Run("terapipe", 4, 4, precision="bf16", slices=3),
    Run("1f1b", 4, 4, offload="activations"),
    Run("2bw", 3, 4, offload="activations", precision="bf16", offload_optimizer="stages"),
    Run("zb-v", 2, 4, offload="activations"),
    Run("seq1f1b", 3, 3, offload="activations"),
    Run("interleaved", 2, 4, offload_optimizer="pieces", precision="bf16"),
)


@pytest.mark.parametrize("run", [*MOVED, *(pytest.param(run, marks=pytest.mark.long) for run in MORE_MOVED)], ids=str)
def test_also_where_activations_are_moved_or_come_in_slices(run: Run) -> None:
    """To other ranks, or to the host."""
    predicted, found = peaks_of_a_run(run)
    assert predicted == found


AVERAGED = (Run("2bw", 2, 2, ema=0.9),)
MORE_AVERAGED = (
    Run("1f1b", 2, 2, precision="bf16", ema=0.9, snapshots=Snapshots(1, kept=True)),
    Run("1f1b", 2, 2, width=2, sharding="full", ema=0.9),
    Run("1f1b", 2, 2, precision="bf16", width=2, sharding="optimizer", ema=0.9),
    Run("2bw", 2, 3, width=2, sharding="gradients:gradients=1", ema=0.9),
    Run("2bw-layered", 2, 4, precision="bf16", width=2, ema=0.9),
    Run("2bw-layered", 2, 4, width=2, ema=0.9),
)


@pytest.mark.parametrize(
    "run", [*AVERAGED, *(pytest.param(run, marks=pytest.mark.long) for run in MORE_AVERAGED)], ids=str
)
def test_also_with_a_moving_average(run: Run) -> None:
    """Of the weights, or of their rows."""
    predicted, found = peaks_of_a_run(run)
    assert predicted == found


APART = (
    Run("1f1b", 2, 2, width=2, combine=Combine("elastic", every=2)),
    Run("stash", 2, 2, width=2, combine=Combine("wsp", distance=1)),
)
MORE_APART = (
    Run("2bw", 2, 3, width=2, combine=Combine("average", every=2, optimizer_state="average")),
    Run("1f1b", 3, 3, width=3, precision="bf16", combine=Combine("average", optimizer_state="reset")),
    Run("chimera", 2, 2, width=2, combine=Combine("bmuf", every=2), clip=1.0),
    Run("zb-v", 2, 4, width=2, precision="bf16", combine=Combine("bmuf", nesterov=True)),
    Run("interleaved", 2, 4, width=2, combine=Combine("elastic"), tied=True),
    Run("2bw", 3, 3, width=3, precision="bf16", combine=Combine("elastic", every=3), recompute="block"),
    Run("stash", 3, 2, width=3, combine=Combine("wsp", every=2, distance=1)),
    Run("stash", 2, 4, width=3, precision="bf16", combine=Combine("wsp", distance=2, lag=(0, 2, 1))),
    Run("1f1b", 2, 2, width=2, combine=Combine("wsp", every=3, distance=1, lag="record")),
    Run("2bw", 2, 2, width=2, combine=Combine("wsp", distance=3, share=0.5)),
    Run("interleaved", 1, 1, width=2, combine=Combine("wsp", distance=2, lag="record")),
)


@pytest.mark.parametrize("run", [*APART, *(pytest.param(run, marks=pytest.mark.long) for run in MORE_APART)], ids=str)
def test_also_where_pipelines_have_weights_of_their_own(run: Run) -> None:
    """Averaged now and then, or in waves."""
    predicted, found = peaks_of_a_run(run)
    assert predicted == found


SAVED = (
    Run("2bw", 3, 4, snapshots=Snapshots(1, kept=True)),
    Run("stash", 2, 3, snapshots=Snapshots(2)),
    Run("3bw", 2, 1, snapshots=Snapshots(1, kept=True)),
    Run("2bw", 2, 2, width=2, sharding="gradients", snapshots=Snapshots(1, kept=True)),
)
MORE_SAVED = (
    Run("1f1b", 2, 2, width=2, sharding="optimizer", snapshots=Snapshots(1, kept=True)),
    Run("2bw", 2, 2, precision="bf16", width=2, sharding="gradients", snapshots=Snapshots(1, kept=True), ema=0.9),
    Run("2bw", 2, 2, width=2, sharding="gradients:gradients=1", snapshots=Snapshots(2)),
    Run("2bw-ahead", 2, 3, width=2, sharding="optimizer", snapshots=Snapshots(1, kept=True)),
    Run("chimera", 2, 2, width=2, sharding="gradients", snapshots=Snapshots(1, kept=True)),
    Run("1f1b", 2, 2, recompute="block", width=2, sharding="full", snapshots=Snapshots(2, kept=True), ema=0.9),
    Run("1f1b", 2, 2, precision="bf16", width=2, sharding="full", snapshots=Snapshots(1)),
    Run("2bw-ahead", 2, 1, width=2, sharding="gradients", snapshots=Snapshots(2, kept=True)),
    Run("2bw-layered", 2, 2, width=2, snapshots=Snapshots(1)),  # which drains it
    Run("2bw-layered", 2, 2, precision="bf16", width=2, snapshots=Snapshots(2)),
    Run("1f1b", 2, 3, snapshots=Snapshots(2)),
    Run("1f1b", 4, 4, recompute="stage", precision="bf16", snapshots=Snapshots(3, kept=True), clip=1.0),
    Run("2bw", 2, 3, precision="bf16", width=2, snapshots=Snapshots(1)),
    Run("2bw-ahead", 2, 3, precision="bf16", snapshots=Snapshots(2, kept=True)),
    Run("error-feedback", 3, 4, snapshots=Snapshots(1, kept=True)),
    Run("3bw-ahead", 3, 2, precision="bf16", width=2, snapshots=Snapshots(1, kept=True)),
    Run("chimera", 4, 4, width=2, snapshots=Snapshots(1, kept=True)),
    Run("bpipe", 4, 6, snapshots=Snapshots(2, kept=True)),
    Run("seq1f1b", 2, 4, snapshots=Snapshots(1, kept=True)),
    Run("zb-h2-post", 2, 4, precision="bf16", clip=1.0, snapshots=Snapshots(2)),
    Run("timeprest", 3, 4, snapshots=Snapshots(1)),
)


@pytest.mark.parametrize("run", [*SAVED, *(pytest.param(run, marks=pytest.mark.long) for run in MORE_SAVED)], ids=str)
def test_also_where_snapshots_are_taken(run: Run) -> None:
    """Kept until the next ones, or gone at once; or taken where the pipeline is drained, which the ledger has not."""
    predicted, found = peaks_of_a_run(run)
    assert predicted == found


def test_copies_of_a_snapshot() -> None:
    """Frozen parameters are copied once; a version is saved beside the newest where that is read, too."""
    passes = SnapshotBytes(weights=1_000, version=500, optimizer=30, buffers=4, frozen=7)
    sizes = {n: StageBytes(100, 100, (20,), snapshot=passes) for n in range(2)}

    def peak(method: str, batches: int, kept: bool) -> int:
        options = MemoryOptions(batches=batches, snapshots=Snapshots(1, kept))
        return peak_bytes(prove(method, 2, 2), sizes, options)[0, 0]

    assert peak("1f1b", 1, kept=False) == 200 + 1_041  # the ledger has the optimizer after the update
    assert peak("1f1b", 1, kept=True) == 200 + 20 + 1_041
    assert peak("1f1b", 2, kept=True) == 200 + 20 + 1_041
    assert peak("2bw", 1, kept=True) == 300 + 20 + 1_541


def test_only_the_largest_combinations_are_kept() -> None:
    holdings = Holdings()
    graph, sent = Held(HeldKind.GRAPH, 0), Held(HeldKind.OUTPUT, 0, 1)
    for what, count in ((graph, 1), (sent, 1), (sent, -1), (graph, 1), (graph, -2), (sent, 3), (sent, -3)):
        holdings.change(what, count)
    found = {frozenset(each) for each in holdings.largest()}
    assert found == {frozenset({(graph, 2)}), frozenset({(graph, 1), (sent, 1)}), frozenset({(sent, 3)})}
    assert most_bytes(found, {graph: 10, sent: 7}) == 21
    assert most_bytes(found, {graph: 10}) == 20
    assert most_bytes((), {graph: 10}) == 0


def test_what_two_ranks_hold_in_a_batch_of_two() -> None:
    """1F1B: F0 F1 B0 B1 on the first rank, which sends both outputs before the second rank takes its turn."""
    lowered = prove("1f1b", 2, 2).lowered
    held = most_held(lowered, 1)
    both = {(Held(HeldKind.GRAPH, 0), 2), (Held(HeldKind.OUTPUT, 0, 1), 2)}
    assert any(both <= each for each in held[0, 0])
    assert all(count <= 1 for each in held[0, 1] for what, count in each if what.kind is HeldKind.GRAPH)


def without(lowered: Lowered, rank: int, op: Op, microbatch: int) -> Lowered:
    """A program that has lost a message of its period."""
    period, epilogue, rejected = lowered.programs[rank]
    left = tuple(i for i in period if (i.action.op, i.action.unit.first) != (op, microbatch))
    assert len(left) == len(period) - 1
    programs = list(lowered.programs)
    programs[rank] = LoweredProgram(left, epilogue, rejected)
    return replace(lowered, programs=tuple(programs))


def without_uses(lowered: Lowered, rank: int) -> Lowered:
    """A program whose passes take no messages."""
    programs = list(lowered.programs)
    programs[rank] = LoweredProgram(*(tuple(i._replace(needs=()) for i in part) for part in lowered.programs[rank]))
    return replace(lowered, programs=tuple(programs))


@pytest.mark.parametrize(("rank", "op"), [(0, Op.SEND), (1, Op.RECV)])
def test_a_rank_that_never_gets_a_message_ends_with_its_name(rank: int, op: Op) -> None:
    with pytest.raises(DeadlockError, match="rank 1 at F1@1 waits for the activation of microbatch 1 from rank 0"):
        most_held(without(prove("1f1b", 2, 2).lowered, rank, op, 1), 1)


def test_all_ranks_that_wait_are_named() -> None:
    with pytest.raises(DeadlockError, match="2 ranks would wait for ever") as caught:
        most_held(without(prove("1f1b", 2, 2).lowered, 0, Op.SEND, 1), 1)
    assert "rank 0 at B1@0 waits for the gradient of microbatch 1 from rank 1" in str(caught.value)


@pytest.mark.parametrize(("window", "batches", "posted"), [(2, 1, 1), (1, 2, 0)])
def test_a_message_that_nobody_receives_ends_with_the_name_of_its_sender(
    window: int, batches: int, posted: int
) -> None:
    """Of the last gradient at the end of the run, of an earlier one where the next one finds no room."""
    lowered = without_uses(lower(prove("1f1b", 2, 1).schedule, window=window), 0)
    text = r"deadlock: 1 rank .*\n  rank 1 at SEND.* waits for rank 0 to receive earlier gradient messages"
    with pytest.raises(DeadlockError, match=text):
        most_held(without(lowered, 0, Op.RECV, posted), batches)


def test_what_is_always_there_is_counted_once() -> None:
    proof = prove("1f1b", 2, 2)
    sizes = {n: StageBytes(100, 100, (0,), frozen=5) for n in range(2)}
    assert peak_bytes(proof, sizes, MemoryOptions()) == {(0, 0): 205, (0, 1): 205}
    assert peak_bytes(proof, sizes, MemoryOptions(low_precision=True)) == {(0, 0): 305, (0, 1): 305}


def test_nothing_more_or_less_changes_nothing() -> None:
    holdings = Holdings()
    graph, message = Held(HeldKind.GRAPH, 0), Held(HeldKind.OUTPUT, 0, 1)
    for what, count in ((graph, 2), (message, 0), (graph, -1)):
        holdings.change(what, count)
    assert holdings.largest() == (frozenset({(graph, 2)}),)


def test_snapshots_of_pipelines_that_are_averaged_are_refused() -> None:
    lowered = lower(with_averages(make_schedule("1f1b", 2, 2), 1))
    with pytest.raises(CapabilityError, match=r"own \(combine=bmuf\)"):
        most_held(lowered, 2, 2, snapshots=Snapshots(1), combine=Combine("bmuf"))


def test_averages_are_refused_unless_it_is_said_how() -> None:
    with pytest.raises(CapabilityError, match="not predicted for schedules with AVERAGE unless"):
        most_held(lower(with_averages(make_schedule("1f1b", 2, 2), 1)), 2)


def test_what_is_whole_of_fully_sharded_stages() -> None:
    """Two places for weights and for gradients; updates find neither, and a run ends with all weights."""
    sizes = {n: StageBytes(100, 200, (8, 8), rows=(50, 60), low_rows=(5, 6)) for n in range(8)}
    proof = prove("layered", 2, 2, options={"chunks": 4})
    rows = 2 * 4 * 50  # weights, and sums that wait for their updates
    assert peak_bytes(proof, sizes, MemoryOptions(width=2))[0, 0] == rows + max(2 * 100 + 2 * 200, 4 * 200) + 4 * 8
    low = peak_bytes(proof, sizes, MemoryOptions(width=2, low_precision=True))
    assert low[0, 0] == rows + 4 * (100 + 200) + 4 * 8
    assert low[1, 1] == low[0, 0] + 2 * 4 * 10
    one = prove("1f1b", 1, 2, sharding="full")  # its sum stays in the gradient
    assert peak_bytes(one, sizes, MemoryOptions(width=2))[0, 0] == 50 + 100 + 200 + 8


def test_sums_that_wait_elsewhere_than_in_gradients() -> None:
    """With one place for gradients there is room for rows of a sum, and for both versions."""
    proof = prove("2bw", 2, 3, sharding="gradients:gradients=1")
    sizes = {n: StageBytes(100, 200, (0, 0), scratch=(0, 0), rows=(80, 90)) for n in range(2)}
    assert peak_bytes(proof, sizes, MemoryOptions(width=2))[0, 0] == 300
    low = peak_bytes(proof, sizes, MemoryOptions(width=2, low_precision=True))
    assert low[0, 0] == 2 * 100 + 2 * 80 + 200
