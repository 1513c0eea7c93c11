"""Where caches lie."""

import os
from pathlib import Path

from llmq import cache_folder


def test_the_place_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LLMQ_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder.cache_folder("gemm") == tmp_path / ".cache/llmq/gemm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder.cache_folder("gemm") == tmp_path / "xdg/llmq/gemm"
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder.cache_folder("gemm") == tmp_path / "own/gemm"
    monkeypatch.setenv("LLMQ_CACHE_DIR", "~/mine")
    assert cache_folder.cache_folder("gemm") == tmp_path / "mine/gemm"


def test_without_a_home_the_cache_is_a_temporary_folder_of_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("LLMQ_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "absent"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = cache_folder.cache_folder("gemm")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "home", classmethod(lambda cls: (_ for _ in ()).throw(RuntimeError("no home"))))
        assert cache_folder.cache_folder("gemm") == folder
    assert folder == tmp_path / f"llmq-{os.getuid()}" / "gemm"
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    folder.parent.chmod(0o777)
    other = cache_folder.cache_folder("gemm")
    assert other.parent != folder.parent, "others may write there"
    assert cache_folder.cache_folder("gemm") == other, "one place for a whole process"
