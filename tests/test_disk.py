"""Free space is checked per file system, for all that is to be written together."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmq.disk import check_free_space, existing_folder, shown
from llmq.errors import StorageError


def test_needs_on_one_disk_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    needs = {"2 checkpoints": (tmp_path / "a" / "b", 600), "the export": (tmp_path, 400)}
    check_free_space(needs)
    with pytest.raises(StorageError) as caught:
        check_free_space({**needs, "the export": (tmp_path, 1401)})
    assert "600 bytes needed and the export" in str(caught.value)
    assert "1,000 bytes are free, 1,001 bytes are missing" in str(caught.value)
    assert not (tmp_path / "a").exists()


def test_a_place_that_cannot_be_written_is_named_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "locked")
    (tmp_path / "locked").mkdir()
    with pytest.raises(StorageError) as caught:
        check_free_space({"x": (tmp_path / "file" / "c", 1), "y": (tmp_path / "locked", 1), "z": (tmp_path, 1)})
    lines = str(caught.value).splitlines()
    assert [line[0] for line in lines] == ["x", "y"]


def test_sizes_are_shown_in_their_unit() -> None:
    assert [shown(n) for n in (1023, 2**20, 3 * 2**29)] == ["1,023 bytes", "1.0 MiB", "1.5 GiB"]


def test_the_nearest_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert existing_folder(tmp_path / "a" / "b") == tmp_path
    monkeypatch.chdir(tmp_path)
    assert existing_folder(Path("a/b")) == tmp_path
