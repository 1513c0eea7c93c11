"""Free space is checked per file system, for all that is written together; files appear whole; where caches lie."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmq.disk import (
    cache_folder,
    check_free_space,
    existing_folder,
    reading,
    remove_folder,
    remove_leftovers,
    replace_folder,
    replaced_name,
    shown,
    storage,
    temporary_name,
    whole_folder,
    write_whole,
)
from llmq.errors import DataError, StorageError


def test_needs_on_one_disk_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert existing_folder(tmp_path / "a" / "b") == tmp_path
    needs = {"2 checkpoints": (tmp_path / "a" / "b", 600), "the export": (tmp_path, 400)}
    check_free_space(needs)
    with pytest.raises(StorageError) as caught:
        check_free_space({**needs, "the export": (tmp_path, 1401)})
    assert "600 bytes needed and the export" in str(caught.value)
    assert "1,000 bytes are free, 1,001 bytes are missing" in str(caught.value)
    assert not (tmp_path / "a").exists()


def test_a_place_that_cannot_be_written_is_named_with_the_others(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError) as caught:
        check_free_space({"x": (tmp_path / "file" / "c", 1), "y": (Path("/proc/x"), 1), "z": (tmp_path, 1)})
    lines = str(caught.value).splitlines()
    assert [line[0] for line in lines] == ["x", "y"]


def test_sizes_are_shown_in_their_unit() -> None:
    assert [shown(n) for n in (1023, 2**20, 3 * 2**29)] == ["1,023 bytes", "1.0 MiB", "1.5 GiB"]


def test_two_processes_with_one_id_write_one_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two containers with a shared cache do: here, one writes while the other waits for its disk."""
    path, real = tmp_path / "x.json", os.fsync

    def other_writes(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", real)
        write_whole(path, b"the other's")
        assert path.read_bytes() == b"the other's"

    monkeypatch.setattr(os, "fsync", other_writes)
    write_whole(path, b"mine")
    assert path.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_whole(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    says = r"x\.json: cannot be written \(No space left on device: [0-9,]+ bytes are free\)"
    with pytest.raises(StorageError, match=says):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def folder_with(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).touch()
    return path


def there(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


def test_a_folder_is_replaced_as_a_whole_or_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fresh, real = tmp_path / "x", tmp_path / "fresh", os.rename

    def fails(source: Path, target: Path) -> None:
        if source == fresh:
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    replace_folder(path, folder_with(fresh, "old"))
    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="Input/output"):
        replace_folder(path, folder_with(fresh, "new"))
    assert there(tmp_path) == ["fresh", "fresh/new", "x", "x/old"]
    monkeypatch.undo()
    replace_folder(path, fresh)
    assert there(tmp_path) == ["x", "x/new"]


@pytest.mark.parametrize("kept", [None, "own".__eq__])
def test_a_replacement_that_was_killed_is_finished(tmp_path: Path, kept: Callable[[str], bool] | None) -> None:
    path = tmp_path / "x"
    folder_with(replaced_name(path), "old", "own")  # killed between the renames
    remove_leftovers(path, kept)
    assert there(path) == ["old", "own"]
    folder_with(replaced_name(path), "old", "own")  # killed after them
    if kept:
        with pytest.raises(StorageError, match=r"own is left .* has one too"):
            remove_leftovers(path, kept)
    (path / "own").unlink()
    with whole_folder(path, kept) as fresh:
        (fresh / "new").touch()
    assert there(tmp_path) == ["x", "x/new", *(["x/own"] if kept else [])]


def test_a_folder_that_is_not_finished_leaves_no_trace(tmp_path: Path) -> None:
    folder_with(tmp_path / "x", "old")
    with pytest.raises(KeyError), whole_folder(tmp_path / "x") as fresh:
        (fresh / "new").touch()
        raise KeyError
    assert there(tmp_path) == ["x", "x/old"]
    remove_folder(tmp_path / "x")
    assert there(tmp_path) == []


def test_nothing_is_beside_the_root() -> None:
    for name_of in (replaced_name, temporary_name):
        with pytest.raises(StorageError, match=r"^/ is the root of the file system: give a folder inside it$"):
            name_of(Path("/"))


def test_what_the_disk_refuses_is_said_with_the_room_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    path, words = tmp_path / "x", {"kept": "; the old one is there", "advice": "go elsewhere"}

    def said(number: int, **more: Any) -> str:
        with pytest.raises(StorageError) as caught, storage(path, "the model cannot be written", **words, **more):
            raise OSError(number, os.strerror(number))
        return str(caught.value)

    start, end = f"{path}: the model cannot be written (", "); the old one is there: go elsewhere"
    full = os.strerror(errno.ENOSPC)
    assert said(errno.EIO, needed=5000) == f"{start}{os.strerror(errno.EIO)}{end}"
    end = "); the old one is there: free some space, or go elsewhere"
    assert said(errno.ENOSPC) == f"{start}{full}: 1,000 bytes are free{end}"
    assert said(errno.ENOSPC, needed=5000) == f"{start}{full}: it needs 5,000 bytes, 1,000 bytes are free{end}"


def test_what_cannot_be_read_is_a_data_error_with_the_way_out(tmp_path: Path) -> None:
    for advice, end in (("", ")"), ("look again", "): look again")):
        with pytest.raises(DataError) as caught, reading(tmp_path / "x", advice):
            (tmp_path / "x").read_bytes()
        assert str(caught.value) == f"{tmp_path / 'x'}: cannot be read ({os.strerror(errno.ENOENT)}{end}"


def test_what_killed_writers_left_of_one_name_is_removed(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "ab"
    temporary_name(path).touch()
    (temporary_name(path) / "in").mkdir(parents=True)
    temporary_name(other).touch()
    path.touch()
    remove_leftovers(path)
    assert sorted(left.name[:4] for left in tmp_path.iterdir()) == [".ab.", "a"]


def test_the_place_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("LLMQ_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value, place in (
        ("HOME", str(tmp_path), ".cache/llmq/gemm"),
        ("XDG_CACHE_HOME", str(tmp_path / "xdg"), "xdg/llmq/gemm"),
        ("LLMQ_CACHE_DIR", str(tmp_path / "own"), "own/gemm"),
        ("LLMQ_CACHE_DIR", "~/mine", "mine/gemm"),
    ):
        monkeypatch.setenv(name, value)
        assert cache_folder("gemm") == tmp_path / place


def test_without_a_home_the_cache_is_a_temporary_folder_of_this_process(tmp_path, monkeypatch):
    monkeypatch.delenv("LLMQ_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "absent"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = cache_folder("gemm")
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: (_ for _ in ()).throw(RuntimeError("no home"))))
    assert cache_folder("gemm") == folder, "one place for a whole process"
    assert folder.parent.stat().st_mode & 0o777 == 0o700
