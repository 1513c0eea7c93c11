"""Saving beside training: what is saved is what was copied, errors come to the run, nothing is left under way."""

import io
import os
import threading
import time
from functools import partial

import numpy as np
import pytest
from checkpoint_files import slices_of

from llmq import disk, screen
from llmq.errors import StorageError
from llmq.files.checkpoint import load
from llmq.files.writers import Keep, Saver, Snapshot
from llmq.screen import Screen

DTYPES = {"a": np.int32, "b": np.uint8, "c": np.float64, "d": np.float32}  # of sizes that want to be aligned


@pytest.fixture
def tensors():
    return {name: np.arange(7).astype(dtype) for name, dtype in DTYPES.items()}


@pytest.fixture
def gate(monkeypatch):
    """An event that every fsync waits for."""
    opened, real = threading.Event(), os.fsync

    def sync(file):
        assert opened.wait(30)
        real(file)

    monkeypatch.setattr(os, "fsync", sync)
    yield opened
    opened.set()


def allocate(num_bytes):
    return np.full(num_bytes, 0xFF, np.uint8)


def snapshot(step, tensors):
    def copies(into):
        for name, array in tensors.items():
            place = np.empty_like(array) if into is None else into(name)
            place[...] = array
            yield name, place

    return Snapshot(step, slices_of(tensors), copies, {}, {})


def test_a_slow_disk_holds_up_the_next_save_alone(tmp_path, tensors, gate):
    with Saver(tmp_path, print, allocate) as saver:
        saver.save(snapshot(1, tensors), Keep())
        before = {name: array.copy() for name, array in tensors.items()}
        for array in tensors.values():
            array += 1  # the next update
        assert saver.finished(wait=False) is None
        gate.set()
        path = saver.finished(wait=True)
        saver.save(snapshot(2, tensors), Keep())  # into the same memory
    for folder, want in ((path, before), (tmp_path / "step-00000002", tensors)):
        _, read = load(folder)
        assert all(np.array_equal(read(name), want[name]) and read(name).dtype == want[name].dtype for name in want)


def test_a_failed_save_is_an_error_once_and_the_next_one_is_saved(tmp_path, tensors, monkeypatch):
    with Saver(tmp_path, print, allocate) as saver, monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        saver.save(snapshot(1, tensors), Keep())
        with pytest.raises(StorageError, match=r"Input/output error.*earlier checkpoints are as they were"):
            saver.finished(wait=True)
        patch.undo()
        assert saver.finished(wait=True) is None
        saver.save(snapshot(2, tensors), Keep())
        assert saver.finished(wait=True) == tmp_path / "step-00000002"
    assert os.listdir(tmp_path) == ["step-00000002"]


def refused(num_bytes):
    raise MemoryError


@pytest.mark.parametrize("memory", [None, refused])
def test_without_memory_a_save_is_complete_when_it_returns(tmp_path, tensors, memory):
    said = []
    with Saver(tmp_path, said.append, memory) as saver:
        for step in (1, 2):
            saver.save(snapshot(step, tensors), Keep())
            assert threading.active_count() == 1 or not [t for t in threading.enumerate() if t.name == "llmq-save"]
            assert saver.finished(wait=False) == tmp_path / f"step-{step:08}"
    assert len(said) == (memory is refused) and all("while training waits" in text for text in said)


def test_the_end_waits_and_a_second_ctrl_c_gives_up(tmp_path, tensors, gate, monkeypatch):
    with pytest.raises(RuntimeError), Saver(tmp_path, print, allocate) as saver:
        saver.save(snapshot(1, tensors), Keep())
        threading.Timer(0.1, gate.set).start()
        raise RuntimeError
    assert os.listdir(tmp_path) == ["step-00000001"]
    stopped, more = threading.Event(), {f"t{n}": np.zeros(4) for n in range(50)}
    with pytest.raises(KeyboardInterrupt), Saver(tmp_path, print, allocate) as saver:
        real = os.write
        monkeypatch.setattr(os, "write", lambda file, data: stopped.wait(30) and real(file, data))
        saver.save(snapshot(2, more), Keep())
        threading.Timer(0.3, stopped.set).start()
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["step-00000001"], "and nothing is left of it"


def test_a_save_that_takes_long_is_shown_until_it_is_complete(tmp_path, tensors, gate, monkeypatch):
    monkeypatch.setattr(screen, "PLAIN_S", 0.2)
    stream = io.StringIO()
    with Saver(tmp_path, print, allocate, partial(Screen(stream).task, words=disk.shown)) as saver:
        saver.save(snapshot(1, tensors), Keep())
        time.sleep(0.3)
        assert saver.finished(wait=False) is None
        beside = stream.getvalue()
        threading.Timer(0.5, gate.set).start()
        saver.finished(wait=True)
    line = f"Saving {tmp_path / 'step-00000001'}: 119 bytes of 119 bytes (100%)\n"
    assert beside == line and set(stream.getvalue().splitlines(keepends=True)) == {line}


@pytest.mark.parametrize("wait", [False, True])
def test_a_save_that_is_over_before_anyone_looks_is_shown_as_complete(tmp_path, tensors, monkeypatch, wait):
    monkeypatch.setattr(screen, "PLAIN_S", 0.0)
    stream = io.StringIO()
    with Saver(tmp_path, print, allocate, partial(Screen(stream).task, words=disk.shown)) as saver:
        saver.save(snapshot(1, tensors), Keep())
        saver._thread.join()
        path = saver.finished(wait=wait)
        assert saver.finished(wait=wait) is None
    assert stream.getvalue() == f"Saving {path}: 119 bytes of 119 bytes (100%)\n"
