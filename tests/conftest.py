"""What the tests of several folders share."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from support.pool import Pool

settings.register_profile("untimed", deadline=None)  # a busy machine is no fault
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The number of threads changes the last bits of a sum."""
    torch.set_num_threads(1)


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> str:
    """Where a test computes: everywhere that is at hand."""
    found: str = request.param
    return found


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes with a gloo group; see `Pool.submit`."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """So that they can be chosen, or left out."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker("processes")
