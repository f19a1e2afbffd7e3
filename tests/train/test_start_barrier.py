"""Ranks that find each other in the job's store: who is missing, what is left behind, how many requests it takes."""

import random
from collections import Counter

import pytest

from penstock.train.process_group import Meeting


class CountingStore:
    """A store that counts requests."""

    def __init__(self):
        self.values, self.requests = {}, 0

    def set(self, key, value):
        self.requests += 1
        self.values[key] = value.encode()

    def get(self, key):
        self.requests += 1
        return self.values[key]

    def check(self, keys):
        self.requests += 1
        return all(key in self.values for key in keys)

    def delete_key(self, key):
        self.requests += 1
        return self.values.pop(key, None) is not None


def meet(store, size, seed=0):
    """Let ranks look in turn, in an order that changes, until all have met; their meetings, and the looks of each."""
    order, looks = random.Random(seed), Counter()
    meetings = {rank: Meeting(store, rank, size, f'{{"rank": {rank}}}') for rank in range(size)}
    waiting = set(meetings)
    while waiting:
        for rank in order.sample(sorted(waiting), len(waiting)):
            looks[rank] += 1
            if meetings[rank].look():
                waiting.discard(rank)
    return meetings, looks


@pytest.mark.smoke
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_all_ranks_learn_one_name_and_leave_one_key_behind(size):
    store = CountingStore()
    for start in range(2):
        meetings, _ = meet(store, size, seed=start)
        assert len({one.name for one in meetings.values()}) == 1
        assert {one.first for one in meetings.values()} == {'{"rank": 0}'}
        assert len(store.values) == start + 1  # that all have met


def test_requests_to_meet_do_not_grow_with_the_ranks():
    """At most so many a look, and as many looks as the tree has levels; by every rank, rank 0 included."""
    found = {}
    for size in (4, 16, 64, 256):
        store, most = CountingStore(), 0
        meetings = []
        for rank in range(size):
            before = store.requests
            meetings.append(Meeting(store, rank, size, "{}"))
            assert store.requests - before <= 2
        waiting, looks = list(range(size)), 0
        while waiting:
            looks += 1
            for rank in list(waiting):
                before = store.requests
                if meetings[rank].look():
                    waiting.remove(rank)
                most = max(most, store.requests - before)
        found[size] = most
        assert looks <= size.bit_length() + 2
    assert found[16] == found[64] == found[256] <= 11


def test_ranks_that_never_came_are_named_in_few_requests():
    store, size = CountingStore(), 256
    meetings = {rank: Meeting(store, rank, size, "{}") for rank in range(size) if rank not in (7, 200)}
    for _ in range(12):
        assert not any(one.look() for one in meetings.values())
    before = store.requests
    assert meetings[0].missing() == meetings[255].missing() == [7, 200]
    assert store.requests - before < 80


def test_whom_a_rank_waits_for_where_all_have_asked():
    store = CountingStore()
    meetings = {rank: Meeting(store, rank, 3, "{}") for rank in range(3)}
    assert meetings[1].missing() == [0]  # has not answered
    for rank in (0, 1, 0):
        meetings[rank].look()
    assert meetings[0].missing() == [2]  # has asked, and not come
    assert meetings[1].missing() == [0]


def test_answers_of_an_earlier_start_are_not_taken():
    """Its workers were killed when some of them had been answered."""
    store = CountingStore()
    old = {rank: Meeting(store, rank, 4, '"old"') for rank in range(4)}
    for rank in (0, 1, 2):
        old[rank].look()
    late = Meeting(store, 1, 4, '"new"')
    assert not late.look()
    assert late.name == ""
    store.values.pop("penstock/asked/1")
    meetings, _ = meet(store, 4)
    assert len({one.name for one in meetings.values()} | {old[0].name}) == 2
