"""A switch with a delay: passes frames between interfaces of its network namespace, some milliseconds later.

    python relay.py SECONDS PORT PORT [PORT ...]

For kernels without the qdisc `netem`. It says "ready" when it listens, and ends when its standard input does. Frames
keep the headers of the kernel's offloads, so large ones pass whole and no checksum is computed here.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

_ALL = socket.htons(3)  # ETH_P_ALL
_SOL_PACKET, _OFFLOADS, _OUTGOING = 263, 15, 4  # SOL_PACKET, PACKET_VNET_HDR, PACKET_OUTGOING of <linux/if_packet.h>
_RECEIVE, _SEND = 33, 32  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
_BUFFER = 64 << 20
_HEADER, _LARGEST = 10, 1 << 17  # bytes of the offloads' header; of a frame


def listen(port: str) -> socket.socket:
    """Open an interface for whole frames."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, _ALL)
    opened.bind((port, 0))
    opened.setsockopt(_SOL_PACKET, _OFFLOADS, 1)
    for option in _RECEIVE, _SEND:
        opened.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    return opened


def relay(ports: Sequence[socket.socket], delay: float, end: int) -> None:
    """Pass frames on until the file descriptor `end` can be read."""
    learned: dict[bytes, socket.socket] = {}  # address -> the port where it was seen
    queue: deque[tuple[float, bytes, socket.socket]] = deque()  # all have the same delay, so it is in order
    while True:
        wait = max(queue[0][0] - time.monotonic(), 0.0) if queue else None
        ready, _, _ = select.select([*ports, end], [], [], wait)
        if end in ready:
            return
        for port in ready:
            due = time.monotonic() + delay
            frame, (_, _, kind, *_) = port.recvfrom(_LARGEST)
            if kind == _OUTGOING:  # what was sent by this relay
                continue
            learned[frame[_HEADER + 6 : _HEADER + 12]] = port
            target = learned.get(frame[_HEADER : _HEADER + 6])
            queue += [(due, frame, other) for other in ([target] if target else ports) if other is not port]
        while queue and queue[0][0] <= time.monotonic():
            _, frame, target = queue.popleft()
            with suppress(OSError):  # the queue of the interface is full: a switch drops the frame
                target.send(frame)


def main() -> None:
    """Relay between the interfaces named in the command."""
    delay, *names = sys.argv[1:]
    ports = [listen(name) for name in names]
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))  # ranks use all cores, and frames are due on time
    print("ready", flush=True)
    relay(ports, float(delay), sys.stdin.fileno())


if __name__ == "__main__":
    main()
