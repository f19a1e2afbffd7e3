"""What ranks leave for each other in the store of their group when a run fails or stands still.

Messages say no more than that nothing comes. A rank that fails leaves its reason, and ranks that wait end with it. A
rank that has run one action for long leaves its name, and those whose patience ends meanwhile tell of it. All this is
for a thread, which looks a few times within the time-out at what its rank is doing: actions pay nothing for it, and the
store is asked by ranks that have waited for a second, and told of actions that take ten.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from penstock.comm.core.ticket import WaitingFor
from penstock.comm.core.trace_recorder import Recorder
from penstock.errors import TransportError
from penstock.runtime.data.batch_source import could_not
from penstock.runtime.ops.bound import Turn

_FAILED, _BUSY = "failed", "busy"
_TICK, _LONG = 1.0, 10.0  # seconds between two looks, and of an action to be told of; less where the time-out is short
_PATIENCE = 3.0  # seconds for the store, which may be gone with the process that serves it


class PeerFailures:
    """What this rank leaves for its peers, and hears of them.

    Args:
        group: of all ranks; None in one process, where there is nothing to tell.
        recorder: knows what the rank is doing.
        timeout: seconds after which a missing message is an error.

    Attributes:
        name: of what ranks leave, which they agree on; until then they leave nothing.
        reason: why a peer has failed, as soon as that is known.
    """

    def __init__(self, group: dist.ProcessGroup | None, recorder: Recorder, timeout: float) -> None:
        self._group, self._recorder = group, recorder
        self._tick, self._long = min(_TICK, timeout / 8), min(_LONG, timeout / 4)
        self._own = uuid.uuid4().hex
        self.name, self.reason = "", ""

    @property
    def proposal(self) -> str:
        """The name, if this rank is the first one."""
        return self.name or self._own

    @contextmanager
    def during(self) -> Iterator[None]:
        """Look after this rank and its peers while it runs."""
        if self._group is None:
            yield
            return
        over = threading.Event()
        watching = threading.Thread(target=self._watch, args=(over,), name="penstock peers", daemon=True)
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join(_PATIENCE)

    def leave(self, error: BaseException) -> None:
        """Leave the reason why this rank has failed, unless another one has before; or learn what was left.

        Args:
            error: the failure; one that follows from that of a peer is told of it.
        """
        if self._group is None or not self.name:
            return
        if isinstance(error, TransportError):
            found = self._soon(lambda store: [_text(store, _FAILED), _text(store, _BUSY)])
            if not found:  # then there is nobody to tell, either
                return
            self.reason = self.reason or found[0]
            if self.reason and self.reason not in str(error):
                error.args = (f"{error}; the cause: {self.reason}",)
            elif not self.reason and found[1]:
                error.args = (f"{error}; meanwhile {found[1]}",)
        elif not self.reason:  # what only says that nothing has come is no cause
            mine = could_not(dist.get_rank(self._group), "go on", error)
            self._soon(lambda store: [store.compare_set(_FAILED, "", mine).decode()])

    def _soon(self, ask: Callable[[Any], list[str]]) -> list[str]:
        """What the store answers; nothing if it does not in time."""
        answers = list[str]()

        def work() -> None:
            with suppress(Exception):  # whatever is wrong with the store: without it errors say what this rank knows
                answers.extend(ask(self._store()))

        thread = threading.Thread(target=work, name="penstock peers", daemon=True)
        thread.start()
        thread.join(_PATIENCE)
        return list(answers)

    def _store(self) -> Any:
        """The store under the name, by a connection of its own, since one serves one caller at a time."""
        assert self._group is not None
        known: Any = self._group.get_group_store()
        return PrefixStore(f"penstock/peers/{self.name}", known.clone())

    def _watch(self, over: threading.Event) -> None:
        store, last, since, told = None, self._recorder.doing, time.monotonic(), ""
        try:
            while not over.wait(self._tick):
                doing, now = self._recorder.doing, time.monotonic()
                if doing is not last:
                    if told and store is not None:
                        store.compare_set(_BUSY, told, "")
                    last, since, told = doing, now, ""
                    continue
                waits = isinstance(doing, WaitingFor)
                if not self.name or not (waits or (not told and now - since >= self._long)):
                    continue
                store = store or self._store()
                if waits:
                    self.reason = self.reason or _text(store, _FAILED)
                else:
                    told = f"{_described(doing)} had been running for {now - since:.1f} s"
                    store.set(_BUSY, told)
            if told and store is not None:
                store.compare_set(_BUSY, told, "")
        except Exception:  # the store is gone, which is no reason to end a run
            return


def _text(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _described(doing: object) -> str:
    return f"{doing} (batch {doing.batch})" if isinstance(doing, Turn) else str(doing)
