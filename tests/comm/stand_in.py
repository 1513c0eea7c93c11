"""What a rank does in tests of launchers, in place of training: it joins the others, and then what its arguments say.

exchange          five exchanges of arrays with all the others; rank 0 prints their sum
fail RANK CODE    the rank ends with an exit code, or by a signal (-9), the others with 6 once they miss it
wait SIGNAL       until this signal comes; the rank prints all that it heard, and ends with 75
stay RANK         one that neither misses the others nor hears SIGTERM
    wait-once FOLDER  until a rank is missed, in the first start; the second one exchanges
fail-once RANK FOLDER     the rank fails in the first start, and its arguments say of the second that it is one
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from llmq.comm.environment import recognised
from llmq.comm.world import join_world
from llmq.errors import TERMINATED, WorldError
from llmq.hardware.device import CPU


def main() -> None:
    """The command of a group in tests."""
    act(*sys.argv[1:])


def run() -> None:
    """The same in place of `llmq-train`, whose arguments it has."""
    again = "--continue=auto"
    act(*os.environ["STAND_IN"].split(), *([again] if again in sys.argv else []))


def act(what: str, *arguments: str) -> None:
    """Joins the others and does what is asked for."""
    place = recognised(os.environ)
    world = join_world(place, CPU)
    if world.rank == 0 and place:
        print(place.in_words, flush=True)
    try:
        sys.exit(globals()[f"_{what.replace('-', '_')}"](world, *arguments))
    except WorldError as error:
        print(error, flush=True)
        os._exit(error.exit_code)


def _exchange(world) -> None:
    total = 0
    for step in range(5):
        outgoing = [np.full(3, 100 * step + 10 * world.rank + other) for other in range(world.size)]
        incoming = [np.empty(3, int) for _ in range(world.size)]
        world.exchange(outgoing, incoming)
        assert [a.tolist() for a in incoming] == [[100 * step + 10 * r + world.rank] * 3 for r in range(world.size)]
        total += sum(int(a.sum()) for a in incoming)
    sums = world.gather(total)
    if world.rank == 0:
        print(f"rank 0 on cores {sorted(os.sched_getaffinity(0))}", flush=True)
        print(f"the sum over {world.size} ranks is {sum(sums)}", flush=True)
    world.close()


def _fail(world, rank: str, code: str) -> None:
    if world.rank == int(rank):
        print(f"error: rank {rank} cannot", flush=True)
        os._exit(int(code)) if int(code) > 0 else os.kill(os.getpid(), -int(code))
    world.gather(None)


def _wait(world, last: str) -> int:
    heard: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: heard.append(number))
    world.gather(None)
    print(f"rank {world.rank} waits", flush=True)
    while int(last) not in heard:
        time.sleep(0.01)
    time.sleep(0.2)  # for what comes twice
    print(f"rank {world.rank} heard {heard}", flush=True)
    return TERMINATED


def _stay(world, rank: str) -> None:
    if world.rank == int(rank):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    os._exit(1)


def _fail_once(world, rank: str, folder: str, *more: str) -> None:
    mark = Path(folder) / "failed"
    if more != ("--continue=auto",):
        if world.rank == int(rank):
            mark.touch()
            os._exit(1)
        world.gather(None)
    assert mark.is_file() and recognised(os.environ).again
    _exchange(world)


def _wait_once(world, folder: str, *more: str) -> None:
    if not more:
        (Path(folder) / "waiting").touch()
        for _ in range(10_000):
            world.gather(None)
            time.sleep(0.01)
    _exchange(world)
