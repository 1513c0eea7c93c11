"""The search in boxes against all points, on random lattices whose costs go from fast to frugal."""

from itertools import product

import numpy as np
import pytest

from llmq.plan.lattice import LESS, Cost, fastest

ROOMS = {"free_bytes": 2**62, "free_host_bytes": 2**62}


def random_costs(seed, lengths, invalid=0.0):
    """Seconds and host bytes that rise along every axis, device bytes that fall; some points cannot be."""
    rng = np.random.default_rng(seed)
    steps = [rng.random((3, length)) for length in lengths]
    found = {}
    for point in product(*(range(length) for length in lengths)):
        seconds, saved, host = (
            sum(one[what, : i + 1].sum() for one, i in zip(steps, point, strict=True)) for what in range(3)
        )
        found[point] = None if rng.random() < invalid else Cost(int(1e6 - 1e5 * saved), int(1e5 * host), float(seconds))
    return found


def brute(costs, free_bytes, free_host_bytes):
    """What the search should give, from all points."""
    there = sorted((c.seconds, sum(p), p) for p, c in costs.items() if c and c.host_bytes <= free_host_bytes)
    found, room = [], free_bytes
    for _, _, point in there:
        if costs[point].num_bytes <= room:
            found.append(point)
            room = int(LESS * costs[point].num_bytes)
    return found


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("invalid", [0.0, 0.3])
def test_points_come_as_from_all_of_them(seed, invalid):
    lengths = (2, 3, 4, 3)
    costs = random_costs(seed, lengths, invalid)
    some = [cost for cost in costs.values() if cost]
    free = int(np.quantile([c.num_bytes for c in some], 0.3))
    host = int(np.quantile([c.host_bytes for c in some], 0.7))
    box = ((0,) * 4, tuple(length - 1 for length in lengths))
    found = fastest([box], costs.get, lambda point: True, free_bytes=free, free_host_bytes=host)
    assert [point for point, _ in found] == brute(costs, free, host)


def test_most_points_are_left_alone():
    lengths = (5, 5, 5, 5)
    costs, asked = random_costs(7, lengths), set()

    def cost_at(point):
        asked.add(point)
        return costs[point]

    free = int(np.quantile([c.num_bytes for c in costs.values()], 0.1))
    first = next(fastest([((0,) * 4, (4,) * 4)], cost_at, lambda p: True, free_bytes=free, free_host_bytes=2**62))
    assert first[0] == brute(costs, free, 2**62)[0] and len(asked) < len(costs) / 2


def test_a_point_that_is_not_accepted_gives_way_to_the_next():
    costs = random_costs(3, (4, 4))
    first, second, *_ = sorted(costs, key=lambda point: costs[point].seconds)
    found = fastest([((0, 0), (3, 3))], costs.get, lambda point: point != first, **ROOMS)
    assert next(found)[0] == second


def test_nothing_comes_where_nothing_fits():
    costs = random_costs(1, (3, 3))
    least = min(cost.num_bytes for cost in costs.values())
    boxes = [((0, 0), (2, 2))]
    assert not [*fastest(boxes, costs.get, lambda p: True, free_bytes=least - 1, free_host_bytes=2**62)]
    assert not [*fastest(boxes, costs.get, lambda p: True, free_bytes=2**62, free_host_bytes=-1)]
    assert not [*fastest(boxes, lambda point: None, lambda p: True, **ROOMS)]
