"""Live figures of all ranks, exchanged through the process group's store, and the bubble computed from them.

The store neither blocks nor uses the pipeline's lanes.
"""

from __future__ import annotations

import json
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]


class Board:
    """Publishes the figures of each rank and reads those of all.

    Args:
        store: shared by all ranks.
        rank: this rank.
        ranks: the number of ranks.
    """

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store, self._rank = PrefixStore("penstock/board", store), rank
        self._silent, self._seen = set(range(ranks)), list[int]()

    def post(self, figures: dict[str, Any]) -> None:
        """Replace this rank's figures."""
        self._store.set(str(self._rank), json.dumps(figures))

    def read(self) -> dict[int, dict[str, Any]]:
        """Return the figures of every rank that has posted some; once all have, in one request where stores can."""
        if self._silent:
            posted = {rank for rank in self._silent if self._store.check([str(rank)])}
            self._silent -= posted
            self._seen = sorted({*self._seen, *posted})
        keys = [str(rank) for rank in self._seen]
        many = keys and self._store.has_extended_api()  # type: ignore[attr-defined]
        texts = self._store.multi_get(keys) if many else [self._store.get(key) for key in keys]
        return {rank: json.loads(text) for rank, text in zip(self._seen, texts, strict=True)}


def bytes_of_all(figures: dict[int, dict[str, Any]], ranks: int) -> dict[int, dict[str, int]]:
    """Return the bytes that each rank has posted; nothing until all have, as a part would look like the whole."""
    return {rank: posted["bytes"] for rank, posted in figures.items()} if len(figures) == ranks else {}


class BubbleMeter:
    """Computes the idle share of all ranks between two moments at which each of them has posted new figures.

    Attributes:
        bubble: the last value; None before the first.
    """

    def __init__(self, ranks: int) -> None:
        self.bubble: float | None = None
        self._ranks = ranks
        self._previous: dict[int, dict[str, Any]] = {}

    def update(self, figures: dict[int, dict[str, Any]]) -> None:
        """Update from the figures of all ranks: "busy" are seconds of work, "time" is when the rank posted them."""
        if len(figures) < self._ranks:
            return
        if not self._previous:
            self._previous = figures
        elif all(new["time"] > self._previous[rank]["time"] for rank, new in figures.items()):
            pairs = [(new, self._previous[rank]) for rank, new in figures.items()]
            busy, spent = (sum(new[key] - old[key] for new, old in pairs) for key in ("busy", "time"))
            self.bubble = max(1 - busy / spent, 0.0)
            self._previous = figures
