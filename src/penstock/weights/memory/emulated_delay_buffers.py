"""Keep older versions of a stage's weights, for passes with chosen delays (`penstock.partition.emulated_delays`).

Training stays synchronous: the store has one version, the newest, and updates start from it. A parameter that is read
with a delay of tau needs the tau versions before it as well. Parameters with the same delay lie together in a ring of
tau buffers, so none keeps more than it needs; where backwards have delays of their own, the longer of both counts.
Directly before an update the newest version is copied over the oldest one of each ring, which is not read any more;
nothing else is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from penstock.weights.memory.buffers import Buffer, Handle, Layout, Readable
from penstock.weights.memory.user_parameter_hooks import ParameterHooks


class Mixture:
    """The weights that the passes of one batch read: leaves of several buffers, each parameter's of its own version.

    Args:
        name: name for error messages.
        owners: name of a parameter -> the buffer from which it is read.

    Attributes:
        leaves: name -> leaf.
        gradient: the buffer to which backwards of graphs on these leaves add; None before the first.
    """

    def __init__(self, name: str, owners: Mapping[str, Readable]) -> None:
        self.name = name
        self.leaves: dict[str, Tensor] = {key: owner.leaves[key] for key, owner in owners.items()}
        self.gradient: Buffer | None = None
        self._owners = dict(owners)
        self._buffers = list({id(owner): owner for owner in owners.values()}.values())

    @property
    def epoch(self) -> int:
        """A counter that is raised when one of the buffers is rewritten."""
        return sum(buffer.epoch for buffer in self._buffers)

    def add_to(self, gradient: Buffer) -> None:
        """Make backwards of graphs on the leaves add to `gradient`."""
        self.gradient = gradient
        for buffer in self._buffers:
            buffer.add_to(gradient)

    def settle(self) -> None:
        """Remove hooks that are no longer needed, between two backwards."""
        for buffer in self._buffers:
            buffer.settle()

    def apply_hooks(self, hooks: ParameterHooks) -> None:
        """Let gradients of the leaves go through the hooks of parameters."""
        for buffer in self._buffers:
            buffer.apply_hooks(hooks)

    def accumulate(self, key: str, found: Tensor) -> None:
        """Add to the gradient of a leaf a part that autograd did not compute."""
        self._owners[key].accumulate(key, found)


class OlderVersions:
    """The versions before the newest one that passes of a stage still read.

    Batch t reads version max(t - tau, first) of a parameter with delay tau, where `first` is the oldest available: the
    initial version, or the oldest in a snapshot.

    Args:
        weights: name -> value, as passes read it; only shapes and dtypes are used.
        delays: name -> tau, in updates; for other parameters the newest version is read.
        where: name of the stage for error messages.
        backward: the delays of backwards, where they differ.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        delays: Mapping[str, int],
        where: str,
        backward: Mapping[str, int] | None = None,
    ) -> None:
        self._where, self._forward, self._backward = where, delays, delays if backward is None else backward
        kept = {name: max(delays.get(name, 0), self._backward.get(name, 0)) for name in weights}
        self._delays = {name: delay for name, delay in kept.items() if delay}  # number of versions kept
        self._rings: dict[int, list[Buffer]] = {}  # version v is at index v modulo the delay
        for delay in sorted(set(self._delays.values())):
            layout = Layout({name: weights[name] for name, other in self._delays.items() if other == delay})
            self._rings[delay] = [Buffer(layout, f"{i} of delay {delay} of {where}") for i in range(delay)]
        self._first = dict.fromkeys(self._delays, 0)
        self._now: tuple[int, Mixture] | None = None
        self._then: tuple[int, Mixture] | None = None  # the weights that backwards look up

    @property
    def nbytes(self) -> int:
        """Bytes of all rings."""
        return sum(buffer.nbytes for buffer in self._buffers())

    @property
    def storages(self) -> set[int]:
        """The identities of its storages, to tell weights from activations."""
        return set[int]().union(*(buffer.storages for buffer in self._buffers()))

    @property
    def apart(self) -> frozenset[str]:
        """The parameters of which backwards read another version than forwards."""
        names = self._forward.keys() | self._backward.keys()
        return frozenset(name for name in names if self._forward.get(name, 0) != self._backward.get(name, 0))

    def read(self, newest: Handle) -> Handle:
        """Return the weights that the passes of a batch read.

        Args:
            newest: the version that they would read without delays, whose number is that of the batch.
        """
        batch = newest.version
        if self._now is None or self._now[0] != batch:  # graphs of a batch share one; a new batch has a new gradient
            self._now = batch, self._mixture(newest, self._forward)
        mixture = self._now[1]
        return Handle(mixture, mixture.epoch, batch)

    def read_backward(self, newest: Handle) -> Mapping[str, Tensor]:
        """Return the weights that the backward formulas of a batch read, by name.

        Args:
            newest: as for `read`.
        """
        batch = newest.version
        if self._then is None or self._then[0] != batch:
            self._then = batch, self._mixture(newest, self._backward)
        return self._then[1].leaves

    def keep(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Copy the newest version over the oldest one, before its update and after all passes that read it."""
        for delay, ring in self._rings.items():
            ring[version % delay].load(weights)

    def copies(self, newest: int) -> dict[str, Tensor]:
        """Copy all kept versions while version `newest` is the newest: "K/NAME" is the K-th version before it."""
        return {
            f"{back}/{name}": self._ring_view(name, newest - back).clone()
            for name, delay in self._delays.items()
            for back in range(1, delay + 1)
            if newest - back >= self._first[name]
        }

    def restart(self, newest: int, find: Callable[[int, str, Tensor], Tensor | None]) -> None:
        """Replace all weights, while nothing is in flight.

        Args:
            newest: the newest version.
            find: (K, name, tensor of the same shape) -> the K-th version before the newest, or None if there is none.
        """
        self._now = self._then = None
        for buffer in self._buffers():
            buffer.rewrite()
        for name, delay in self._delays.items():
            self._first[name] = newest
            for back in range(1, delay + 1):
                view = self._ring_view(name, newest - back)
                found = find(back, name, view)
                if found is None:
                    break
                view.copy_(found)
                self._first[name] = newest - back

    def _mixture(self, newest: Handle, delays: Mapping[str, int]) -> Mixture:
        owners = {name: self._owner(name, newest, delays.get(name, 0)) for name in newest.buffer.leaves}
        return Mixture(f"of delayed weights of batch {newest.version} of {self._where}", owners)

    def _owner(self, name: str, newest: Handle, delay: int) -> Readable:
        """Return the buffer from which a parameter is read."""
        version = max(newest.version - delay, self._first[name]) if delay else newest.version
        if version == newest.version:
            return newest.buffer
        kept = self._delays[name]
        return self._rings[kept][version % kept]

    def _ring_view(self, name: str, version: int) -> Tensor:
        delay = self._delays[name]
        return self._rings[delay][version % delay].views[name]

    def _buffers(self) -> Iterator[Buffer]:
        for ring in self._rings.values():
            yield from ring
