"""Which candidate is the fastest: of single runs, and where a load lasts."""

from collections.abc import Mapping

import pytest

from llmq.ops.cuda.timing import CLOSE, ROUNDS, ranking


class Timed:
    """Candidates with a time for a single run and one at a lasting load, every other reading disturbed."""

    def __init__(self, single: Mapping[int, float], lasting: Mapping[int, float]) -> None:
        self.single, self.loaded, self.asked = single, lasting, []

    def times(self, index: int, count: int) -> list[float]:
        return [self.single[index]] * (count - 1) + [3 * self.single[index]]

    def lasting(self, index: int, microseconds: float) -> float:
        assert microseconds == self.single[index]
        self.asked.append(index)
        return self.loaded[index] * (2 if len(self.asked) == 1 else 1)


def test_single_runs_decide_where_no_load_lasts():
    runner = Timed({3: 100, 1: 101, 2: 150}, {})
    order, means = ranking(runner, [1, 2, 3], lasting=False)
    assert order == [3, 1, 2] and means == {1: 101, 2: 150, 3: 100}


def test_a_lasting_load_decides_among_those_that_are_close():
    runner = Timed({0: 100, 1: 103, 2: 100 * CLOSE + 1, 3: 105}, {0: 130, 1: 125, 2: 1, 3: 120})
    order, means = ranking(runner, [0, 1, 2, 3], lasting=True)
    assert order == [3, 1, 0, 2]
    assert means[3] == 105  # what is noted stays the time of a single run
    assert sorted(runner.asked) == sorted([0, 1, 3] * ROUNDS)
    assert runner.asked[:3] == runner.asked[3:6]  # in turns, so that a GPU that grows warm is warm for all


@pytest.mark.parametrize("others", [{}, {1: 120.0}])
def test_one_alone_needs_no_load(others):
    runner = Timed({0: 100, **others}, {})
    assert ranking(runner, [0, *others], lasting=True)[0] == [0, *others]
    assert not runner.asked
