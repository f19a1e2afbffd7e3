"""The benchmark of sharded pipelines on links: what it expects ranks to send, and what it makes of a run."""

import pytest
from benchmarks.network.arms import MODELS, PARALLEL, PARALLEL_MAKERS, SHARDED, case_named
from benchmarks.sharded_links import CHUNKS, expected, print_bytes

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
