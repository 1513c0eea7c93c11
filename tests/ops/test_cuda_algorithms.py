"""The table of GEMM algorithms: what is found, what is kept on disk, what a run carries."""

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmq.ops.cuda import cublaslt
from llmq.ops.cuda.algorithms import Algorithms, Choice

DEVICE = "NVIDIA H200, 132 SMs, cuBLASLt 130100"


def choice(byte: int) -> Choice:
    return Choice(bytes([byte] * 64).hex(), 10.5, 12.0, 24)


def stored(folder: Path, *problems: str) -> Algorithms:
    table = Algorithms(DEVICE, folder=folder)
    for number, problem in enumerate(problems, 1):
        table.add(problem, choice(number))
    assert table.save() is None
    return table


def test_what_was_chosen_is_found_by_the_next_process(tmp_path):
    stored(tmp_path, "a", "b")
    table = Algorithms(DEVICE, folder=tmp_path)
    assert table.find("b") == bytes([2] * 64)
    assert table.find("c") is None
    assert list(table.facts()["algorithms"]) == ["b"], "a run carries what it used"


def test_algorithms_belong_to_one_device_and_library(tmp_path):
    """In the file, in one of the same name that is another's, and in what a run carries."""
    path = stored(tmp_path, "a").path
    for other in ("NVIDIA H100, 132 SMs, cuBLASLt 130100", "NVIDIA H200, 132 SMs, cuBLASLt 130200"):
        assert Algorithms(other, folder=tmp_path).find("a") is None
        run = Algorithms(other, folder=tmp_path / "run")
        run.add("a", choice(7))
        moved = Algorithms(DEVICE, given=run.facts(), folder=tmp_path / "empty")
        assert not moved.given_fits and moved.find("a") is None
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "another"}))
    assert Algorithms(DEVICE, folder=tmp_path).find("a") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: text.replace("0202", "0203", 1),
        lambda text: "[]",
        lambda text: json.dumps({"device": DEVICE, "algorithms": {"a": 1}, "digest": "x"}),
        lambda text: "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    ],
    ids=["empty", "cut", "one digit", "a list", "no choices", "no text"],
)
def test_a_damaged_file_is_made_again(tmp_path, damage):
    path = stored(tmp_path, "a", "b").path
    path.write_text(damage(path.read_text()), "latin-1")
    assert Algorithms(DEVICE, folder=tmp_path).find("a") is None
    stored(tmp_path, "c")
    assert Algorithms(DEVICE, folder=tmp_path).find("c") is not None


def test_an_algorithm_of_another_size_is_refused():
    with pytest.raises(ValueError, match="64 bytes, not 63"):
        Choice(bytes(63).hex(), 1, 1, 1)


def test_a_run_carries_its_algorithms_and_they_come_first(tmp_path):
    run = Algorithms(DEVICE, folder=tmp_path / "first")
    run.add("a", choice(7))
    facts = json.loads(json.dumps(run.facts()))
    stored(tmp_path / "second", "a", "b")
    resumed = Algorithms(DEVICE, given=facts, folder=tmp_path / "second")
    assert resumed.given_fits
    assert resumed.find("a") == bytes([7] * 64)
    assert resumed.find("b") == bytes([2] * 64)
    assert resumed.facts()["algorithms"]["a"] == facts["algorithms"]["a"]


def test_what_was_given_and_had_to_be_chosen_again_does_not_fit(tmp_path):
    """The library refuses an algorithm of the earlier run; another problem is nothing to speak of."""
    run = Algorithms(DEVICE, folder=tmp_path / "first")
    run.add("a", choice(7))
    resumed = Algorithms(DEVICE, given=run.facts(), folder=tmp_path / "second")
    resumed.add("b", choice(8))
    assert resumed.given_fits
    resumed.add("a", choice(9))
    assert not resumed.given_fits and resumed.find("a") == bytes([9] * 64)


def test_a_table_is_for_what_the_library_was_asked_for(monkeypatch):
    """Another workspace or other ways to add give other proposals."""
    facts = {"name": b"NVIDIA H200", "multiProcessorCount": 132}
    runtime = SimpleNamespace(getDevice=lambda: 0, getDeviceProperties=lambda device: facts)
    lt = SimpleNamespace(get_version=lambda: 130100, ReductionScheme=SimpleNamespace(COMPUTE_TYPE=2))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    for name, module in (("nvmath", SimpleNamespace()), ("nvmath.bindings", SimpleNamespace(cublasLt=lt))):
        monkeypatch.setitem(sys.modules, name, module)
    plain = cublaslt.device_key()
    assert plain == f"{DEVICE}, workspace 33554432, reductions 2"
    monkeypatch.setattr(cublaslt, "WORKSPACE_BYTES", 2**20)
    smaller = cublaslt.device_key()
    lt.ReductionScheme.COMPUTE_TYPE = 6
    assert len({plain, smaller, cublaslt.device_key()}) == 3


def test_processes_add_to_one_file_and_a_reader_always_sees_a_whole_one(tmp_path):
    path = stored(tmp_path, "first").path
    seen, done = [], threading.Event()

    def read():
        while not done.is_set():
            seen.append(json.loads(path.read_bytes())["algorithms"])

    reader = threading.Thread(target=read)
    reader.start()
    one, two = Algorithms(DEVICE, folder=tmp_path), Algorithms(DEVICE, folder=tmp_path)
    for number in range(30):
        table = (one, two)[number % 2]
        table.add(f"p{number}", choice(number))
        assert table.save() is None
    done.set()
    reader.join()
    assert all("first" in table for table in seen)
    assert len(json.loads(path.read_bytes())["algorithms"]) == 31
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_costs_a_notice_and_nothing_else(tmp_path):
    (tmp_path / "gemm").write_text("in the way")
    table = Algorithms(DEVICE, folder=tmp_path / "gemm")
    table.add("a", choice(1))
    notice = table.save()
    assert notice is not None and str(tmp_path) in notice and "not kept" in notice
    assert table.find("a") is not None
