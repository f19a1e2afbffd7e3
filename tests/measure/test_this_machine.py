"""The machine at hand as a cluster; the link between two processes is not measured here."""

from __future__ import annotations

import pytest
import torch

from penstock.cli.plans.plan_devices import cluster_named
from penstock.measure import this_machine
from penstock.plan.profile.schema import ProfiledLink


def test_this_machine_is_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "measure_link", lambda _: ProfiledLink(bandwidth=1e9))
    monkeypatch.setattr(this_machine, "_LARGE", 1 << 16)
    monkeypatch.setattr(this_machine, "_SIDES", {"cpu": 64, "cuda": 64})
    threads = torch.get_num_threads()
    cluster = cluster_named("this-machine")
    assert (cluster.name, cluster.inside.value, cluster.between.value) == ("this-machine", 2e9, 2e9)
    assert cluster.flops.value > 1e6
    assert cluster.memory.value > 1e6
    assert all(each.source for each in (cluster.flops, cluster.memory, cluster.inside, cluster.between))
    assert (cluster.host is None) == (torch.cuda.device_count() == 0)
    assert torch.get_num_threads() == threads
    assert cluster.devices(2 * cluster.node).count == 2 * cluster.node
