"""What forwards to come read, against a list of all of them."""

from hypothesis import given, strategies as st

from penstock.schedule.stage_state.stage_constants import Forwards

M = 3
rows = st.lists(st.tuples(st.integers(-3 * M, M - 1), st.integers(-4, 0)), min_size=1, max_size=4).map(tuple)


@given(rows, rows, st.integers(0, 12), st.integers(4, 8))
def test_the_oldest_version_still_to_be_read(period, epilogue, position, batches):
    forwards = Forwards(M, period, epilogue)
    unrolled = [(first + t * M, version + t) for t in range(40) for first, version in period]
    assert forwards.oldest(position) == min(version for _, version in unrolled[position:])
    settled = forwards.settled(position)
    assert unrolled[settled][0] >= 0
    assert all(first < 0 for first, _ in unrolled[position:settled])
    tail = [version + batches for _, version in epilogue]
    assert forwards.oldest(1, batches) == (min(tail[1:]) if tail[1:] else None)


def test_a_node_without_forwards_reads_nothing():
    assert Forwards(M, (), ()).oldest(0) is None
    assert Forwards(M, (), ()).settled(5) == 5
