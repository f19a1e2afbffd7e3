"""Hosts on one machine: network namespaces whose interfaces meet in a switch, with links of a rate and a delay.

Each host has an interface `eth0`, one end of a veth pair; the other end is a port of a bridge in another namespace.
`tbf` limits what a host sends and what the switch sends to it. A delay is that of a relay in user space between the
ports (`benchmarks.network.relay`), as many kernels lack `netem`. One more namespace has only a loopback interface.
Everything lies in namespaces whose names have the number of this process: deleting them removes all interfaces, and
what a killed process has left is removed by the next one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from benchmarks.network import probe, relay

PREFIX = "penstock-links"
INTERFACE, LOOPBACK = "eth0", "lo"
_FRAMES = 1514 / 1448  # bytes of an Ethernet frame / those of a message in it, behind headers and time stamps of TCP
_LIMIT = 4_000_000  # bytes that wait in front of a link
_PROBE_PORT = 29400
# Reno, which every kernel lets a namespace choose: BBR would go by the delay of the link before for ten seconds.
_SETTINGS = (
    "net.ipv6.conf.all.disable_ipv6=1",
    "net.ipv4.tcp_congestion_control=reno",
    "net.ipv4.tcp_no_metrics_save=1",
)


class Link(NamedTuple):
    """How hosts are connected.

    Attributes:
        name: of the link.
        mbit: its rate in Mbit/s, in each direction of each host; none for the loopback interface.
        delay: seconds from a host to another one, besides those of the rate.
    """

    name: str
    mbit: int | None
    delay: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """The time that a message of so many bytes takes when nothing else is on its way."""
        return 0.0 if self.mbit is None else self.delay + self.occupied(nbytes)

    def occupied(self, nbytes: float) -> float:
        """The time for which it keeps others of its direction waiting, with its headers."""
        return 0.0 if self.mbit is None else 8e-6 * nbytes * _FRAMES / self.mbit


LINKS = {
    link.name: link
    for link in (
        Link("loopback", None),
        Link("1 Gbit/s", 1000),
        Link("200 Mbit/s", 200),
        Link("100 Mbit/s", 100),
        Link("10 Mbit/s", 10),
        Link("1 Gbit/s, 5 ms", 1000, 0.005),
    )
}


def why_not() -> str:
    """The reason for which this machine cannot have such hosts; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are of Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the command {tool!r} is missing (iproute2)"
    try:
        with Network(1) as network:
            network.set(Link("a trial", 100))
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)!r} failed: {error.stderr.strip()}"
    return ""


class Network:
    """Hosts, a switch and a loopback, from `__enter__` to `__exit__`.

    Args:
        hosts: how many.
    """

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self._stem = f"{PREFIX}-{os.getpid()}-"
        self._relay: subprocess.Popen[str] | None = None
        self._link: Link | None = None

    def __enter__(self) -> Network:
        """Make everything.

        Raises:
            CalledProcessError: a command failed, such as one that needs a module of the kernel.
        """
        sweep()
        try:
            self._make()
        except BaseException:
            self._delete()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Remove everything."""
        self._delete()

    def namespace(self, host: int | str) -> str:
        """The namespace of a host, or of the loopback ("lo") or the switch ("switch")."""
        return f"{self._stem}{host}"

    def inside(self, host: int | str, *command: str) -> list[str]:
        """A command that runs in the namespace of a host."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    @staticmethod
    def address(host: int) -> str:
        """The address of a host."""
        return f"10.77.0.{host + 1}"

    def set(self, link: Link) -> None:
        """Make this the link of every host; connections stay."""
        if link.mbit is None or link == self._link:
            return
        self._stop_relay()
        burst = max(8_000, 32 * link.mbit)  # what may pass at once: 8 kB, and 256 microseconds at high rates
        limit = ["root", "tbf", "rate", f"{link.mbit}mbit", "burst", str(burst), "limit", str(_LIMIT)]
        for host in range(self.hosts):
            for place, interface in ((host, INTERFACE), ("switch", f"port{host}")):
                _run("tc", "-n", self.namespace(place), "qdisc", "replace", "dev", interface, *limit)
            joined = ["nomaster"] if link.delay else ["master", "bridge"]
            self._ip("switch", "link", "set", f"port{host}", *joined)
        if link.delay:
            self._start_relay(link.delay)
        self._link = link

    def probe(self, link: Link, nbytes: int) -> dict[str, float]:
        """Measure a link with a plain socket between the first two hosts, or through the loopback.

        Returns:
            What `benchmarks.network.probe.send` returns; and sent: bytes counted by the interface.
        """
        self.set(link)
        alone = link.mbit is None
        first, second = ("lo", "lo") if alone else (0, 1)
        where = ["127.0.0.1" if alone else self.address(1), str(_PROBE_PORT)]
        script = [sys.executable, "-S", probe.__file__]
        server = subprocess.Popen(self.inside(second, *script, "serve", *where), stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            server.stdout.readline()
            interface = LOOPBACK if alone else INTERFACE
            before = self.sent(first, interface)
            told = _run(*self.inside(first, *script, "send", *where, str(nbytes)))
            return {**json.loads(told), "sent": self.sent(first, interface) - before}
        finally:
            server.kill()
            server.communicate()

    def sent(self, host: int | str, interface: str) -> int:
        """The bytes that an interface has sent."""
        told = json.loads(_run("ip", "-n", self.namespace(host), "-s", "-j", "link", "show", interface))
        return int(told[0]["stats64"]["tx"]["bytes"])

    def _make(self) -> None:
        for host in (*range(self.hosts), LOOPBACK, "switch"):
            _run("ip", "netns", "add", self.namespace(host))
            for setting in _SETTINGS:
                subprocess.run(self.inside(host, "sysctl", "-qw", setting), capture_output=True, check=False)
            self._ip(host, "link", "set", "lo", "up")
        self._ip("switch", "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        self._ip("switch", "link", "set", "bridge", "up")
        for host in range(self.hosts):
            ends = ["type", "veth", "peer", "name", INTERFACE, "netns", self.namespace(host)]
            self._ip("switch", "link", "add", f"port{host}", *ends)
            self._ip("switch", "link", "set", f"port{host}", "master", "bridge", "up")
            self._ip(host, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            # Frames of five segments: no larger than a burst, so that `tbf` need not divide them.
            self._ip(host, "link", "set", INTERFACE, "gso_max_size", "7400")
            self._ip(host, "link", "set", INTERFACE, "up")

    def _delete(self) -> None:
        self._stop_relay()
        sweep(self._stem)

    def _start_relay(self, delay: float) -> None:
        command = [sys.executable, "-S", relay.__file__, str(delay), *(f"port{host}" for host in range(self.hosts))]
        self._relay = subprocess.Popen(
            self.inside("switch", *command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the benchmark, which stops it
        )
        assert self._relay.stdout is not None
        if self._relay.stdout.readline().strip() != "ready":
            raise RuntimeError(f"the relay for a delay of {delay} s did not start: {self._relay.args}")

    def _stop_relay(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
            self._relay = None

    def _ip(self, host: int | str, *command: str) -> None:
        _run("ip", "-n", self.namespace(host), *command)


def sweep(stem: str = "") -> None:
    """Delete the namespaces whose names begin so; if empty, those of benchmarks whose process is no more."""
    folder = Path("/run/netns")
    for path in folder.iterdir() if folder.exists() else ():
        found = re.fullmatch(rf"{PREFIX}-(\d+)-\w+", path.name)
        if found and (path.name.startswith(stem) if stem else not Path("/proc", found[1]).exists()):
            subprocess.run(["ip", "netns", "delete", path.name], capture_output=True, check=False)


def _run(*command: str) -> str:
    return subprocess.run(_strings(command), capture_output=True, text=True, check=True).stdout


def _strings(command: Sequence[str]) -> list[str]:
    return [str(word) for word in command]
