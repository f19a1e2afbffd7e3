"""Measures Penstock on one GPU: two ranks that share it, and a pipeline whose ranks are all in one process.

    python -m benchmarks.gpu                          # both parts, fp32 and bf16
    python -m benchmarks.gpu --part alone --rounds 5
    python -m benchmarks.gpu --device cpu --layers 2 --width 64 --context 32   # try it without a GPU

    shared  two ranks on one GPU: Penstock over gloo and over NCCL, torch.distributed.pipelining over NCCL, and two
            processes that never communicate (the ceiling)
    alone   one process: Penstock with two stages / the same passes as a plain loop over microbatches

NCCL takes several ranks on one GPU only if it believes that they are on different hosts, so it is told so; messages
then travel through the memory of the host. The ranks take turns on the GPU, or compute side by side where NVIDIA's MPS
runs (nvidia-cuda-mps-control -d). So the engines are measured, not NVLink. In bf16 Penstock keeps float32 masters;
torch's arms hold nothing but bf16, the cheapest that they could do. Ratios are those of throughput, taken within a
round; arms take turns as in `benchmarks.throughput`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

from benchmarks import arms
from benchmarks.arms import STAGES, Arm, Data, LoopArm, Maker, PenstockArm, PenstockStream, Task, TorchArm
from benchmarks.machine import free_port
from benchmarks.throughput import RESULTS, interval, measure, open_raw, read_raw
from penstock import Device, GPTConfig, Pipeline

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Setting(NamedTuple):
    """What all arms train, and where.

    Attributes:
        shape: of the GPT.
        samples: per microbatch.
        device: of all ranks.
        precision: of passes, "fp32" or "bf16".
    """

    shape: GPTConfig
    samples: int
    device: str
    precision: str

    def data(self) -> Data:
        """Random tokens, on the device."""
        generator = torch.Generator().manual_seed(0)
        size = (2, self.samples, self.shape.context)
        pairs = [torch.randint(self.shape.vocabulary, size, generator=generator).to(self.device) for _ in range(16)]
        return Data([(x, y) for x, y in pairs])

    def task(self, dtype: torch.dtype = torch.float32) -> Task:
        """The GPT in parts whose parameters have a dtype."""
        return Task(
            lambda count: [part.to(self.device, dtype) for part in self.parts(count)], float_loss, arms.make_optimizer
        )

    def loop(self, microbatches: int, data: Data, part: int | None = None) -> LoopArm:
        """Plain torch in the precision of passes: the whole model, or one of two parts that never communicate."""
        dtype = DTYPES[self.precision]
        size = (self.samples, self.shape.context, self.shape.width)
        loopback = torch.randn(size, device=self.device, dtype=dtype)
        return LoopArm(microbatches, data, loopback, self.task(dtype), part)

    def parts(self, count: int) -> list[nn.Sequential]:
        """The GPT, as it is made, in equal parts."""
        return arms.stage_modules(count, self.shape)

    def wait(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()


def float_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of a microbatch, computed in float32."""
    return arms.mean_loss(logits.float(), targets)


class Waited:
    """An arm whose runs end when the device has done all of it."""

    def __init__(self, arm: Arm, wait: Callable[[], None]) -> None:
        self._arm, self._wait = arm, wait

    def run(self, batches: int) -> None:
        """Train, and wait."""
        self._arm.run(batches)
        self._wait()

    def close(self) -> None:
        """Finish everything that is in flight."""
        self._arm.close()


class AloneArm:
    """A method of Penstock with both stages in this process; each run is a span."""

    def __init__(self, setting: Setting, method: str, cuda_graphs: bool, microbatches: int, data: Data) -> None:
        self.microbatches, self.data = microbatches, data
        self.pipeline = Pipeline(
            setting.parts(STAGES),
            method=method,
            stages=STAGES,
            microbatches=microbatches,
            loss=float_loss,
            optimizer=arms.make_optimizer,
            partition=[1] * STAGES,
            device=Device(setting.device, cuda_graphs=cuda_graphs),
            precision=setting.precision,
        )

    def run(self, batches: int) -> None:
        """Run one span."""
        for _ in self.pipeline.run(self.data.batches(batches, self.microbatches)):
            pass

    def close(self) -> None:
        """Do nothing: nothing is in flight between spans."""


def shared_makers(setting: Setting) -> dict[str, Maker]:
    """Return the arms of two ranks on one device; those over NCCL where the device is a GPU."""
    both = "cpu:gloo,cuda:nccl"
    fast = "nccl" if setting.device != "cpu" else "gloo"
    backends = {"gloo": "gloo", "nccl": both} if fast == "nccl" else {"gloo": "gloo"}

    def ours(kind: type[PenstockArm], method: str, backend: str, cuda_graphs: bool, m: int, data: Data) -> Arm:
        task = Task(setting.parts, float_loss, arms.make_optimizer)
        group, device = dist.new_group(backend=backend), Device(setting.device, cuda_graphs=cuda_graphs)
        options: dict[str, Any] = {"group": group, "device": device, "precision": setting.precision}
        return kind(method, m, data, task=task, **options)

    def theirs(name: str, m: int, data: Data) -> Arm:
        return TorchArm(name, m, data, task=setting.task(DTYPES[setting.precision]), device=setting.device)

    makers: dict[str, Maker] = {"ceiling": lambda m, data: setting.loop(m, data, dist.get_rank())}
    for name, backend in backends.items():
        for graphs in (False, True)[: 1 + (fast == "nccl")]:
            suffix = " graphs" if graphs else ""
            makers[f"penstock 2bw {name}{suffix}"] = partial(ours, PenstockStream, "2bw", backend, graphs)
            makers[f"penstock 1f1b {name}{suffix}"] = partial(ours, PenstockArm, "1f1b", backend, graphs)
    return makers | {f"torch {name} {fast}": partial(theirs, name) for name in ("1f1b", "gpipe")}


def alone_makers(setting: Setting) -> dict[str, Maker]:
    """Return the arms of one process."""
    ours = {f"penstock {method}": partial(AloneArm, setting, method, False) for method in ("1f1b", "2bw", "zb-h1")}
    if setting.device != "cpu":
        ours |= {
            f"penstock {method} graphs": partial(AloneArm, setting, method, True) for method in ("1f1b", "2bw", "zb-h1")
        }
    return {"plain loop": setting.loop, **ours}


PARTS: dict[str, tuple[int, Callable[[Setting], dict[str, Maker]]]] = {
    "shared": (2, shared_makers),
    "alone": (1, alone_makers),
}
"""Name -> processes, arms."""


def work(rank: int, port: int, arguments: argparse.Namespace, out: str, part: str, setting: Setting) -> None:
    """One rank of a part."""
    processes, makers = PARTS[part]
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo")  # NCCL has no other way to be told
    waited = {
        name: (lambda m, data, make=make: Waited(make(m, data), setting.wait)) for name, make in makers(setting).items()
    }
    arguments.arms = [name for name in waited if arguments.only is None or name in arguments.only]
    backend = "cpu:gloo,cuda:nccl" if setting.device != "cpu" and processes > 1 else "gloo"
    measure(rank, port, arguments, out, waited, setting.data, processes, f"{part} {setting.precision}", backend)


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Print, per part, the throughput of every arm over that of the first, as Markdown."""
    for part in dict.fromkeys(row["part"] for row in rows):
        here = [row["seconds"] for row in rows if row["part"] == part]
        base = next((name for name in here[0] if name.startswith("torch 1f1b")), next(iter(here[0])))
        count = next(row["microbatches"] for row in rows if row["part"] == part)
        print(f"\n{part}: throughput / {base}, and ms per microbatch; {len(here)} rounds\n")
        print("| arm | ratio | ms |\n|---|---|---|")
        for name in here[0]:
            median, low, high = interval([seconds[base] / seconds[name] for seconds in here])
            each, _, _ = interval([1e3 * seconds[name] / count for seconds in here])
            print(f"| {name} | {median:.3f} ({low:.3f}, {high:.3f}) | {each:.2f} |")


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--precision", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--device", default="cuda:0", help="of all ranks")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8], help="values of m")
    parser.add_argument("--count", type=int, default=64, help="microbatches per arm and round")
    parser.add_argument("--slice", type=int, default=32, help="microbatches that an arm runs at a time")
    parser.add_argument("--only", nargs="+", help="names of arms")
    for name, size in (("layers", 8), ("width", 1024), ("context", 512), ("samples", 8), ("vocabulary", 8192)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    arguments = parser.parse_args()
    shape = GPTConfig(
        arguments.layers, arguments.width, max(arguments.width // 64, 1), arguments.context, arguments.vocabulary
    )
    out = open_raw("gpu", arguments.out)
    for part in arguments.part:
        for precision in arguments.precision:
            setting = Setting(shape, arguments.samples, arguments.device, precision)
            multiprocessing.spawn(work, (free_port(), arguments, str(out), part, setting), nprocs=PARTS[part][0])
    print_summary(read_raw(out))


if __name__ == "__main__":
    main()
