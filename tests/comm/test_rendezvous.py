"""Ranks meet at a store: in any order, with strangers at the door, and never without an answer."""

import random
import socket
import time
from contextlib import contextmanager, suppress

import pytest
from rank_threads import at_once

from llmq.comm import store_server, wire
from llmq.comm.rendezvous import Store, StoreServer
from llmq.errors import WorldError

HOST, TOKEN = "127.0.0.1", "the job's token"


@contextmanager
def served(size, *, deadline=20.0):
    """A store for `size` ranks."""
    server = StoreServer(HOST, 0, size, TOKEN, deadline)
    try:
        yield server
    finally:
        server.close(grace=0)


def joined(server, rank, size, *, token=TOKEN, deadline=20.0):
    """A rank's store."""
    return Store.join(HOST, server.port, rank, size, token, deadline)


def free_port():
    with socket.socket() as found:
        found.bind((HOST, 0))
        return found.getsockname()[1]


def meet(order, *, size=16):
    """One rendezvous of `size` ranks and the server, which start in a random order within 30 ms."""
    draw = random.Random(order)
    port = free_port()
    servers = []

    def work(index):
        if index == size:
            servers.append(StoreServer(HOST, port, size, TOKEN, 30))
            return None
        store = Store.join(HOST, port, index, size, TOKEN, 30)
        found = store.gather(index)
        store.close()
        return found

    found = at_once(size + 1, work, pauses=[draw.uniform(0, 0.03) for _ in range(size + 1)])
    servers[0].close()
    assert found[:size] == [list(range(size))] * size


@pytest.mark.parametrize("order", [*range(5), *(pytest.param(n, marks=pytest.mark.slow) for n in range(5, 20))])
def test_ranks_and_server_start_in_any_order(order):
    meet(order)


@pytest.mark.sweep
def test_a_thousand_random_orders_meet():
    for order in range(1000):
        meet(order)


def test_values_and_messages_arrive_whole():
    big = "é" * 200_000

    def work(rank):
        store = joined(server, rank, 3)
        if rank == 1:
            store.set("key", b"old")
        time.sleep(0.02)
        store.set(f"of {rank}", bytes([rank]) * 100_000)
        value = store.get(f"of {(rank + 1) % 3}", 10)
        gathered = [store.gather({"rank": rank, "loss": 0.5, "text": big}), store.gather(None)]
        if rank == 1:
            store.set("key", b"new")
        store.gather(0)
        last = store.get("key", 1)
        store.close()
        return value == bytes([(rank + 1) % 3]) * 100_000, gathered, last

    with served(3) as server:
        found = at_once(3, work)
    messages = [{"rank": rank, "loss": 0.5, "text": big} for rank in range(3)]
    assert found == [(True, [messages, [None] * 3], b"new")] * 3


def skip_without_ipv6(*hosts):
    if "::1" in hosts:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")


@pytest.mark.parametrize(
    ("host", "address"),
    [("", "127.0.0.1"), ("", "::1"), ("a-name-of-others", "127.0.0.1"), ("localhost", "localhost"), ("::1", "::1")],
)
def test_a_store_listens_where_it_is_reached(host, address):
    skip_without_ipv6(host, address)
    server = StoreServer(host, 0, 1, TOKEN, 5)
    store = Store.join(address, server.port, 0, 1, TOKEN, 5)
    assert store.seen is None and store.is_keeper and store.gather(1) == [1]
    store.close()
    server.close()


@pytest.mark.parametrize(("host", "address"), [("localhost", "::1"), ("127.0.0.1", "::1"), ("::1", "127.0.0.1")])
def test_a_store_of_this_machine_listens_nowhere_else(host, address):
    skip_without_ipv6(host, address)
    server = StoreServer(host, 0, 1, TOKEN, 5)
    with pytest.raises(WorldError, match="found no store"):
        Store.join(address, server.port, 0, 1, TOKEN, 0.1)
    server.close()


def test_missing_ranks_are_named_at_the_deadline_of_the_server():
    with served(8, deadline=0.5) as server:
        found = at_once(8, lambda rank: joined(server, rank, 8) if rank not in (1, 4, 5, 6) else None)
        late = at_once(1, lambda _: joined(server, 4, 8))
    for error in [found[0], found[2], found[3], found[7], *late]:
        assert "of 8 ranks, ranks 1, 4 to 6 did not come within 0.5 s" in str(error), error


def test_missing_ranks_are_named_at_the_deadline_of_a_rank():
    with served(3) as server:
        found = at_once(2, lambda rank: joined(server, rank, 3, deadline=0.4 if rank else 10))
    assert all("rank 2 did not come" in str(error) for error in found)


def test_without_a_server_the_address_is_named():
    port = free_port()
    with pytest.raises(WorldError, match=f"rank 3 found no store at 127.0.0.1:{port} within 0.2 s") as error:
        Store.join(HOST, port, 3, 4, TOKEN, 0.2)
    assert error.value.exit_code == 6


def test_a_port_in_use_is_named():
    with served(1) as server, pytest.raises(WorldError, match=f"cannot use port {server.port}"):
        StoreServer(HOST, server.port, 1, TOKEN, 1)


def test_another_token_is_refused_and_mentioned():
    with served(2, deadline=0.3) as server:
        with pytest.raises(WorldError, match="belongs to another job"):
            joined(server, 1, 2, token="another")
        calling = wire.calling(
            "another", store_server.PURPOSE
        )  # one that goes on although the server has another token
        with socket.create_connection((HOST, server.port)) as connection:
            connection.sendall(next(calling) + b"x" * wire.PROOF_BYTES)
            assert len(connection.recv(1000)) <= 72 and connection.recv(1) == b""
        with pytest.raises(WorldError, match=r"rank 1 did not come.*127.0.0.1 with another job token was refused"):
            joined(server, 0, 2)


def test_the_token_is_never_sent_and_no_proof_holds_twice():
    def talk():
        sent, callers, answerers = b"", wire.calling(TOKEN, "a"), wire.answering(TOKEN, "a")
        wire_bytes = {callers: b"", answerers: b""}
        want = {side: next(side) for side in (callers, answerers)}
        other = {callers: answerers, answerers: callers}
        while want:
            for side in list(want):
                step = want[side]
                if isinstance(step, int) and len(wire_bytes[side]) < step:
                    continue
                data = b""
                if isinstance(step, int):
                    data, wire_bytes[side] = wire_bytes[side][:step], wire_bytes[side][step:]
                else:
                    wire_bytes[other[side]] += step
                    sent += step
                try:
                    want[side] = side.send(data)
                except StopIteration:
                    del want[side]
        return sent

    first, second = talk(), talk()
    assert TOKEN.encode() not in first and len(first) == 2 * (8 + 32 + 32)
    assert first[-32:] != second[-32:] and first[8:40] != second[8:40]


def test_a_proof_cannot_be_sent_back():
    """A server that is asked by itself: its own answer is no proof of the one who called."""
    answering = wire.answering(TOKEN, "store")
    next(answering)
    answering.send(wire.MAGIC)
    reply = answering.send(b"c" * 32)
    answering.send(b"")
    with pytest.raises(wire.WrongToken):
        answering.send(reply[-32:])


def test_strangers_do_not_disturb(monkeypatch):
    """Scans, garbage, web browsers, huge frames, and more silent connections than there is room for."""
    monkeypatch.setattr(store_server, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(store_server, "NUM_STRANGERS", 10)
    with served(2) as server:
        silent = [socket.create_connection((HOST, server.port)) for _ in range(40)]
        for text in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 100_000, wire.MAGIC, wire.MAGIC + b"x" * 500):
            with socket.create_connection((HOST, server.port)) as connection, suppress(OSError):
                connection.sendall(text)
        found = at_once(2, lambda rank: joined(server, rank, 2).gather(rank))
        for connection in silent:
            connection.settimeout(5)
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
            connection.close()
    assert found == [[0, 1], [0, 1]]


def test_a_frame_above_the_limit_is_refused():
    with served(1) as server:
        store = joined(server, 0, 1)
        store._channel._write(wire.LENGTHS.pack(1, 1 << 60) + b"x", None)
        with pytest.raises(WorldError, match="is lost"):
            store.gather(1)


def test_a_message_above_the_limit_is_an_error_with_the_limit(monkeypatch):
    monkeypatch.setattr("llmq.comm.rendezvous.MESSAGE_BYTES", 10)
    with served(1) as server:
        store = joined(server, 0, 1)
        with pytest.raises(WorldError, match="has 11 bytes, and the store takes at most 10"):
            store.set("a", b"x" * 11)
        store.set("a", b"x" * 10)
        assert store.get("a", 1) == b"x" * 10


def test_a_rank_that_joins_twice_is_named():
    with served(3, deadline=0.6) as server:
        found = at_once(3, lambda rank: joined(server, max(rank, 1), 3), pauses=[0, 0.05, 0.1])
    assert sum("rank 1 joined twice, from 127.0.0.1 and from 127.0.0.1" in str(error) for error in found) == 3
    assert sum("rank 0 did not come" in str(error) for error in found) == 2


def test_another_number_of_ranks_is_named():
    with served(2) as server:
        with pytest.raises(WorldError, match=r"rank 2 on 127.0.0.1 belongs to a run of 3 ranks, and this one has 2"):
            joined(server, 2, 3)
        with pytest.raises(WorldError, match=r"there is no rank 2 .* ranks are 0 to 1"):
            joined(server, 2, 2)


def test_a_rank_may_come_again_until_all_are_here():
    with served(2) as server:
        channel = wire.Channel(socket.create_connection((HOST, server.port)))
        channel.shake_hands(wire.calling(TOKEN, store_server.PURPOSE), time.monotonic() + 5)
        channel.send({"op": "join", "rank": 1, "size": 2, "seconds": 5.0})
        time.sleep(0.1)
        channel.close()
        time.sleep(0.1)
        assert at_once(2, lambda rank: joined(server, rank, 2).gather(rank)) == [[0, 1]] * 2


def test_a_lost_rank_ends_the_wait_of_the_others():
    def work(rank):
        store = joined(server, rank, 3)
        store.gather(None)
        if rank == 1:
            time.sleep(0.1)
            store._channel.close()
            return
        with pytest.raises(WorldError, match=r"rank 1 is lost: its process on 127.0.0.1 has ended"):
            store.gather(0) if rank else store.get("never", 10)
        assert list(store.lost()) == [1]
        store.gather(0)

    with served(3) as server:
        found = at_once(3, work)
    assert all("rank 1 is lost" in str(found[rank]) for rank in (0, 2))


def test_a_rank_that_left_is_no_loss_but_cannot_be_waited_for():
    def work(rank):
        store = joined(server, rank, 2)
        store.gather(None)
        if rank == 1:
            store.close()
            return None
        time.sleep(0.1)
        assert store.lost() == {}
        return store.gather(0)

    with served(2) as server:
        assert "the run has ended for rank 1" in str(at_once(2, work)[0])


def test_a_value_that_is_never_set_is_named():
    with served(1) as server:
        store = joined(server, 0, 1)
        with pytest.raises(WorldError, match=r"no rank has set 'weights' within 0.1 s"):
            store.get("weights", 0.1)
        assert store.gather(1) == [1]
        store.close()
        with pytest.raises(WorldError, match="has left the store"):
            store.gather(1)


def test_a_store_that_ends_is_named():
    with served(2) as server:
        stores = at_once(2, lambda rank: joined(server, rank, 2))
    with pytest.raises(WorldError, match=f"the store at 127.0.0.1:{server.port} is lost"):
        stores[0].gather(1)


def test_ranks_are_told_in_words():
    assert store_server.in_words([3]) == "rank 3"
    assert store_server.in_words([7, 1, 4, 6, 5]) == "ranks 1, 4 to 7"
    assert store_server.in_words([1, 2]) == "ranks 1 to 2"
