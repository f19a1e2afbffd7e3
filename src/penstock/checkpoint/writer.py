"""Checkpoints are written while training goes on, by a thread of each rank; the first stage's completes them.

Every rank writes the files of its stages and posts what it has written. When all have, the rank with the first stage
writes the index and gives the checkpoint its name. Where one of them fails (the disk is full, say), the checkpoint is
dropped, those before it stay, and training goes on. A rank whose last snapshot is not written yet waits with the next,
but not so long that others would give it up: then the next one is left out, on all ranks.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import save_file
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from penstock.checkpoint import format as disk
from penstock.comm.core.background import Background
from penstock.comm.core.ticket import Ticket
from penstock.errors import CheckpointError
from penstock.runtime.rank.snapshot import Snapshot

Part = tuple[int, int]
_LOOK = 0.05  # seconds between two looks at what others have posted


class Wall(Protocol):
    """Where ranks post what they have written."""

    def post(self, key: str, text: str) -> None:
        """Post a text."""
        ...

    def read(self, key: str) -> str | None:
        """What was posted; None if nothing yet."""
        ...


class LocalWall:
    """All stages in one process."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        """Post a text."""
        self._texts[key] = text

    def read(self, key: str) -> str | None:
        """What was posted; None if nothing yet."""
        return self._texts.get(key)


class StoreWall:
    """The job's store; looking never waits, because the store serves one caller of a process at a time.

    Args:
        store: it may hold what was posted on other walls, by workers that have failed and been started again.
        name: of this wall.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = PrefixStore(f"penstock/checkpoint/{name}", store)

    def post(self, key: str, text: str) -> None:
        """Post a text."""
        self._store.set(key, text)

    def read(self, key: str) -> str | None:
        """What was posted; None if nothing yet."""
        return self._store.get(key).decode() if self._store.check([key]) else None


class Writer:
    """Writes the checkpoints of a run.

    Args:
        run: the run's folder.
        parts: the index of every stage and its place among the copies of it.
        own: those of this process; who has the first of all parts completes the checkpoints.
        keep: how many checkpoints stay.
        extra: of the number of batches, what goes into the index besides, the same on all ranks.
        wall: shared by all ranks.
        timeout: seconds to wait for what others write.
        patience: seconds that a rank in training waits for its own disk, with others waiting for the rank.
        tell: called by the thread of the rank with the first stage, with the number of batches and None, or what has
            kept the checkpoint from being written.

    Attributes:
        batch: of the last snapshot.
    """

    def __init__(
        self,
        run: Path,
        parts: Sequence[Part],
        own: Sequence[Part],
        keep: int,
        extra: Callable[[int], Mapping[str, Any]],
        wall: Wall,
        timeout: float,
        patience: float,
        tell: Callable[[int, str | None], None],
    ) -> None:
        self._run, self._keep, self._extra = run, keep, extra
        self._wall, self._timeout, self._patience, self._tell = wall, timeout, patience, tell
        self._parts, self._own = list(parts), list(own)
        self._completes = parts[0] in own
        self._written: Counter[int] = Counter()  # files of a batch
        self._thread = Background("checkpoint")
        self._pending: list[Ticket] = []
        self._rooms: dict[int, bool] = {}  # stages in one process may be a batch apart
        self.batch = -1

    def make_room(self, batch: int) -> bool:
        """Wait until snapshots of earlier batches are written, so that there is one copy at most.

        Returns:
            Whether they are; if not, there will be no checkpoint of this batch.
        """
        if batch not in self._rooms:
            self.batch, self._rooms[batch] = batch, self._settles(self._patience)
            if not self._rooms[batch]:
                self._leave_out(batch)
        return self._rooms[batch]

    def sink(self, snapshot: Snapshot) -> None:
        """Have a snapshot written, if there is room."""
        if self.make_room(snapshot.batch):
            self._later(snapshot.batch, partial(self._write, snapshot))

    def finish(self, batch: int) -> str | None:
        """Wait until the checkpoint of `batch` is complete, on every rank; returns what has kept it from being."""
        limit = 3 * self._timeout
        found = self._await([f"{batch}/complete"], limit) if self._settles(limit) else None
        if found is None:
            return f"nobody completed it within {limit:g} seconds"
        failure: str | None = json.loads(found[0])  # what the first rank says counts
        return failure

    def _later(self, batch: int, work: Callable[[], None]) -> None:
        ticket = Ticket(f"the checkpoint of batch {batch}")
        self._pending.append(ticket)
        self._thread.later([ticket], work)

    def _settles(self, patience: float) -> bool:
        """Wait for what this rank is writing (the first one waits for the others with it); whether that is done."""
        deadline = time.monotonic() + patience
        while self._pending:
            if not self._pending[0].settles(deadline - time.monotonic()):
                return False
            self._pending.pop(0).check("writing a checkpoint")
        return True

    def _leave_out(self, batch: int) -> None:
        """Let the others know that this rank has no part in the checkpoint of a batch."""
        text = json.dumps({"failure": "a disk is too slow: the checkpoint before was still being written"})
        for part in self._own:
            self._wall.post(_key(batch, *part), text)
        if self._completes:
            self._later(batch, partial(self._complete, batch))

    def _write(self, snapshot: Snapshot) -> None:
        """Write one stage's file; the first stage's writer then waits for the others and completes the checkpoint."""
        place, name = disk.place_of(self._run, snapshot.batch), _file_name(snapshot)
        part: dict[str, Any] = {"values": snapshot.values, "facts": snapshot.facts, "tensors": [], "files": {}}
        try:
            path = disk.part_of(place) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if snapshot.tensors:
                tensors = snapshot.on_cpu()
                save_file(tensors, path, metadata={"schema": str(disk.SCHEMA)})
                disk.sync_file(path)
                part |= {"tensors": list(tensors), "files": {name: disk.fingerprint(path)}}
                del tensors
        except Exception as error:  # whatever it is, it costs this checkpoint alone
            part["failure"] = f"{name}: {error}"
        snapshot.tensors.clear()
        self._wall.post(_key(snapshot.batch, snapshot.stage, snapshot.place), json.dumps(part))
        self._written[snapshot.batch] += 1
        if self._completes and self._written[snapshot.batch] == len(self._own):
            del self._written[snapshot.batch]
            self._complete(snapshot.batch)

    def _complete(self, batch: int) -> None:
        """Write the index once all stages are there."""
        place = disk.place_of(self._run, batch)
        found = self._await([_key(batch, index, place) for index, place in self._parts], self._timeout)
        if found is None:
            failure: str | None = f"a stage was not written within {self._timeout:g} seconds"
        else:
            parts = [json.loads(text) for text in found]
            failure = next((part["failure"] for part in parts if "failure" in part), None)
        try:
            if failure is None:
                disk.write_index(place, _content(parts, self._extra(batch)))
                with suppress(OSError):  # older ones may stay
                    if not any(map(_is_doubtful, parts)):
                        disk.rotate(self._run, place, self._keep)
        except Exception as error:
            failure = f"{disk.INDEX}: {error}"
        if failure is not None:
            shutil.rmtree(disk.part_of(place), ignore_errors=True)
        self._wall.post(f"{batch}/complete", json.dumps(failure))
        self._tell(batch, failure)

    def _await(self, keys: Sequence[str], patience: float) -> list[str] | None:
        """What is posted under these keys, once all is; None if not all is within so many seconds."""
        deadline = time.monotonic() + patience
        while True:
            found = [self._wall.read(key) for key in keys]
            texts = [text for text in found if text is not None]
            if len(texts) == len(keys):
                return texts
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK)


def _is_doubtful(part: Mapping[str, Any]) -> bool:
    """Whether training had diverged by then: the run may have to go back to a checkpoint from before."""
    return "trouble" in part["facts"].get("decisions", {}).get("detector", {})


def _key(batch: int, index: int, place: int) -> str:
    return f"{batch}/{index}.{place}"


def _file_name(snapshot: Snapshot) -> str:
    return f"stage-{snapshot.stage}{f'.{snapshot.place}' if snapshot.place else ''}.safetensors"


def _content(parts: Sequence[dict[str, Any]], extra: Mapping[str, Any]) -> dict[str, Any]:
    """The index, from what each stage has written.

    Raises:
        CheckpointError: two stages write one tensor.
    """
    facts: dict[str, Any] = {"values": {}}
    tensors: dict[str, str] = {}
    files: dict[str, Any] = {}
    for part in parts:
        twice = tensors.keys() & set(part["tensors"])
        if twice:
            raise CheckpointError(f"two stages have a tensor {min(twice)}")
        facts["values"] |= part["values"]
        facts |= part["facts"]
        files |= part["files"]
        tensors |= dict.fromkeys(part["tensors"], *part["files"])
    return {"facts": facts, "extra": dict(extra), "files": files, "tensors": tensors}
