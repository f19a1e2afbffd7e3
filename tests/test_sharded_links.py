"""The benchmark of sharded pipelines on links: what it expects ranks to send, and what it makes of a run."""

import pytest
from benchmarks.network.arms import MODELS, PARALLEL, PARALLEL_MAKERS, REPLICATED, SHARDED, case_named
from benchmarks.network.sharded_arms import CHUNKS
from benchmarks.sharded_bytes import expected, print_bytes
from benchmarks.sharded_levels import print_ratio
from benchmarks.sharded_links import predict, proof_of

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
    seconds = predict(row, proof_of("layered", case)) - CHUNKS * stage / 2 / 25e6
    assert 4 * 0.98 * (sent - messages) <= 25e6 * seconds <= 4 * 1.02 * (sent + messages)


def test_ratio_of_levels_is_taken_within_rounds(capsys):
    rows = [
        {"arm": arm, "microbatches": count * REPLICATED.m, "seconds": seconds * count}
        for slow in (1.0, 3.0, 2.0)
        for arm, seconds in zip(REPLICATED.arms, (slow, 1.1 * slow), strict=True)
        for count in (1, 4)
    ]
    print_ratio(rows, REPLICATED)
    assert "sharded / replicated: 1.100 (1.100, 1.100)" in capsys.readouterr().out
