"""Gradients in the books of a stage: when they are complete, and what they take part in."""

import pytest

from penstock.schedule.ir.schedule import Op
from penstock.schedule.stage_state.gradient_state import Gradients
from penstock.schedule.stage_state.microbatch_state import BooksError


def test_a_gradient_accumulates_until_its_last_backward():
    gradients = Gradients(3, ())
    assert not gradients.accumulates(4)
    gradients.begin(4)
    found = []
    for _ in range(3):
        found.append(gradients.accumulates(4))
        gradients.add(4, 3, 3, 0)
    assert found == [True, True, True]
    assert not gradients.accumulates(4)
    assert gradients.ready_for(Op.STEP, 4).forward == 9


def test_collectives_come_once_and_in_order():
    gradients = Gradients(1, (Op.REDUCE, Op.DECIDE))
    gradients.begin(0)
    with pytest.raises(BooksError):
        gradients.join(Op.REDUCE, 0)  # before the backward
    gradients.add(0, 0, 0, 0)
    with pytest.raises(BooksError):
        gradients.join(Op.DECIDE, 0)  # before the sum
    gradients.join(Op.REDUCE, 0)
    with pytest.raises(BooksError):
        gradients.join(Op.REDUCE, 0)  # a second time
    gradients.join(Op.DECIDE, 0)
    assert gradients.ready_for(Op.STEP, 0).joined == (Op.REDUCE, Op.DECIDE)


def test_later_gradients_are_the_same_relative_to_their_batch():
    gradients = Gradients(2, ())
    gradients.begin(5)
    gradients.add(5, 4, 5, 0)
    assert gradients.shifted(3).state(8) == gradients.state(5)
    copy = gradients.copy()
    copy.add(5, 4, 5, 0)
    assert gradients.accumulates(5)
    assert not copy.accumulates(5)
