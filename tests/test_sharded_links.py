"""The benchmark of sharded pipelines on links: what it expects ranks to send, and what it makes of a run."""

import pytest
from benchmarks.network.arms import MODELS, PARALLEL, PARALLEL_MAKERS, REPLICATED, SHARDED, case_named
from benchmarks.network.sharded_arms import CHUNKS
from benchmarks.network.sharded_compare import ALONE, STEPS, core_work, predict, print_comparison, proof_of
from benchmarks.sharded_bytes import expected, print_bytes
from benchmarks.sharded_levels import print_ratio

CASE = SHARDED[-1]
WEIGHTS = sum(4 * p.numel() for part in MODELS[CASE.model].task.stages(1) for p in part.parameters())


def test_expected_bytes_are_the_published_ones():
    """Of both ranks: (w - 1) / w (P (2v - k) / v + G) for breadth-first, 2 (w - 1) / w G for replicas, and messages.

    Stages have a layer each, so gathers kept from the forward to the backward are about k / v of the weights.
    """
    layers = CHUNKS * 2
    messages = 2 * (layers - 1) * CASE.m * MODELS[CASE.model].message
    assert sum(expected("breadth-first", CASE)) == pytest.approx(messages + WEIGHTS, rel=1e-6)
    sharded = WEIGHTS / 2 * (2 * CHUNKS - 2) / CHUNKS + WEIGHTS / 2
    assert sum(expected("layered", CASE)) == pytest.approx(messages + sharded, rel=1e-2)
    assert sum(expected("depth-first-full", CASE)) > messages + 4 * sharded


def test_cases_have_arms_that_there_are():
    for case in SHARDED:
        assert set(case.arms) == set(PARALLEL_MAKERS)
        assert case_named(case.name) is case
    assert all(f"penstock {method} x 2" in PARALLEL_MAKERS for method in PARALLEL)


def test_the_bytes_of_a_batch_are_those_that_a_longer_run_sends_more(capsys):
    """A run sends 1000 bytes once, and for each batch what is expected; the second rank twice that."""
    found = expected("layered", CASE)
    rows = [
        {
            "case": CASE.name,
            "arm": "penstock layered x 2",
            "microbatches": batches * CASE.m,
            "ranks": [{"sent": 1000 + batches * found[0]}, {"sent": 1000 + 2 * batches * found[1]}],
        }
        for batches in (1, 3)
    ]
    case = CASE._replace(arms=("penstock layered x 2",))
    print_bytes(rows, [case])
    assert "| 1.000, 2.000 |" in capsys.readouterr().out


def test_without_passes_a_run_is_predicted_to_take_what_its_bytes_take():
    """At 25 MB/s: no less than gathers and sums on the lane of a rank, no more than with its messages after them."""
    case = SHARDED[0]
    work = {f"{stage}:{op}": [1, 0.0] for stage in range(2 * CHUNKS) for op in ("F", "B", "STEP")}
    row = {"case": case.name, "link": "200 Mbit/s", "microbatches": 4 * case.m, "ranks": [{"work": work}]}
    sent, stage = expected("layered", case)[0], WEIGHTS / (2 * CHUNKS)
    messages = (2 * CHUNKS - 1) * case.m * MODELS[case.model].message
    proof = proof_of("layered", case)
    lanes, links, work = (predict(row, proof, inputs, 2) for inputs in STEPS[:3])
    assert 4 * 0.98 * (sent - messages) <= 25e6 * (lanes - CHUNKS * stage / 2 / 25e6) <= 4 * 1.02 * (sent + messages)
    assert lanes < links < work <= links * (1 + 25e6 * ALONE / 1e9 * 1.01)
    assert predict(row, proof, STEPS[3], 2) is None  # what it took of cores was not measured


def turn_on_cores(case, seconds):
    """Four ranks, of which each works 2 s on passes, 1 s on 10 messages, 3 s on 1 GB, and waits 0.5 s."""
    stages = range(2 * CHUNKS)
    ranks = []
    for rank in range(4):
        own = [f"{stage}:{op}" for stage in stages if stage % 2 == rank % 2 for op in ("F", "B")]
        ranks.append(
            {
                "work": {name: [1, 9.0] for name in own},
                "cores": {**{name: 2 / len(own) for name in own}, "wait": 0.5},
                "threads": {"MainThread": [3.5, 9.0], "others": [1.0, 0.0]},
                "messages": {"activation 0>1": [10, 1.0, 1.0], "collective REDUCE": [7, 1.0, 1.0]},
                "cpu": 6.5,
                "sent": 1e9,
            }
        )
    cores = {"busy": 30.0, "stolen": 1.0, "interrupts": 1.4}
    arm = {"case": case.name, "arm": "penstock layered x 2", "link": "1 Gbit/s", "microbatches": 4 * case.m}
    return {**arm, "seconds": seconds, "cores": cores, "ranks": ranks}


def test_what_a_turn_takes_of_cores_is_divided_among_passes_messages_and_bytes():
    """24 s are told of, and 2.4 s of interrupts and of the host lengthen all by a tenth."""
    work = core_work(turn_on_cores(SHARDED[0], 1.0), 100)
    assert work.byte == pytest.approx(1.1 * 3e-9)
    assert work.message == pytest.approx(1.1 * 1 / 20 + 50 * work.byte)
    assert core_work(turn_on_cores(SHARDED[0], 1.0), 100, others=True).byte == pytest.approx((1 + 5 / 24) * 3e-9)
    assert work.means == pytest.approx({f"{stage}:{op}": 1.1 * 0.25 for stage in range(2 * CHUNKS) for op in "FB"})


def test_all_steps_are_printed_of_a_turn_whose_work_is_known(capsys):
    case = SHARDED[0]._replace(arms=("penstock layered x 2",))
    print_comparison([turn_on_cores(case, 40.0)], [case], ["1 Gbit/s"], 2)
    title, _, row = capsys.readouterr().out.split("\n")[1:4]
    assert title.count("|") == row.count("|") == 4 + len(STEPS) + 1
    assert all(cell.strip() for cell in row.split("|")[1:-1])


def test_ratio_of_levels_is_taken_within_rounds(capsys):
    rows = [
        {"arm": arm, "microbatches": count * REPLICATED.m, "seconds": seconds * count}
        for slow in (1.0, 3.0, 2.0)
        for arm, seconds in zip(REPLICATED.arms, (slow, 1.1 * slow), strict=True)
        for count in (1, 4)
    ]
    print_ratio(rows, REPLICATED)
    assert "sharded / replicated: 1.100 (1.100, 1.100)" in capsys.readouterr().out
