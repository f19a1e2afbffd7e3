"""What has gone wrong in a run that continues: checkpoints that were not written, damaged ones that were passed over.

The rank of the first stage knows of it, and the rank that reports shows it at once; in the last lines it shows how many
checkpoints were not written.
"""

from __future__ import annotations

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]


class Troubles:
    """The troubles of one start of a run.

    Args:
        store: of this start, shared by all ranks.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._read = PrefixStore("penstock/troubles", store), 0
        self._tried, self._failures, self._lost = 0, list[tuple[int, str]](), list[str]()

    def passed_over(self, fault: str) -> None:
        """Note that a damaged checkpoint was passed over."""
        self._say(f"a damaged checkpoint was passed over: {fault}")

    def checkpoint(self, batch: int, failure: str | None) -> None:
        """Note that a checkpoint was written, or was not; any thread of one rank calls this."""
        self._tried += 1
        if failure is not None:
            self._failures.append((batch, failure))
            self._say(f"the checkpoint after {batch} batches was not written: {failure}")

    def lost(self, what: str) -> None:
        """Note for the end of the run that something else could not be written; any thread of any rank calls this."""
        self._lost.append(what)

    def _say(self, text: str) -> None:
        self._store.set(str(self._store.add("said", 1) - 1), text)

    def news(self) -> list[str]:
        """Return what has not been returned yet; one rank calls this."""
        found = []
        while self._store.check([str(self._read)]):
            found.append(self._store.get(str(self._read)).decode())
            self._read += 1
        return found

    def summary(self) -> list[str]:
        """Return what this rank has not been able to write, for the end of the run: a line about all checkpoints."""
        if not self._failures:
            return list(self._lost)
        batch, failure = self._failures[-1]
        count = f"{len(self._failures)} of {self._tried} checkpoints were not written"
        return [*self._lost, f"{count}; the last of them, after {batch} batches: {failure}"]
