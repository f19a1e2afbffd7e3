"""What a process finds around it, checked before a job is started: network interfaces, limits."""

from __future__ import annotations

import resource
import socket
from collections.abc import Mapping

from penstock.errors import ConfigError

_FILES, _FILES_PER_PROCESS = 32, 4  # that a process of a job opens: some, and connections to each of the others


def check_surroundings(environment: Mapping[str, str], processes: int) -> None:
    """Refuse to start a job that cannot run here.

    Args:
        environment: the variables of this process.
        processes: of the job.

    Raises:
        ConfigError: GLOO_SOCKET_IFNAME names no network interface, or too few files may be opened.
    """
    names = [name for name in environment.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    known = [name for _, name in socket.if_nameindex()]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise ConfigError(
            f"the environment variable GLOO_SOCKET_IFNAME names the network interface {unknown!r:.80}, which this "
            f"machine does not have; it has {', '.join(known)}. Set one of these, or unset it"
        )
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + _FILES_PER_PROCESS * processes
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise ConfigError(
            f"a process may open {allowed} files here, but with {processes} process{'es' * (processes > 1)} training "
            f"needs about {needed}; raise the limit: ulimit -n {max(needed, 1024)}"
        )
