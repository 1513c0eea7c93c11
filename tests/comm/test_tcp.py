"""Processes and threads with sockets between them: what they exchange, and what they say when one is gone."""

import socket
import time
from contextlib import closing, suppress

import ml_dtypes
import numpy as np
import pytest
from rank_threads import at_once

from llmq.comm import tcp, wire
from llmq.comm.membership import Membership
from llmq.comm.store import StoreServer
from llmq.comm.tcp import TcpWorld
from llmq.errors import WorldError

HOST, TOKEN = "127.0.0.1", "the job's token"


def run_ranks(size, work):
    """What `work(world)` returns or raises on ranks that are threads of this process."""
    server = StoreServer(HOST, 0, size, TOKEN, 20)

    def run(rank):
        with closing(TcpWorld(HOST, server.port, rank, size, TOKEN, 20)) as world:
            return work(world)

    found = at_once(size, run)
    server.close()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_an_exchange_brings_each_rank_what_the_others_have_for_it(size):
    """Different sizes in every direction, none among them; many exchanges behind each other."""

    def sizes(sender, receiver, turn):
        return (3 * sender + 5 * receiver + turn) % 4 * 1000

    def work(world):
        for turn in range(10):
            draw = np.random.default_rng([turn, world.rank])
            everyones = [np.random.default_rng([turn, rank]) for rank in range(size)]
            outgoing = [draw.random(sizes(world.rank, rank, turn)) for rank in range(size)]
            incoming = [np.full(sizes(rank, world.rank, turn), np.nan) for rank in range(size)]
            world.exchange(outgoing, incoming)
            for rank, theirs in enumerate(everyones):
                right = [theirs.random(sizes(rank, other, turn)) for other in range(size)][world.rank]
                np.testing.assert_array_equal(incoming[rank], right)
        return world.gather({"rank": world.rank, "text": "é" * 1000 * world.rank})

    messages = [{"rank": rank, "text": "é" * 1000 * rank} for rank in range(size)]
    assert run_ranks(size, work) == [messages] * size


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32, np.int64])
def test_every_dtype_and_shape_arrives(dtype):
    def work(world):
        outgoing = [np.full((2, 3), 4 * world.rank + rank, dtype) for rank in range(2)]
        incoming = [np.empty((2, 3), dtype) for _ in range(2)]
        world.exchange(outgoing, incoming)
        scalars = [np.zeros((), dtype) for _ in range(2)]
        world.exchange([np.array(world.rank, dtype)] * 2, scalars)
        return [float(array[1, 2]) for array in incoming], [float(scalar) for scalar in scalars]

    assert run_ranks(2, work) == [([0, 4], [0, 1]), ([1, 5], [0, 1])]


@pytest.mark.parametrize("size", [4_000_000, pytest.param(130_000_000, marks=pytest.mark.sweep)])
def test_arrays_larger_than_every_buffer_pass_each_other(size):
    """16 MB, or more than half a GB, in each direction at once."""

    def work(world):
        outgoing = [np.full(size if rank != world.rank else 1, world.rank, np.float32) for rank in range(2)]
        incoming = [np.full_like(array, np.nan) for array in outgoing]
        world.exchange(outgoing, incoming)
        return [(float(array.min()), float(array.max()), array.size) for array in incoming]

    assert run_ranks(2, work) == [[(0, 0, 1), (1, 1, size)], [(0, 0, size), (1, 1, 1)]]


def test_small_exchanges_are_fast():
    """A delayed acknowledgement would make each take 40 ms."""

    def work(world):
        arrays = [np.zeros(4) for _ in range(2)], [np.zeros(4) for _ in range(2)]
        began = time.monotonic()
        for _ in range(50):
            world.exchange(*arrays)
        return time.monotonic() - began

    assert max(run_ranks(2, work)) < 1.0


def test_ranks_that_make_different_calls_are_reported():
    def work(world):
        mine = np.zeros(4 + world.rank)
        world.exchange([mine, mine], [np.zeros_like(mine), np.zeros_like(mine)])

    found = [str(error) for error in run_ranks(2, work)]
    assert any("rank 1 sends 40 bytes in exchange 1, and 32 in exchange 1 are expected" in text for text in found)


def test_a_rank_that_leaves_early_is_named_and_every_later_call_fails(monkeypatch):
    monkeypatch.setattr(tcp, "LOST_S", 0.1)

    def work(world):
        world.gather(None)
        if world.rank == 1:
            return []
        errors = []
        for _ in range(2):
            with pytest.raises(WorldError) as error:
                world.gather(None)
            errors.append(str(error.value))
        return errors

    errors, _ = run_ranks(2, work)
    assert "rank 1 has ended, and rank 0 waits for it" in errors[0] and errors[0] == errors[1]


def test_an_interrupted_exchange_is_not_continued(monkeypatch):
    monkeypatch.setattr(tcp, "LOST_S", 0.1)

    def interrupted(peers, whole=tcp._move):
        if peers[0].rank == 1:  # those of rank 0
            raise KeyboardInterrupt
        whole(peers)

    def work(world):
        if world.rank == 1:
            with suppress(WorldError):
                world.gather(None)
            return None
        with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
            patch.setattr(tcp, "_move", interrupted)
            world.gather(None)
        with pytest.raises(WorldError, match="was interrupted"):
            world.gather(None)
        return True

    assert run_ranks(2, work) == [True, None]


def test_strangers_are_not_taken_for_ranks(monkeypatch):
    """Between the listening of a rank and the last connection: silence, garbage, another token, a wrong rank."""
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.3)
    strangers = []

    class Visited(Membership):
        @classmethod
        def join(cls, *where, own_port):
            strangers.append(socket.create_connection((HOST, own_port)))
            strangers.append(socket.create_connection((HOST, own_port)))
            strangers[-1].sendall(b"GET /")
            for token in ("another", TOKEN):
                channel = wire.Channel(socket.create_connection((HOST, own_port)))
                strangers.append(channel)
                with suppress(wire.WrongToken):
                    channel.call(token, tcp.PURPOSE, time.monotonic() + 5)
                    channel.send({"from": 0, "to": 0})
            return Membership.join(*where, own_port=own_port)

    monkeypatch.setattr(tcp, "Membership", Visited)
    assert run_ranks(3, lambda world: world.gather(world.rank)) == [[0, 1, 2]] * 3
    assert len(strangers) == 12
    for stranger in strangers:
        stranger.close()


def test_a_rank_that_does_not_call_is_named(monkeypatch):
    monkeypatch.setattr(tcp, "CONNECT_S", 0.2)
    server = StoreServer(HOST, 0, 2, TOKEN, 20)
    join = (
        (lambda rank: TcpWorld(HOST, server.port, 0, 2, TOKEN, 20)),
        (lambda rank: Membership.join(HOST, server.port, 1, 2, TOKEN, 20)),
    )
    found = at_once(2, lambda rank: join[rank](rank))
    assert "rank 0 was not called by rank 1 within 0.2 s" in str(found[0])
    server.close(grace=0)
