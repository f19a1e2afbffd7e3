"""Messages and collectives of ranks that take turns in one process, without contents: when each is complete."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping

Part = tuple[int, int]
"""A rank: the index of its pipeline, and its rank there."""


class Completion:
    """Something that is complete once others have done their part."""

    __slots__ = ("_followers", "done")

    def __init__(self) -> None:
        self.done = False
        self._followers: list[Callable[[], None]] = []

    def complete(self) -> None:
        """Mark as complete, and call what follows."""
        self.done = True
        for follow in self._followers:
            follow()

    def then(self, follow: Callable[[], None]) -> None:
        """Call something when it is complete."""
        if self.done:
            follow()
        else:
            self._followers.append(follow)


def wait(what: Completion) -> Iterator[Completion]:
    """Wait for something."""
    if not what.done:
        yield what


class InProcessLane:
    """A lane of messages: a SEND is complete once its RECV is posted, a RECV once its SEND is."""

    def __init__(self) -> None:
        self._sends: deque[Completion] = deque()
        self._receives: deque[Completion] = deque()

    def send(self) -> Completion:
        """Post a SEND."""
        return self._post(self._sends, self._receives)

    def receive(self) -> Completion:
        """Post a RECV."""
        return self._post(self._receives, self._sends)

    @staticmethod
    def _post(own: deque[Completion], others: deque[Completion]) -> Completion:
        mine = Completion()
        if others:
            others.popleft().complete()
            mine.complete()
        else:
            own.append(mine)
        return mine


class Rendezvous:
    """Collectives: each is complete once all its members have joined it."""

    def __init__(self) -> None:
        self._open: dict[Hashable, list[Completion]] = defaultdict(list)

    def join(self, what: Hashable, members: int, mine: Completion | None = None) -> Completion:
        """Join a collective of so many members."""
        mine = mine or Completion()
        here = self._open[what]
        here.append(mine)
        if len(here) == members:
            del self._open[what]
            for each in here:
                each.complete()
        return mine


def take_turns(runs: Mapping[Part, Iterator[Completion]]) -> list[Part]:
    """Run generators that yield what they wait for, in turns, each until it has to wait.

    Returns:
        those that wait for ever; none if all have ended.
    """
    blocked: dict[Part, Completion | None] = dict.fromkeys(runs)
    moved = True
    while moved:
        moved = False
        for place in list(blocked):
            wait = blocked[place]
            if wait is not None and not wait.done:
                continue
            moved = True
            for event in runs[place]:
                blocked[place] = event
                break
            else:
                del blocked[place]
    return list(blocked)
