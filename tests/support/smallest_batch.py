"""How many microbatches a method needs, in closed form, and which methods run whole passes on one stage per rank."""

CHAINS = ("sequential", "gpipe", "1f1b", "eager", "2bw", "2bw-eager", "stash", "vertical-sync", "newest")
"""The others have tests of their own, in test_orders_of_the_literature.py and test_orders_in_time.py."""


def least(method: str, stages: int) -> int:
    """The smallest legal number of microbatches: what the tests of the search itself compare with."""
    return max(1, {"2bw": stages - 1, "2bw-eager": 2 * stages - 2, "3bw": stages // 2}.get(method, 1))
