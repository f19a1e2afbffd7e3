"""What a rank of a job of 256 ranks sends, receives and asks of the store: it hardly grows with their number.

The ranks are threads of this process on a network that counts. Each run is compared with one of a quarter of the ranks.
What a decision takes is in `test_control_reduce`, what it takes to meet in `test_meeting`.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint import rank_announcements as posts
from penstock.checkpoint.rank_announcements import StorePosts
from penstock.checkpoint.writer import Writer
from penstock.comm.collective import control_plane
from penstock.runtime.rank.snapshot import Snapshot
from penstock.schedule.build import prove
from penstock.schedule.rank_schedule import common_part, part_of_rank, schedule_facts
from support.many_ranks import Network

RANKS = (64, 256)
_here = threading.local()


class Ends:
    """The network, as the rank that a thread plays has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
        self.network, self.ranks = Network(), ranks
        for module in (control_plane,):
            monkeypatch.setattr(module, "TaggedGroup", lambda *_: self.end())
            monkeypatch.setattr(module.dist, "get_rank", lambda _=None: _here.rank)
            monkeypatch.setattr(module.dist, "get_world_size", lambda _=None: ranks)

    def end(self) -> Any:
        made = self.network.end(_here.rank)()
        made.group = None
        return made

    def play(self, call: Callable[[int], Any]) -> list[Any]:
        """Call a function on every rank; return what each has returned."""
        found: list[Any] = [None] * self.ranks

        def run(rank: int) -> None:
            _here.rank = rank
            found[rank] = call(rank)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        return found


@pytest.mark.slow
def test_messages_of_a_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of figures, lags, votes and agreements between spans: each message is a size and a block."""
    most = {}
    for ranks in RANKS:
        ends = Ends(monkeypatch, ranks)
        found = ends.play(lambda rank: control_plane.gather_json(rank, "counting", None))
        assert found == [list(range(ranks))] * ranks
        most[ranks] = max(ends.network.messages.values())
        # On average a rank talks to the one above and to one below, there and back.
        assert sum(ends.network.messages.values()) == 2 * 2 * 2 * (ranks - 1)
    assert most == {64: 2 * 2 * 6, 256: 2 * 2 * 8}


def test_bytes_of_what_ranks_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Votes, comparisons, what rank 0 alone says: messages are as short for many ranks."""
    most = {}
    for ranks in RANKS:
        ends = Ends(monkeypatch, ranks)
        said = [["the same" * 20, None]] * 5 + [["the same" * 20, 1]] + [["the same" * 20, None]] * (ranks - 6)
        assert (
            ends.play(lambda rank, said=said: control_plane.gather_json(said[rank], "agreeing", None)) == [said] * ranks
        )
        most[ranks] = max(ends.network.bytes.values()) / (2 * (ranks - 1).bit_length())  # per value sent or received
    assert most[256] < 1.1 * most[64]


def test_values_that_are_only_equal_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [1, 1.0, True, 0.0, -0.0, False, [1], [True]]
    for found in Ends(monkeypatch, len(said)).play(
        lambda rank: control_plane.gather_json(said[rank], "agreeing", None)
    ):
        assert list(map(repr, found)) == list(map(repr, said))
    first, second = Ends(monkeypatch, 2).play(lambda _: control_plane.gather_json([], "agreeing", None))[0]
    assert first is not second


def share(monkeypatch: pytest.MonkeyPatch, ranks: int) -> tuple[int, int]:
    """Hand out a proof: what a rank receives beside what is common, in bytes; and the most messages but of rank 0."""
    proof, ends = prove("1f1b", ranks, 8), Ends(monkeypatch, ranks)
    common = [schedule_facts(proof.schedule), common_part(proof)]
    parts = [part_of_rank(proof.lowered, rank) for rank in range(ranks)]

    def make() -> control_plane.HandedOut:
        return control_plane.HandedOut(common, lambda rank: parts[rank])

    found = ends.play(lambda _: control_plane.hand_out(make, "proving", None))
    assert [part for _, part in found[1:]] == json.loads(json.dumps(parts[1:]))
    own = ends.network.bytes[ranks - 1] - len(json.dumps(common))  # of the last rank, which passes nothing on
    return own, max(count for rank, count in ends.network.messages.items() if rank)


@pytest.mark.long
def test_messages_and_bytes_of_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank receives the facts of the stages, and its own program, which does not grow with the ranks."""
    few, many = (share(monkeypatch, ranks) for ranks in RANKS)
    assert many[0] < 1.2 * few[0]
    assert (few[1], many[1]) == (2 * (1 + 5 + 1), 2 * (1 + 7 + 1))


class CountingStore:
    """A store that counts requests, by the rank that makes them."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()
        self.rank = 0

    def of(self, rank: int) -> CountingStore:
        """The store as one rank has it, with the values of all."""
        other = CountingStore()
        other.values, other.requests, other.bytes, other.rank = self.values, self.requests, self.bytes, rank
        return other

    def _count(self, size: int = 0) -> None:
        self.requests[self.rank] += 1
        self.bytes[self.rank] += size

    def set(self, key: str, value: str) -> None:
        self._count(len(value))
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self._count()
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._count()
        return [self.values[key] for key in keys]

    def delete_key(self, key: str) -> bool:
        self._count()
        return self.values.pop(key, None) is not None

    def has_extended_api(self) -> bool:
        return True


def save(folder: Path, ranks: int) -> CountingStore:
    """Write a checkpoint of stages without tensors; rank 0 completes it, when all others have announced theirs."""
    store, told = CountingStore(), list[tuple[int, str | None]]()
    parts = [(index, 0) for index in range(ranks)]
    made = [
        Writer(
            folder, parts, [part], 1, lambda _: {}, StorePosts(store.of(rank), "run"), 30.0, 30.0,  # type: ignore[arg-type]
            lambda batch, failure: told.append((batch, failure)),
        )
        for rank, part in enumerate(parts)
    ]  # fmt: skip
    for rank, one in reversed(list(enumerate(made))):
        one.sink(Snapshot(3, 0, rank, {}, {}, {"batch": 3}))
        assert one._settles(30.0)
    assert told == [(3, None)]
    assert [one.finish(3) for one in made] == [None] * ranks
    assert list(store.values) == ["3/complete"]
    return store


def test_requests_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank announces its part and reads the verdict. One rank reads all parts, in one request, and removes them."""
    monkeypatch.setattr(posts, "PrefixStore", lambda _, store: store)
    sizes = {}
    for ranks in RANKS:
        store = save(tmp_path / str(ranks), ranks)
        assert {store.requests[rank] for rank in range(1, ranks)} == {1 + 2}  # the verdict: is it there, and what it is
        assert store.requests[0] == 1 + 2 + ranks + 1 + 2  # of which only the removals grow
        sizes[ranks] = max(store.bytes[rank] for rank in range(1, ranks))
    assert sizes[256] <= sizes[64] + 8
