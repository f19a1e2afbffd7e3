"""How far two runs are apart, and where first."""

from __future__ import annotations

import math

import pytest
import torch

from penstock.verify.differences import Comparison, TensorPlace, apart


def test_how_far_tensors_are_apart() -> None:
    a = torch.tensor([3.0, 4.0])
    assert apart(a, a.clone()) == (0.0, 0.0)
    assert apart(a + torch.tensor([0.3, -0.4]), a) == pytest.approx((0.4, 0.1))
    assert apart(2.5, 2.0) == (0.5, 0.25)
    assert apart(torch.tensor([math.nan, 4.0]), torch.tensor([math.nan, 4.0])) == (0.0, 0.0)
    assert apart(torch.tensor([-0.0]), torch.tensor([0.0])) == (0.0, 0.0)
    for strange in (torch.tensor([math.nan, 4.0]), torch.tensor([math.inf, 4.0]), torch.ones(3)):
        assert apart(strange, a) == (math.inf, math.inf)
        assert apart(a, strange) == (math.inf, math.inf)
    assert apart(a, torch.zeros(2)) == (4.0, math.inf)
    assert str(TensorPlace(0, "w", *apart(a, torch.zeros(2)))) == "w: 4 from zero"
    tiny = torch.tensor([3.0, torch.nextafter(torch.tensor(4.0), torch.tensor(5.0))])
    assert 0 < apart(tiny, a)[1] < 1e-7


def test_what_one_run_lacks_differs() -> None:
    wanted = {(0, "a"): 1.0, (1, "a"): 1.0}
    comparison = Comparison(wanted, 0.1, pipelines=2)
    for batch, pipeline in ((0, 0), (1, 0), (0, 1)):
        comparison.see(batch, "a", 1.05, pipeline)
    found = comparison.result(complete=False)
    assert found.agrees
    assert found.worst is not None
    assert found.worst.relative == pytest.approx(0.05)
    found = comparison.result()
    assert (found.compared, found.differing) == (4, 1)
    assert found.first == (1, "a of pipeline 1", math.inf, math.inf)
    comparison = Comparison(wanted, 0.1)
    for batch, name in ((0, "a"), (1, "a"), (1, "b")):
        comparison.see(batch, name, 1.0)
    assert comparison.result().first == (1, "b", math.inf, math.inf)


def test_the_first_place_is_that_of_the_first_batch_that_differs_most() -> None:
    comparison = Comparison({(t, name): 1.0 for t in range(3) for name in "ab"}, 0.1)
    for batch, name, value in ((2, "a", 9.0), (1, "a", 1.2), (1, "b", 1.3), (0, "a", 1.05), (2, "b", 5.0)):
        comparison.see(batch, name, value)
    found = comparison.result(complete=False)
    assert found.differing == 4
    assert found.first is not None
    assert found.worst is not None
    assert (found.first[:2], found.worst[:2]) == ((1, "b"), (2, "a"))
