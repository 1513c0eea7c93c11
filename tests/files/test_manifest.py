"""Manifests: what they say is within their folder and complete, and any part of a tensor is read by it."""

from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import save
from tiny_runs import change_manifest

from llmq.errors import DataError
from llmq.files.checkpoint import load

TENSORS = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.array(7, np.int32)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path, 7, TENSORS, {"position": 3})


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "a/b.safetensors", "a.bin", "\ud800.safetensors"])
def test_a_manifest_cannot_name_a_file_elsewhere(saved, name):
    def elsewhere(record):
        record["files"][0]["name"] = name

    change_manifest(saved, elsewhere)
    with pytest.raises(DataError, match="corrupt"):
        load(saved)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"at": 10**6}, "not within its file"),
        ({"at": -1}, "greater than or equal to 0"),
        ({"start": [1, 0]}, "not within its shape"),
        ({"start": [0]}, "shorter|argument"),
        ({"shape": [2, 4]}, "do not fill its shape"),
        ({"file": "other.safetensors"}, "not within its file"),
    ],
)
def test_slices_that_cannot_be_are_refused(saved, change, said):
    change_manifest(saved, lambda record: record["tensors"]["a"]["slices"][0].update(change))
    with pytest.raises(DataError, match=said):
        load(saved)


@pytest.mark.parametrize("field", ["step", "save", "files", "tensors", "state", "schema"])
def test_a_manifest_without_a_field_is_damaged(saved, field):
    change_manifest(saved, lambda record: record.pop(field))
    with pytest.raises(DataError, match="is corrupt"):
        load(saved)


def test_two_slices_of_one_place_are_refused(saved):
    def twice(record):
        record["tensors"]["a"]["slices"] *= 2

    change_manifest(saved, twice)
    with pytest.raises(DataError, match="two slices of a overlap"):
        load(saved)


def test_any_part_of_a_tensor_is_read(saved):
    _, read = load(saved)
    assert np.array_equal(read("a", (1, 1), (2, 3)), TENSORS["a"][1:, 1:])
    assert np.array_equal(read("a", (2, 0), (1, 4)), TENSORS["a"][2:])


def test_tensors_that_share_one_memory_are_valid_until_the_next(saved):
    _, apart = load(saved)
    read = apart.in_one_memory()
    for name in (*apart.tensors, *reversed(apart.tensors)):
        assert np.array_equal(read(name), apart(name)) and np.shares_memory(read(name), read.memory)
        assert not np.shares_memory(apart(name), apart(name))
