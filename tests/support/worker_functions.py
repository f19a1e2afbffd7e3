"""Functions that tests run in workers; in a module of their own so that spawned processes can import them."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from penstock.stage.blocks.module import StageModule
from penstock.train.config.load import validate_config
from penstock.train.loop import train


def list_modules(path: str, _: str) -> None:
    """Write down the modules of a worker, and where processes of its job listen for connections."""
    processes = [psutil.Process(), *psutil.Process().parents()[:2]]
    listening = [c.laddr.ip for p in processes for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    Path(path).write_text(json.dumps({"modules": list(sys.modules), "listening": listening}))


def raise_on_rank_1(_: str) -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("planted failure")
    time.sleep(120)  # a worker that would never notice by itself


def die_on_rank_1(_: str) -> None:
    if os.environ["RANK"] == "1":
        os._exit(17)
    time.sleep(120)


class Silent:
    """An observer that shows nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def fail_in_training(values: dict[str, Any], folder: str, rank: int, how: str, drain: str) -> None:
    """Train; on one rank a block raises, or the process is killed, at its fifth microbatch, while the others wait."""
    (Path(folder) / f"start-{os.environ['RANK']}-{os.getpid()}").touch()
    run, calls = StageModule.run, []

    def failing(self: StageModule, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 5 and int(os.environ["RANK"]) == rank:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("planted in a block")
        return run(self, *arguments)

    StageModule.run = failing  # type: ignore[method-assign]
    train(validate_config(values), Path(folder), Silent(), Path(drain))


def stop_at_the_end(_: str) -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_nothing(_: str) -> None:
    time.sleep(120)  # without a connection whose end would tell


def stop_after_the_end(_: str) -> None:
    """Rank 1 is stopped when it has done its part and waits for the launcher, before rank 0 has done its own."""
    if os.environ["RANK"] == "1":
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGSTOP]).start()
    else:
        time.sleep(1.5)
