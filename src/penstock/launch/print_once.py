"""Chooses, among workers of torchrun, the one that prints what all of them would print."""

from __future__ import annotations

import os
import zlib
from datetime import timedelta

from penstock.job.place import job_place

_PATIENCE = timedelta(seconds=5)


def is_first_to_say(message: str) -> bool:
    """Return whether this process is to print a message.

    False in a worker of torchrun if another one has asked for the same message since the workers were started, as it
    then prints it. True everywhere else, and where the store of the job cannot be reached.
    """
    try:
        place = job_place(os.environ)
        if place is None or not place.served:
            return True
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(place.address, place.port, is_master=False, timeout=_PATIENCE, wait_for_workers=False)
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return int(store.add(f"penstock/said/{start}/{zlib.crc32(message.encode()):08x}", 1)) == 1
    except Exception:  # whatever is wrong with the store, the message matters more
        return True
