"""Cores: how many are free, work in threads and BLAS's threads on them, those of a GPU, and shares of the CPU."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from llmq.backends.opening import open_backend
from llmq.hardware import cores
from llmq.hardware.cores import cores_of_ranks, in_threads, read_cores

ROOT = Path(__file__).parents[2]
ADDRESS = "0000:18:00.0"


@pytest.fixture
def blas(monkeypatch):
    """NumPy's BLAS as its number of threads, without anything that the user set; two cores are free of four."""
    found = [16]
    monkeypatch.setattr(cores, "_openblas", lambda: (lambda count: found.__setitem__(0, count), lambda: found[0]))
    monkeypatch.setattr(cores, "num_cores", lambda: 4)
    monkeypatch.setattr(cores, "_free_at_first", lambda: 2)
    for name in cores.SET_BY:
        monkeypatch.delenv(name, raising=False)
    return found


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("load", "free"),
    [
        ("0.00 0.00 0.00 1/133 7", 8),
        ("3.10 0.00 0.00 9/133 7", 5),  # three cores are busy
        ("7.90 9.00 9.00 1/133 7", 8),  # what was busy has ended
        ("0.20 0.00 0.00 9/133 7", 8),  # it begins just now
        ("40.0 40.0 40.0 41/133 7", 1),
        ("0.00 0.00 0.00 0/0 0", 8),
        ("nonsense", 8),
    ],
)
def test_cores_are_free_that_nothing_else_keeps_busy(load, free, tmp_path, monkeypatch):
    write(tmp_path, {"proc/loadavg": load})
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(cores, "num_cores", lambda: 8)
    assert cores.free_cores(tmp_path) == free
    monkeypatch.setattr(cores, "num_cores", lambda: 2)  # the others of the machine may be as busy as they like
    assert cores.free_cores(tmp_path) == min(free, 2)


@pytest.mark.parametrize(
    ("quota", "number"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_a_container_has_as_many_cores_as_its_quota(quota, number, tmp_path, monkeypatch):
    write(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in quota.items()})
    assert cores.cpu_quota(tmp_path) == number
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: number)
    assert cores.num_cores() == (3 if number is None else min(3, round(number)))


@pytest.mark.parametrize("count", [1, 3])
def test_every_item_is_worked_on_once(monkeypatch, count):
    monkeypatch.setattr(cores, "num_cores", lambda: count)
    done = []
    in_threads(done.append, range(20))
    assert sorted(done) == list(range(20))
    in_threads(done.append, [])


def test_as_many_work_at_once_as_there_are_cores_and_the_first_error_ends_it(monkeypatch):
    monkeypatch.setattr(cores, "num_cores", lambda: 3)
    together = threading.Barrier(3, timeout=10)
    in_threads(lambda item: together.wait(), range(3))  # a broken barrier raises
    begun = []

    def work(item):
        begun.append(item)
        time.sleep(0.001)
        raise OSError(f"item {item}")

    with pytest.raises(OSError, match="item 0"):
        in_threads(work, range(1000))
    assert len(begun) < 1000


def test_blas_has_as_many_threads_as_cores_are_free_or_as_the_first_part_of_a_run_had(blas):
    assert open_backend("cpu").algorithms == {"blas_threads": 2} and blas == [2]
    assert cores.blas_in_words().endswith(", 2 threads on 4 cores")
    assert open_backend("cpu", algorithms={"blas_threads": 3}).algorithms == {"blas_threads": 3} and blas == [3]
    assert open_backend("cpu", algorithms={"a GPU's": "table"}).algorithms == {"blas_threads": 2}


@pytest.mark.parametrize("name", cores.SET_BY)
def test_what_the_user_sets_counts(name, blas, monkeypatch):
    monkeypatch.setenv(name, "16")
    assert open_backend("cpu", algorithms={"blas_threads": 3}).algorithms == {"blas_threads": 16}
    assert cores.blas_in_words().endswith(f", 16 threads ({name}) on 4 cores")


def test_another_blas_is_left_alone(blas, monkeypatch):
    monkeypatch.setattr(cores, "_openblas", lambda: None)
    assert open_backend("cpu").algorithms == {} and "thread" not in cores.blas_in_words()


def test_numpys_own_library_is_set():
    """In a process of its own, on a machine that is said to be idle or busy."""
    code = (
        "import numpy, sys; from llmq.hardware import cores\n"
        "if cores.use_blas_threads() is None: sys.exit('no OpenBLAS here')\n"
        "cores._free_at_first = lambda: 3\n"
        "print(cores.use_blas_threads(), cores.use_blas_threads(5), cores._openblas()[1]())"
    )
    kept = {key: value for key, value in os.environ.items() if key not in cores.SET_BY}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**kept, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    if "no OpenBLAS" in done.stderr:
        pytest.skip("NumPy has another BLAS")
    assert done.stdout == "3 5 5\n", done.stderr


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 8 cores, of which 0 to 3 and 6 are beside a GPU."""
    write(tmp_path, {f"sys/bus/pci/devices/{ADDRESS}/local_cpulist": "0-3,6\n"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    return tmp_path


def test_the_cores_beside_a_gpu(machine, monkeypatch):
    assert read_cores("0-3,8,10-11") == {0, 1, 2, 3, 8, 10, 11} and read_cores("") == set()
    assert cores_of_ranks(2, [ADDRESS, ""], machine) == [{0, 1, 2, 3, 6}, set()]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 3, 4})
    assert cores_of_ranks(1, [ADDRESS], machine) == [{2, 3}]
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert cores_of_ranks(2, None) == [set(), set()]


@pytest.mark.parametrize("num", [1, 3, 8, 11])
def test_shares_of_the_cpu(machine, num):
    shares = cores_of_ranks(num, None)
    assert len(shares) == num and all(len(share) == max(1, 8 // num) for share in shares)
    assert len(frozenset().union(*shares)) == min(8, num * (8 // num or 1))
