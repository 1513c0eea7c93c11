"""Real processes, one of which is killed, stopped, stuck or fails: the others say so and end with code 6, in time."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from llmq.comm.environment import Place
from llmq.comm.membership import Membership
from llmq.comm.store import Beat, StoreServer
from llmq.errors import WorldError

TOKEN = "the job's token"
NOWHERE = Path("nowhere")  # where no stacks are written
RANK = """
    import os, sys, time
    from pathlib import Path
    from llmq.comm.environment import recognised
    from llmq.comm.store import Beat
    from llmq.comm.world import join_world
    from llmq.errors import LlmqError
    from llmq.hardware.device import CPU

    folder, patience, trouble, steps = sys.argv[1:]
    world = join_world(recognised(os.environ), CPU)
    rank = world.rank
    at = [0, "", 0]

    def work_of_the_stuck():
        time.sleep(1000)

    def wait_for(world):
        at[1:] = "the gather of a test", at[2] + 1
        world.gather(at[0])
        at[1] = ""

    def run(world, watch):
        for at[0] in range(int(steps)):
            wait_for(world)
            if at[0] == 3:
                print("third step", flush=True)
                if rank == 1 and trouble == "stuck":
                    work_of_the_stuck()
                if rank == 1 and trouble == "fails":
                    raise ValueError("a fault of its own")
                if rank == 1 and trouble == "leaves":
                    return
                if trouble == "all fail":
                    raise LlmqError("the loss is not finite")
                if rank == 1 and trouble == "long":
                    with watch.long("exporting"):
                        time.sleep(3 * patience)
            time.sleep(0.01)

    def last_lines(lost):
        print(f"the log of rank {rank} ends: {lost[:14]}", flush=True)
        if rank == 0 and trouble == "the log is stuck":
            time.sleep(1000)

    status = 0
    try:
        try:
            stacks = Path(folder, f"stacks-{rank}")
            beat, patience = lambda: Beat(*at), float(patience)
            with world.membership.watched(beat, stacks, patience=patience, on_lost=last_lines) as watch:
                run(world, watch)
        finally:
            world.close()
    except LlmqError as error:
        print(f"error: {error}", file=sys.stderr)
        status = error.exit_code
    sys.exit(status)
"""


class Ranks:
    """Processes of a run, and their store, which is in this process unless rank 0 keeps it."""

    def __init__(self, folder, trouble, *, patience, size=3, steps=1_000_000, keeps=False):
        self._server = StoreServer("127.0.0.1", 0, size, TOKEN, 60)
        if keeps:
            self._server.close()
        first = Place(0, size, 0, size, "127.0.0.1", self._server.port, TOKEN, "test", has_store=not keeps, join_s=20)
        command = [sys.executable, "-c", textwrap.dedent(RANK), str(folder), str(patience), trouble, str(steps)]
        environs = [{**os.environ, **replace(first, rank=rank).environ()} for rank in range(size)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.all = [subprocess.Popen(command, env=environ, **streams) for environ in environs]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.all:
            process.kill()
            process.communicate()
        self._server.close(grace=0)

    def reach_the_third_step(self):
        for process in self.all:
            assert process.stdout.readline() == "third step\n", process.communicate()

    def ends(self, *numbers, within):
        """Exit code, stdout and stderr of some ranks, all of which end within some seconds."""
        until = time.monotonic() + within
        found = []
        for number in numbers:
            out, error = self.all[number].communicate(timeout=max(0.1, until - time.monotonic()))
            found.append((self.all[number].returncode, out, error))
        return found


def test_a_killed_rank_is_reported_by_all_others_with_their_stacks(tmp_path):
    (tmp_path / "stacks-2").mkdir()  # which cannot be written
    with Ranks(tmp_path, "", patience=60) as ranks:
        ranks.reach_the_third_step()
        ranks.all[1].send_signal(signal.SIGKILL)
        for number, (status, out, error) in zip((0, 2), ranks.ends(0, 2, within=10), strict=True):
            assert status == 6 and out == f"the log of rank {number} ends: rank 1 is lost\n"
            line, *printed = error.splitlines(keepends=True)
            report, _, where = line.partition(". Python stacks are in ")
            says = f"rank {number} ends, because rank 1 is lost: its process has ended (last seen in "
            assert report.startswith(says) and where == f"{tmp_path}/stacks-{number}\n"
            written = "".join(printed) or Path(where.strip()).read_text()
            assert bool(printed) == (number == 2) and (number != 2 or "stacks-2 cannot be written: " in written)
            assert f"{report}\nPython stacks of rank {number}:\nthread MainThread:\n" in written


STORE_LOST, KEEPS = "rank 0 is lost: it keeps the store; ", {"keeps": True}
# what goes wrong, how the ranks run, the signal that a rank gets, within how many seconds all others say what
LOST = {
    "stopped": ("", {"patience": 3}, (1, signal.SIGSTOP), 10, "rank 1 is lost: no sign of life for 2 s: its process"),
    "stands still": ("stuck", {"patience": 3}, (1, None), 10, "it stands still for 2 s, and others wait for it"),
    "fails": ("fails", {}, (1, None), 15, "rank 1 is lost: it has failed with ValueError: a fault of its own"),
    "leaves": ("leaves", {}, (1, None), 30, "rank 1 has ended, and rank"),  # no verdict: a rank that left is no loss
    "killed, and a log is stuck": ("the log is stuck", {}, (1, signal.SIGKILL), 25, "its process has ended"),
    "killed with the store": ("", KEEPS, (0, signal.SIGKILL), 10, f"{STORE_LOST}its connection has ended"),
    "stopped with the store": ("", {**KEEPS, "patience": 3}, (0, signal.SIGSTOP), 10, f"{STORE_LOST}no answer for 2"),
    "store of a rank": ("", {**KEEPS, "size": 5}, (3, signal.SIGKILL), 15, "rank 3 is lost: its process has ended"),
}


@pytest.mark.parametrize(
    ("trouble", "run", "sent", "within", "said"),
    [
        pytest.param(*case, marks=pytest.mark.slow if i == 0 else pytest.mark.sweep)
        for i, case in enumerate(LOST.values())
    ],
    ids=LOST,
)
def test_a_rank_that_is_lost_is_named_by_all_others(tmp_path, trouble, run, sent, within, said):
    rank, number = sent
    with Ranks(tmp_path, trouble, **{"patience": 60, **run}) as ranks:
        ranks.reach_the_third_step()
        if number is not None:
            time.sleep(1.5)
            ranks.all[rank].send_signal(number)
        for status, out, error in ranks.ends(*(i for i in range(len(ranks.all)) if i != rank), within=within):
            assert status == 6 and said in error
            assert trouble == "leaves" or f"ends: rank {rank} is lost" in out
        if number == signal.SIGSTOP:
            ranks.all[rank].send_signal(signal.SIGCONT)
        if number != signal.SIGKILL:
            [(status, _, error)] = ranks.ends(rank, within=10)
            own = {"fails": (1, "ValueError: a fault of its own"), "leaves": (0, "")}
            code, words = own.get(trouble, (6, f"rank {rank} ends"))
            assert status == code and words in error and (code != 1 or "is lost" not in error)
        if trouble == "stuck":
            assert "(last seen in step 3, after collective 4)" in error
            stacks = [(tmp_path / f"stacks-{number}").read_text() for number in range(3)]
            assert ["in work_of_the_stuck" in text for text in stacks] == [False, True, False]


@pytest.mark.sweep
def test_ranks_that_fail_alike_all_end_with_their_own_error(tmp_path):
    with Ranks(tmp_path, "all fail", patience=60, keeps=True) as ranks:
        assert [end[::2] for end in ranks.ends(0, 1, 2, within=20)] == [(1, "error: the loss is not finite\n")] * 3


@pytest.mark.sweep
@pytest.mark.parametrize("keeps", [False, True])
def test_what_takes_long_is_waited_for(keeps, tmp_path):
    """Three times the patience; and a run that ends well says nothing."""
    with Ranks(tmp_path, "long", patience=3, steps=10, keeps=keeps) as ranks:
        assert ranks.ends(0, 1, 2, within=30) == [(0, "third step\n", "")] * 3


@pytest.mark.sweep
def test_all_ranks_stopped_and_continued_are_not_lost(tmp_path):
    """Ctrl-Z and fg, or a laptop that slept."""
    with Ranks(tmp_path, "", patience=3, steps=400, keeps=True) as ranks:
        ranks.reach_the_third_step()
        for process in ranks.all:
            process.send_signal(signal.SIGSTOP)
        time.sleep(6)
        for process in ranks.all:
            process.send_signal(signal.SIGCONT)
        assert ranks.ends(0, 1, 2, within=30) == [(0, "", "")] * 3


def test_a_store_that_is_gone_cannot_watch():
    server = StoreServer("127.0.0.1", 0, 1, TOKEN, 20)
    member = Membership.join("127.0.0.1", server.port, 0, 1, TOKEN, 20)
    member._channel.end()
    with (
        pytest.raises(WorldError, match="rank 0 cannot reach the store to be watched"),
        member.watched(lambda: Beat(0, "", 0), NOWHERE, patience=60.0),
    ):
        pass
    server.close(grace=0)
