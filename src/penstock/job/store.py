"""The store of a job: rank 0 or an agent of torch elastic serves it, all others connect to it."""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from contextlib import closing
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from penstock.errors import ConfigError, TransportError
from penstock.job.place import JobPlace

_LOOK = 0.1  # seconds between two attempts to connect
_ATTEMPT = 2.0  # seconds of one of them


def job_store(place: JobPlace, timeout: timedelta, patience: float) -> TCPStore:
    """Serve the store of a job on rank 0, if no agent does, and connect to it everywhere else.

    Args:
        place: of this process.
        timeout: of waits in the store.
        patience: seconds for rank 0 to start.

    Raises:
        ConfigError: the store cannot be served where the launcher says.
        TransportError: nobody serves it.
    """
    if place.rank == 0 and not place.served:
        return _serve(place, timeout)
    _wait_for(place, patience)
    return TCPStore(place.address, place.port, is_master=False, timeout=timeout, wait_for_workers=False)


def listening_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Make a store that listens on one address only; torch's own listens on all interfaces.

    Args:
        address: of an interface of this machine, as a name or a number.
        port: 0 for any that is free.
        timeout: of waits in the store.

    Raises:
        OSError: the address is unknown or none of this machine's, or the port is taken.
    """
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with closing(socket.create_server(place[:2], family=family, backlog=1024)) as listener:
        port = listener.getsockname()[1]
        # The store closes the socket that it is given.
        return TCPStore(
            address,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )


def is_loopback(address: str) -> bool:
    """Return whether a name or an address stands for this machine alone.

    Raises:
        OSError: the name is unknown.
    """
    return ipaddress.ip_address(_number(address)).is_loopback


def _number(address: str) -> str:
    """Return the address that a name has here."""
    return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0]).partition("%")[0]


def _serve(place: JobPlace, timeout: timedelta) -> TCPStore:
    """Serve the store on the address that the launcher gives, and on no other one.

    Raises:
        ConfigError: the other machines would not reach it there, or it cannot be served.
    """
    where = f"{place.launcher} gives {place.address}, port {place.port}, as the place of the job's store on rank 0, but"
    try:
        elsewhere = place.local_size is not None and place.local_size < place.size
        if elsewhere and is_loopback(place.address):
            raise ConfigError(
                f"{where} that is {_number(place.address)} here, which other machines cannot reach; set MASTER_ADDR to "
                "the address of rank 0's machine in their network"
            )
        return listening_store(place.address, place.port, timeout)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            advice = "that port is taken; set MASTER_PORT to another one, for all processes"
        else:
            advice = f"it cannot listen there ({error.strerror or error}); set MASTER_ADDR to an address of its machine"
        raise ConfigError(f"{where} {advice}") from None


def _wait_for(place: JobPlace, patience: float) -> None:
    """Wait until the store listens; unlike torch's wait, a signal can interrupt it.

    Raises:
        TransportError: it does not, within `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            with socket.create_connection((place.address, place.port), _ATTEMPT):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                hint = "; start every process with srun" if place.launcher == "srun" else ""
                raise TransportError(
                    f"rank {place.rank}, joining the job: nobody serves its store at {place.address}, port "
                    f"{place.port}, after {patience:g} seconds ({error.strerror or error}); rank 0 is stalled or dead, "
                    f"or its machine has another address{hint}"
                ) from None
        time.sleep(_LOOK)
