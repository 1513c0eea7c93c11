"""A run of 10,000 steps with all that happens now and then: memory, descriptors and threads are those of its start."""

import gc
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import tiny_options

import llmq

LOOKS = 20  # in a run
WARM = 4  # looks until caches, pools and the allocator's arenas have what they need
# Of resident memory beyond the largest of the first looks: a page for every other step of 10,000 would be 20 MiB.
# glibc gives back only what is freed at the top of an arena, so that buffers of a save may come and go.
SLACK_BYTES = 8 << 20


@pytest.mark.parametrize(
    "steps", [pytest.param(200, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.sweep)]
)
def test_nothing_grows_with_the_steps_of_a_run(steps, tmp_path, monkeypatch):
    """Evaluated and saved now and then, with a callback that logs at each step."""
    monkeypatch.chdir(tmp_path)
    gc.freeze()  # what other tests left took seconds to go through at each look
    found = []

    class Look(llmq.Callback):
        def on_step(self, run, record):
            run.log(mine=record.loss)
            if record.step % (steps // LOOKS) == 0:
                gc.collect()
                resident = int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize()
                found.append((resident, len(os.listdir("/proc/self/fd")), threading.active_count()))

    now_and_then = {"eval_every_n_steps": steps // 50, "ckpt_interval": steps // 10, "ckpt_keep_n": 2}
    now_and_then |= {"grad_accumulation": 1, "batch_size": 1}
    llmq.train(**{**tiny_options(tmp_path), **now_and_then, "steps": steps}, callbacks=[Look()])
    resident, descriptors, threads = map(np.array, zip(*found, strict=True))
    assert len(found) == LOOKS
    assert max(resident[WARM:]) - max(resident[:WARM]) < SLACK_BYTES, resident / 2**20
    for kind in (descriptors, threads):  # a save that is being written has some of its own, which come and go
        assert min(kind[-WARM:]) <= max(kind[:WARM]), kind
