"""Groups of collectives between GPUs, with a library in NCCL's place that notes its calls: what is made with what."""

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from llmq.comm import nccl
from llmq.comm.nccl import NcclWorld
from llmq.comm.world import Copying, OneRank, copied_in_words

MANY = nccl.LEAST_BYTES
FP32 = np.dtype("float32")


class Host(OneRank):
    """The first of two ranks, whose messages are all that is heard."""

    size = 2

    def gather(self, message):
        return [message, message]


class Copies:
    """Notes what is copied, and how often ranks tell each other addresses."""

    def __init__(self, calls):
        self._calls, self.agreements, self.is_closed = calls, 0, False

    def agreed(self, transfers):
        self.agreements += 1
        return transfers

    def run(self, transfers):
        self._calls.append(("copied", dict(transfers.sent), dict(transfers.received), transfers.own))

    def close(self):
        self.is_closed = True


@pytest.fixture
def made(monkeypatch):
    """A function that gives a world that copies so, and the list of its calls."""
    calls = []

    class Communicator:
        def __init__(self, size, unique, rank):
            self.broadcast = lambda *given: calls.append(("broadcast", *given[:3]))
            self.reduce = lambda *given: calls.append(("reduce", given[0]))
            self.allReduce = lambda *given: calls.append(("all_reduce", given[0]))
            self.send = lambda *given: calls.append(("send", given[0]))
            self.recv = lambda *given: calls.append(("receive", given[0]))
            self.abort = lambda: calls.append("abort")

    fake = {
        "get_unique_id": lambda: (0, 1),
        "NcclCommunicator": Communicator,
        "NcclError": RuntimeError,
        "groupStart": lambda: calls.append("("),
        "groupEnd": lambda: calls.append(")"),
    }
    cuda = ModuleType("cupy.cuda")
    cuda.nccl = SimpleNamespace(**fake)

    class Pinned(bytearray):
        ptr = 0

    cuda.alloc_pinned_memory = Pinned
    cuda.get_current_stream = lambda: SimpleNamespace(ptr=7)
    cupy = ModuleType("cupy")
    cupy.cuda = cuda
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)

    def make(gathers=False, exchanges=False):
        copying = Copying(gathers, exchanges)
        monkeypatch.setattr(
            NcclWorld, "_peer_copies", lambda self, asked: Copies(calls) if any(vars(asked).values()) else None
        )
        return NcclWorld(Host(), copying), calls

    return make


@contextmanager
def group(world, calls, known=None):
    calls.clear()
    with world.group(known):
        yield


def test_what_ranks_get_from_each_other_is_one_group_with_small_sums(made):
    world, calls = made()
    with group(world, calls):
        with world.group():  # of an op that is called in a group
            world.broadcast(1, 2, MANY, 1)
        world.all_reduce(3, 3, 1, FP32, largest=False)
        world.send(4, 8, 1)
        world.receive(5, 8, 1)
    assert calls == ["(", ("all_reduce", 3), ("broadcast", 1, 2, MANY), ("send", 4), ("receive", 5), ")"]


def test_gathers_are_copied_after_all_else(made):
    world, calls = made(gathers=True)
    known = {}
    for _ in range(2):
        with group(world, calls, known):
            world.broadcast(10, 20, MANY, 0)  # out of place: this rank's own
            world.broadcast(30, 30, 5, 1)
            world.send(4, 8, 1)
        *sent, copied = calls
        assert sent == ["(", ("send", 4), ")"]
        assert copied == ("copied", {1: [(10, MANY)]}, {1: [(30, 5)]}, [(20, 10, MANY)])
    assert world._copies.agreements == 1, "the ranks know where they write"
    with group(world, calls):
        world.broadcast(10, 20, MANY - 2, 0)
        world.broadcast(30, 30, 1, 1)
    assert [call[0] for call in calls] == ["(", "broadcast", "broadcast", ")"], "small gathers stay with NCCL"


def test_exchanges_are_copied_and_gathers_are_not(made):
    world, calls = made(exchanges=True)
    with group(world, calls):
        world.broadcast(10, 10, MANY, 0)
        world.send(4, 8, 1)
        world.receive(5, 6, 1)
    assert calls == ["(", ("broadcast", 10, 10, MANY), ")", ("copied", {1: [(4, 8)]}, {1: [(5, 6)]}, [])]


def test_what_waits_is_let_go_at_the_end(made):
    world, calls = made(exchanges=True)
    forgotten = []

    class Program:
        def forget(self):
            forgotten.append(list(calls))

    program = Program()
    world.captured(program)
    world.close()
    assert calls == ["abort"] and world._copies.is_closed
    assert forgotten == [[]], "NCCL waits for graphs with its collectives"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (Copying(None, None), Copying(True, False)),
        (Copying(None, True), Copying(True, True)),
        (Copying(False, None), Copying(False, False)),
    ],
)
def test_what_is_left_to_timing_is_copied_where_that_is_faster(asked, expected, monkeypatch):
    seconds = {"gathers": {True: 1.0, False: 2.0}, "exchanges": {True: 3.0, False: 2.0}}

    def timed(world, works):
        return {(name, how): value for name in works for how, value in seconds[name].items()}

    monkeypatch.setattr(nccl, "timed", timed)
    assert nccl.fastest(OneRank(), asked) == expected


def test_a_run_says_what_is_copied_and_knows_what_was_asked_for():
    for copies, words, options in (
        (Copying(True, None), "weights by copy engines", ("--memcpy-all-gather",)),
        (Copying(True, True), "weights and gradients by copy engines", ("--memcpy-all-gather", "--memcpy-send-recv")),
        (Copying(False, False), "", ()),
    ):
        assert copied_in_words(SimpleNamespace(copies=copies)) == words and copies.demanded == options
    assert copied_in_words(OneRank()) == "" and Copying().demanded == ()
