"""Lets the ranks of a job find each other in its store and agree to start, with few requests per rank."""

from __future__ import annotations

import json
import uuid
from typing import Any, Protocol


class Requests(Protocol):
    """What a meeting asks of the job's store; values come back as bytes."""

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        ...

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        ...

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        ...


class Meeting:
    """The part of one rank in a meeting of all ranks, look by look: a blocking wait could not be interrupted.

    Ranks form a binary tree. The name of the start goes down, from rank 0; that all of a subtree have come goes up; and
    rank 0 then says that all have met. So a look takes a few requests of each rank, however many there are.

    Elastic keeps its store, with everything that earlier workers have written, when it restarts workers, and its count
    of restarts may differ between machines. So rank 0 gives each start a name, and every rank asks its parent a
    question of its own, which the parent answers with the name and that question; a rank that finds an answer to
    another question knows that it is an old one. Keys are removed once they have been read, but for the last one.

    Args:
        store: the job's.
        rank, size: of this process, and of the job.
        config: what rank 0 was started with is what all compare theirs with.

    Attributes:
        name: of this start; empty while it is not known.
        first: the `config` of rank 0, once it is known.
    """

    def __init__(self, store: Requests, rank: int, size: int, config: str) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._question, self.name = uuid.uuid4().hex, uuid.uuid4().hex if rank == 0 else ""
        self.first = config if rank == 0 else ""
        self._coming = [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]
        self._answered: dict[int, bytes] = {}  # the last question of each child
        self._told = False
        store.set(_asked(rank), self._question)
        if rank == 0:
            store.set(self._own("config"), config)

    def look(self) -> bool:
        """Do what can be done by now; return whether all ranks have met."""
        if not self.name and not self._hear_name():
            return False
        self._coming = [child for child in self._coming if not self._has_come(child)]
        if self._coming:
            return False
        if not self._told:
            self._told = True
            self._store.set(self._own(f"came/{self._rank}" if self._rank else "met"), "")
        if self._rank and not self._store.check([self._own("met")]):
            return False
        self._clear()
        return True

    def missing(self) -> list[int]:
        """Return the ranks that have not come at all, or those that this one waits for."""
        absent = self._absent([rank for rank in range(self._size) if rank != self._rank])
        return absent or self._coming or [(self._rank - 1) // 2 if not self.name else 0]

    def _hear_name(self) -> bool:
        """Return whether the parent has answered."""
        if not self._store.check([_answer(self._rank)]):
            return False
        name, question = json.loads(self._store.get(_answer(self._rank)))
        if question != self._question:
            return False
        self.name = name
        self.first = self._store.get(self._own("config")).decode()
        return True

    def _has_come(self, child: int) -> bool:
        """Return whether a whole subtree has come; if not, answer the rank at its top."""
        came = self._own(f"came/{child}")
        if self._store.check([came]):
            self._store.delete_key(came)
            return True
        if self._store.check([_asked(child)]):
            question = self._store.get(_asked(child))
            if question != self._answered.get(child):
                self._answered[child] = question
                self._store.set(_answer(child), json.dumps([self.name, question.decode()]))
        return False

    def _clear(self) -> None:
        """Remove what nobody reads any more; it is this rank's own, or was for all that have come."""
        for key in (_asked(self._rank), _answer(self._rank)) if self._rank else (_asked(0), self._own("config")):
            self._store.delete_key(key)

    def _absent(self, ranks: list[int]) -> list[int]:
        """Return those that have not asked, by halving: a request tells whether all of some ranks have."""
        if not ranks or self._store.check([_asked(rank) for rank in ranks]):
            return []
        half = len(ranks) // 2
        return self._absent(ranks[:half]) + self._absent(ranks[half:]) if half else ranks

    def _own(self, key: str) -> str:
        return f"penstock/{self.name}/{key}"


def differing_keys(mine: str, first: str) -> list[str]:
    """Return the keys whose values differ between two configurations, given as JSON."""
    other: dict[str, Any] = json.loads(first)
    return [key for key, value in json.loads(mine).items() if other.get(key) != value]


def _asked(rank: int) -> str:
    return f"penstock/asked/{rank}"


def _answer(rank: int) -> str:
    return f"penstock/start/{rank}"
