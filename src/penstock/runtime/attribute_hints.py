"""What to write in place of attributes and arguments that a `Pipeline` does not have, but other libraries do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from penstock.checks import did_you_mean

Method = TypeVar("Method", bound=Callable[..., Any])

_MODES = "run() has the blocks in training mode, and evaluate() in evaluation mode; leave the call out"
_LOOP = (
    "for report in pipeline.run(loader): ... trains: forward, backward and update of every batch; step(batch) does "
    "it for one, where batches do not overlap"
)
_WEIGHTS = (
    "pipeline.state_dict() has the tensors of the stages in this process, pipeline.full_state_dict() those of the "
    "whole model"
)
_PLACE = "Pipeline(..., device='cuda') moves the blocks; precision='bf16' computes in less than float32"
_SAVE = "penstock.Checkpoints(pipeline, folder) has save(), load(), and every(100) for run(save=...)"
_OPTIMIZERS = "pipeline.optimizers() has one per stage; updates are part of run(), and lr_scheduler= sets their rates"
_MODEL = (
    "load pipeline.full_state_dict(model) into the unsplit model, and call that; pipeline.evaluate(loader) returns the "
    "mean loss on data, pipeline.predict(loader) yields outputs"
)

HABITS = {
    **dict.fromkeys(("train", "eval"), _MODES),
    **dict.fromkeys(("fit", "train_batch", "train_step", "backward", "zero_grad", "no_sync"), _LOOP),
    **dict.fromkeys(("parameters", "named_parameters", "modules", "children", "buffers"), _WEIGHTS),
    **dict.fromkeys(("to", "cuda", "cpu", "half", "bfloat16", "float", "device"), _PLACE),
    **dict.fromkeys(("save", "save_checkpoint", "load_checkpoint", "save_pretrained"), _SAVE),
    **dict.fromkeys(("optimizer", "lr_scheduler", "scheduler", "clip_grad_norm_"), _OPTIMIZERS),
    **dict.fromkeys(("forward", "model", "module", "generate", "eval_batch"), _MODEL),
    "compile": "compile the blocks before the pipeline is made: for block in blocks: block.compile()",
    "summary": "print(penstock.summary(pipeline)) has the time and the memory of every rank",
    "draw": "penstock.check(pipeline.schedule).draw(), and penstock.draw_timeline(pipeline.timeline()) of what ran",
    "rank": "torch.distributed.get_rank(group); pipeline.stages has the stages in this process",
}

ARGUMENTS = {
    **dict.fromkeys(("loss_fn", "criterion", "loss_function", "loss_func"), "loss"),
    **dict.fromkeys(
        ("num_microbatches", "n_microbatches", "micro_batches", "chunks", "gradient_accumulation_steps"), "microbatches"
    ),
    **dict.fromkeys(("num_stages", "n_stages", "depth", "pp", "pp_size", "pipeline_parallel_size"), "stages"),
    **dict.fromkeys(("scheduler", "lr_schedule", "schedulers"), "lr_scheduler"),
    **dict.fromkeys(("optim", "optimizers", "optimizer_class", "optimizer_factory"), "optimizer"),
    **dict.fromkeys(("clip", "grad_clip", "clip_grad_norm", "gradient_clipping", "max_norm"), "max_grad_norm"),
    **dict.fromkeys(("dp", "dp_size", "width", "replicas", "data_parallel_size"), "data_parallel"),
    **dict.fromkeys(("dtype", "mixed_precision", "amp", "bf16", "fp16"), "precision"),
    **dict.fromkeys(
        ("checkpoint", "checkpointing", "activation_checkpointing", "activation_checkpoint_interval"), "recompute"
    ),
    **dict.fromkeys(("balance", "split_points", "split_spec", "tied", "partition_method"), "partition"),
    **dict.fromkeys(("model", "module", "layers", "stage_modules"), "blocks"),
    **dict.fromkeys(("correction", "delays"), "staleness"),
    **dict.fromkeys(("process_group", "pg", "pp_group"), "group"),
    **dict.fromkeys(("ema", "ema_beta"), "ema_decay"),
    **dict.fromkeys(("devices", "device_ids", "device_map"), "device"),
    **dict.fromkeys(("schedule", "pipeline_schedule", "schedule_class", "order"), "method"),
    "random_seed": "seed",
}
"""What other libraries call an argument -> what it is called here."""


_RUNS = "pass data to pipeline.run: for report in pipeline.run(loader): ..."
_EPOCHS = "go through the data again: for epoch in range(2): for report in pipeline.run(loader): ..."
_FEWER = "pipeline.run trains as long as its data last: itertools.islice(loader, 100) has 100 batches"
_HELD_OUT = "during a run: evaluate=penstock.Evaluating(50, validation_loader); after it: pipeline.evaluate(loader)"
_SAVES = "checkpoints = penstock.Checkpoints(pipeline, folder), then pipeline.run(loader, save=checkpoints.every(100))"

ADVICE = {
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs", "max_epochs", "num_train_epochs"), _EPOCHS),
    **dict.fromkeys(("steps", "max_steps", "num_steps", "iterations", "num_batches", "batches", "train_iters"), _FEWER),
    **dict.fromkeys(("dataloader", "data_loader", "train_loader", "loader", "dataset", "training_data", "data"), _RUNS),
    **dict.fromkeys(("validation_loader", "val_loader", "eval_loader", "eval_dataset", "validation"), _HELD_OUT),
    **dict.fromkeys(("checkpoints", "save_every", "save_steps", "checkpoint_dir", "output_dir"), _SAVES),
    **dict.fromkeys(
        ("batch_size", "micro_batch_size", "microbatch_size", "train_batch_size", "train_micro_batch_size_per_gpu"),
        "a batch has as many samples as the loader puts into it; microbatches= says into how many parts it is split",
    ),
    **dict.fromkeys(
        ("lr", "learning_rate", "weight_decay"),
        "it belongs to the optimizer: optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3)",
    ),
    **dict.fromkeys(
        ("sharding", "zero", "zero_stage", "zero_optimization", "fsdp"),
        "parallel pipelines divide their state: data_parallel=penstock.DataParallel(2, sharding='optimizer')",
    ),
    "in_flight": "it goes with the number of microbatches: microbatches=penstock.Microbatches(8, in_flight='auto')",
    **dict.fromkeys(("timeout", "waits"), "it goes with the group: group=penstock.Group(group, timeout=60.0)"),
    **dict.fromkeys(
        ("rank", "world_size", "num_gpus", "n_gpus"),
        "torchrun starts the processes; pass group=torch.distributed.group.WORLD",
    ),
}
"""What other libraries have as an argument and Penstock has not -> how to do that here."""


def positional(given: int) -> str:
    """Return the message for more arguments without a name than `Pipeline(...)` takes."""
    return (
        "Pipeline takes the blocks and the method by position; give the others by name: Pipeline(blocks, "
        f"method='1f1b', stages=2, microbatches=4, loss=..., optimizer=...); got {given} by position"
    )


def names_checked(function: Method) -> Method:
    """Let a method say how to do what an argument means that other libraries have."""
    known = list(signature(function).parameters)[1:]

    @wraps(function)
    def checked(*arguments: Any, **given: Any) -> Any:
        for name in given:
            if name not in known:
                advice = _SAVES if name == "checkpoint" else ADVICE.get(name)
                hint = f"; {advice}" if advice else f".{did_you_mean(name, known)}"
                raise TypeError(f"{function.__name__} has no argument {name!r}{hint}")
        return function(*arguments, **given)

    return checked  # type: ignore[return-value]


def no_argument(name: str, known: list[str]) -> str:
    """Return the message for an argument that `Pipeline(...)` does not have.

    Args:
        name: of the argument.
        known: those that it has.
    """
    if name in ADVICE:
        return f"Pipeline takes no argument {name!r}; {ADVICE[name]}"
    hint = f" Did you mean {ARGUMENTS[name]!r}?" if name in ARGUMENTS else did_you_mean(name, known)
    return f"Pipeline takes no argument {name!r}.{hint}"


def missing(name: str, known: list[str]) -> str:
    """Return the message for an attribute that a pipeline does not have.

    Args:
        name: of the attribute.
        known: those that it has.
    """
    hint = f"; {HABITS[name]}" if name in HABITS else f".{did_you_mean(name, known)}".rstrip(".")
    return f"a Pipeline has no attribute {name!r}{hint}"


NO_PICKLE = (
    "a Pipeline is not pickled or copied. Its weights: weights = pipeline.full_state_dict() on all ranks, then "
    f"torch.save(weights, path) if there are any (on rank 0); all that training depends on: {_SAVE}"
)
NO_CALL = f"a Pipeline is not called. {_LOOP}. For outputs, {_MODEL}"


class UserAdvice:
    """The part of `Pipeline` that answers to names and habits of other libraries: it says what to write instead."""

    if not TYPE_CHECKING:  # or type checkers would take every name

        def __init_subclass__(cls, **more):
            """Show the signature of `__init__`, not that of `__new__`."""
            super().__init_subclass__(**more)
            cls.__signature__ = signature(partial(cls.__init__, None))

        def __new__(cls, *places, **given):
            """Refuse arguments of other libraries, before Python asks for those that are missing."""
            if len(places) > 2:
                raise TypeError(positional(len(places)))
            known = signature(cls.__init__).parameters
            unknown = [name for name in given if name not in known]
            if unknown:
                raise TypeError(no_argument(unknown[0], list(known)[1:]))
            if (places or given) and len(places) < 2 and "method" not in given:
                raise TypeError(
                    "Pipeline takes a method, such as Pipeline(blocks, method='1f1b', stages=2, microbatches=4, "
                    "loss=..., optimizer=...); `penstock methods` lists all"
                )
            return super().__new__(cls)

        def __getattr__(self, name):
            """Say what to write in place of a name that other libraries have."""
            raise AttributeError(missing(name, [n for n in dir(type(self)) if not n.startswith("_")]))

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Say what to write instead: there is no forward without its backward and update."""
        raise TypeError(NO_CALL)

    def __reduce__(self) -> NoReturn:
        """Say how to save what is worth saving."""
        raise TypeError(NO_PICKLE)
