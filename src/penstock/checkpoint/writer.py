"""Writes checkpoints during training, in a thread of each rank; the rank of the first stage completes them.

Every rank writes the files of its stages and announces them. When all have, the rank of the first stage writes the
index and gives the checkpoint its name. If one of them fails (for example because the disk is full), the checkpoint is
dropped, earlier ones stay, and training continues. A rank whose last snapshot is not written yet waits before it takes
the next, but less long than the time-out of its peers; after that the next checkpoint is skipped on all ranks.

The end of Python waits for what is being written, as it would stop the thread wherever it is, also amid code in C++,
which aborts the process. Then the first rank waits less long for the files of others, of which one may have failed.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import signal
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open

from penstock.checkpoint import format as disk
from penstock.checkpoint.index import INDEX, layout_of
from penstock.checkpoint.rank_announcements import Posts
from penstock.comm.core.ticket import Background, Ticket
from penstock.errors import CheckpointError, TransportError
from penstock.guarded_files import make_own_folder, open_regular
from penstock.runtime.rank.snapshot import Snapshot
from penstock.weights.memory.tensor_sums import tensor_sums

_LOG = logging.getLogger(__name__)
Part = tuple[int, int]
_LOOK = 0.05  # seconds between two looks at the announcements
NOTHING: Mapping[str, Any] = MappingProxyType({})
"""Of a file that is not there."""


class Writer:
    """Writes the checkpoints of a run.

    Args:
        run: the run's folder.
        parts: (stage index, position among the copies of the stage) of all files of a checkpoint.
        own: the parts of this process; the process of the first of all parts completes the checkpoints.
        keep: how many checkpoints to keep.
        extra: number of batches -> additional content of the index, the same on all ranks.
        posts: shared by all ranks.
        timeout: seconds to wait for the files of other ranks.
        patience: seconds that a rank in training waits for its own disk, while others wait for the rank.
        tell: called by the thread of the rank of the first stage, with the number of batches and None, or the reason
            why the checkpoint was not written.
        claim: called by that thread before it writes, which is within it; raises an error if another one owns the
            folder.

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
        posts: Posts,
        timeout: float,
        patience: float,
        tell: Callable[[int, str | None], None],
        claim: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._claim = claim
        self._run, self._keep, self._extra = run, keep, extra
        self._posts, self._timeout, self._patience, self._tell = posts, timeout, patience, tell
        self._parts, self._own = list(parts), list(own)
        self._completes = parts[0] in own
        self._written: Counter[int] = Counter()  # files written, by batch
        self._frozen: dict[Part, FrozenFile] = {}
        self._begun, self._files = -1, NOTHING  # the checkpoint that the run goes on from
        self._thread = Background("checkpoint")
        self._pending: list[Ticket] = []
        self._entered: tuple[int, CheckpointError | None] = -1, None  # the last batch, and why it is not to be written
        self._rooms: dict[int, bool] = {}  # of the last two batches, as stages of one process may be one apart
        self._completed: int | None = None  # the last batch whose checkpoint this process has completed
        self._registered = self._ending = False  # whether the end of Python will wait, and whether it does
        self.batch = -1

    def goes_on_from(self, checkpoint: disk.Checkpoint) -> int:
        """Say from which checkpoint the run goes on, whose frozen parameters may be linked to; return its batch."""
        self._begun, self._files = checkpoint.batch, checkpoint.files
        return self._begun

    def make_room(self, batch: int) -> bool:
        """Wait until snapshots of earlier batches are written, so that there is at most one copy of the weights.

        Returns:
            Whether they are; if not, there will be no checkpoint of this batch.
        """
        if batch not in self._rooms:
            self.batch, self._rooms[batch] = batch, self._settles(self._patience)
            self._rooms = dict(sorted(self._rooms.items())[-2:])
            if not self._rooms[batch]:
                self._leave_out(batch)
        return self._rooms[batch]

    def sink(self, snapshot: Snapshot) -> None:
        """Start to write a snapshot, unless `make_room` returned False for its batch."""
        if self.make_room(snapshot.batch):
            self._later(snapshot.batch, partial(self._write, snapshot))

    def finish(self, batch: int) -> str | None:
        """Wait until the checkpoint of `batch` is complete on every rank; return None or why it was not written."""
        limit = 3 * self._timeout
        found = self._await([_verdict(batch)], 3) if self._settles(limit) else None
        if found is None:
            return f"it was not completed within {limit:g} seconds"
        failure: str | None = json.loads(found[0])  # the first rank's verdict
        return failure

    def end(self) -> None:
        """Wait, at the end of Python, for what is being written; a disk that does not answer costs the checkpoint."""
        limit = self._timeout + self._patience
        self._ending, why = True, ""
        try:
            if not self._settles(limit):
                why = f"it was not completed within {limit:g} seconds after the end of the script"
        except TransportError as error:
            why = str(error)
        except KeyboardInterrupt:
            why = "interrupted"
            raise
        finally:
            if why:
                _LOG.warning("the checkpoint after %d batches was not written: %s", self.batch, why)

    def _later(self, batch: int, work: Callable[[], None]) -> None:
        if not self._registered:
            self._registered = True
            end_at_exit(self)
        ticket = Ticket(f"the checkpoint of batch {batch}")
        self._pending.append(ticket)
        self._thread.later([ticket], work)

    def _settles(self, patience: float) -> bool:
        """Wait for this rank's pending writes (on the first rank, for those of all); return whether they are done."""
        deadline = time.monotonic() + patience
        while self._pending:
            if not self._pending[0].settles(deadline - time.monotonic()):
                return False
            self._pending.pop(0).check("writing a checkpoint")
        return True

    def _leave_out(self, batch: int) -> None:
        """Announce that this rank has not written its part of a checkpoint."""
        text = json.dumps({"failure": "a disk is too slow: the previous checkpoint was still being written"})
        for part in self._own:
            self._posts.post(_key(batch, *part), text)
        if self._completes:
            self._later(batch, partial(self._complete, batch))

    def _write(self, snapshot: Snapshot) -> None:
        """Write the files of one stage; on the first rank, then wait for the others and complete the checkpoint."""
        place, name = disk.checkpoint_folder(self._run, snapshot.batch), _file_name("stage", snapshot)
        part: dict[str, Any] = {"values": snapshot.values, "facts": snapshot.facts, "tensors": {}, "files": {}}
        layouts = {key: layout_of(tensor) for key, tensor in snapshot.tensors.items()}
        try:
            folder = disk.partial_folder(place)
            self._enter(snapshot.batch)
            for each in (place.parent, folder):
                make_own_folder(each)
            tensors = snapshot.on_cpu(snapshot.tensors.keys() - snapshot.frozen.keys())
            if tensors:
                part["files"][name] = disk.write_tensors(folder / name, tensors, snapshot.batch)
                part["tensors"][name] = {key: layouts[key] for key in tensors}
            if snapshot.frozen:
                name = _file_name("frozen", snapshot)
                begun = FrozenFile(self._run, self._begun, self._files.get(name, NOTHING))
                shared = self._frozen.setdefault((snapshot.stage, snapshot.place), begun)
                part["files"][name] = shared.put(snapshot.batch, name, snapshot)
                part["tensors"][name] = {key: layouts[key] for key in snapshot.frozen}
            del tensors
        except Exception as error:  # any error costs only this checkpoint
            part["failure"] = f"{name}: {error}"
        snapshot.tensors.clear()
        self._posts.post(_key(snapshot.batch, snapshot.stage, snapshot.place), json.dumps(part))
        self._written[snapshot.batch] += 1
        if self._completes and self._written[snapshot.batch] == len(self._own):
            del self._written[snapshot.batch]
            self._complete(snapshot.batch)

    def _enter(self, batch: int) -> None:
        """Claim the folder, once for each checkpoint, before anything is written to it.

        Raises:
            CheckpointError: it is another one's.
        """
        if self._completes and self._entered[0] != batch:
            self._entered = batch, None
            try:
                with self._claim():
                    pass
            except CheckpointError as error:
                self._entered = batch, error
        if self._entered[1] is not None:
            raise self._entered[1]

    def _complete(self, batch: int) -> None:
        """Write the index once all stages have been written."""
        place = disk.checkpoint_folder(self._run, batch)
        keys = [_key(batch, index, place) for index, place in self._parts]
        found = self._await(keys)
        if found is None:
            failure: str | None = f"a stage was not written within {self._limit:g} seconds"
        else:
            parts = [json.loads(text) for text in found]
            failure = next((part["failure"] for part in parts if "failure" in part), None)
        try:
            self._enter(batch)  # or else the folder of this batch may be another one's
            with self._claim():
                try:
                    if failure is None:
                        disk.complete(place, _content(parts, self._extra(batch)))
                        with suppress(OSError):  # older checkpoints may stay
                            if not any(map(_is_doubtful, parts)):
                                disk.remove_older(self._run, place, self._keep)
                finally:
                    shutil.rmtree(disk.partial_folder(place), ignore_errors=True)
        except Exception as error:
            failure = f"{INDEX}: {error}"
        # Nobody waits for the verdict before: all ranks have contributed to this checkpoint since, or have given up.
        before = [] if self._completed is None else [_verdict(self._completed)]
        self._posts.remove([*keys, *before])
        self._completed = batch
        try:
            self._tell(batch, failure)
        finally:  # whoever has waited for the verdict may count on it that it was told
            self._posts.post(_verdict(batch), json.dumps(failure))

    @property
    def _limit(self) -> float:
        """Seconds to wait for the files of other ranks."""
        return min(self._timeout, self._patience) if self._ending else self._timeout

    def _await(self, keys: Sequence[str], times: int = 1) -> list[str] | None:
        """Return the texts of some keys once all are there; None if they are not within so many times the limit."""
        start = time.monotonic()
        while True:
            texts = self._posts.read(keys)
            if texts is not None:
                return texts
            if time.monotonic() - start > times * self._limit:
                return None
            time.sleep(_LOOK)


def _is_doubtful(part: Mapping[str, Any]) -> bool:
    """Whether training had diverged by then: the run may have to go back to a checkpoint from before."""
    return "trouble" in part["facts"].get("decisions", {}).get("detector", {})


def _key(batch: int, index: int, place: int) -> str:
    return f"{batch}/{index}.{place}"


def _verdict(batch: int) -> str:
    return f"{batch}/complete"


def _file_name(kind: str, snapshot: Snapshot) -> str:
    return f"{kind}-{snapshot.stage}{f'.{snapshot.place}' if snapshot.place else ''}.safetensors"


def _content(parts: Sequence[dict[str, Any]], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Make the content of the index from what each stage has written.

    Raises:
        CheckpointError: two stages have written a tensor of the same name.
    """
    facts: dict[str, Any] = {"values": {}}
    tensors: dict[str, str] = {}
    files: dict[str, Any] = {}
    layouts: dict[str, Any] = {}
    for part in parts:
        for name, found in part["tensors"].items():
            twice = tensors.keys() & found.keys()
            if twice:
                raise CheckpointError(f"two stages have written a tensor named {min(twice)!r}")
            tensors |= dict.fromkeys(found, name)
            layouts |= found
        facts["values"] |= part["values"]
        facts |= part["facts"]
        files |= part["files"]
    return {"facts": facts, "extra": dict(extra), "files": files, "tensors": tensors, "layouts": layouts}


class _Ends(Protocol):
    def end(self) -> None: ...


def end_at_exit(owner: _Ends) -> None:
    """Call the method `end` of an object at the end of Python, unless the object is gone by then.

    Python calls what was registered last first, so whoever wants to end at once registers that later.
    """
    hook = partial(_end, weakref.ref(owner))
    atexit.register(hook)
    weakref.finalize(owner, atexit.unregister, hook).atexit = False


def _end(found: weakref.ref[_Ends]) -> None:
    owner = found()
    if owner is None:
        return
    try:
        owner.end()
    except KeyboardInterrupt:  # the end is to come at once, and a thread that is amid code in C++ would abort Python
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(128 + signal.SIGINT)


# The file of a stage's frozen parameters, which the checkpoints of a run share while these stay the same.
#
# Every checkpoint has the file in its own folder, as a hard link, so each is whole by itself, and the content goes with
# the last of them. Snapshots say whether parameters have stayed the same, by sums over their bits.


class FrozenFile:
    """Writes the file of one stage's frozen parameters, or links to the one of an earlier checkpoint.

    Args:
        run: the run's folder.
        batch: of the checkpoint that the run goes on from, if that has such a file.
        written: the size and SHA-256 of that file.
    """

    def __init__(self, run: Path, batch: int = -1, written: Mapping[str, Any] = NOTHING) -> None:
        self._run = run
        self._sums: Mapping[str, int] | None = None  # not known of a file that this object has not written
        self._batch = batch  # of the last checkpoint that has the file
        self._written = dict(written)

    def put(self, batch: int, name: str, snapshot: Snapshot) -> dict[str, Any]:
        """Put the file into the checkpoint of `batch` that is being written; return its size and SHA-256.

        Args:
            batch: of the checkpoint.
            name: of the file.
            snapshot: of which the frozen parameters are.

        Raises:
            OSError: it cannot be written.
            CheckpointError: parameters that the snapshot shares with the stage were changed before they were written.
        """
        path = disk.partial_folder(disk.checkpoint_folder(self._run, batch)) / name
        if self._written and self._sums is None:
            self._sums = _sums_of(disk.checkpoint_folder(self._run, self._batch) / name)
        if snapshot.frozen != self._sums or not self._link(path):
            tensors = snapshot.on_cpu(sorted(snapshot.frozen))
            self._written, self._sums = disk.write_tensors(path, tensors), None
            if snapshot.shared and tensor_sums(tensors) != snapshot.frozen:
                raise CheckpointError("frozen parameters were changed while they were being written")
        self._sums, self._batch = snapshot.frozen, batch
        return self._written

    def _link(self, path: Path) -> bool:
        """Link to the file of the last checkpoint; return False if there is none, or it is another one by now."""
        place = disk.checkpoint_folder(self._run, self._batch)
        for source in (disk.partial_folder(place), place):  # in this order, as it may be renamed just now
            try:
                path.unlink(missing_ok=True)
                os.link(source / path.name, path, follow_symlinks=False)
                with open_regular(path) as file:
                    return bool(os.fstat(file.fileno()).st_size == self._written["bytes"])
            except OSError:  # the checkpoint was dropped or damaged, or the file system has no links
                continue
        return False


def _sums_of(path: Path) -> dict[str, int]:
    """Return the sums of the tensors in a file; none if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tensor_sums({name: file.get_tensor(name)})[name] for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return {}
