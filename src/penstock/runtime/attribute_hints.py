"""What to write in place of attributes and arguments that a `Pipeline` does not have, but other libraries do."""

from __future__ import annotations

from penstock.checks import did_you_mean

_MODES = "run() has the blocks in training mode, and evaluate() in evaluation mode; leave the call out"
_LOOP = "for report in pipeline.run(loader): ... trains: forward, backward and update of every batch"
_WEIGHTS = (
    "pipeline.state_dict() has the tensors of the stages in this process, pipeline.full_state_dict() those of the "
    "whole model"
)
_PLACE = "Pipeline(..., device='cuda') moves the blocks; precision='bf16' computes in less than float32"
_SAVE = "penstock.Checkpoints(pipeline, folder) has save(), load(), and every(100) for run(save=...)"
_OPTIMIZERS = "pipeline.optimizers() has one per stage; updates are part of run(), and lr_scheduler= sets their rates"
_MODEL = (
    "load pipeline.full_state_dict() into the unsplit model, and call that; pipeline.evaluate(loader) returns the mean "
    "loss on data"
)

HABITS = {
    **dict.fromkeys(("train", "eval"), _MODES),
    **dict.fromkeys(("fit", "step", "train_batch", "train_step", "backward", "zero_grad", "no_sync"), _LOOP),
    **dict.fromkeys(("parameters", "named_parameters", "modules", "children", "buffers"), _WEIGHTS),
    **dict.fromkeys(("to", "cuda", "cpu", "half", "bfloat16", "float", "device"), _PLACE),
    **dict.fromkeys(("save", "save_checkpoint", "load_checkpoint", "save_pretrained"), _SAVE),
    **dict.fromkeys(("optimizer", "lr_scheduler", "scheduler", "clip_grad_norm_"), _OPTIMIZERS),
    **dict.fromkeys(("forward", "model", "module", "generate", "predict", "eval_batch"), _MODEL),
    "load_state_dict": f"load weights into the blocks before the pipeline is made; to resume training: {_SAVE}",
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
    "random_seed": "seed",
}
"""What other libraries call an argument -> what it is called here."""


def no_argument(name: str, known: list[str]) -> str:
    """Return the message for an argument that `Pipeline(...)` does not have.

    Args:
        name: of the argument.
        known: those that it has.
    """
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
    "a Pipeline is not pickled or copied. Its weights: torch.save(pipeline.full_state_dict(), path); all that training "
    f"depends on: {_SAVE}"
)
NO_CALL = f"a Pipeline is not called. {_LOOP}. For outputs, {_MODEL}"
