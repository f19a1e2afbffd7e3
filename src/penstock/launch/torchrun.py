"""Workers of torchrun: whether this process is one, and which of them says what all of them would say."""

from __future__ import annotations

import os
import zlib
from datetime import timedelta

_PATIENCE = timedelta(seconds=5)


def is_worker() -> bool:
    """Return whether torch elastic (torchrun) started this process as a worker of a job."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def is_first_to_say(message: str) -> bool:
    """Return whether this process is to print a message.

    False in a worker of torchrun if another one has asked for the same message since the workers were started, as it
    then prints it. True everywhere else, and where the store of the job cannot be reached.
    """
    if not is_worker():
        return True
    from torch.distributed.rendezvous import rendezvous

    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=_PATIENCE)))
        return int(store.add(f"penstock/said/{start}/{zlib.crc32(message.encode()):08x}", 1)) == 1
    except Exception:  # whatever is wrong with the store, the message matters more
        return True
