"""Functions that tests run in workers; in a module of their own so that spawned processes can import them."""

import os
import time


def raise_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("planted failure")
    time.sleep(120)  # a worker that would never notice by itself


def die_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        os._exit(17)
    time.sleep(120)
