"""Streamed safetensors files: read by the safetensors library, by ours, and refused when damaged."""

import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from llmq.errors import DataError
from llmq.files import tensor_files
from llmq.files.tensor_files import (
    OUR_NAMES,
    Piece,
    Shard,
    cut,
    file_name,
    files_bytes,
    read_tensor,
    tensors_of,
    verify,
    write_files,
)
from llmq.tensor import DTYPES

Given = dict[str, np.ndarray]


def some_tensors() -> Given:
    """Every dtype, odd sizes, a scalar, empty ones, and one that is not contiguous; all bit patterns."""
    rng = np.random.default_rng()
    tensors = {"empty first": np.zeros((4, 0), np.float32)}
    for name, dtype in DTYPES.items():
        tensors[f"layers.0.{name}"] = rng.integers(0, 256, 35 * dtype.itemsize, np.uint8).view(dtype).reshape(5, 7)
    tensors["scalar"] = np.array(3.5, np.float32)
    tensors['transposed \u00e9 " \\'] = np.arange(12, dtype=np.int32).reshape(3, 4).T
    return {**tensors, "empty last": np.zeros((0, 4), np.float64)}


def write(folder: Path, tensors: Given, shard_bytes: int = 1 << 30) -> list[Shard]:
    files = cut((Piece(name, array.shape, array.dtype) for name, array in tensors.items()), shard_bytes)
    shards = write_files(folder, ((f"{n}.safetensors", part) for n, part in enumerate(files)), iter(tensors.values()))
    assert [(folder / shard.name).stat().st_size for shard in shards] == [shard.num_bytes for shard in shards]
    assert files_bytes(files) == sum(shard.num_bytes for shard in shards)
    return shards


def assert_same(got: Given, want: Given) -> None:
    assert list(got) == list(want)
    for name in want:
        assert (got[name].dtype, got[name].shape) == (want[name].dtype, want[name].shape)
        assert got[name].tobytes() == want[name].tobytes()


@pytest.mark.parametrize("shard_bytes", [1, 200, 1 << 30])
def test_written_and_read_back_exactly(tmp_path: Path, shard_bytes: int) -> None:
    tensors = some_tensors()
    shards = write(tmp_path, tensors, shard_bytes)
    verify(tmp_path, shards)
    assert_same({n: read_tensor(at) for s in shards for n, at in tensors_of(tmp_path / s.name).items()}, tensors)
    assert (len(shards) == 1) == (shard_bytes == 1 << 30)
    (tmp_path / "none").mkdir()
    (shard,) = write(tmp_path / "none", {}, shard_bytes)  # no tensors are one file
    assert tensors_of(tmp_path / "none" / shard.name) == {} == load_file(tmp_path / "none" / shard.name)


def test_the_safetensors_library_reads_them(tmp_path: Path) -> None:
    assert list(dict.fromkeys(map(file_name, DTYPES.values()))) == list(OUR_NAMES) and OUR_NAMES["U8"] == "uint8"
    tensors = some_tensors()
    write(tmp_path, tensors)
    assert int.from_bytes((tmp_path / "0.safetensors").read_bytes()[:8], "little") % 8 == 0, "values are aligned"
    with safe_open(tmp_path / "0.safetensors", "np") as file:
        assert sorted(file.keys()) == sorted(tensors) and file.metadata() == {"format": "pt"}
        for name, array in tensors.items():
            part = file.get_slice(name)
            assert tuple(part.get_shape()) == array.shape and DTYPES[OUR_NAMES[part.get_dtype()]] == array.dtype
    common = {n: a for n, a in tensors.items() if not n.endswith(("e4m3", "e5m2"))}
    (tmp_path / "common").mkdir()
    write(tmp_path / "common", common)
    loaded = load_file(tmp_path / "common" / "0.safetensors")
    assert_same({name: loaded[name] for name in common}, common)


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    def tensors() -> Iterator[np.ndarray]:
        for i in range(12):
            yield np.full(4 << 20, i, np.uint8)

    files = cut((Piece(f"t{i}", (4 << 20,), np.dtype(np.uint8)) for i in range(12)), 20 << 20)
    tracemalloc.start()
    try:
        shards = write_files(tmp_path, ((f"{n}.safetensors", part) for n, part in enumerate(files)), tensors())
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        verify(tmp_path, shards)
        stored = [at for shard in shards for at in tensors_of(tmp_path / shard.name).values()]
        assert sum(int(read_tensor(at)[-1]) for at in stored) == 66
        read = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert written < 14 << 20  # the tensor, and the next one that the generator makes before letting go
    assert read < 40 << 20  # the verifier's blocks of 8 MiB, of four files


def test_what_does_not_fit_the_plan_is_refused(tmp_path: Path) -> None:
    piece = Piece("a", (2,), np.dtype(np.uint8))
    with pytest.raises(AssertionError, match="taken"):
        write_files(tmp_path, [("twice", [piece, piece])], iter([np.zeros(4, np.uint8)]))
    for number, slices in enumerate(([1, 2], [2, 1])):
        with pytest.raises(AssertionError, match=r"more than was planned|no tensor"):
            write_files(tmp_path, [(str(number), [piece])], iter([np.zeros(n, np.uint8) for n in slices]))


def test_every_damage_is_found(tmp_path: Path) -> None:
    chance = random.Random(3)
    (shard,) = write(tmp_path, some_tensors())
    path = tmp_path / shard.name
    whole = path.read_bytes()
    for position in [*range(20), *(chance.randrange(len(whole)) for _ in range(200))]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="checksum"):
            verify(tmp_path, [shard])
    for size in (0, 5, 400, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=f"{size} bytes instead of {len(whole)}"):
            verify(tmp_path, [shard])
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        verify(tmp_path, [shard])


def test_a_header_that_lies_is_refused(tmp_path: Path) -> None:
    for entry in ({"shape": [-4]}, {"data_offsets": [0, 5]}, {"data_offsets": [1, 4]}, {"dtype": "F99"}, None):
        good = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
        header = json.dumps({"a": entry and {**good, **entry}}).encode()
        (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + b"data")
        with pytest.raises(DataError, match="not a valid safetensors file"):
            tensors_of(tmp_path / "x")


def test_large_tensors_are_read_in_blocks_into_memory_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 16)
    tensors = some_tensors()
    stored = {n: at for s in write(tmp_path, tensors) for n, at in tensors_of(tmp_path / s.name).items()}
    assert_same({name: read_tensor(at) for name, at in stored.items()}, tensors)
    memory = np.full(1000, 0xFF, np.uint8)
    for name, at in stored.items():
        value = read_tensor(at, memory)
        assert_same({name: value}, {name: tensors[name]})
        assert not value.size or np.shares_memory(value, memory)
    last = list(stored.values())[-2]
    with open(last.path, "r+b") as file:
        file.truncate(last.start + 20)
    with pytest.raises(DataError, match="ends within a tensor"):
        read_tensor(last, memory)
