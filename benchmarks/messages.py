"""Measures where the time of a message between two stages goes, on loopback or on a shaped link.

    python -m benchmarks.messages                                                # loopback
    python -m benchmarks.messages --rate loopback 100mbit --busy 0 2 --rounds 3  # needs root

Two ranks, one thread each, train linear layers on messages of half a megabyte. With a rate each rank has a network
namespace of its own; a pair of virtual interfaces joins them, each shaped by a token bucket (`tc ... tbf`). `--busy`
starts so many processes that want a core each. Settings take turns within a round; medians are those of all rounds.
For every message this takes, on the clock that all processes of a machine share:

- ready: from when the tensor exists to when its SEND begins
- encode: header and copy into one block
- post: the call of gloo, which hands to the kernel what its buffer takes
- way: from then on until the receiver has all of it, or later, if it looks later
- held: of this, how long the receiver could do nothing else, after it had taken note of the header
- needless: of that, where it needed another message
- wait: how long the rank that needed it stood still for it
- decode: views of the block
- use: from then on until the pass takes it
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import penstock
from benchmarks.arms import STAGES, Data, PenstockArm, Task, TorchArm, make_optimizer
from benchmarks.machine import free_port, leave
from benchmarks.throughput import RESULTS, open_raw, read_raw
from penstock.comm.p2p import gloo
from penstock.comm.p2p.codec import Codec
from penstock.comm.p2p.gloo import ReceiveLane, SendLane
from penstock.comm.p2p.mailbox import Inbox, MessageBuffer
from penstock.comm.p2p.tensor_message import TensorMessage

NAMES, ADDRESSES = ("penstock-m0", "penstock-m1"), ("10.231.7.1", "10.231.7.2")
PARTS = ("ready", "encode", "post", "way", "held", "needless", "wait", "decode", "use")
LOOPBACK = "loopback"
ROWS, WIDTH = 512, 256  # of a message in float32: half a megabyte
now = time.perf_counter


@contextmanager
def shaped_link(rate: str, settings: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by virtual interfaces of a rate; needs root.

    Args:
        rate: as `tc` takes it, such as 100mbit.
        settings: of their TCP, such as net.ipv4.tcp_congestion_control=cubic.
    """

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    for name in NAMES:  # left behind by a run that was killed
        subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", "p0", "netns", NAMES[0], "type", "veth", "peer", "name", "p1", "netns", NAMES[1])
        for i, name in enumerate(NAMES):
            ip("-n", name, "addr", "add", f"{ADDRESSES[i]}/24", "dev", f"p{i}")
            for device in ("lo", f"p{i}"):
                ip("-n", name, "link", "set", device, "up")
            shape = ["dev", f"p{i}", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
            ip("netns", "exec", name, "tc", "qdisc", "add", *shape)
            for setting in settings:
                ip("netns", "exec", name, "sysctl", "--quiet", "--write", setting)
        yield NAMES
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False)


class Stamps:
    """The moments of every message of this rank, by (payload, batch, first microbatch).

    It puts itself around the functions that a message passes through.
    """

    def __init__(self) -> None:
        self.rows: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._ready: dict[int, float] = {}  # by identity of the tree, which lives until it is sent
        self._now: dict[str, float] = {}  # of the SEND under way
        self._asked: object = None  # the ticket that the rank needs
        self._waited = (-1, 0.0)  # for which microbatch, and for how long
        self._decoded = (0.0, 0.0)

    def attach(self) -> None:
        """Take the moments from now on."""
        self._around(MessageBuffer, "put", self._put)
        self._around(SendLane, "send", self._send)
        self._around(Codec, "fill", self._encode)
        self._around(gloo.BlockGroup, "send", self._post)
        self._around(ReceiveLane, "_finish", self._finish)
        self._around(ReceiveLane, "decode", self._decode)
        self._around(Inbox, "arrived", self._ask)
        self._around(Inbox, "wait", self._wait)
        self._around(Inbox, "collect", self._use)

    def _around(self, owner: Any, name: str, inner: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, wraps(original)(lambda *a, **k: inner(original, *a, **k)))

    def _row(self, lane: Any, message: TensorMessage) -> dict[str, float]:
        header = message.header
        return self.rows[f"{lane.payload.value} {header.batch} {header.first}"]

    def _put(self, original: Any, buffer: MessageBuffer, content: TensorMessage) -> None:
        self._ready[id(content)] = now()
        original(buffer, content)

    def _send(self, original: Any, lane: SendLane, message: TensorMessage) -> Any:
        start = now()
        ticket = original(lane, message)
        row = self._row(lane.lane, message)
        row |= {"nbytes": message.nbytes, "ready": start - self._ready.pop(id(message), start), **self._now}
        row["posted"] = self._now["posted"]
        return ticket

    def _encode(self, original: Any, codec: Codec, *arguments: Any) -> Any:
        start = now()
        frame = original(codec, *arguments)
        self._now = {"encode": now() - start}
        return frame

    def _post(self, original: Any, group: Any, *arguments: Any) -> Any:
        start = now()
        work = original(group, *arguments)
        end = now()
        self._now |= {"post": end - start, "posted": end}
        return work

    def _finish(self, original: Any, lane: ReceiveLane, ticket: Any, *patience: Any) -> Any:
        start = now()
        message = original(lane, ticket, *patience)
        row = self._row(lane.lane, message)
        held = self._decoded[0] - start
        row |= {"held": held, "needless": 0.0 if ticket is self._asked else held, "arrived": self._decoded[0]}
        row["decode"] = self._decoded[1] - self._decoded[0]
        return message

    def _decode(self, original: Any, lane: ReceiveLane, *block: Any) -> Any:
        start = now()
        message = original(lane, *block)
        self._decoded = (start, now())
        return message

    def _ask(self, original: Any, inbox: Inbox, first: int) -> Any:
        self._asked = inbox._posted[first]
        return original(inbox, first)

    def _wait(self, original: Any, inbox: Inbox, first: int, what: object) -> Iterator[Any]:
        start = now()
        yield from original(inbox, first, what)
        self._waited = (first, now() - start)

    def _use(self, original: Any, inbox: Inbox, first: int, batch: int, what: object) -> None:
        original(inbox, first, batch, what)
        row = self.rows[f"{inbox._route.payload.value} {batch} {first}"]
        row["wait"] = self._waited[1] if self._waited[0] == first else 0.0
        row["used"] = now()
        self._waited = (-1, 0.0)


def make_task(layers: int) -> Task:
    """Stages of so many linear layers."""

    def stages(count: int) -> list[nn.Sequential]:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(count * layers)]
        return [nn.Sequential(*blocks[i * layers :][:layers]) for i in range(count)]

    return Task(stages, F.mse_loss, make_optimizer)


def make_data() -> Data:
    """Random inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    pairs = [torch.randn(2, ROWS, WIDTH, generator=generator) for _ in range(8)]
    return Data([(x, y) for x, y in pairs])


def train(rank: int, arguments: argparse.Namespace) -> None:
    """One rank: train, and leave its moments in a file."""
    torch.set_num_threads(1)
    penstock.keep_freed_memory()
    method = f"tcp://{arguments.address}:{arguments.port}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=STAGES)
    stamps, m, task, data = Stamps(), arguments.microbatches, make_task(arguments.layers), make_data()
    (name,) = arguments.arm
    if name.startswith("torch_"):
        arm: Any = TorchArm(name.removeprefix("torch_"), m, data, task)
    else:
        stamps.attach()
        arm = PenstockArm(name, m, data, task=task, window=arguments.window)
    arm.run(2)
    stamps.rows.clear()
    dist.barrier()
    start, busy = now(), time.process_time()
    arm.run(arguments.batches)
    seconds, busy = now() - start, time.process_time() - busy
    Path(arguments.found, f"{rank}.json").write_text(json.dumps([seconds, busy, stamps.rows]))
    leave()


def measure(arguments: argparse.Namespace, arm: str, rate: str, busy: int) -> dict[str, Any]:
    """Start both ranks, and join what they have found: a line of the raw data, with the whole way of every message."""
    shaped = rate != LOOPBACK
    with ExitStack() as stack:
        found_in = stack.enter_context(tempfile.TemporaryDirectory())
        names = stack.enter_context(shaped_link(rate, arguments.tcp)) if shaped else ("", "")
        address, port = (ADDRESSES[0] if shaped else "127.0.0.1"), free_port()
        for _ in range(busy):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        ranks = []
        for rank, name in enumerate(names):
            words = [sys.executable, "-m", "benchmarks.messages", *sys.argv[1:], "--arm", arm, "--rank", str(rank)]
            words += ["--found", found_in, "--port", str(port), "--address", address]
            interface = f"p{rank}" if name else "lo"
            where = ["ip", "netns", "exec", name] if name else []
            ranks.append(subprocess.Popen([*where, *words], env=os.environ | {"GLOO_SOCKET_IFNAME": interface}))
            stack.callback(ranks[-1].kill)
        if any(process.wait() for process in ranks):
            raise SystemExit("a rank has failed")
        found = [json.loads(Path(found_in, f"{rank}.json").read_text()) for rank in range(STAGES)]
    seconds = max(part[0] for part in found)
    return {
        "arm": arm, "rate": rate, "busy": busy, "window": arguments.window, "tcp": " ".join(arguments.tcp),
        "microbatches a second": round(arguments.batches * arguments.microbatches / seconds, 2),
        "CPU seconds": [round(part[1], 2) for part in found],
        "messages": list(whole_ways(*(part[2] for part in found))),
    }  # fmt: skip


def whole_ways(*ranks: dict[str, dict[str, float]]) -> Iterator[dict[str, Any]]:
    """Yield the milliseconds of each part of the messages whose whole way was seen, with their payload."""
    first, second = ranks
    for key in first.keys() & second.keys():
        row = first[key] | second[key]
        if {"posted", "arrived", "used"} <= row.keys():
            row |= {"way": row["arrived"] - row["posted"], "use": row["used"] - row["arrived"] - row["decode"]}
            yield {"payload": key.split()[0], **{part: round(1e3 * row.get(part, 0.0), 4) for part in PARTS}}


def print_summary(rows: Sequence[dict[str, Any]]) -> None:
    """Print medians, means and maxima of the messages of every setting, over all rounds."""
    for arm, rate, busy in dict.fromkeys((row["arm"], row["rate"], row["busy"]) for row in rows):
        here = [row for row in rows if (row["arm"], row["rate"], row["busy"]) == (arm, rate, busy)]
        speeds = [row["microbatches a second"] for row in here]
        print(f"\n{arm}, {rate}, {busy} busy processes: {statistics.median(speeds):.2f} microbatches a second", end="")
        print(f" ({min(speeds):.2f}, {max(speeds):.2f}) in {len(here)} rounds; CPU seconds {here[-1]['CPU seconds']}")
        messages = [message for row in here for message in row["messages"]]
        for payload in sorted({message["payload"] for message in messages}):
            print(f"{payload} (ms): median, mean, maximum")
            for part in PARTS:
                values = [message[part] for message in messages if message["payload"] == payload]
                figures = statistics.median(values), statistics.mean(values), max(values)
                print(f"  {part:8}" + "".join(f"{figure:10.3f}" for figure in figures))


def main() -> None:
    """Measure every setting, and print medians, means and maxima."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", nargs="+", default=["2bw"], help="methods of Penstock, or torch's as torch_1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4, help="of each stage")
    parser.add_argument("--rate", nargs="+", default=[LOOPBACK], help=f"of links, such as 100mbit; or {LOOPBACK}")
    parser.add_argument("--tcp", nargs="*", default=(), help="sysctl settings of the namespaces, NAME=VALUE")
    parser.add_argument("--window", type=int, help="messages outstanding on a lane; what the method chooses without it")
    parser.add_argument("--busy", type=int, nargs="+", default=[0], help="processes that want a core each")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    for name, kind in (("rank", int), ("port", int), ("address", str), ("found", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        train(arguments.rank, arguments)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    out = open_raw("messages", arguments.out)
    with out.open("a") as file:
        for round_, *setting in product(range(arguments.rounds), arguments.arm, arguments.rate, arguments.busy):
            row = measure(arguments, *setting)
            print(json.dumps({"round": round_, **row}), file=file, flush=True)
    print_summary(read_raw(out))


if __name__ == "__main__":
    main()
