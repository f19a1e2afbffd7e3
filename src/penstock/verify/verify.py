"""Verifies that a pipeline trains what its method says: trains the same batches two or three times and compares.

    pipeline    all ranks, as configured
    reference   the equations of the method, one microbatch after the other (`penstock.verify.reference`): every number
                must be equal
    plain       one model and one optimizer in plain torch (`penstock.verify.plain_torch`): equal up to rounding; only
                for methods that read up-to-date weights, in fp32

Everything runs in this process, so what does not fit on one device cannot be verified; but for pipelines with tensor
parallelism, which have processes of their own (`penstock.verify.tensor_parallel_run`). It takes the memory of the whole
pipeline, and in addition that of the weights and gradients of every batch (twice if plain torch is compared, too).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from penstock.comm.core.devices import find_device, is_accelerator
from penstock.errors import ConfigError
from penstock.job.cpus import Cpus
from penstock.measure.recompute_choice import choose_for
from penstock.schedule.ir.schedule import Op, Schedule, Stage
from penstock.schedule.ir.sharding import Level
from penstock.schedule.ir.version_rules import RULES
from penstock.train.config.schema import TrainConfig
from penstock.train.prepare.prepare_run import Prepared, prepare
from penstock.verify.baseline_runs import decides, record_of, run_plain, run_reference
from penstock.verify.differences import Comparisons
from penstock.verify.report import ReportRow, Verification
from penstock.verify.tensor_parallel_run import run_in_processes
from penstock.verify.watched_run import WatchedRun
from penstock.weights.optim.optimizer_adapters import takes_rows

TOLERANCE = 1e-5
"""Tolerance for plain torch, which adds norms and the parts of parallel pipelines in another order. That changes the
last of 24 bits, 6e-8, each time; after a few batches tensors differ by about 1e-7. Real faults differ by far more."""


def verify(config: TrainConfig, count: int) -> Verification:
    """Train the first batches of a run as a pipeline, as its reference and, where it applies, in plain torch.

    Args:
        config: of the run.
        count: the number of batches.

    Raises:
        ConfigError: the configuration cannot be verified; also whatever `preflight.prepare` raises.
    """
    _check_comparable(config)
    local, left_out = config.tensor_parallel > 1, _no_plain(config)
    prepared = prepare(config, local=local, choose=choose_for)
    if config.row.spec.rewrites:
        raise ConfigError(
            f"method {config.row.name!r} changes weights after the optimizer's step, where verify cannot observe it; "
            "Penstock's tests compare it with its reference. Verify the method it builds on, such as 2bw or newest"
        )
    low = next((name for name in (config.precision, config.boundary_gradients) if name not in ("fp32", "same")), None)
    apart = "slices of sequences" if prepared.plan.schedule.slices > 1 else "parts of stages" if local else None
    if apart is not None and low is not None:
        raise ConfigError(
            f"method {config.row.name!r} adds up {apart}, whose rounding differs from the reference's, in {low} by "
            "percents, so a comparison would show nothing; verify it with precision=fp32 and boundary_gradients=same"
        )
    kernels = prepared.plan.options.precision.kernels
    with _threads(config), torch.random.fork_rng(devices=[]), kernels.applied():
        reference, watch = run_reference(prepared, count)
        updated = [t for t, gradients in enumerate(reference.gradients) if gradients]
        allowed = _allowed(prepared)
        others = [(record_of(reference, updated, watch, decides(prepared)), allowed)]
        if left_out is None:
            others.append((run_plain(prepared, count, reference.versions), max(allowed, TOLERANCE)))
        divided = prepared.plan.schedule.sharding.level is not Level.NONE
        if divided and not all(map(takes_rows, watch.optimizers)):
            raise ConfigError(
                f"verify compares the rows that each pipeline steps, but {config.optimizer.name} steps whole "
                "parameters; verify it with sharding=none, whose numbers are the same"
            )
        comparisons = Comparisons(others, config.width, divided)
        if config.tensor_parallel > 1:
            error = run_in_processes(config, count, updated, comparisons.see)
        else:
            error = WatchedRun(prepared, count, updated, comparisons.see).run()
    found = comparisons.results(complete=error is None)
    rows = tuple(ReportRow(kind, first, others[0] if others else None) for kind, (first, *others) in found.items())
    return Verification(config, count, rows, left_out, error)


def _check_comparable(config: TrainConfig) -> None:
    """Refuse what has no reference.

    Raises:
        ConfigError: what, and what to verify instead.
    """
    if config.phased:
        raise ConfigError(
            "verify checks one method at a time: set sync.batches=0, fallback.at=null and fallback.when=[], and verify "
            "each method separately"
        )
    if config.combine.chosen.apart:
        raise ConfigError(
            "verify supports only pipelines that add their gradients in every batch, not those that synchronize less "
            f"often (combine.kind={config.combine.kind}); leave combine out"
        )
    if config.delayed:
        raise ConfigError("delays: there is no reference to verify chosen delays against; leave delays out")
    if isinstance(config.options.get("in_flight"), str):
        raise ConfigError(
            f"options.in_flight={config.options['in_flight']}: verify trains in one process, where there are no links "
            "to measure; give the numbers to verify, such as those of a run (in_flight in its metrics.jsonl)"
        )
    if config.row.divides_head and config.precision == "fp32" and config.boundary_gradients != "same":
        raise ConfigError(
            f"{config.row.name}: stages round the gradient of each part of the output layer to "
            f"{config.boundary_gradients} before they add it, the reference that of all; verify it with "
            "boundary_gradients=same"
        )


def _allowed(prepared: Prepared) -> float:
    """Return the relative difference that is allowed from the reference: 0, unless the run rounds differently."""
    schedule = prepared.plan.schedule
    if schedule.slices > 1 or prepared.config.tensor_parallel > 1:
        # Other sums; the first steps of Adam magnify that in gradients near zero.
        return 10 * TOLERANCE
    if not prepared.config.row.spec.exact:
        return 10 * TOLERANCE
    rounds = not _sums_in_order(schedule) or not _summed_once(schedule)  # the same sums in another order
    rounds |= prepared.config.compile  # fused operations round once
    rounds |= is_accelerator(find_device(prepared.config.device))  # sums depend on how their terms lie in memory
    return TOLERANCE if rounds or prepared.config.undo == "in-place" else 0.0


def _sums_in_order(schedule: Schedule) -> bool:
    """Return whether every stage adds up gradients in the order of microbatches, as the reference does.

    All methods do; an order of one's own may run its backwards in another one.
    """
    last: dict[Stage, int] = {}
    for p in schedule.passes():
        if p.op in (Op.B, Op.W):
            if p.unit.first < last.get(p.stage, p.unit.first):
                return False
            last[p.stage] = p.unit.first
    return True


def _summed_once(schedule: Schedule) -> bool:
    """Return whether parallel pipelines add up each gradient of a batch in one piece.

    Where full-size gradients have fewer places than stages take turns, a sum comes in several.
    """
    sums = Counter(a.stage for program in schedule.programs for a in program.period if a.op is Op.REDUCE)
    return max(sums.values(), default=1) == 1


def _no_plain(config: TrainConfig) -> str | None:
    """Return why plain torch is not comparable, or None if it is."""
    method = config.row
    if not RULES[method.rule].flushes:
        return f"{method.name} reads delayed weights"
    if config.boundary_gradients != "same":
        return f"gradients are rounded to {config.boundary_gradients} between stages"
    return None if config.precision == "fp32" else f"it is compared in fp32 only, not in {config.precision}"


@contextmanager
def _threads(config: TrainConfig) -> Iterator[None]:
    """Use as many threads as a rank does on this machine, as their number changes the last bits of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads or Cpus.of_this_process().threads(config.stages * config.width))
    try:
        yield
    finally:
        torch.set_num_threads(before)
