"""Writing checkpoints: several writers and one commit, what is kept, and every call that a disk can refuse."""

import errno
import itertools
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from checkpoint_files import save

from llmq import disk
from llmq.errors import StorageError
from llmq.files.checkpoint import find, load
from llmq.files.tensor_files import Piece
from llmq.files.writers import Keep, TensorSlice, begin, commit, remove_unfinished, write_part

WORLD = 3
MATRIX, VECTOR = Piece("m", (7, 5), np.dtype(np.float32)), Piece("v", (4,), np.dtype(np.int32))
VALUES = {"m": np.arange(35, dtype=np.float32).reshape(7, 5), "v": np.arange(4, dtype=np.int32)}
ROWS = {0: (0, 3), 1: (3, 4), 2: (4, 7)}


def slices_of(rank):
    """Rows of the matrix for every rank; the vector is the first one's."""
    low, high = ROWS[rank]
    slices = [TensorSlice(MATRIX, (low, 0), (high - low, 5))]
    return [*slices, TensorSlice.whole(VECTOR)] if rank == 0 else slices


def part_of(saving, rank):
    slices = slices_of(rank)
    values = [
        (name, VALUES[name][tuple(slice(a, a + n) for a, n in zip(each.start, each.shape, strict=True))])
        for each in slices
        for name in [each.tensor.name]
    ]
    return write_part(saving, rank, slices, values)


def write(folder, step, **about):
    return save(folder, step, {name: array + step for name, array in VALUES.items()}, {"n": step}, **about)


def steps(folder):
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_three_writers_and_one_or_two_readers(tmp_path, ranks):
    saving = begin(tmp_path, 4, WORLD)
    if ranks == "threads":
        with ThreadPoolExecutor(WORLD) as pool:
            parts = list(pool.map(partial(part_of, saving), range(WORLD)))
    else:
        with multiprocessing.get_context("spawn").Pool(WORLD) as processes:
            parts = processes.map(partial(part_of, saving), range(WORLD))
    assert find(tmp_path, "auto") is None, "nothing is there before the commit"
    path = commit(saving, parts[::-1], {"n": 4})
    state, read = load(path)
    assert state == {"n": 4, "step": 4} and len(list(path.glob("*.safetensors"))) == WORLD
    assert np.array_equal(read("m"), VALUES["m"]) and np.array_equal(read("v"), VALUES["v"])
    halves = [read("m", (0, 0), (4, 5)), read("m", (4, 0), (3, 5))]
    assert np.array_equal(np.concatenate(halves), VALUES["m"])
    columns = [read("m", (0, 0), (7, 2)), read("m", (0, 2), (7, 3))]  # split along the other axis
    assert np.array_equal(np.concatenate(columns, 1), VALUES["m"])


def test_a_commit_needs_all_parts_and_each_place_once(tmp_path):
    saving = begin(tmp_path, 4, WORLD)
    parts = [part_of(saving, rank) for rank in range(WORLD)]
    with pytest.raises(AssertionError, match=r"\[1\] are absent"):
        commit(saving, [parts[0], parts[2]], {})
    other = begin(tmp_path, 5, 2)
    with pytest.raises(ValueError, match="do not fill its shape"):
        commit(other, [part_of(other, 0), part_of(other, 1)], {})
    assert steps(tmp_path) == []


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


def test_a_folder_that_vanishes_is_an_error_of_storage(tmp_path, monkeypatch):
    folder = tmp_path / "ckpt"
    real = os.fsync

    def sync(file):
        if folder.exists():
            folder.rename(tmp_path / "gone")
        real(file)

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(StorageError, match="checkpoint cannot be written"):
        write(folder, 1)
