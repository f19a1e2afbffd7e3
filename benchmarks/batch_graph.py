"""What one CUDA graph of a whole batch would gain over a graph for each pass: the same kernels, without an engine.

python -m benchmarks.batch_graph            # on a GPU

eager   every kernel issued by the host
passes  a graph for each forward and backward of two stages, as `Device(cuda_graphs=True)` records them
batch   one graph of all passes of a batch
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from benchmarks.gpu import Setting, float_loss
from penstock import GPTConfig

SHAPE = GPTConfig(layers=8, width=1024, heads=16, context=512, vocabulary=8192)
SAMPLES, MICROBATCHES, ROUNDS, BATCHES = 8, 8, 12, 4

Record = Callable[[str], AbstractContextManager[Any]]


def one_microbatch() -> Callable[[Record], None]:
    """Make two stages in bf16; return their passes over one microbatch, each within what `record` gives for it."""
    first, second = (part.cuda().bfloat16() for part in Setting(SHAPE, SAMPLES, "cuda", "bf16").parts(2))
    x, y = (torch.randint(SHAPE.vocabulary, (SAMPLES, SHAPE.context), device="cuda") for _ in range(2))
    size = (SAMPLES, SHAPE.context, SHAPE.width)
    received = torch.zeros(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    sent_back = torch.zeros_like(received)
    for p in (*first.parameters(), *second.parameters()):
        p.grad = torch.zeros_like(p)

    def passes(record: Record) -> None:
        with record("F0"):
            output = first(x)
        with record("F1"):
            received.data.copy_(output.detach())
            loss = float_loss(second(received), y)
        with record("B1"):
            received.grad = None
            loss.backward()  # type: ignore[no-untyped-call]
            assert received.grad is not None
            sent_back.copy_(received.grad)
        with record("B0"):
            output.backward(sent_back)

    return passes


def arms() -> dict[str, Callable[[], None]]:
    """Record the graphs; return what trains a batch without an update, by the name of the arm."""
    passes = one_microbatch()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            passes(lambda _: nullcontext())
    torch.cuda.current_stream().wait_stream(side)
    pool, graphs, batch = torch.cuda.graph_pool_handle(), [], torch.cuda.CUDAGraph()

    def record(_: str) -> AbstractContextManager[Any]:
        graphs.append(torch.cuda.CUDAGraph())
        return torch.cuda.graph(graphs[-1], pool=pool)

    def eager() -> None:
        for _ in range(MICROBATCHES):
            passes(lambda _: nullcontext())

    def replay() -> None:
        for _ in range(MICROBATCHES):
            for graph in graphs:
                graph.replay()

    passes(record)
    with torch.cuda.graph(batch):
        eager()
    return {"eager": eager, "passes": replay, "batch": batch.replay}


def main() -> None:
    """Measure the arms in turns, and print milliseconds per microbatch: the medians, and all."""
    torch.manual_seed(0)
    found, times = arms(), {"eager": [], "passes": [], "batch": []}  # type: dict[str, Any], dict[str, list[float]]
    for _ in range(ROUNDS):
        for name, run in found.items():
            run()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(BATCHES):
                run()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - begun) / BATCHES / MICROBATCHES * 1e3)
    medians = {name: statistics.median(each) for name, each in times.items()}
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "ms per microbatch": medians, "raw": times}))


if __name__ == "__main__":
    main()
