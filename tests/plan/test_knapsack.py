"""The knapsack of a stage: exact against every choice, bounds on both sides of it."""

import itertools
from random import Random

import numpy as np
import pytest

from penstock.plan.stages.knapsack import bounds_of_two, greedy_time, least_time


def instances(count, ways):
    random = Random(5)
    for _ in range(count):
        layers = random.randint(1, 7)
        seconds = [np.array([float(random.randint(0, 9)) for _ in range(ways)]) for _ in range(layers)]
        memory = [np.array([float(random.randint(0, 9)) for _ in range(ways)]) for _ in range(layers)]
        yield seconds, memory, random.uniform(0, 4.5 * layers)


def every_choice(seconds, memory, limit):
    fitting = [
        sum(float(s[w]) for s, w in zip(seconds, ways, strict=True))
        for ways in itertools.product(*(range(len(s)) for s in seconds))
        if sum(float(m[w]) for m, w in zip(memory, ways, strict=True)) <= limit
    ]
    return min(fitting, default=None)


@pytest.mark.parametrize("ways", [2, 3])
def test_least_time_is_that_of_the_best_choice(ways):
    found = [(least_time(*each), greedy_time(*each), every_choice(*each), each) for each in instances(80, ways)]
    assert {best is None for _, _, best, _ in found} == {True, False}
    for exact, greedy, best, (seconds, memory, limit) in found:
        if best is None:
            assert exact is None
            assert greedy is None
            continue
        assert exact.seconds == best
        for choice in (exact, greedy):
            assert sum(m[w] for m, w in zip(memory, choice.ways, strict=True)) <= limit
            assert sum(s[w] for s, w in zip(seconds, choice.ways, strict=True)) == choice.seconds
        assert greedy.seconds >= best


def test_bounds_hold_and_meet_where_layers_are_alike():
    gaps = 0
    for seconds, memory, limit in instances(150, 2):
        inside = np.ones((1, len(seconds)), dtype=bool)
        lower, upper = bounds_of_two(np.array(seconds)[None], np.array(memory)[None], inside, limit)
        best = every_choice(seconds, memory, limit)
        if best is None:
            assert upper[0] == np.inf
        else:
            assert lower[0] <= best * (1 + 1e-12)
            assert best <= upper[0]
            gaps += lower[0] < upper[0]
    assert gaps > 5  # so the bounds are not tested where they are equal only
    seconds, memory = np.tile([3.0, 5.0], (1, 9, 1)), np.tile([10.0, 4.0], (1, 9, 1))
    for limit in range(36, 91, 5):
        lower, upper = bounds_of_two(seconds, memory, np.ones((1, 9), dtype=bool), float(limit))
        assert lower[0] == upper[0]


def test_too_many_points_are_given_up():
    random = Random(1)
    seconds = [np.array([0.0, random.random()]) for _ in range(8)]
    memory = [np.array([random.random(), 0.0]) for _ in range(8)]
    with pytest.raises(OverflowError):
        least_time(seconds, memory, 4.0, most=3)
