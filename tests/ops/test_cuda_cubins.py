"""Compiled kernels on disk: made once, made again if damaged, and no reason to end a run."""

import errno
import os
from pathlib import Path

import pytest

from llmq.ops.cuda import compile as cuda_compile


def test_a_cubin_is_compiled_once_and_a_damaged_one_again(monkeypatch, tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc")
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path))
    path = cuda_compile.cubin_file("bias", 90, {"G": "float"})
    content, written = path.read_bytes(), path.stat().st_mtime_ns
    assert content[:4] == b"\x7fELF"
    assert cuda_compile.cubin_file("bias", 90, {"G": "float"}) == path
    assert path.stat().st_mtime_ns == written
    assert cuda_compile.cubin_file("bias", 90, {"G": "bf16"}) != path
    path.write_bytes(content[:-100])
    assert cuda_compile.cubin_file("bias", 90, {"G": "float"}).read_bytes() == content
    assert len(list((tmp_path / "kernels").iterdir())) == 2


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Cubins in a cache of their own, of one kernel that takes no time to compile."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc")
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda_compile, "compiled", lambda name, capability, constants: (b"a cubin", ""))
    monkeypatch.setattr(cuda_compile, "notices", [])
    return lambda: cuda_compile.cubin_file("bias", 90, {"G": "float"})


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_cache_that_cannot_be_written_keeps_no_run_from_going_on(quick, monkeypatch, tmp_path, error):
    def refuse(path, content):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(cuda_compile, "replace_file", refuse)
    paths = [quick(), quick()]
    assert [path.read_bytes() for path in paths] == [b"a cubin"] * 2
    assert paths[0] != paths[1] and not list(tmp_path.iterdir())
    said = f"Compiled kernels are not kept for the next run: {tmp_path / 'kernels'}: {os.strerror(error)}"
    assert cuda_compile.notices == [said]


def test_a_cubin_that_goes_while_it_is_read_is_compiled_again(quick, monkeypatch):
    """Another process found it damaged."""
    path, read = quick(), Path.read_bytes
    path.write_bytes(b"damaged")
    monkeypatch.setattr(Path, "read_bytes", lambda self: self.unlink() or read(self))
    assert quick() == path and read(path) == b"a cubin"
    assert not cuda_compile.notices


def test_headers_are_part_of_the_source():
    text = cuda_compile.source("rmsnorm", {"T": "bf16", "C": 896})
    assert "#include" not in text
    assert text.count("struct Pack") == 1
    assert "using T = bf16;\n" in text and "constexpr int C = 896;\n" in text


def test_an_empty_log_is_not_written_into_what_python_shares(monkeypatch):
    """It is one NUL, which NVRTC writes where asked; `b" " * 1` is the same object everywhere."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc")
    monkeypatch.setattr(cuda_compile, "OPTIONS", ("--std=c++17",))
    one = 1
    _, log = cuda_compile.compiled("bias", 90, {"G": "float"})
    assert not log and list(b" " * one) == [32]
