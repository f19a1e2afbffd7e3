"""The options that divide the work: among parallel pipelines, among stages, and into microbatches in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh

from penstock.checks import check_number, check_whole
from penstock.comm.collective.all_reduce import Reduce, is_fast
from penstock.errors import ConfigError
from penstock.partition.sequence_slices import EQUAL_SLICES, Slicing
from penstock.repr_without_defaults import ShortRepr
from penstock.schedule.ir.in_flight_option import AUTO, AUTO_DELAYED, read_in_flight
from penstock.schedule.ir.rank_numbers import RankNumbers, RankOrder, check_rank_order
from penstock.schedule.ir.sharding import Sharding, read_sharding
from penstock.schedule.methods.data_parallel_sync import REDUCE, Combine

Dims = int | Mapping[str, int | None]
"""The dimension of samples, of all tensors of a batch or by the name of a part."""


@dataclass(frozen=True, repr=False)
class DataParallel(ShortRepr):
    """How many parallel pipelines share the work of a batch, and how they agree on the weights.

    Attributes:
        width: w, the number of parallel pipelines. Each takes m of the w * m microbatches of a batch. They hold the
            same weights, and their gradients are added while the passes go on (unless `combine` says otherwise).
            Reports and decisions (`Report.decided`) are about the whole batch.
        reduce: how gradients are added: "ordered" adds in the order of the pipelines, and gives the same bits as one
            process; "fast" uses torch's all_reduce between processes, on the groups of the mesh along its width or on
            one group per stage. All pipelines still get the same bits. With two pipelines these are the bits of
            "ordered"; with more, a sum may differ from the ordered one by (w - 1) eps times the sum of the magnitudes.
        combine: lets pipelines make updates of their own and agree now and then, such as ``Combine("average",
            every=8)`` (equations: `schedule.methods.data_parallel_sync`). Each pipeline then decides by its own norm,
            loss weight and loss scale; reports and decisions are about one pipeline; `Pipeline.stop` ends the run at
            the next synchronization; sums are always in the order of the pipelines. With "wsp", pipelines read each
            other's updates some waves later, `stop` takes as many waves, and a run ends with a wave. Evaluations and
            `Pipeline.state_dict` are about the model that the pipelines have in common; with "average", evaluations are
            about the mean of their newest weights, and `state_dict` about those of the first pipeline in this process.
        mesh: a device mesh with the dimensions ("width", "depth") or ("width", "depth", "inner"), or with depth before
            width; `width` is then taken from it, `rank_order` from the order of the two ("tp-dp-pp" if depth is the
            first), and `Partition.tensor_parallel`, which is the size of inner. Its ranks must be those of the
            pipeline's group (of the whole job, if there is none) in the same order, as `init_device_mesh` lays them
            out. With reduce="fast", its groups along the width belong to a run while that is under way.
        sharding: what of the state of each stage the pipelines divide among them, by rows of each parameter: "none";
            "optimizer", the optimizer's states (ZeRO-1); "gradients", also the sums of gradients, so that half as much
            travels for them (ZeRO-2). Each pipeline updates its rows, and a gather completes the weights. "full", also
            the weights (ZeRO-3), for methods that flush and 2bw-layered: a stage is whole only for the passes between a
            gather and a release, and between two runs. All numbers are those of "none", bit for bit, but for torch's
            fused kernels (fused=True), which may round an element otherwise in another place. Optimizers that look at
            whole parameters, such as Muon, get these, dealt out by size, in place of rows; those of classes that are
            not known here are refused. None: what the method has by itself ("none" for all but `layered` and its kin),
            or the schedule that is given.
        rank_order: how ranks are numbered, what changes fastest first: "tp-pp-dp", where the ranks of a pipeline follow
            each other, or "tp-dp-pp", where the replicas of a stage do. Launchers put ranks that follow each other on
            one machine, so this says which links messages and sums use. It changes no numbers, and checkpoints do not
            depend on it. A mesh says it by the order of its dimensions.

    Raises:
        ConfigError: a width below 1, or an unknown way to add gradients, to agree, to divide or to number ranks.
    """

    width: int = 1
    reduce: Reduce = "ordered"
    combine: Combine = REDUCE
    mesh: DeviceMesh | None = None
    sharding: str | Sharding | None = None
    rank_order: RankOrder = "tp-pp-dp"

    def __post_init__(self) -> None:
        """Check each by itself."""
        check_whole("data_parallel: width", self.width)
        check_rank_order(self.rank_order)
        is_fast(self.reduce)
        if self.sharding is not None:
            read_sharding(self.sharding)
        if not isinstance(self.combine, Combine):
            raise ConfigError(
                f"combine must be a Combine, such as Combine('average', every=4); got {self.combine!r:.80}"
            )

    @property
    def fast(self) -> bool:
        """Whether torch adds gradients, in an order of its own."""
        return is_fast(self.reduce)


def rank_numbers(parallel: DataParallel, depth: int) -> RankNumbers:
    """Return the numbers of ranks, of pipelines with so many each."""
    return RankNumbers(parallel.width, depth, parallel.rank_order)


@dataclass(frozen=True, repr=False)
class Partition(ShortRepr):
    """How the model is divided into stages, and sequences into slices.

    Attributes:
        balance: the number of blocks of each stage; chosen by the cost of blocks if None.
        cut: in place of it, the names of the first block of each stage but the first; of a whole model (`example=`),
            the paths of its modules, such as ["model.layers.4", "lm_head"].
        units: of a whole model, the paths of the layers that stages are made of, or of the lists that hold them, such
            as ["encoder.block", "decoder.block"], with what is around them. If neither this nor `cut` says so, modules
            are opened until none takes more than a third of an even stage's work, if they can be.
        by: what stages are balanced by: "work", the cost of blocks, of a whole model the floating-point operations of
            its forward on the example and the bytes that cuts send (`partition.blocks.cut_blocks`); or "time", seconds
            of forward and backward on the example, as rank 0 measures them when the pipeline is made, where the model
            is. A list of blocks has the example for that. Take a microbatch for it.
        tied: parameters that are one and the same, such as {"head.weight": "embedding.weight"}. It is needed for lazy
            blocks only: where two modules hold one parameter, that is noticed. Each stage that uses it has a copy; the
            copies stay equal, and count once in the norm. The optimizer must treat all of them alike.
        slicing: how sequences are divided where a method takes slices of them, such as "seq1f1b".
        tensor_parallel: T, how many processes share each stage, next to each other in the group. A block with a method
            ``parallelize(mesh)`` is divided by it among them, by torch's `parallelize_module` with `ColwiseParallel`
            and `RowwiseParallel`; the others are the same on all. Passes add over these processes, and each steps the
            part of a parameter that it has. A gradient norm counts parts once each, and what is the same on all once.
            Weights are those of a run without it, up to roundings (docs/design.md).

    Raises:
        ConfigError: a value of another type.
    """

    balance: Sequence[int] | None = None
    tied: Mapping[str, str] | None = None
    slicing: Slicing = EQUAL_SLICES
    tensor_parallel: int = 1
    cut: Sequence[str] | None = None
    units: Sequence[str] | None = None
    by: Literal["work", "time"] = "work"

    def __post_init__(self) -> None:
        """Check each by itself."""
        check_whole("tensor_parallel", self.tensor_parallel)
        listed = self.balance is None or isinstance(self.balance, Sequence)
        if not listed or not all(isinstance(size, int) for size in self.balance or ()):
            raise ConfigError(
                "partition must be the number of blocks of each stage, such as [3, 2, 3], a Partition, or None; got "
                f"{self.balance!r:.80}"
            )
        for name in ("cut", "units"):
            listed = getattr(self, name)
            if isinstance(listed, str) or not all(isinstance(path, str) for path in listed or ()):
                raise ConfigError(f"{name} must be a list of names, such as ['layers.4'], or None; got {listed!r:.80}")
        if self.cut is not None and self.balance is not None:
            raise ConfigError("balance and cut both say where stages begin; leave one of them out")
        if self.by not in ("work", "time"):
            raise ConfigError(f"by must be 'work' or 'time', got {self.by!r:.80}")
        if self.tied is not None and not isinstance(self.tied, Mapping):
            raise ConfigError(
                f"tied must be a dict, such as {{'head.weight': 'embedding.weight'}}, or None; got {self.tied!r:.80}"
            )
        if not isinstance(self.slicing, Slicing):
            raise ConfigError(f"slicing must be a Slicing, such as Slicing(dimension=1); got {self.slicing!r:.80}")


@dataclass(frozen=True, repr=False)
class Microbatches(ShortRepr):
    """Into how many microbatches a batch is split, and how many of them are in flight (docs/orders.md).

    Attributes:
        microbatches: m, for each of the parallel pipelines. None where a schedule is given, which has its own.
        in_flight: how many are in flight on each rank (begun there, and their backwards not yet), where the order of
            the method has that option: of the first rank, or one number for every rank; or "auto": between processes
            the first batches are measured, and the run goes on with as many as hide the time of messages, but without
            reading weights later; "auto+delay" may do that, too. In one process messages take no time, and nothing
            changes. What the method itself has if None.
        in_flight_bytes: with "auto", the most bytes of activations on a rank; any number if None.
        dims: along which dimension a batch is split: a number, such as 1 for sequences of shape (time, samples, ...);
            or a dict, such as {"mask": None, "position_ids": 1}, of the parts for which it is not the first one; None
            for a part that goes whole to every microbatch (as `penstock.Whole` says in the batch itself). A part is
            named by the key of a dict, the field of a dataclass, or its place: "inputs", "targets", "inputs.1",
            "targets.weights". The longest name that fits counts, for all that is inside the part.

    Raises:
        ConfigError: one is no such number or word.
    """

    microbatches: int | None = None
    in_flight: int | Sequence[int] | str | None = None
    in_flight_bytes: float | None = None
    dims: Dims = 0

    def __post_init__(self) -> None:
        """Check each by itself."""
        if self.microbatches is not None:
            check_whole("microbatches", self.microbatches)
        if isinstance(self.in_flight, str):
            object.__setattr__(self, "in_flight", read_in_flight(self.in_flight))
        parts = self.dims if isinstance(self.dims, Mapping) else {"": self.dims}
        allowed = (None,) if parts is self.dims else ()
        if not all(
            type(name) is str and (dim in allowed or (type(dim) is int and dim >= 0)) for name, dim in parts.items()
        ):
            raise ConfigError(
                "dims must be the dimension of samples, such as 1, or a dict of the parts that have it elsewhere, such "
                f"as {{'mask': None, 'position_ids': 1}}; got {self.dims!r:.80}"
            )
        check_number("in_flight_bytes", self.in_flight_bytes, "2e9")
        if self.in_flight_bytes is not None and not self.in_flight_bytes > 0:
            raise ConfigError(f"in_flight_bytes must be positive, got {self.in_flight_bytes}")
        if self.in_flight_bytes is not None and self.in_flight not in (None, AUTO, AUTO_DELAYED):
            raise ConfigError(
                f"in_flight_bytes limits what in_flight='auto' takes, but in_flight={self.in_flight!r:.80} asks for a "
                "number; leave one of them out"
            )
