"""The rendezvous of workers on one machine: a store that only this machine can reach."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from penstock.job.store import listening_store

BACKEND = "penstock-local"  # the name under which torch elastic finds it
_LOOPBACK = "127.0.0.1"


class LocalRendezvous(RendezvousHandler):
    """The meeting of a single agent with itself; its store listens on the loopback interface.

    Elastic's own rendezvous let the store listen on all interfaces.

    Args:
        parameters: of elastic's launcher.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run, self._store = parameters.run_id, listening_store(_LOOPBACK, 0, timedelta(minutes=5))

    @property
    def use_agent_store(self) -> bool:
        """Workers connect to this store, instead of making one."""
        return True

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store and the place of this agent, which is the only one."""
        place = RendezvousStoreInfo(_LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore(self._run, self._store), 0, 1, place)

    def is_closed(self) -> bool:
        """Return False: workers may always be started again."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is nobody else to be told."""

    def num_nodes_waiting(self) -> int:
        """Return 0: nobody else can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return str(self._run)

    def shutdown(self) -> bool:
        """Return True: the store ends with this object."""
        return True


rendezvous_handler_registry.register(BACKEND, LocalRendezvous)
