"""A whole model in place of blocks: the blocks that it calls, or what to write where they cannot be found."""

from __future__ import annotations

from torch import nn

from penstock.errors import ConfigError
from penstock.partition.whole_model.fx_subgraph_module import ModelBlocks, ModelPart, changed_part
from penstock.partition.whole_model.fx_trace import CannotFollowError, without_guards
from penstock.partition.whole_model.traced_blocks import blocks_of_forward, called_parts

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_CALL = nn.Module.__call__
_PLAIN = "pass the parts of the model itself"
WRAPPERS = {
    "DistributedDataParallel": f"{_PLAIN} (model.module), and data_parallel=2 for two parallel pipelines",
    "DataParallel": f"{_PLAIN} (model.module), and data_parallel=2 for two parallel pipelines",
    "FullyShardedDataParallel": f"{_PLAIN}: its stages are sharded over the ranks already",
    "FSDPModule": f"{_PLAIN}, without fully_shard, and data_parallel=penstock.DataParallel(2, sharding='full')",
}
"""What wraps modules for other kinds of parallelism, with what to do instead."""

_AGAIN = (
    "make a new Pipeline of the changed model (a checkpoint from before the change can be loaded into it if parameters "
    "have kept their names and shapes)"
)

_EXAMPLE = "pass example=inputs, inputs of a batch, with which any model is divided as it is"


def own_part(container: nn.Module) -> str | None:
    """Return what a container has that would be lost if its children were called in turn; None if nothing.

    Args:
        container: an nn.Sequential, nn.ModuleList or nn.ModuleDict, or of a class made from one.
    """
    base = nn.Sequential if isinstance(container, nn.Sequential) else nn.Module
    if getattr(container.forward, "__func__", None) is not base.forward or type(container).__call__ is not _CALL:
        return "a forward of its own"
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    if any(getattr(container, kind) for kind in hooks):
        return "hooks"
    state = next(iter({**container._parameters, **container._buffers}), None)
    return None if state is None else f"a parameter or buffer of its own, {state}"


def refuse_wrapped(name: str, module: nn.Module) -> None:
    """Refuse a module that is wrapped for another kind of parallelism, as is one in it.

    Raises:
        ConfigError: it is; the message says what to do instead.
    """
    for path, inner in module.named_modules():
        for kind in type(inner).__mro__:  # fully_shard makes a class from that of the module and FSDPModule
            if kind.__name__ in WRAPPERS:
                where = f"{name}, in {path}," if path else name
                raise ConfigError(f"{where} is of type {type(inner).__name__}; {WRAPPERS[kind.__name__]}")


def check_whole_model(model: nn.Module) -> None:
    """Refuse a whole model that is wrapped or compiled.

    Raises:
        ConfigError: it is.
    """
    refuse_wrapped("the model", model)
    if type(model).__name__ == "OptimizedModule":  # of torch.compile
        raise ConfigError(
            f"the model is compiled as a whole; {_PLAIN}, and compile each: for block in blocks: block.compile()"
        )


def blocks_of_model(model: nn.Module) -> ModelBlocks:
    """Return the blocks that a whole model calls one after the other, by name, and compute what it does.

    Raises:
        ConfigError: they cannot be found; the message shows what to write.
    """
    kind = type(model).__name__
    check_whole_model(model)
    try:
        return ModelBlocks(model, _found(model))
    except CannotFollowError as error:
        what = f"{kind} has {own_part(model)}, so it is one" if isinstance(model, CONTAINERS) else f"{kind} is one"
        raise ConfigError(
            f"{what} module, and its forward cannot be followed to divide it into blocks: {error}; {_EXAMPLE}: "
            "penstock.Pipeline(model, ..., example=inputs)"
        ) from None


def check_same_model(blocks: ModelBlocks) -> None:
    """Make sure that a whole model still does what the blocks do that were made of it.

    Raises:
        ConfigError: a module was replaced, or the forward is another one, as after an attribute was changed.
    """
    try:
        now = _found(blocks.model)
    except CannotFollowError as error:
        said = f"the forward of the model has changed since the pipeline was made: {error}"
        raise ConfigError(f"{said}; {_AGAIN}") from None
    path = changed_part(blocks) or blocks.replaced_forward()
    for name, block in blocks.items():
        other = now.get(name)
        if path is None and other is not block and not isinstance(block, ModelPart):
            path = name
        elif path is None and getattr(block, "text", "") != getattr(other, "text", ""):
            raise ConfigError(
                f"the forward of the model does something else in block {name!r} since the pipeline was made, as after "
                f"an attribute that it reads was changed; {_AGAIN}"
            )
    path = path or next((name for name in now if name not in blocks), None)
    if path is not None:
        raise ConfigError(
            f"{path} is another object since the pipeline was made of the model, so the pipeline would train without "
            f"that change; {_AGAIN}"
        )


def _found(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model, of which other processes may train some.

    Raises:
        CannotFollowError: there are none that are known to be right.
    """
    with without_guards(model):
        if type(model).__module__.startswith("transformers."):
            raise CannotFollowError("models of transformers take masks, caches and more")
        if type(model).forward is nn.Module.forward:
            raise CannotFollowError("it has none")
        parts = called_parts("", model)  # of a TransformerEncoder
        return blocks_of_forward(model) if "" in parts else parts
