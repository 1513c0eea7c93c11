"""The device of a run: the choice, the facts, the memory with a container's limit, the measured peak."""

import time
from importlib.metadata import version

import numpy as np
import pytest

from llmq import device
from llmq.errors import UsageError
from llmq.options import SystemOptions


def test_auto_and_cpu_are_the_cpu():
    assert device.pick_device(SystemOptions()) == "cpu"
    assert device.pick_device(SystemOptions(device="cpu")) == "cpu"


@pytest.mark.parametrize("problem", ["there is no NVIDIA driver (libcuda.so.1)", None])
def test_cuda_is_never_the_cpu_in_silence(problem, monkeypatch):
    monkeypatch.setattr(device, "cuda_problem", lambda: problem)
    with pytest.raises(UsageError, match="use --device cpu") as error:
        device.pick_device(SystemOptions(device="cuda"))
    assert (problem or "no CUDA backend") in str(error.value)


def test_no_driver_is_said(monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(device.ctypes, "CDLL", absent)
    assert "no NVIDIA driver" in device.cuda_problem()


def test_seed():
    assert device.seed_of(SystemOptions(seed=7)) == 7


def test_facts_name_what_is_loaded():
    facts = device.system_facts()
    assert facts["numpy"] == version("numpy") == np.__version__
    assert facts["device"].startswith("cpu: ") and len(facts["device"]) > 5
    assert facts["cores"] >= 1
    assert "blas" in facts and "python" in facts and "MiB" in facts["memory"]
    assert not {"torch", "transformers", "matplotlib"} & facts.keys()


def test_a_library_that_is_not_loaded_is_not_named(monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "tokenizers", raising=False)
    assert "tokenizers" not in device.system_facts()


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = "MemTotal:       8000 kB\nMemFree:        1000 kB\nMemAvailable:   6000 kB\nHugePages_Total:   0\n"


@pytest.mark.parametrize(
    ("files", "kilobytes"),
    [
        ({}, (8000, 6000)),
        ({"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"}, (8000, 6000)),
        ({"sys/fs/cgroup/memory.max": "4096000\n", "sys/fs/cgroup/memory.current": "1024000\n"}, (4000, 3000)),
        ({"sys/fs/cgroup/memory.max": "4096000\n", "sys/fs/cgroup/memory.current": "5096000\n"}, (4000, 0)),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1024000\n",
            },
            (8000, 6000),
        ),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "2048000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1024000\n",
            },
            (2000, 1000),
        ),
    ],
)
def test_memory_obeys_a_containers_limit(files, kilobytes, tmp_path):
    write(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert device.memory_bytes(tmp_path) == tuple(1024 * k for k in kilobytes)


def test_memory_without_proc_is_the_machines(tmp_path):
    total, free = device.memory_bytes(tmp_path)
    assert total == free > 2**20


def test_memory_of_this_machine():
    total, free = device.memory_bytes()
    assert 0 < free <= total


def test_peak_is_a_rate_that_is_measured_once():
    device.measured_peak.cache_clear()
    start = time.perf_counter()
    rate = device.measured_peak("fp32")
    assert time.perf_counter() - start < 5
    a = np.ones((512, 512), np.float32)
    start = time.perf_counter()
    for _ in range(3):
        a @ a
    slow = 3 * 2 * 512**3 / (time.perf_counter() - start)
    assert rate > slow / 4  # the best of many, with room for a busy machine
    assert device.measured_peak("fp32") == rate
    assert device.peaks() == {"fp32": rate, "bf16": rate, "e4m3": rate, "fp64": rate / 2}
