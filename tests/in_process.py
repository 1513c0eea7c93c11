"""A world of threads in one process: ranks without processes and sockets."""

import io
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from llmq.comm.world import World
from llmq.errors import WorldError

PATIENCE = 120.0  # seconds until the others are given up
Result = TypeVar("Result")


class _Meeting:
    """What all threads share: a place for each rank, and the point where they wait for each other."""

    def __init__(self, size: int) -> None:
        self.places: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)


class ThreadRank:
    """One rank, which is a thread."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting

    def exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[np.ndarray]) -> None:
        """Copies from the others' arrays, between two meetings: all have put theirs down, all have copied."""
        for target, theirs in zip(incoming, self._meet(outgoing), strict=True):
            target[...] = theirs[self.rank]
        self._wait()

    def gather(self, message: Any) -> list[Any]:
        """The messages themselves."""
        found = self._meet(message)
        self._wait()
        return found

    def close(self) -> None:
        """The others stop waiting for this rank."""
        self._meeting.barrier.abort()

    def _meet(self, mine: Any) -> list[Any]:
        self._meeting.places[self.rank] = mine
        self._wait()
        return list(self._meeting.places)

    def _wait(self) -> None:
        try:
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise WorldError(f"rank {self.rank} waits for another rank that has ended") from error


def run_ranks(size: int, work: Callable[[World], Result]) -> list[Result]:
    """What `work` returns on each of `size` ranks, which run at once; the first real error of one ends all."""
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        world = ThreadRank(rank, size, meeting)
        try:
            results[rank] = work(world)
        except BaseException as error:
            errors.append(error)
            world.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, WorldError)), errors[0])
    return results


def train_on_ranks(size: int, values: Mapping[str, Any], callbacks: Sequence[Any] = ()) -> tuple[list[Any], str]:
    """The results of a run on all of its ranks, with these options that are not None, and callbacks on the first one;
    what that printed."""
    from llmq.options.parse import Options
    from llmq.training.ranks import Ranks
    from llmq.training.train import run

    consoles = [io.StringIO() for _ in range(size)]

    def work(world: World) -> Any:
        given = {key: value for key, value in values.items() if value is not None and key != "console"}
        about = {"console": consoles[world.rank], "callbacks": () if world.rank else callbacks}
        return run(Options.parse(given), ranks=Ranks(world), **about)

    results = run_ranks(size, work)
    assert not any(console.getvalue() for console in consoles[1:])
    return results, consoles[0].getvalue()


def train_on(
    size: int, options: Mapping[str, Any], console: io.StringIO | None = None, hooks: Sequence[Any] = ()
) -> Any:
    """Trains on some ranks, or with hooks on one; what the first one returns. `console` gets its lines."""
    from llmq.options.parse import Options
    from llmq.training.ranks import Ranks
    from llmq.training.train import run

    parsed = Options.parse(options)
    consoles = [console or io.StringIO(), *(io.StringIO() for _ in range(size - 1))]
    if size == 1:
        return run(parsed, console=consoles[0], hooks=hooks)
    return run_ranks(size, lambda world: run(parsed, console=consoles[world.rank], ranks=Ranks(world)))[0]
