"""Training on a Ray cluster, which starts the ranks and restarts them; needs `pip install penstock[ray]`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import CapabilityError, WorkerError


def train_on_ray(
    values: Mapping[str, Any], *, cpus_per_rank: int = 1, gpus_per_rank: int = 0, folder: Path | str | None = None
) -> Path:
    """Train with Ray's TorchTrainer; the ranks of one node follow each other, so that a pipeline stays together.

    Ray makes the process group. If ranks or nodes fail, it starts all ranks again, up to `restarts` times, and they go
    on from the newest checkpoint.

    Args:
        values: keys of `penstock train`; `out` must be a folder that all nodes share.
        cpus_per_rank, gpus_per_rank: what Ray reserves for each.
        folder: of a run that is to go on; a new one in `out` if not given.

    Returns:
        The folder of the run.

    Raises:
        CapabilityError: Ray is not installed.
        ConfigError: the configuration is wrong.
        WorkerError: the job has failed more often than `restarts`.
    """
    try:
        import ray.train
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        raise CapabilityError(f"training on Ray needs Ray ({error}); pip install 'penstock[ray]'") from None
    from penstock.train.config.load import validate_config
    from penstock.train.setup.run_folder import make_run_folder

    config = validate_config(dict(values))
    place = Path(folder if folder is not None else make_run_folder(config)).resolve()
    trainer = TorchTrainer(
        train_rank,
        train_loop_config={"values": config.model_dump(), "folder": str(place)},
        torch_config=TorchConfig(backend="gloo", timeout_s=int(config.timeout)),
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.processes,
            use_gpu=gpus_per_rank > 0,
            resources_per_worker={"CPU": cpus_per_rank} | ({"GPU": gpus_per_rank} if gpus_per_rank else {}),
            placement_strategy="PACK",
        ),
        run_config=ray.train.RunConfig(
            name="ray", storage_path=str(place), failure_config=ray.train.FailureConfig(max_failures=config.restarts)
        ),
    )
    try:
        trainer.fit()
    except Exception as error:
        raise WorkerError(f"the job on Ray has failed: {error}", "") from error
    return place


def train_rank(job: Mapping[str, Any]) -> None:
    """Train as one rank, which Ray has started."""
    from penstock.measure.recompute_for_config import chosen_recompute
    from penstock.train.config.load import validate_config
    from penstock.train.loop import train
    from penstock.view.progress import TerminalObserver

    observer = TerminalObserver()
    try:
        config = validate_config(dict(job["values"]))
        train(config, Path(job["folder"]), observer, choose=chosen_recompute)
    finally:
        observer.close()
