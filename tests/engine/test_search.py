"""The search of settings beside every setting there is: the fastest that fits, and then those that need less; and the
search in boxes against all points, on random lattices whose costs go from fast to frugal."""

from itertools import product

import numpy as np
import pytest
from tiny_engines import BF16, plan_of, tiny

from llmq.engine.cost import Cost, Costs
from llmq.engine.predict import sustained
from llmq.engine.search import LESS, WORTH, Available, Search, fastest
from llmq.hardware import cards
from llmq.plan.remedies import NOTHING, WHOLE, Terms, axes, masters, moments

WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
UNLIMITED = 2**62


def searched(free_bytes, host_bytes=UNLIMITED, **about):
    """A search among the settings of a small model, with and without other numbers."""
    spec = plan_of(BF16, config=tiny(num_layers=1, **WIDE), batch_size=2, seq_len=64).spec
    costs = {False: Costs(None, None, sustained(cards.named("H200")))}
    return Search(spec, Terms(8, (2, 1), (WHOLE, (2, 1, 2)), **about), Available(free_bytes, host_bytes), costs)


def every_cost(search, alternatives):
    """Of all combinations, with more seconds where numbers change."""
    for alternative in alternatives:
        base = alternative.of(search.spec)
        for remedies in product(*axes(base, search.terms)):
            spec = base
            for remedy in remedies:
                spec = remedy(spec)
            search._costs[False].plan(spec)
            cost = search._costs[False].of(spec, 8 // spec.batch_size)
            yield cost, cost.seconds * WORTH**alternative.kinds


@pytest.mark.slow
@pytest.mark.parametrize("changing", [False, True])
def test_the_fastest_of_all_that_fit_is_first(changing, few_remedies):
    """In rooms from little to enough for everything."""
    spec = searched(0).spec
    alternatives = [NOTHING, *(moments(spec) + masters(spec)[:1] if changing else [])]
    every = list(every_cost(searched(0), alternatives))
    sizes = sorted(cost.num_bytes for cost, _ in every)
    hosts = sorted(cost.host_bytes for cost, _ in every)
    for free, host in ((sizes[0], UNLIMITED), (sizes[len(sizes) // 3], hosts[len(hosts) // 2]), (sizes[-1], 0)):
        best = searched(free, host).best(alternatives, 1)
        fitting = [weighed for cost, weighed in every if cost.num_bytes <= free and cost.host_bytes <= host]
        assert bool(best) == bool(fitting)
        for one in best:
            assert one.cost.num_bytes <= free and one.cost.host_bytes <= host
            assert min(fitting) <= one.cost.seconds * WORTH ** len(one.mark and [1]) <= 1.001 * min(fitting)


@pytest.mark.slow
def test_each_of_the_next_needs_less_of_the_device():
    best = searched(UNLIMITED).best([NOTHING], 5)
    sizes = [one.cost.num_bytes for one in best]
    assert len(best) > 2 and sizes == sorted(sizes, reverse=True)
    assert [one.cost.seconds for one in best] == sorted(one.cost.seconds for one in best)
    assert best[0].changes == {} and all(one.flags.startswith("--") for one in best[1:])


@pytest.mark.slow
def test_where_nothing_fits_the_nearest_misses_least():
    search = searched(1)
    assert not search.best([NOTHING], 1)
    nearest = search.nearest([NOTHING])
    assert searched(nearest.cost.num_bytes, nearest.cost.host_bytes).best([NOTHING], 1)
    assert not searched(nearest.cost.num_bytes - 2**10).best([NOTHING], 1)


ROOM = Available(UNLIMITED, UNLIMITED)


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
    found = fastest([box], costs.get, lambda point: True, Available(free, host))
    assert [point for point, _ in found] == brute(costs, free, host)


def test_most_points_are_left_alone():
    lengths = (5, 5, 5, 5)
    costs, asked = random_costs(7, lengths), set()

    def cost_at(point):
        asked.add(point)
        return costs[point]

    free = int(np.quantile([c.num_bytes for c in costs.values()], 0.1))
    first = next(fastest([((0,) * 4, (4,) * 4)], cost_at, lambda p: True, Available(free, UNLIMITED)))
    assert first[0] == brute(costs, free, UNLIMITED)[0] and len(asked) < len(costs) / 2


def test_a_point_that_is_not_accepted_gives_way_to_the_next():
    costs = random_costs(3, (4, 4))
    first, second, *_ = sorted(costs, key=lambda point: costs[point].seconds)
    found = fastest([((0, 0), (3, 3))], costs.get, lambda point: point != first, ROOM)
    assert next(found)[0] == second


def test_nothing_comes_where_nothing_fits():
    costs = random_costs(1, (3, 3))
    least = min(cost.num_bytes for cost in costs.values())
    boxes = [((0, 0), (2, 2))]
    assert not [*fastest(boxes, costs.get, lambda p: True, Available(least - 1, UNLIMITED))]
    assert not [*fastest(boxes, costs.get, lambda p: True, Available(UNLIMITED, -1))]
    assert not [*fastest(boxes, lambda point: None, lambda p: True, ROOM)]
