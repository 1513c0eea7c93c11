"""Ranks meet at a store: in any order, with strangers at the door, never without an answer; and who is lost."""

import random
import socket
import time
from contextlib import closing, contextmanager, suppress
from itertools import product

import pytest
from rank_threads import at_once

from llmq.comm import store, wire
from llmq.comm.launch import free_port
from llmq.comm.membership import Membership
from llmq.comm.store import Beat, StoreServer, Watched, lost_in_words, lost_ranks
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
    """A rank at its store; its own port is its number."""
    return Membership.join(HOST, server.port, rank, size, token, deadline, own_port=rank)


def soon():
    """Until when a message may come."""
    return time.monotonic() + 5


def met(member):
    """The numbers of the ranks that a rank can reach."""
    return [port for _, port in member.places]


@pytest.mark.parametrize("order", [*range(5), *(pytest.param(n, marks=pytest.mark.sweep) for n in range(5, 200))])
def test_ranks_and_server_start_in_any_order(order, size=16):
    """Within 30 ms."""
    draw, port, servers = random.Random(order), free_port(), []

    def work(index):
        if index == size:
            servers.append(StoreServer(HOST, port, size, TOKEN, 30))
            return None
        member = Membership.join(HOST, port, index, size, TOKEN, 30, own_port=index)
        member.close()
        return met(member)

    found = at_once(size + 1, work, pauses=[draw.uniform(0, 0.03) for _ in range(size + 1)])
    servers[0].close()
    assert found[:size] == [list(range(size))] * size


@pytest.mark.parametrize(
    ("host", "address", "listens"),
    [
        *((host, address, True) for host, address in product(("", "a-name-of-others"), ("127.0.0.1", "::1"))),
        ("localhost", "localhost", True),
        ("::1", "::1", True),
        ("localhost", "::1", False),
        ("127.0.0.1", "::1", False),
        ("::1", "127.0.0.1", False),
    ],
)
def test_a_store_listens_where_it_is_reached_and_one_of_this_machine_nowhere_else(host, address, listens):
    if "::1" in (host, address):
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
    with closing(StoreServer(host, 0, 1, TOKEN, 5)) as server:
        if listens:
            member = Membership.join(address, server.port, 0, 1, TOKEN, 5, own_port=7)
            assert member.places == [(address, 7)], "where the store is reached, on its own machine"
            member.close()
        else:
            with pytest.raises(WorldError, match="found no store"):
                Membership.join(address, server.port, 0, 1, TOKEN, 0.1)


def test_missing_ranks_are_named_at_the_deadline():
    with served(8, deadline=0.5) as server:
        found = at_once(8, lambda rank: joined(server, rank, 8) if rank not in (1, 4, 5, 6) else None)
        late = at_once(1, lambda _: joined(server, 4, 8))
    for error in [found[0], found[2], found[3], found[7], *late]:
        assert "of 8 ranks, ranks 1, 4 to 6 did not come within 0.5 s" in str(error), error
    with served(3) as server:  # and at that of a rank
        found = at_once(2, lambda rank: joined(server, rank, 3, deadline=0.4 if rank else 10))
    assert all("rank 2 did not come" in str(error) for error in found)


def test_a_server_that_is_absent_or_has_no_port_is_named():
    port = free_port()
    with pytest.raises(WorldError, match=f"rank 3 found no store at 127.0.0.1:{port} within 0.2 s") as error:
        Membership.join(HOST, port, 3, 4, TOKEN, 0.2)
    assert error.value.exit_code == 6
    with served(1) as server, pytest.raises(WorldError, match=f"cannot use port {server.port}"):
        StoreServer(HOST, server.port, 1, TOKEN, 1)


def test_another_token_is_refused_and_mentioned():
    with served(2, deadline=0.3) as server:
        with pytest.raises(WorldError, match="belongs to another job"):
            joined(server, 1, 2, token="another")
        stranger = wire.Channel(socket.create_connection((HOST, server.port)))
        stranger.send({"challenge": "x"})
        assert stranger.receive(soon()).keys() == {"challenge", "proof"}
        stranger.send({"proof": "x"})  # although the server has another token
        with pytest.raises(ConnectionError):
            stranger.receive(soon())
        stranger.close()
        with pytest.raises(WorldError, match=r"rank 1 did not come.*127.0.0.1 with another job token was refused"):
            joined(server, 0, 2)


class Noted(wire.Channel):
    """A channel that notes what it sends."""

    def __init__(self, connection):
        super().__init__(connection)
        self.sent = []

    def send(self, message):
        self.sent.append(message)
        super().send(message)


def handshake(call, answer):
    """What both sides of a connection say to each other, each a function of its channel."""
    with socket.create_server((HOST, 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        channels = Noted(one), Noted(listener.accept()[0])
    at_once(2, lambda side: (call, answer)[side](channels[side]))
    for channel in channels:
        channel.close()
    return [message for channel in channels for message in channel.sent]


def test_the_token_is_never_sent_and_no_proof_holds_twice():
    talks = [
        handshake(lambda one: one.call(TOKEN, "a", soon()), lambda one: one.answer(TOKEN, "a", soon()))
        for _ in range(2)
    ]
    assert TOKEN not in str(talks) and [len(talk) for talk in talks] == [3, 3]
    values = [value for talk in talks for message in talk for value in message.values()]
    assert len(values) == len(set(values)) == 8


@pytest.mark.parametrize("purpose", ["a", "b"])
def test_a_proof_cannot_be_sent_back_or_elsewhere(purpose):
    """A server that is asked by itself: its own answer is no proof of the one who called, here or at another door."""

    def parrot(channel):
        channel.send({"challenge": "c"})
        channel.send({"proof": channel.receive(soon())["proof"]})

    def answers(channel):
        with pytest.raises(wire.WrongToken):
            channel.answer(TOKEN, purpose, soon())

    handshake(parrot, answers)


def test_strangers_do_not_disturb(monkeypatch):
    """Scans, garbage, web browsers, huge frames, and more silent connections than there is room for."""
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(wire, "NUM_STRANGERS", 10)
    with served(2) as server:
        silent = [socket.create_connection((HOST, server.port)) for _ in range(40)]
        for text in (
            b"",
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\0" * 100_000,
            b"\0\0\0\2[]",
            b"\0\0\1\0" + b"[" * 256,
        ):
            with socket.create_connection((HOST, server.port)) as connection, suppress(OSError):
                connection.sendall(text)
        found = at_once(2, lambda rank: met(joined(server, rank, 2)))
        for connection in silent:
            connection.settimeout(5)
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
            connection.close()
    assert found == [[0, 1], [0, 1]]


def test_a_stranger_that_says_little_at_a_time_is_cut_off(monkeypatch):
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.5)
    with served(1) as server, socket.create_connection((HOST, server.port)) as stranger:
        began = time.monotonic()
        stranger.sendall(wire.LENGTH.pack(256))
        with suppress(OSError):
            while time.monotonic() < began + 5:
                stranger.sendall(b" ")
                time.sleep(0.05)
        assert time.monotonic() < began + 4


def test_a_message_above_the_limit_is_refused():
    with served(1) as server:
        member = joined(server, 0, 1)
        member._channel.socket.sendall(wire.LENGTH.pack(wire.MESSAGE_BYTES + 1) + b"x")
        lost = member.lost_within(5)
    assert "rank 0 is lost: it keeps the store; its connection has ended" in lost


def test_a_rank_that_joins_twice_or_belongs_elsewhere_is_named():
    with served(3, deadline=0.6) as server:
        found = at_once(3, lambda rank: joined(server, max(rank, 1), 3), pauses=[0, 0.05, 0.1])
    assert sum("rank 1 joined twice, from 127.0.0.1 and from 127.0.0.1" in str(error) for error in found) == 3
    assert sum("rank 0 did not come" in str(error) for error in found) == 2
    with served(2) as server:
        with pytest.raises(WorldError, match=r"rank 2 on 127.0.0.1 belongs to a run of 3 ranks, and this one has 2"):
            joined(server, 2, 3)
        with pytest.raises(WorldError, match=r"there is no rank 2 .* ranks are 0 to 1"):
            joined(server, 2, 2)


def test_a_rank_may_come_again_until_all_are_here():
    with served(2) as server:
        channel = wire.Channel(socket.create_connection((HOST, server.port)))
        channel.call(TOKEN, store.PURPOSE, soon())
        channel.send({"rank": 1, "size": 2, "port": 0, "pid": 0, "seconds": 5.0})
        time.sleep(0.1)
        channel.close()
        time.sleep(0.1)
        assert at_once(2, lambda rank: met(joined(server, rank, 2))) == [[0, 1]] * 2
        with pytest.raises(WorldError, match="rank 1 joined twice"):
            joined(server, 1, 2)


def test_all_hear_of_a_lost_rank_and_one_that_left_is_no_loss():
    with served(4) as server:
        members = at_once(4, lambda rank: joined(server, rank, 4))
        members[3].close()
        assert members[0].lost_within(0.3) == ""
        members[1]._channel.end()
        for rank in (0, 2):
            assert members[rank].lost_within(5) == "rank 1 is lost: its process has ended"
    with served(1) as server:  # which says that it ends
        member = joined(server, 0, 1)
    assert member.lost_within(0.3) == ""


def test_who_keeps_the_store_is_named_when_it_breaks_off():
    with served(1) as server:
        member = joined(server, 0, 1)
        member._channel.socket.shutdown(socket.SHUT_RD)
        lost = member.lost_within(5)
    assert lost == "rank 0 is lost: it keeps the store; its connection has ended (the connection was closed)"


def test_ranks_are_described_in_words():
    assert [store.in_words(ranks) for ranks in ([3], [7, 1, 4, 6, 5])] == ["rank 3", "ranks 1, 4 to 7"]
    assert store.in_words([1, 2]) == "ranks 1 to 2"
    assert lost_in_words(None, "why") == "the launcher is lost: why"
    said = lost_in_words(1, "it waits", Beat(3, "", 7))
    assert said == "rank 1 is lost: it waits (last seen in step 3, after collective 7)"


PATIENCE = 60.0


class Board:
    """Ranks that have said (collective, count, doing), and then nothing else for some seconds, although alive."""

    def __init__(self, *ranks, seconds=0, alive=True):
        self.ranks = {rank: Watched() for rank in range(len(ranks))}
        for second in range(seconds + 1):
            for number, (collective, count, doing) in enumerate(ranks):
                if alive or not second:
                    self.hear(number, collective, count, doing)
            self.tick()

    def hear(self, rank, collective, count, doing="", step=3):
        self.ranks[rank].hear(Beat(step, collective, count), doing)

    def tick(self):
        """A second."""
        for rank in self.ranks.values():
            rank.tick(1.0)

    def lost(self, size=None):
        return lost_ranks(self.ranks, size or len(self.ranks), PATIENCE)


COMPUTES = ("gather", 8, ""), ("", 7, ""), ("gather", 8, "")
STANDS = "it stands still for 61 s, and others wait for it"
STUCK = "it does not come out of a collective for 61 s"
SILENT = "no sign of life for 51 s: its process, or its machine, is stopped or cut off"


@pytest.mark.parametrize(
    ("ranks", "seconds", "alive", "lost"),
    [
        (COMPUTES, 58, True, {}),
        (COMPUTES, 60, True, {1: STANDS}),
        ([("gather", 8, ""), ("reduce", 7, "")], 60, True, {1: STANDS}),
        ([("", 7, "exporting"), ("gather", 8, "")], 3600, True, {}),
        # rank 2 is in an earlier collective than rank 1, and waits for rank 0 as well
        ([("", 6, "exporting"), ("gather", 8, ""), ("reduce", 7, "")], 3600, True, {}),
        ([("", 7, "exporting"), ("", 7, ""), ("gather", 8, "")], 60, True, {1: STANDS}),
        ([("", 7, ""), ("", 7, "")], 3600, True, {}),  # all compute
        ([("gather", 8, ""), ("gather", 8, "")], 60, True, dict.fromkeys(range(2), STUCK)),
        ([("", 8, ""), ("gather", 8, "")], 60, True, {1: STUCK}),
        ([("", 8, "exporting"), ("", 8, "")], 50, False, dict.fromkeys(range(2), SILENT)),
    ],
)
def test_ranks_that_stand_still_are_lost_where_others_wait_for_them(ranks, seconds, alive, lost):
    assert Board(*ranks, seconds=seconds, alive=alive).lost() == lost


def test_no_rank_is_lost_while_all_advance():
    board = Board(("", 0, ""), ("", 0, ""))
    for count in range(500):
        for rank in range(2):
            board.hear(rank, "reduce", count, step=count)
        board.tick()
        assert not board.lost()


@pytest.mark.parametrize(
    ("ranks", "now"),
    [
        ([("", 7, "exporting"), ("gather", 8, "")], ("", 7)),  # the time of what took long does not count afterwards
        ([("", 3, "exporting"), ("reduce", 4, ""), ("reduce", 4, "")], ("reduce", 4)),  # which all have now begun
    ],
)
def test_ranks_that_waited_for_what_took_long_are_not_lost(ranks, now):
    board = Board(*ranks, seconds=600)
    board.hear(0, *now)
    board.tick()
    assert not board.lost()


def test_ranks_that_were_just_released_are_not_lost():
    """All have waited for ten minutes; what rank 0 does now has not reached what they say."""
    board = Board(("", 3, "exporting"), ("reduce", 4, ""), ("gather", 5, ""), seconds=600)
    for seconds in range(60):
        for rank, (collective, count) in enumerate([("reduce", 4), ("reduce", 4), ("gather", 5)]):
            board.hear(rank, collective, count)
        assert not board.lost(), seconds
        board.tick()
    assert board.lost().keys() == {0, 1}


def test_a_silent_rank_is_lost_before_those_that_wait_for_it():
    board = Board(("gather", 8, ""), ("gather", 8, ""))
    for _ in range(46):
        board.hear(0, "gather", 8)
        board.tick()
    assert board.lost().keys() == {1} and "no sign of life for 47 s" in board.lost()[1]


def test_a_rank_that_left_is_not_missed_until_others_wait_for_it():
    board = Board(("", 8, ""), ("", 8, ""))
    board.ranks[1].leave()
    for _ in range(100):
        board.hear(0, "", 8, step=4)
        board.tick()
    assert not board.lost()
    for _ in range(60):
        board.hear(0, "gather", 9, step=4)
        assert not board.lost()
        board.tick()
    assert board.lost() == {1: "it has ended, and others wait for it"}


def test_a_rank_that_left_may_have_been_the_last_to_come():
    board = Board(("gather", 9, ""), ("", 8, "exporting"), seconds=100)
    board.ranks[1].leave()
    board.tick()
    assert not board.lost()
    board.ranks[1].problem = "it has failed with DataError: no data"  # which is known at once
    assert board.lost() == {1: "it has failed with DataError: no data"}


def test_ranks_that_are_not_watched_yet_are_waited_for():
    board = Board(("gather", 1, ""))
    for _ in range(1000):
        board.hear(0, "gather", 1)
        board.tick()
    assert not board.lost(size=2)
