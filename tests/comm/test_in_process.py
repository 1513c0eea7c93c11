"""A world of threads: what they send each other arrives, and no one waits for a rank that has ended."""

import numpy as np
import pytest
from in_process import run_ranks

from llmq.comm.world import World
from llmq.errors import WorldError


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_rank_gets_what_the_others_have_for_it(size: int) -> None:
    def work(world: World) -> list[list[int]]:
        outgoing = [np.full(1 + world.rank, 10 * world.rank + other) for other in range(size)]
        incoming = [np.empty(1 + other, int) for other in range(size)]
        world.exchange(outgoing, incoming)
        return [array.tolist() for array in incoming]

    for rank, found in enumerate(run_ranks(size, work)):
        assert found == [[10 * other + rank] * (1 + other) for other in range(size)]


def test_messages_come_in_the_order_of_ranks() -> None:
    found = run_ranks(4, lambda world: [world.gather({"rank": world.rank, "turn": turn}) for turn in range(50)])
    assert found == [[[{"rank": rank, "turn": turn} for rank in range(4)] for turn in range(50)]] * 4


def test_the_error_of_a_rank_ends_the_others() -> None:
    def work(world: World) -> None:
        if world.rank == 2:
            raise KeyError("lost")
        with pytest.raises(WorldError):
            world.gather(None)
        raise WorldError("a rank is missing")

    with pytest.raises(KeyError, match="lost"):
        run_ranks(3, work)
