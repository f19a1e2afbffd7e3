"""Silent edges between two processes: the bits of one process, the numbers of plain torch, the same refusals."""

from __future__ import annotations

import pytest
import torch

from support.edge_habits import HABITS, METHODS, PLAIN, train, train_plainly
from support.plain_training import assert_close_weights
from support.pool import Pool

pytestmark = pytest.mark.processes
REFUSED = {
    "a parameter frozen between runs": "stage 0 on rank 0: 0.weight no longer requires gradients",
    "shared memory": "ConfigError: 4.weight and 2.weight are two tensors over the same memory",
    "a loader that refills": "DataError: batch 0 was written into",
    "a factory of nothing": "CapabilityError: ",
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", HABITS)
def test_two_processes_do_what_one_does(pool: Pool, name: str, method: str) -> None:
    alone = train(None, name, method)
    first, last = pool.submit(train, name, method, ranks=2, fresh=True)
    if name in REFUSED:
        here, *there = [result.get("error", "") for result in (alone, first, last)]
        assert REFUSED[name] in here
        assert any(REFUSED[name] in text for text in there)  # by the process that has the stage
        assert all(REFUSED[name] in text or text.startswith("TransportError: ") for text in there), there
        return
    for result in (first, last):
        assert "error" not in result, result["error"]
        assert result["updates"] == alone["updates"] != []
        assert all(torch.equal(tensor, alone["own"][key]) for key, tensor in result["own"].items())
    assert first["weights"].keys() == alone["weights"].keys()
    assert all(torch.equal(tensor, alone["weights"][key]) for key, tensor in first["weights"].items())
    if name in PLAIN:
        assert_close_weights(first["weights"], train_plainly(name, method))
