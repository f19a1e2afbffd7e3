"""The profile of what a configuration of `penstock train` trains, on the device that it names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.comm.core.devices import find_device
from penstock.job.cpus import Cpus, parts
from penstock.measure.machine.links import measure_link, sizes_around
from penstock.measure.model_profile import check_microbatch_sizes, measure_blocks, profile_of
from penstock.options.all_options import PipelineOptions
from penstock.plan.profile.schema import Profile
from penstock.runtime.malloc import keep_freed_memory
from penstock.train.config.schema import TrainConfig
from penstock.train.data.corpus import load_corpus
from penstock.train.data.window_sampler import Windows
from penstock.train.setup.model_shape import model_of, model_shape
from penstock.train.setup.optimizers import optimizer_factory
from penstock.train.setup.run_folder import is_of_a_run

_PASSES = ("precision", "tf32", "sdpa", "compile", "boundary_gradients", "max_grad_norm", "seed")
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

    Blocks compute with as many threads as each of stages x width processes on this machine would have.

    Args:
        config: its keys about model, data, optimizer, precision, kernels, device and threads count.
        sizes: samples of a microbatch, ascending.
        seconds: for each size of each block, once for every kind of pass.
        links: whether links are measured, too.
        name: of the model; that of its preset if None.
        told: called with the name of each block that is measured.

    Raises:
        ConfigError: there is no such model or device, or sizes do not ascend.
        DataError: the text is missing, unreadable or too short.
        WorkerError: a process that measures the link failed.
    """
    check_microbatch_sizes(sizes)
    config.check_chain("profiles", "which have one cost for each cut between two blocks")
    config.check_own_stages("profiles", "which measure blocks in one process")
    device = find_device(config.device)
    corpus = load_corpus(config.data, partial(is_of_a_run, Path(config.out)), config.model.vocabulary)
    model = model_of(config, model_shape(config, corpus))
    windows = Windows(corpus, model.shape.context, config.held_out, config.seed, model.pair)
    options = PipelineOptions().changed(device=device, **{key: getattr(config, key) for key in _PASSES})
    threads, before = (
        config.threads or Cpus.of_this_process().threads(config.stages * config.width),
        torch.get_num_threads(),
    )
    keep_freed_memory()
    torch.set_num_threads(threads)
    try:
        samples = {size: windows.samples(0, size) for size in sizes}
        optimizer = optimizer_factory(config.optimizer)
        measured = measure_blocks(model.blocks, samples, model.loss, optimizer, options, seconds, told)
    finally:
        torch.set_num_threads(before)
    messages = (size.output for block in measured for size in block.passes.values())
    link = [measure_link(config, sizes_around(messages))] if links else []
    said = f"measured on {_named(device, threads)}, {config.precision}, {config.optimizer.name}"
    said += _said_of_links(device) if links else ""
    (cpus,) = parts([Cpus.of_this_process()])
    cores = cpus / threads if device.type == "cpu" else None
    return profile_of(name or config.model.preset, measured, link, said, _changed(config), cores)


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
    """Return the keys that a run of a plan must have as here, where they are not the defaults."""
    values, defaults = config.model_dump(include=set(_KEPT)), TrainConfig().model_dump(include=set(_KEPT))
    found = dict[str, Any]()
    for key in _KEPT:
        if isinstance(values[key], dict):
            inner = {name: value for name, value in values[key].items() if value != defaults[key][name]}
            found |= {key: inner} if inner else {}
        elif values[key] != defaults[key]:
            found[key] = values[key]
    return found
