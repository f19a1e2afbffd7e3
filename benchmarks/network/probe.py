"""Measures a link with a plain socket: the rate of a transfer, the time of a message, and of a byte there and back.

python probe.py serve ADDRESS PORT          # on one host, says "ready", serves one peer
python probe.py send ADDRESS PORT BYTES     # on another: prints what `send` returns
"""

from __future__ import annotations

import json
import socket
import sys
import time
from statistics import median

MESSAGE = 131_072
_TIMES, _PAUSE = 11, 0.02  # of messages, and seconds between them, as between those of a pipeline


def serve(address: str, port: int) -> None:
    """Confirm everything that is sent with a byte, until the peer is gone."""
    with socket.create_server((address, port)) as server:
        print("ready", flush=True)
        peer, _ = server.accept()
    with peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while header := peer.recv(8, socket.MSG_WAITALL):
            nbytes = int.from_bytes(header)
            while nbytes > 0:
                nbytes -= len(peer.recv(min(nbytes, 1 << 20)))
            peer.sendall(b"x")


def send(address: str, port: int, nbytes: int) -> dict[str, float]:
    """Return the rate in Mbit/s of payload, the seconds of a `MESSAGE` one way, and those of a round trip."""
    with socket.create_connection((address, port)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rtt = median(_confirmed(peer, 0) for _ in range(_TIMES))
        seconds = _confirmed(peer, nbytes)
        message = median(_confirmed(peer, MESSAGE) for _ in range(_TIMES))
    return {"mbit": 8e-6 * nbytes / max(seconds - rtt, 1e-9), "message": message - rtt / 2, "rtt": rtt}


def _confirmed(peer: socket.socket, nbytes: int) -> float:
    """The seconds until so many bytes have been confirmed."""
    content = nbytes.to_bytes(8) + bytes(nbytes)
    time.sleep(_PAUSE)
    start = time.perf_counter()
    peer.sendall(content)
    peer.recv(1)
    return time.perf_counter() - start


def main() -> None:
    """Serve or send."""
    what, address, port, *more = sys.argv[1:]
    if what == "serve":
        serve(address, int(port))
    else:
        print(json.dumps(send(address, int(port), int(*more))), flush=True)


if __name__ == "__main__":
    main()
