"""The main command with few steps, as a person starts it."""

import os
import subprocess
import sys

TINY = [
    "batches=3", "microbatches=2", "microbatch_size=2", "model.layers=2", "model.width=32", "model.heads=2",
    "model.context=16", "validation_samples=8", "sample_length=12", "threads=1",
]  # fmt: skip


def settings(*changes):
    return [part for change in (*TINY, *changes) for part in ("--set", change)]


def start(*command, **kwargs):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "RANK"))}
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=120, env=environment, **kwargs
    )


def only_folder(out):
    (folder,) = out.iterdir()
    return folder
