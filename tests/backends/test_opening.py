"""What the backend of a GPU waits for begins in a thread, and what fails there is said where it is opened."""

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from llmq.backends.opening import begin_opening


def finished():
    """Waits for the thread, if there is one."""
    found = [thread for thread in threading.enumerate() if thread.name == "llmq-cuda"]
    for thread in found:
        thread.join()
    return len(found)


@pytest.mark.parametrize("fails", [False, True])
def test_the_context_of_the_gpu_of_a_number_is_begun(monkeypatch, fails):
    begun, may_end = [], threading.Event()

    class Device:
        def __init__(self, number):
            self.number = number

        def use(self):
            may_end.wait(10)
            begun.append(self.number)
            assert not fails

    module = ModuleType("llmq.backends.cuda")
    module.cupy = SimpleNamespace(cuda=SimpleNamespace(Device=Device))
    module.runtime = SimpleNamespace(free=begun.append)
    monkeypatch.setitem(sys.modules, "llmq.backends.cuda", module)
    begin_opening("cuda", 3)
    assert not begun, "the caller does not wait"
    may_end.set()
    assert finished() == 1 and begun == ([3] if fails else [3, 0])


def test_what_cannot_be_imported_is_said_later_and_other_backends_need_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "llmq.backends.cuda", None)
    begin_opening("cuda", 0)
    finished()
    begin_opening("cpu", 0)
    assert finished() == 0
