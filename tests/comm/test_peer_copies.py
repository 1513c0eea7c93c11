"""The protocol of copies between GPUs, on GPUs that are lists of commands: whatever order these run in, data is whole.

A copy is made in two halves, between which others run.
"""

import random
from collections import deque
from contextlib import suppress

import numpy as np
import pytest
from in_process import run_ranks

from llmq.comm.peer_copies import ARRIVED, READY, PeerCopies, PeerError, Transfers
from llmq.errors import WorldError

SPACE = 1 << 20  # addresses of one GPU
WORDS = 1000  # where its words are
LENGTH = 12  # bytes of a piece


class Memory:
    def __init__(self, address):
        self.address = address


class Gpu:
    """A GPU whose memory is part of one array, and whose stream is a list of commands. Handles name the GPU."""

    def __init__(self, rank, memory, closed=()):
        self.rank, self._memory, self._closed = rank, memory, closed
        self.stream = deque()
        self.is_strict = True

    def exported(self, address):
        if self.rank in self._closed:
            raise PeerError("no handles here")
        return f"{self.rank}", address - self.rank * SPACE

    def opened(self, handle):
        if (self.rank, int(handle)) in self._closed:
            raise PeerError("no way there")
        return Memory(int(handle) * SPACE)

    def words(self, count):
        return self.rank * SPACE + WORDS

    def copy(self, target, source, num_bytes):
        half = num_bytes // 2
        for start, stop in ((0, half), (half, num_bytes)):
            self.stream.append(("copy", target + start, source + start, stop - start))

    def beside(self, moves):
        for move in moves:
            self.copy(*move)
        return lambda: None

    def meet(self, theirs, mine):
        self.stream.extend(("set", word, 1) for word in theirs)
        self.stream.extend(("wait", word) for word in mine)
        self.stream.extend(("set", word, 0) for word in mine)

    def release(self, words, count):
        self.is_strict = False
        while self.stream:
            self._memory[words : words + 4 * count : 4] = 1
            self.step()

    def step(self):
        """Whether the next command could run."""
        match self.stream[0]:
            case ("copy", target, source, size):
                self._memory[target : target + size] = self._memory[source : source + size]
            case ("set", word, value):
                assert not self.is_strict or value == 0 or self._memory[word] == 0, (
                    "a word is set twice before it is cleared"
                )
                self._memory[word] = value
            case ("wait", word):
                if not self._memory[word]:
                    return False
            case work:
                work()
        self.stream.popleft()
        return True


def transfers(rank, size):
    """Every rank's piece to all, and another of its pieces to each other rank."""
    found, base = Transfers(rank, size), rank * SPACE
    for root in range(size):
        source = base + 100 if root == rank else base + 200 + LENGTH * root
        found.broadcast(source, base + 200 + LENGTH * root, LENGTH, root)
    for other in range(size):
        if other != rank:
            found.sent[other].append((base + 400 + LENGTH * other, LENGTH))
            found.received[other].append((base + 600 + LENGTH * other, LENGTH))
    return found


def queued(size, turns):
    """GPUs with the commands of this many turns, in each of which every piece has other numbers; and what was wrong."""
    memory, wrong = np.zeros(size * SPACE, np.uint8), []
    gpus = [Gpu(rank, memory) for rank in range(size)]

    def work(world):
        rank, gpu, base = world.rank, gpus[world.rank], world.rank * SPACE
        copies = PeerCopies(world, gpu, "here")
        agreed = copies.agreed(transfers(rank, size))

        def write(turn):
            memory[base + 100 : base + 100 + LENGTH] = turn * size + rank
            for other in range(size):
                memory[base + 400 + LENGTH * other :][:LENGTH] = 100 + (turn * size + rank) * size + other

        def check(turn):
            for other in range(size):
                wrong.append((memory[base + 200 + LENGTH * other :][:LENGTH] != turn * size + other).any())
                if other != rank:
                    expected = 100 + (turn * size + other) * size + rank
                    wrong.append((memory[base + 600 + LENGTH * other :][:LENGTH] != expected).any())

        for turn in range(turns):
            gpu.stream.append(lambda turn=turn: write(turn))
            copies.run(agreed)
            gpu.stream.append(lambda turn=turn: check(turn))
        return copies

    return gpus, run_ranks(size, work), wrong


def run(gpus, seed):
    """All commands, of whichever GPU comes next."""
    order = random.Random(seed)
    waits = [order.choice((1, 1, 10, 100)) for _ in gpus]  # some are slow
    while any(gpu.stream for gpu in gpus):
        ready = [gpu for gpu in gpus if gpu.stream]
        ran = [gpu.step() for gpu in ready if not order.randrange(waits[gpu.rank])]
        if not any(ran):
            assert any(gpu.step() for gpu in ready), "all wait for each other"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_copies_are_whole_in_any_order(size):
    for seed in range(20):
        gpus, _, wrong = queued(size, turns=3)
        run(gpus, seed)
        assert len(wrong) == 3 * size * (2 * size - 1) and not any(wrong)


@pytest.mark.parametrize("left_out", [READY, ARRIVED])
def test_each_meeting_is_needed(left_out, monkeypatch):
    """Else what is read is overwritten, or what has not arrived is read."""
    meet = PeerCopies._meet
    monkeypatch.setattr(PeerCopies, "_meet", lambda self, kind: kind == left_out or meet(self, kind))
    found = []
    for seed in range(20):
        gpus, _, wrong = queued(2, turns=3)
        for gpu in gpus:
            gpu.is_strict = False
        with suppress(AssertionError):  # signals are lost as well
            run(gpus, seed)
        found.append(any(wrong))
    assert any(found)


def test_the_commands_of_every_turn_are_the_same():
    """So a graph can have them."""
    (gpu, _), _, _ = queued(2, turns=2)
    commands = [command for command in gpu.stream if not callable(command)]
    assert commands and commands[: len(commands) // 2] == commands[len(commands) // 2 :]


def test_a_rank_that_leaves_goes_on_without_the_others():
    gpus, (first, _), _ = queued(2, turns=3)
    while gpus[0].step():
        pass
    assert gpus[0].stream[0][0] == "wait"
    first.close()
    assert not gpus[0].stream


@pytest.mark.parametrize(
    ("closed", "machines", "message"),
    [
        ((1,), ("here", "here"), "rank 1 does not share memory: no handles here"),
        (((0, 1),), ("here", "here"), "rank 0 does not share memory: no way there"),
        ((), ("here", "there"), "the ranks are on several machines"),
    ],
)
def test_all_ranks_hear_why_one_cannot_copy(closed, machines, message):
    memory = np.zeros(2 * SPACE, np.uint8)

    def work(world):
        with pytest.raises(PeerError, match=message):
            PeerCopies(world, Gpu(world.rank, memory, closed), machines[world.rank])
        return True

    assert run_ranks(2, work) == [True, True]


def sizes(world, copies):
    found = Transfers(world.rank, 2)
    found.broadcast(world.rank * SPACE, world.rank * SPACE, 8 + world.rank, 0)
    copies.agreed(found)


def calls(world, copies):
    if world.rank:
        world.gather("something else")
    else:
        copies.agreed(Transfers(0, 2))


@pytest.mark.parametrize(("differ", "message"), [(sizes, "receives other sizes"), (calls, "others do something else")])
def test_ranks_that_differ_are_reported(differ, message):
    memory = np.zeros(2 * SPACE, np.uint8)
    with pytest.raises(WorldError, match=message):
        run_ranks(2, lambda world: differ(world, PeerCopies(world, Gpu(world.rank, memory), "here")))


def test_memory_that_cannot_be_reached_any_more_ends_the_run():
    memory = np.zeros(2 * SPACE, np.uint8)

    def work(world):
        closed = set()
        copies = PeerCopies(world, Gpu(world.rank, memory, closed), "here")
        closed.add((world.rank, 1 - world.rank))
        copies.agreed(transfers(world.rank, 2))

    with pytest.raises(WorldError, match=r"cannot reach the memory of rank . any more: no way there"):
        run_ranks(2, work)
