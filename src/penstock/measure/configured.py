"""The profile of what a configuration of `penstock train` trains, on the device that it names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.comm.core.devices import find_device
from penstock.comm.core.tensor_group import TensorGroup
from penstock.job.cpus import Cpus, parts
from penstock.measure.local_processes import in_processes
from penstock.measure.model_profile import check_microbatch_sizes, measure_blocks, profile_of
from penstock.measure.this_machine import measure_link, sizes_around
from penstock.models.gpt_variant import LanguageModel
from penstock.options.all_options import PipelineOptions
from penstock.plan.profile.schema import Profile
from penstock.runtime.malloc import keep_freed_memory
from penstock.runtime.plan.plan import UnprovenPlan
from penstock.runtime.setup.tensor_division import check_steps_parts
from penstock.schedule.build import ScheduleRequest
from penstock.train.config.schema import TrainConfig
from penstock.train.data.corpus import load_corpus
from penstock.train.data.window_sampler import Windows
from penstock.train.setup.model_shape import model_of, model_shape
from penstock.train.setup.optimizers import optimizer_factory
from penstock.train.setup.run_folder import is_of_a_run

_PASSES = ("precision", "tf32", "sdpa", "compile", "boundary_gradients", "max_grad_norm", "seed", "tensor_parallel")
_KEPT = ("data", "model", "optimizer", *_PASSES, "threads", "device")


def measure_configured(
    config: TrainConfig,
    sizes: Sequence[int],
    seconds: float,
    links: bool,
    name: str | None = None,
    told: Callable[[str], None] = lambda name: None,  # noqa: ARG005
) -> Profile:
    """Measure every distinct block of the model that a configuration trains, and the link between two processes.

    Blocks compute with as many threads as each process of the run would have on this machine. With tensor parallelism
    the processes that share a stage measure their parts of each block together, as they compute it in a run.

    Args:
        config: its keys about model, data, optimizer, precision, kernels, device, threads and tensor parallelism count.
        sizes: samples of a microbatch, ascending.
        seconds: for each size of each block, once for every kind of pass.
        links: whether links are measured, too.
        name: of the model; that of its preset if None.
        told: called with the name of each block that is measured.

    Raises:
        ConfigError: there is no such model or device, or sizes do not ascend.
        DataError: the text is missing, unreadable or too short.
        CapabilityError: with tensor parallelism, something that does not go with it is asked for.
        WorkerError: a process that measures failed.
    """
    check_microbatch_sizes(sizes)
    config.check_chain("profiles", "which have one cost for each cut between two blocks")
    model, device = _model(config)[0], find_device(config.device)
    threads, shared = config.threads or Cpus.of_this_process().threads(config.processes), config.tensor_parallel
    given = tuple(sizes), seconds, threads, name
    if shared > 1:
        _check_shared(config, model, device)
        told(f"parts of blocks in {shared} processes")
        values = in_processes(shared, config.timeout, _measure_parts, config.model_dump(), *given)
        found = Profile.model_validate(values)
    else:
        found = _measure(config, *given, told=told)
    if not links:
        return found
    messages = (n for each in found.layers for n in (each.output if isinstance(each.output, list) else [each.output]))
    link, said = measure_link(config, sizes_around(messages)), _said_of_links(device)
    return found.model_copy(update={"links": [link], "source": found.source + said})


def _check_shared(config: TrainConfig, model: LanguageModel, device: torch.device) -> None:
    """Refuse what processes that share a block would refuse, before they start.

    Raises:
        CapabilityError: it is asked for.
    """
    UnprovenPlan.of(model.blocks, ScheduleRequest("1f1b", 1, 1), _options(config, device))
    check_steps_parts(optimizer_factory(config.optimizer)([("block.weight", nn.Parameter(torch.zeros(1, 1)))]))


def _measure_parts(
    group: dist.ProcessGroup,
    values: dict[str, Any],
    sizes: Sequence[int],
    seconds: float,
    threads: int,
    name: str | None,
) -> dict[str, Any]:
    """Measure as one of the processes that share every block; returns the values of a profile."""
    config = TrainConfig.model_validate(values)
    found = _measure(config, sizes, seconds, threads, name, tensor=TensorGroup.around(group))
    return found.model_dump(exclude_unset=True)


def _measure(
    config: TrainConfig,
    sizes: Sequence[int],
    seconds: float,
    threads: int,
    name: str | None,
    told: Callable[[str], None] = lambda name: None,  # noqa: ARG005
    tensor: TensorGroup | None = None,
) -> Profile:
    """Measure the blocks, with so many threads; arguments as of `measure_configured` and `measure_blocks`."""
    device, (model, windows), before = find_device(config.device), _model(config), torch.get_num_threads()
    keep_freed_memory()
    torch.set_num_threads(threads)
    try:
        samples = {size: windows.samples(0, size) for size in sizes}
        optimizer, options = optimizer_factory(config.optimizer), _options(config, device)
        measured = measure_blocks(model.blocks, samples, model.loss, optimizer, options, seconds, told, tensor)
    finally:
        torch.set_num_threads(before)
    said = f"measured on {_named(device, threads)}, {config.precision}, {config.optimizer.name}"
    said += f", {config.tensor_parallel} processes for each stage" if config.tensor_parallel > 1 else ""
    (cpus,) = parts([Cpus.of_this_process()])
    cores = cpus / (threads * config.tensor_parallel) if device.type == "cpu" else None
    return profile_of(name or config.model.preset, measured, (), said, _changed(config), cores)


def _model(config: TrainConfig) -> tuple[LanguageModel, Windows]:
    """Return the model of a configuration, and its data."""
    corpus = load_corpus(config.data, partial(is_of_a_run, Path(config.out)), config.model.vocabulary)
    model = model_of(config, model_shape(config, corpus))
    return model, Windows(corpus, model.shape.context, config.held_out, config.seed, model.pair)


def _options(config: TrainConfig, device: torch.device) -> PipelineOptions:
    """Return the options that blocks are measured with."""
    return PipelineOptions().changed(device=device, **{key: getattr(config, key) for key in _PASSES})


def _named(device: torch.device, threads: int) -> str:
    """Return what a device is called."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"the {device.type}, {threads} thread{'s' if threads > 1 else ''}"


def _said_of_links(device: torch.device) -> str:
    """Return how links are measured, whatever the device is."""
    other = "" if device.type == "cpu" else f", not between {device.type} devices: give --bandwidth for these"
    return f"; link: gloo between two processes of this machine, on the cpu{other}"


def _changed(config: TrainConfig) -> dict[str, Any]:
    """Return the keys that a run of a plan must have as here: those that are not the defaults or, if all are, a preset.

    A profile without any would be one of a model that `penstock train` does not have.
    """
    values, defaults = config.model_dump(include=set(_KEPT)), TrainConfig().model_dump(include=set(_KEPT))
    found = dict[str, Any]()
    for key in _KEPT:
        if isinstance(values[key], dict):
            inner = {name: value for name, value in values[key].items() if value != defaults[key][name]}
            found |= {key: inner} if inner else {}
        elif values[key] != defaults[key]:
            found[key] = values[key]
    return found or {"model": {"preset": config.model.preset}}
