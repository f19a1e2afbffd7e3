"""Slurm's notations for nodes and tasks."""

import pytest

from penstock.job.slurm_notation import first_host, tasks_on_node


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("node[03-10,12],gpu7", "node03"),
        ("rack[1-2]n[4,5].site.org,x", "rack1n4.site.org"),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_the_tasks_of_each_node() -> None:
    counts = [tasks_on_node({"SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": str(node)}) for node in range(5)]
    assert counts == [2, 2, 2, 1, None]
    assert tasks_on_node({}) is None
