"""Threads of BLAS: those of the user, of an earlier run, or as many as cores are free."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmq.backends import open_backend
from llmq.hardware import blas

ROOT = Path(__file__).parents[2]


class Library:
    """An OpenBLAS that keeps its number of threads."""

    threads = 16

    def scipy_openblas_set_num_threads64_(self, count):
        self.threads = count

    def scipy_openblas_get_num_threads64_(self):
        return self.threads


@pytest.fixture
def library(monkeypatch):
    """NumPy's BLAS, without anything that the user set; two cores are free of four."""
    found = Library()
    monkeypatch.setattr(blas, "_openblas", lambda: found)
    monkeypatch.setattr(blas, "num_cores", lambda: 4)
    monkeypatch.setattr(blas, "_free_at_first", lambda: 2)
    for name in blas.SET_BY:
        monkeypatch.delenv(name, raising=False)
    return found


def machine(root, load, quota=None):
    """A root folder with /proc/loadavg, and a container's quota in either version of cgroups."""
    (root / "proc").mkdir(parents=True)
    (root / "proc" / "loadavg").write_text(load)
    for name, text in (quota or {}).items():
        (root / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / name).write_text(text)
    return root


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
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(blas, "num_cores", lambda: 8)
    assert blas.free_cores(machine(tmp_path, load)) == free
    monkeypatch.setattr(blas, "num_cores", lambda: 2)  # the others of the machine may be as busy as they like
    assert blas.free_cores(tmp_path) == min(free, 2)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_a_container_has_as_many_cores_as_its_quota(quota, cores, tmp_path, monkeypatch):
    assert blas.cpu_quota(machine(tmp_path, "", quota)) == cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)))
    monkeypatch.setattr(blas, "cpu_quota", lambda: cores)
    assert blas.num_cores() == (3 if cores is None else min(3, round(cores)))


def test_threads_are_those_of_free_cores_and_the_log_says_so(library):
    assert open_backend("cpu").algorithms == {"blas_threads": 2} and library.threads == 2
    assert blas.in_words().endswith(", 2 threads on 4 cores")


def test_a_resumed_run_has_the_threads_of_the_first(library):
    assert open_backend("cpu", algorithms={"blas_threads": 3}).algorithms == {"blas_threads": 3}
    assert library.threads == 3
    assert open_backend("cpu", algorithms={"a GPU's": "table"}).algorithms == {"blas_threads": 2}


@pytest.mark.parametrize("name", blas.SET_BY)
def test_what_the_user_sets_counts(name, library, monkeypatch):
    monkeypatch.setenv(name, "16")
    assert open_backend("cpu", algorithms={"blas_threads": 3}).algorithms == {"blas_threads": 16}
    assert blas.in_words().endswith(f", 16 threads ({name}) on 4 cores")


def test_another_blas_is_left_alone(library, monkeypatch):
    monkeypatch.setattr(blas, "_openblas", lambda: None)
    assert open_backend("cpu").algorithms == {} and blas.in_words() == blas.name()


def test_numpys_own_library_is_set():
    """In a process of its own, on a machine that is said to be idle or busy."""
    code = (
        "import os, sys; from llmq.hardware import blas\n"
        "if blas.num_threads() is None: sys.exit('no OpenBLAS here')\n"
        "blas.free_cores = lambda: 3\n"
        "print(blas.use_threads(), blas.num_threads(), blas.use_threads(5), blas.num_threads())"
    )
    kept = {key: value for key, value in os.environ.items() if key not in blas.SET_BY}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**kept, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    if "no OpenBLAS" in done.stderr:
        pytest.skip("NumPy has another BLAS")
    assert done.stdout == "3 3 5 5\n", done.stderr
