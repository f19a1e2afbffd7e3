"""A board on which every rank posts its figures and the reporting rank reads them.

It lives in the process group's store, so it neither waits for anybody nor touches the pipeline's lanes.
"""

from __future__ import annotations

import json
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]


class Board:
    """Figures of all ranks.

    Args:
        store: shared by all ranks.
        rank: this one.
        ranks: how many.
    """

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store, self._rank, self._ranks = PrefixStore("penstock/board", store), rank, ranks

    def post(self, figures: dict[str, Any]) -> None:
        """Replace this rank's figures."""
        self._store.set(str(self._rank), json.dumps(figures))

    def read(self) -> dict[int, dict[str, Any]]:
        """The figures of every rank that has posted some."""
        posted = [rank for rank in range(self._ranks) if self._store.check([str(rank)])]
        return {rank: json.loads(self._store.get(str(rank))) for rank in posted}
