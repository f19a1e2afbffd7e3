"""Planted in the processes of a job: a worker for which a file appears fails, or hangs, in the code of its model."""

import os
import sys
import threading
import time
from pathlib import Path

FOLDER = os.environ.get("PENSTOCK_PLANTED", "")


def _fails(*_: object, **__: object) -> None:
    raise ZeroDivisionError("planted in a model")


def _hangs(*_: object, **__: object) -> None:
    time.sleep(3600.0)


def _watch() -> None:
    deeds = {"fails": _fails, "hangs": _hangs}
    while True:
        rank = os.environ.get("RANK", "none")
        for name, deed in deeds.items():
            asked = Path(FOLDER, f"{name}-{rank}")
            if asked.exists() and "torch" in sys.modules:
                asked.unlink()
                sys.modules["torch"].nn.functional.linear = deed
                return
        time.sleep(0.005)


def _start() -> None:
    threading.Thread(target=_watch, daemon=True).start()


if FOLDER:
    os.register_at_fork(after_in_child=_start)
