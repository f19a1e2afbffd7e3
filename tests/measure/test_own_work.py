"""What a rank's own work takes: not its waits, not other ranks, not what interrupts it."""

import pytest

from penstock.measure.single_rank_rehearsal import own_work
from penstock.timeline import Interval, Waiting


def batch_of(number, seconds, *, rank=1, start=0.0):
    """The intervals of a batch: (what, stage, seconds) one after the other."""
    found, now = [], start
    for what, stage, time in seconds:
        found.append(Interval(rank, "compute", now, now + time, what, what, stage, batch=number))
        now += time
    return found


PLAIN = [("F", 1, 1.0), ("B", 1, 2.0), ("F", 1, 1.0), ("B", 1, 2.0), ("STEP", 1, 0.5)]


def interrupted(at, by):
    """The batch whose pass number `at` takes longer."""
    return [(what, stage, time + by * (number == at)) for number, (what, stage, time) in enumerate(PLAIN)]


def test_interrupted_passes_do_not_count():
    """Each batch has one, so that the median of whole batches would be 106.5 and the least of them 56.5."""
    given = [each for n in range(5) for each in batch_of(n, interrupted(n, 50.0 + 50.0 * bool(n)))]
    found = own_work(given, 1, range(5))
    assert found.fastest == pytest.approx(6.5)
    assert found.busy == pytest.approx(6.5)
    assert {kind: number for kind, (number, _) in found.passes.items()} == {"F": 2, "B": 2, "STEP": 1}


def test_waits_other_ranks_and_other_batches_do_not_count():
    given = [*batch_of(0, [("F", 1, 0.1)]), *batch_of(1, PLAIN), *batch_of(2, [("F", 1, 0.1)])]
    given += batch_of(1, [("F", 0, 70.0)], rank=0) + batch_of(1, [(wait.value, 1, 9.0) for wait in Waiting])
    given.append(Interval(1, "activation 0>1", 0.0, 99.0, "RECV", "activation 0", batch=1))
    assert own_work(given, 1, range(1, 2)).fastest == pytest.approx(6.5)


def test_stages_of_a_rank_are_not_taken_for_each_other():
    """Stages of 1, 1 and 7 seconds forward take 9 in a batch, not three times the fastest or the median one."""
    given = [each for n in range(3) for each in batch_of(n, [("F", 1, 1.0), ("F", 3, 1.0), ("F", 5, 7.0)])]
    found = own_work(given, 1, range(3))
    assert found.fastest == pytest.approx(9.0)
    assert found.busy == pytest.approx(9.0)


def test_the_fastest_is_no_more_than_any_batch():
    given = [each for n in range(4) for each in batch_of(n, [(w, s, t * (1 + 0.1 * n)) for w, s, t in PLAIN])]
    found = own_work(given, 1, range(4))
    assert found.fastest == pytest.approx(6.5)
    assert found.busy == pytest.approx(6.5 * 1.15)
