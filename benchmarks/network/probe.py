"""Measures a link with a plain socket: the rate of a transfer, and the time of a byte there and back.

python probe.py serve ADDRESS PORT          # on one host, says "ready", serves one peer
python probe.py send ADDRESS PORT BYTES     # on another: prints {"mbit": ..., "rtt": ...}
"""

from __future__ import annotations

import json
import socket
import sys
import time

_PINGS = 21


def serve(address: str, port: int) -> None:
    """Answer single bytes, then take a transfer and confirm it."""
    with socket.create_server((address, port)) as server:
        print("ready", flush=True)
        peer, _ = server.accept()
    with peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            peer.sendall(peer.recv(1))
        nbytes = int.from_bytes(peer.recv(8, socket.MSG_WAITALL))
        while nbytes > 0:
            nbytes -= len(peer.recv(1 << 20))
        peer.sendall(b"x")


def send(address: str, port: int, nbytes: int) -> dict[str, float]:
    """Return the rate in Mbit/s of payload, and the median round trip in seconds."""
    with socket.create_connection((address, port)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(_PINGS):
            start = time.perf_counter()
            peer.sendall(b"x")
            peer.recv(1)
            trips.append(time.perf_counter() - start)
        rtt, content = sorted(trips)[_PINGS // 2], nbytes.to_bytes(8) + bytes(nbytes)
        start = time.perf_counter()
        peer.sendall(content)
        peer.recv(1)
        seconds = time.perf_counter() - start
    return {"mbit": 8e-6 * nbytes / max(seconds - rtt, 1e-9), "rtt": rtt}


def main() -> None:
    """Serve or send."""
    what, address, port, *more = sys.argv[1:]
    if what == "serve":
        serve(address, int(port))
    else:
        print(json.dumps(send(address, int(port), int(*more))), flush=True)


if __name__ == "__main__":
    main()
