"""How many microbatches a method needs, in closed form."""


def least(method: str, stages: int) -> int:
    """The smallest legal number of microbatches: what the tests of the search itself compare with."""
    return max(1, {"2bw": stages - 1, "2bw-eager": 2 * stages - 2}.get(method, 1))
