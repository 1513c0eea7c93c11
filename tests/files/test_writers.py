"""Writing checkpoints: several writers and one commit, beside training; what is kept, and what a disk can refuse."""

import errno
import itertools
import os
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from in_process import run_ranks
from sample_files import save, slices_of

from llmq import disk
from llmq.errors import StorageError
from llmq.files.checkpoint import find, load
from llmq.files.tensor_files import Piece
from llmq.files.writers import Keep, Saver, Snapshot, TensorSlice, remove_unfinished

MATRIX, VECTOR = Piece("m", (7, 5), np.dtype(np.float32)), Piece("v", (4,), np.dtype(np.int32))
VALUES = {"m": np.arange(35, dtype=np.float32).reshape(7, 5), "v": np.arange(4, dtype=np.int32)}


def written(folder, *rows):
    """What ranks save that have these rows of the matrix, and the first one the vector; the path as each has it."""

    def work(world):
        low, high = rows[world.rank]
        values = {"m": VALUES["m"][low:high], **({} if world.rank else {"v": VALUES["v"]})}
        slices = [TensorSlice(MATRIX, (low, 0), (high - low, 5)), *([] if world.rank else [TensorSlice.whole(VECTOR)])]
        with Saver(folder, print, None, world=world) as saver:
            saver.save(Snapshot(4, slices, lambda into: values.items(), {"n": 4}, {}), Keep())
            return saver.finished(wait=True)

    return run_ranks(len(rows), work)


def write(folder, step, **about):
    return save(folder, step, {name: array + step for name, array in VALUES.items()}, {"n": step}, **about)


def steps(folder):
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


def test_three_writers_and_one_or_two_readers(tmp_path):
    path, *others = written(tmp_path, (0, 3), (3, 4), (4, 7))
    assert others == [path, path]
    state, read = load(path)
    assert state == {"n": 4, "step": 4} and len(list(path.glob("*.safetensors"))) == 3
    assert np.array_equal(read("m"), VALUES["m"]) and np.array_equal(read("v"), VALUES["v"])
    halves = [read("m", (0, 0), (4, 5)), read("m", (4, 0), (3, 5))]
    assert np.array_equal(np.concatenate(halves), VALUES["m"])
    assert np.array_equal(read("m", (1, 1), (2, 3)), VALUES["m"][1:3, 1:4])
    columns = [read("m", (0, 0), (7, 2)), read("m", (0, 2), (7, 3))]  # split along the other axis
    assert np.array_equal(np.concatenate(columns, 1), VALUES["m"])


@pytest.mark.parametrize("rows", [((0, 3), (3, 4)), ((0, 3), (2, 7))])
def test_a_checkpoint_has_each_place_once(tmp_path, rows):
    with pytest.raises((ValueError, StorageError), match=r"do not fill its shape|overlap|not completed"):
        written(tmp_path, *rows)
    assert os.listdir(tmp_path) == []


def test_multiples_and_the_best_are_kept_beside_the_newest(tmp_path):
    losses = {2: 3.0, 3: 1.5, 4: 2.0, 5: 1.5, 6: 9.0, 7: 2.5}
    for step in range(1, 8):
        metrics = {"eval/loss": losses[step]} if step in losses else {}
        write(tmp_path, step, metrics=metrics, keep=Keep(2, major=4, best="eval/loss"))
    assert steps(tmp_path) == [3, 4, 6, 7]  # of two that are alike, the first is the best
    write(tmp_path, 8, metrics={"eval/loss": 1.0}, keep=Keep(2, major=4, best="eval/loss"))
    assert steps(tmp_path) == [4, 7, 8]


CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")
ERRORS = {"full": errno.ENOSPC, "read-only": errno.EROFS, "i/o": errno.EIO}


def refusing(monkeypatch, at, code, *, stays):
    """The call number `at` of those that change a disk fails, and with `stays` all after it, as if it were gone."""
    count = itertools.count()

    def wrapped(real):
        def call(*arguments, **about):
            number = next(count)
            if number == at or (stays and number > at):
                raise OSError(code, os.strerror(code))
            return real(*arguments, **about)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, wrapped(getattr(os, name)))
    return count


@pytest.mark.parametrize(
    ("kind", "stays"),
    [
        pytest.param(*one, marks=() if one in {("full", True), ("i/o", False)} else pytest.mark.slow)
        for one in itertools.product(ERRORS, (False, True))
    ],
)
def test_whatever_call_fails_the_older_checkpoint_stays(tmp_path, monkeypatch, kind, stays):
    number, failed = 0, 0
    while True:
        folder = tmp_path / str(number)
        write(folder, 1)
        with monkeypatch.context() as patch:
            calls = refusing(patch, number, ERRORS[kind], stays=stays)
            error = None
            try:
                write(folder, 2, keep=Keep(1))
            except StorageError as caught:
                error = caught
            reached = next(calls) > number
        if not reached:
            break
        failed += error is not None
        remove_unfinished(folder)
        path = find(folder, "auto")
        state, read = load(path)
        assert np.array_equal(read("m"), VALUES["m"] + state["n"])
        assert state["n"] == 2 or steps(folder) == [1], "an older one goes only after the newer is complete"
        assert write(folder, 3, keep=Keep(1)).is_dir() and steps(folder) == [3]
        number += 1
    assert number > 10 and failed > number / 2


def test_a_disk_that_takes_a_few_bytes_at_a_time_gets_all_of_them(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(disk.os, "write", lambda file, data: real(file, data[:13]))
    assert np.array_equal(load(write(tmp_path, 1))[1]("m"), VALUES["m"] + 1)
    monkeypatch.setattr(disk.os, "write", lambda file, data: 0)
    with pytest.raises(StorageError, match="takes no more bytes"):
        write(tmp_path, 2)
    assert steps(tmp_path) == [1]


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
        patch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        saver.save(snapshot(1, tensors), Keep())
        says = r"needs [0-9,]+ bytes, .* bytes are free.*earlier checkpoints are as they were.*--ckpt-keep-n"
        with pytest.raises(StorageError, match=says):
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


@pytest.mark.parametrize("wait", [False, True])
def test_how_far_a_save_is_is_shown_until_it_is_complete(tmp_path, tensors, gate, wait):
    shown = []

    @contextmanager
    def task(title):
        yield lambda *progress: shown.append((title, *progress))

    with Saver(tmp_path, print, allocate, task) as saver:
        saver.save(snapshot(1, tensors), Keep())
        assert saver.finished(wait=False) is None and shown[-1][2] == 119
        gate.set()
        saver._thread.join()  # over before anyone looks
        path = saver.finished(wait=wait)
        assert saver.finished(wait=wait) is None
    assert shown[-1] == (f"Saving {path}", 119, 119)
