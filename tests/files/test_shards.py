"""Streamed safetensors files: read by the safetensors library, by ours, and refused when damaged."""

from __future__ import annotations

import random
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from llmq.errors import DataError
from llmq.files.shards import BLOCK_BYTES, DTYPES, Shard, read_tensor, shards_bytes, verify_shard, write_shards

Given = dict[str, np.ndarray]


def some_tensors() -> Given:
    """Every dtype, odd sizes, a scalar, an empty one, and one that is not contiguous; all bit patterns."""
    rng = np.random.default_rng()
    tensors: Given = {}
    for name, dtype in DTYPES.items():
        data = rng.integers(0, 2 if name == "BOOL" else 256, 35 * dtype.itemsize, dtype=np.uint8)
        tensors[f"layers.0.{name}"] = data.view(dtype).reshape(5, 7)
    tensors["scalar"] = np.array(3.5, np.float32)
    tensors["empty"] = np.zeros((0, 4), np.float64)
    tensors['transposed \u00e9 " \\'] = np.arange(12, dtype=np.int32).reshape(3, 4).T
    return tensors


def read_all(folder: Path, shards: list[Shard]) -> Given:
    return {
        name: read_tensor(folder / shard.name, place)
        for shard in shards
        for name, place in verify_shard(folder, shard).items()
    }


def assert_same(got: Given, want: Given) -> None:
    assert list(got) == list(want)
    for name in want:
        assert (got[name].dtype, got[name].shape) == (want[name].dtype, want[name].shape)
        assert got[name].tobytes() == want[name].tobytes()


@pytest.mark.parametrize("shard_bytes", [1, 200, 1 << 30])
def test_written_and_read_back_exactly(tmp_path: Path, shard_bytes: int) -> None:
    tensors = some_tensors()
    shards = write_shards(tmp_path, tensors.items(), shard_bytes=shard_bytes)
    assert_same(read_all(tmp_path, shards), tensors)
    on_disk = [path.stat().st_size for path in sorted(tmp_path.iterdir())]
    assert on_disk == [shard.num_bytes for shard in shards]
    assert sum(on_disk) == shards_bytes(((n, a.shape, a.dtype) for n, a in tensors.items()), shard_bytes=shard_bytes)
    assert (len(shards) == 1) == (shard_bytes == 1 << 30)


def test_the_safetensors_library_reads_them(tmp_path: Path) -> None:
    tensors = some_tensors()
    (shard,) = write_shards(tmp_path, tensors.items())
    with safe_open(tmp_path / shard.name, "np") as file:
        assert sorted(file.keys()) == sorted(tensors)
        for name, array in tensors.items():
            part = file.get_slice(name)
            assert tuple(part.get_shape()) == array.shape
            assert DTYPES[part.get_dtype()] == array.dtype
    common = {
        n: a for n, a in tensors.items() if a.dtype.kind in "fiub" and not n.endswith(("BF16", "F8_E4M3", "F8_E5M2"))
    }
    (tmp_path / "b").mkdir()
    (shard,) = write_shards(tmp_path / "b", common.items())
    loaded = load_file(tmp_path / "b" / shard.name)
    for name, array in common.items():
        assert loaded[name].tobytes() == array.tobytes()


def test_many_names_start_a_new_file_before_the_header_is_full(tmp_path: Path) -> None:
    tensors = {f"layers.{i}." + "n" * 100: np.full((1, 2, 3), i, np.int32) for i in range(1500)}
    shards = write_shards(tmp_path, tensors.items())
    assert len(shards) > 2
    assert_same(read_all(tmp_path, shards), tensors)
    assert sum(s.num_bytes for s in shards) == shards_bytes((n, a.shape, a.dtype) for n, a in tensors.items())


def test_no_tensors_is_one_valid_file(tmp_path: Path) -> None:
    (shard,) = write_shards(tmp_path, [])
    assert verify_shard(tmp_path, shard) == {} == load_file(tmp_path / shard.name)
    assert shard.num_bytes == BLOCK_BYTES == shards_bytes([])


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for i in range(12):
            yield f"t{i}", np.full(4 << 20, i, np.uint8)

    tracemalloc.start()
    try:
        shards = write_shards(tmp_path, tensors(), shard_bytes=20 << 20)
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        places = [(tmp_path / s.name, p) for s in shards for p in verify_shard(tmp_path, s).values()]
        assert sum(int(read_tensor(*place)[-1]) for place in places) == 66
        read = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert written < 14 << 20  # the tensor, and the next one that the generator makes before letting go
    assert read < 26 << 20  # the verifying buffer of 16 MiB


def test_a_name_may_come_once(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="taken"):
        write_shards(tmp_path, [("a", np.zeros(1)), ("a", np.zeros(1))])


def test_every_damage_is_found(tmp_path: Path) -> None:
    chance = random.Random(3)
    (shard,) = write_shards(tmp_path, some_tensors().items())
    path = tmp_path / shard.name
    whole = path.read_bytes()
    for position in [0, 7, 8, 9, BLOCK_BYTES - 1, BLOCK_BYTES, *(chance.randrange(len(whole)) for _ in range(200))]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="checksum"):
            verify_shard(tmp_path, shard)
    for size in (0, 5, BLOCK_BYTES, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=f"{size} bytes instead of {len(whole)}"):
            verify_shard(tmp_path, shard)
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        verify_shard(tmp_path, shard)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{}",
        b"{" * 10000,
        b'{"a": 1}',
        b'{"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "U8", "shape": [-4], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 5]}}',
        b'{"a": {"dtype": "U8", "shape": [3], "data_offsets": [1, 4]}}',
        b'{"a": {"dtype": "U8", "shape": [true, 4], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "U8", "shape": ["4"], "data_offsets": [0, 4]}}',
    ],
)
def test_a_crafted_header_is_refused(tmp_path: Path, header: bytes) -> None:
    block = (BLOCK_BYTES - 8).to_bytes(8, "little") + header.ljust(BLOCK_BYTES - 8)
    (tmp_path / "x").write_bytes(block + b"data")
    shard = Shard("x", BLOCK_BYTES + 4, zlib.crc32(block, zlib.crc32(b"data")))
    with pytest.raises(DataError, match="not a safetensors file of ours"):
        verify_shard(tmp_path, shard)
