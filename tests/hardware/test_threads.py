"""Work in threads: all of it is done, as much at once as there are cores, and the first error ends it."""

import threading

import pytest

from llmq.hardware import threads
from llmq.hardware.threads import in_threads


@pytest.mark.parametrize("cores", [1, 3])
def test_every_item_is_worked_on_once(monkeypatch, cores):
    monkeypatch.setattr(threads, "num_cores", lambda: cores)
    done = []
    in_threads(done.append, range(20))
    assert sorted(done) == list(range(20))
    in_threads(done.append, [])


def test_as_many_work_at_once_as_there_are_cores(monkeypatch):
    monkeypatch.setattr(threads, "num_cores", lambda: 3)
    together = threading.Barrier(3, timeout=10)
    in_threads(lambda item: together.wait(), range(3))  # a broken barrier raises


def test_the_first_error_ends_it(monkeypatch):
    monkeypatch.setattr(threads, "num_cores", lambda: 2)
    begun = []

    def work(item):
        begun.append(item)
        raise OSError(f"item {item}")

    with pytest.raises(OSError, match="item 0"):
        in_threads(work, range(1000))
    assert len(begun) < 1000
