"""The search of settings beside every setting there is: the fastest that fits, and then those that need less."""

from itertools import product

import pytest
from tiny_engines import BF16, plan_of, tiny

from llmq.engine.cost import Costs
from llmq.engine.predict import sustained
from llmq.engine.search import WORTH, Available, Search
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
def test_the_fastest_of_all_that_fit_is_first(changing):
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


def test_each_of_the_next_needs_less_of_the_device():
    best = searched(UNLIMITED).best([NOTHING], 5)
    sizes = [one.cost.num_bytes for one in best]
    assert len(best) > 2 and sizes == sorted(sizes, reverse=True)
    assert [one.cost.seconds for one in best] == sorted(one.cost.seconds for one in best)
    assert best[0].changes == {} and all(one.flags.startswith("--") for one in best[1:])


def test_where_nothing_fits_the_nearest_misses_least():
    search = searched(1)
    assert not search.best([NOTHING], 1)
    nearest = search.nearest([NOTHING])
    assert searched(nearest.cost.num_bytes, nearest.cost.host_bytes).best([NOTHING], 1)
    assert not searched(nearest.cost.num_bytes - 2**10).best([NOTHING], 1)
