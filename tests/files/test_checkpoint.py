"""Checkpoints: complete or absent, whatever happens to the writer, the disk or the files; and what manifests say."""

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from sample_files import save
from tiny_runs import change_manifest

from llmq.errors import DataError, StorageError, UsageError
from llmq.files import writers
from llmq.files.checkpoint import Checkpoints, check_same, find, load
from llmq.files.tensor_files import Piece
from llmq.files.writers import MANIFEST_BYTES, Keep, checkpoint_bytes
from llmq.options.run import CheckpointOptions

TESTS = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}


def some_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((9, 5)).astype(np.float32)
    return {
        "weight/embed": weight.astype(ml_dtypes.bfloat16),
        "m/embed": weight,
        "v/embed": weight.astype(np.float64),
        "copy/embed": weight.astype(ml_dtypes.float8_e4m3fn),
        "scale": np.array([0.25], np.float32),
    }


def write(folder: Path, step: int, **changes: object) -> Path:
    return save(folder, step, some_tensors(step), {"seed": 2**64 - 1, "position": [step, 0.1]}, **changes)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def options(folder: Path, **changes: object) -> CheckpointOptions:
    return CheckpointOptions.model_validate({"checkpoint_dir": str(folder), "ckpt_interval": 10, **changes})


def started(given: CheckpointOptions, **how: bool) -> Path | None:
    return Checkpoints(given).start(print, **how)


@pytest.mark.parametrize("in_memory", [False, True])
def test_all_comes_back_as_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool) -> None:
    monkeypatch.setattr(writers, "FILE_BYTES", 300)
    path = write(tmp_path / "new" / "folder", 12, in_memory=in_memory)
    assert path == tmp_path / "new" / "folder" / "step-00000012"
    assert len(list(path.glob("*.safetensors"))) > 1
    state, read = load(path)
    assert state == {"step": 12, "seed": 2**64 - 1, "position": [12, 0.1]}
    for name, array in some_tensors(12).items():
        assert read(name).dtype == array.dtype and read(name).tobytes() == array.tobytes()
        assert read(name).shape == array.shape
    read("m/embed")[:] = 0  # in memory of its own
    assert read("m/embed").any()
    with pytest.raises(DataError, match="no tensor absent"):
        read("absent")


def test_what_is_on_disk_is_what_was_estimated(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    estimate = checkpoint_bytes([Piece(name, array.shape, array.dtype) for name, array in some_tensors().items()])
    state = (path / "manifest.json").stat().st_size
    assert sum(p.stat().st_size for p in path.iterdir()) == estimate - MANIFEST_BYTES + state
    assert state < MANIFEST_BYTES


def test_the_newest_are_those_that_were_written_last(tmp_path: Path) -> None:
    for step, keep, kept in (
        (8, 2, [8]),
        (12, 2, [8, 12]),
        (10, 2, [10, 12]),  # 12 is of the line that was left at 8
        (11, 2, [10, 11]),
        (20, 0, [10, 11, 20]),
        (25, 1, [25]),
    ):
        write(tmp_path, step, keep=Keep(keep))
        assert names(tmp_path) == [f"step-{one:08d}" for one in kept]
        assert find(tmp_path, "auto") == tmp_path / f"step-{step:08d}"


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 3)
    path = save(tmp_path, 3, {"only": np.ones(2)}, keep=Keep(2))
    assert list(load(path)[1].tensors) == ["only"]
    assert names(tmp_path) == ["step-00000003"]


def test_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(tmp_path, "auto") is None and find(tmp_path / "absent", "auto") is None
    for folder in (tmp_path / "runs" / "a" / "checkpoints", tmp_path / "runs" / "b"):
        with pytest.raises(DataError, match=r"no checkpoint in \S+ to continue from\nWith --continue auto"):
            find(folder, "newest")
    with pytest.raises(DataError, match=r"step 3 in .*: no checkpoints"):
        find(tmp_path, 3)
    for step in (3, 123456789):
        write(tmp_path, step)
    (tmp_path / "step-00000099").touch()
    assert find(tmp_path, "auto") == find(tmp_path, 123456789) == tmp_path / "step-123456789"
    assert find(tmp_path, "3") == find(tmp_path, tmp_path / "step-00000003") == tmp_path / "step-00000003"
    assert find(Path("elsewhere"), str(tmp_path)) == tmp_path / "step-123456789"
    for absent in (4, 99, "absent/path"):
        with pytest.raises(DataError, match="steps 3, 123456789"):
            find(tmp_path, absent)
    monkeypatch.chdir(tmp_path)
    assert find(Path("."), "step-00000003") == Path("step-00000003")
    with pytest.raises(DataError, match="cannot be read: No such file"):
        find(tmp_path, Path(__file__).parent)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "state", "no state"])
def test_a_damaged_newest_one_is_named_and_the_one_before_taken(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        path = write(tmp_path, step)
    tensors, state = path / "tensors-00000-00001.safetensors", path / "manifest.json"
    {
        "flip": lambda: flip(tensors),
        "truncate": lambda: os.truncate(tensors, 100),
        "remove": tensors.unlink,
        "state": lambda: flip(state, 30),
        "no state": state.unlink,
    }[damage]()
    advice = r"Others there: steps 1, 2; .* the newest with --continue \S*step-00000002\."
    for which in (3, path):  # asked for by name, it is an error
        with pytest.raises(DataError, match=advice):
            find(tmp_path, which, verified=True)
    with pytest.raises(DataError, match=advice):
        load(path)
    assert find(tmp_path, "auto", verified=True) == tmp_path / "step-00000002"
    said = capsys.readouterr().out
    assert "step-00000003" in said and f"continues from the checkpoint before, {tmp_path / 'step-00000002'}" in said
    flip(tmp_path / "step-00000001" / "manifest.json", 30)
    flip(tmp_path / "step-00000002" / "tensors-00000-00001.safetensors")
    with pytest.raises(DataError, match=r"(?s)every checkpoint is damaged:.*step-00000003.*step-00000002.*"):
        find(tmp_path, "auto", verified=True)
    write(tmp_path, 4, keep=Keep(2))
    assert find(tmp_path, "auto") == tmp_path / "step-00000004"
    flip(write(tmp_path / "alone", 7) / "tensors-00000-00001.safetensors")
    with pytest.raises(DataError, match=r"corrupt.*Others there: no checkpoints\."):
        load(tmp_path / "alone" / "step-00000007")


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 6)
    change_manifest(write(tmp_path, 7), lambda record: record.update(schema=3))
    for use in (lambda: load(tmp_path / "step-00000007"), lambda: find(tmp_path, "auto"), lambda: write(tmp_path, 8)):
        with pytest.raises(UsageError, match=r"schema 3.*update llmq"):
            use()
    assert (tmp_path / "step-00000007").is_dir()


def test_what_a_killed_writer_left_goes(tmp_path: Path) -> None:
    path, newest = write(tmp_path, 5), options(tmp_path, continue_="newest")
    left = tmp_path / ".step-00000006.0123456789abcdef.tmp"
    shutil.copytree(path, left)
    assert started(newest, writes=False) == path and len(names(tmp_path)) == 2  # who only reads changes nothing
    assert started(newest) == path and names(tmp_path) == ["step-00000005"]
    path.rename(tmp_path / ".step-00000005.replaced")  # killed between the renames of a replacement
    assert started(newest) == path
    load(path)
    shutil.copytree(path, tmp_path / ".step-00000005.replaced")
    shutil.copytree(path, left)
    write(tmp_path, 6)
    assert names(tmp_path) == ["step-00000005", "step-00000006"]


@pytest.mark.slow
def test_a_writer_killed_at_any_time_leaves_a_whole_newest_one(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np; from sample_files import save; from llmq.files import writers\n"
        "writers.FILE_BYTES = 1\n"
        "for step in range(int(sys.argv[2]), 10**6):\n"
        "    tensors = {f't{i}': np.full(50000, step, 'i4') for i in range(4)}\n"
        "    save(sys.argv[1], step, tensors, {'n': step}, keep=writers.Keep(1))\n"
        "    print(step, flush=True)"
    )
    chance, step = random.Random(), 0
    for _ in range(4):
        command = [sys.executable, "-c", code, str(tmp_path), str(step + 1)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
            assert process.stdout is not None
            process.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(chance.uniform(0, 0.1))
            process.send_signal(signal.SIGKILL)
            reported = [int(line) for line in process.stdout.read().split()]
        path = find(tmp_path, "auto")
        assert path is not None
        state, read = load(path)
        assert [int(read(f"t{i}")[-1]) for i in range(4)] == [state["n"]] * 4
        assert state["step"] >= max(reported, default=step + 1)
        step = state["step"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_a_failing_source_leaves_nothing(tmp_path: Path, stop: type[BaseException]) -> None:
    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        yield "a", np.ones(4)
        raise stop

    write(tmp_path, 1)
    with pytest.raises(stop):
        save(tmp_path, 2, dict.fromkeys("ab", np.ones(4)), values=tensors(), keep=Keep(1))
    assert names(tmp_path) == ["step-00000001"]


def test_places_that_cannot_be_written_and_too_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="checkpoints: the checkpoint cannot be written"):
        write(tmp_path / "file" / "checkpoints", 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(StorageError, match=r"needed, 10 bytes are free, .* are missing"):
        write(tmp_path, 2)
    assert names(tmp_path) == ["file"]


def test_everything_is_synced_before_the_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_sync, real_rename = os.fsync, os.rename

    def sync(fd: int) -> None:
        events.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))[:9])
        real_sync(fd)

    def rename(source: Path, target: Path) -> None:
        events.append(f"rename {Path(target).name}")
        real_rename(source, target)

    if not os.path.exists("/proc/self/fd"):
        pytest.skip("needs /proc to name file descriptors")
    folder = tmp_path / "ckpt"
    write(folder, 1)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    write(folder, 2, keep=Keep(1))
    assert events[:2] == ["sync tensors-0", "sync manifest."]  # which says that the others are complete
    renamed = events.index("rename step-00000002")
    assert events[renamed - 1 : renamed + 2] == ["sync .step-000", "rename step-00000002", "sync ckpt"]
    assert events[-1].startswith("rename .step-00000001.")  # the old one goes last


def test_the_run_and_its_options(tmp_path: Path) -> None:
    run = Checkpoints(options(tmp_path))
    assert run.start(print) is None
    assert [s for s in range(1, 26) if run.due(s, last=s == 25)] == [10, 20, 25]
    assert [s for s in range(1, 26) if Checkpoints(options(tmp_path, ckpt_interval=0)).due(s, last=s == 25)] == [25]
    assert run.peak_bytes(100, 1, 25) == 300
    assert [run.peak_bytes(100, 1, last) for last in (9, 10, 11, 20, 21)] == [100, 100, 200, 200, 300]
    assert run.peak_bytes(100, 11, 20) == 100
    assert Checkpoints(options(tmp_path, ckpt_interval=0)).peak_bytes(100, 1, 25) == 100
    for step in (10, 20, 25):
        write(run.folder, step, keep=run.keep)
    assert names(tmp_path) == ["step-00000020", "step-00000025"]
    assert run.peak_bytes(100, 26, 99) == 100
    with pytest.raises(UsageError, match=r"earlier run \(steps 20, 25\).*--continue.*--overwrite"):
        run.refuse_earlier()
    assert started(options(tmp_path, continue_="auto")) == tmp_path / "step-00000025"
    assert started(options(tmp_path, continue_=20)) == tmp_path / "step-00000020"


def test_where_there_is_none_the_nearest_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("qwen-sft-1", "a run"):
        write(Path("runs", name, "checkpoints"), 5)
        write(Path("runs", name, "checkpoints"), 7)
    with pytest.raises(DataError) as caught:
        find(Path("runs", "qwen-sft-2", "checkpoints"), "newest")
    assert str(caught.value).splitlines() == [
        "there is no checkpoint in runs/qwen-sft-2/checkpoints to continue from",
        f"  {tmp_path}/runs/qwen-sft-1/checkpoints has some: continue them with --name qwen-sft-1 (steps 5, 7)",
        "With --continue auto, a run starts from step 0 where there is none",
    ]


def test_options_that_must_match() -> None:
    check_same({"a": 1, "b": [1, 2]}, {"b": (1, 2), "a": 1})
    with pytest.raises(UsageError) as caught:
        check_same({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 4, "d": None})
    lines = str(caught.value).splitlines()[1:]
    assert lines == [
        "  b: 2 in the checkpoint, 4 now",
        "  d: not set in the checkpoint, None now",
        "  c: 3 in the checkpoint, not set now",
    ]
    with pytest.raises(UsageError) as caught:
        check_same({"m": {"x": 1, "y": [2, 3]}}, {"m": {"x": 1, "y": (2, 4)}})
    assert str(caught.value).splitlines()[1:] == ["  m y: [2, 3] in the checkpoint, (2, 4) now"]
    with pytest.raises(UsageError) as caught:
        check_same({}, dict.fromkeys(map(str, range(12))))
    assert str(caught.value).splitlines()[11:] == ["  and 2 more"]


TENSORS = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.array(7, np.int32)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path, 7, TENSORS, {"position": 3})


def of_slice(**change: object) -> Callable[[Any], object]:
    return lambda record: record["tensors"]["a"]["slices"][0].update(change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(
            (lambda record, name=name: record["files"][0].update(name=name), "corrupt")
            for name in ("../a.safetensors", "/etc/passwd", "a/b.safetensors", "a.bin", "\ud800.safetensors")
        ),
        (of_slice(at=10**6), "not within its file"),
        (of_slice(at=-1), "greater than or equal to 0"),
        (of_slice(start=[1, 0]), "not within its shape"),
        (of_slice(start=[0]), "shorter|argument"),
        (of_slice(shape=[2, 4]), "do not fill its shape"),
        (of_slice(file="other.safetensors"), "not within its file"),
        (
            lambda record: record["tensors"]["a"]["slices"].extend(record["tensors"]["a"]["slices"]),
            "two slices of a over",
        ),
        *(
            (lambda record, field=field: record.pop(field), "is corrupt")
            for field in ("step", "save", "files", "tensors", "state", "schema")
        ),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(saved: Path, change: Callable[[Any], object], said: str) -> None:
    """Nor one that names a file elsewhere, or lacks a field."""
    change_manifest(saved, change)
    with pytest.raises(DataError, match=said):
        load(saved)


def test_tensors_that_share_one_memory_are_valid_until_the_next(saved):
    _, apart = load(saved)
    read = apart.in_one_memory()
    for name in (*apart.tensors, *reversed(apart.tensors)):
        assert np.array_equal(read(name), apart(name)) and np.shares_memory(read(name), read.memory)
        assert not np.shares_memory(apart(name), apart(name))
