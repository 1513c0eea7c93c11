"""Host memory: what a process may use of it, where its pages come from, and what is said when there is too little."""

import ctypes
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from llmq.errors import RefusedMemoryError
from llmq.hardware import host_memory
from llmq.hardware.host_memory import (
    bind,
    free_now_bytes,
    host_memory_bytes,
    may_grow,
    numa_node,
    reserved,
    write_pages,
)

MEMINFO = "MemTotal:           8000 kB\nMemFree:            1000 kB\nMemAvailable:       6000 kB\nHugePages_Total: 0\n"
GROWS = {"sys/bus/virtio/drivers/virtio_mem/virtio3": ""}


def write(root, files):
    """Text files by path."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def group(folder, limit, used, name="memory.max", current="memory.current"):
    """A cgroup's files, in KiB."""
    return {f"sys/fs/cgroup/{folder}{name}": f"{limit * 1024}\n", f"sys/fs/cgroup/{folder}{current}": f"{used * 1024}"}


RUN, JOB = {"proc/self/cgroup": "0::/user/run\n"}, {"proc/self/cgroup": "4:memory:/job\n"}
CACHED = "anon 1000\nfile 3071500\nactive_file 500\ninactive_file 3070976\n"
CACHED_V1 = "inactive_file 7\ntotal_inactive_file 3070976\n"
V1 = {"name": "memory.limit_in_bytes", "current": "memory.usage_in_bytes"}


def unlimited(page, folder="memory/"):
    """The files of a group of cgroup v1 without a limit, on a machine with pages of `page` KiB."""
    return group(folder, 2**53 - page, 1000, **V1)


@pytest.mark.parametrize(
    ("files", "kilobytes"),
    [
        ({}, (8000, 6000)),
        ({"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"}, (8000, 6000)),
        (group("", 4000, 1000), (4000, 3000)),
        (group("", 4000, 5000), (4000, 0)),
        # what cgroup v1 says where there is no limit, with pages of 4, 16 and 64 KiB; a limit of a group above counts
        *((unlimited(page), (8000, 6000)) for page in (4, 16, 64)),
        *(({**GROWS, **unlimited(page)}, (8000, 6000)) for page in (4, 16, 64)),
        ({**GROWS, **JOB, **unlimited(4, "memory/job/"), **group("memory/", 64000, 1000, **V1)}, (64000, 63000)),
        (group("memory/", 2000, 1000, **V1), (2000, 1000)),
        # files that a container has read are no use of it
        ({**group("", 4000, 3999), "sys/fs/cgroup/memory.stat": CACHED}, (4000, 3000)),
        ({**group("memory/", 4000, 3999, **V1), "sys/fs/cgroup/memory/memory.stat": CACHED_V1}, (4000, 3000)),
        # the group of this process, and those that it is in
        ({**RUN, **group("user/", 5000, 1000)}, (5000, 4000)),
        ({**RUN, **group("user/", 5000, 1000), **group("user/run/", 4500, 100)}, (4500, 4000)),
        (
            {"proc/self/cgroup": "9:cpu:/c\n4:memory:/j:1\n0::/\n", **group("memory/j:1/", 3000, 500, **V1)},
            (3000, 2500),
        ),
        ({"proc/self/cgroup": "0::/../elsewhere\n", **group("", 4000, 1000)}, (4000, 3000)),
        # a machine that has less than it may have; one that does not grow is what it is
        ({**GROWS, **group("", 64000, 1000)}, (64000, 63000)),
        (group("", 64000, 1000), (8000, 6000)),
        ({**GROWS, **group("", 4000, 1000)}, (4000, 3000)),
        (GROWS, (8000, 6000)),
    ],
)
def test_memory_obeys_the_limits_of_containers(files, kilobytes, tmp_path):
    write(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert host_memory_bytes(tmp_path) == tuple(1024 * k for k in kilobytes)
    assert free_now_bytes(tmp_path) == 1024 * min(6000, kilobytes[1])
    assert may_grow(tmp_path) == (GROWS.keys() <= files.keys())


def test_memory_without_proc_is_the_machines(tmp_path):
    total, free = host_memory_bytes(tmp_path)
    assert total == free > 2**20 and not may_grow(tmp_path)


def test_the_node_of_a_gpu_is_known_where_there_are_several(tmp_path):
    of_gpu = "sys/bus/pci/devices/0000:18:00.0/numa_node"
    write(tmp_path, {"sys/devices/system/node/node0/x": "", of_gpu: "1\n"})
    assert numa_node("0000:18:00.0", tmp_path) is None
    write(tmp_path, {"sys/devices/system/node/node1/x": ""})
    assert numa_node("0000:18:00.0", tmp_path) == 1
    write(tmp_path, {of_gpu: "-1\n"})
    assert numa_node("0000:18:00.0", tmp_path) is None and numa_node("0000:19:00.0", tmp_path) is None


def test_the_kernel_takes_pages_from_the_node(tmp_path):
    """On this machine, which has node 0: the policy that the kernel notes for the addresses."""
    block = reserved(1 << 21)
    if not bind(block, 0):
        pytest.skip("the system refuses mbind")
    policy = ctypes.c_int(-1)
    flag_address = 2  # MPOL_F_ADDR
    address = ctypes.c_void_p(block.ctypes.data)
    done = ctypes.CDLL(None).syscall(
        ctypes.c_long(239), ctypes.byref(policy), None, ctypes.c_ulong(0), address, ctypes.c_ulong(flag_address)
    )
    assert done == 0 and policy.value == 1


def resident():
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("has_call", [True, False], ids=["system call", "writes"])
def test_pages_are_there_before_they_are_used(monkeypatch, has_call):
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 5 << 20)
    if not has_call:
        monkeypatch.setattr(host_memory, "POPULATE_WRITE", 12345)  # what an older kernel says of 23: EINVAL
    sizes = (40 << 20, 11 << 20, 1000)
    before = resident()
    blocks = [reserved(size) for size in sizes]
    assert resident() - before < 8 << 20
    write_pages(blocks)
    assert resident() - before > 0.95 * sum(sizes)
    assert [block.nbytes for block in blocks] == list(sizes) and not any(block.any() for block in blocks)
    blocks[0][:] = 7
    view = blocks[0][5:9]
    del blocks
    assert resident() - before > 30 << 20 and (view == 7).all()
    del view
    assert resident() - before < 8 << 20


def test_a_shortfall_is_named_before_a_page_is_written(tmp_path, monkeypatch):
    write(tmp_path, {"proc/meminfo": MEMINFO})
    monkeypatch.setattr(host_memory, "_write", lambda chunk: pytest.fail("written"))
    with pytest.raises(RefusedMemoryError, match=r"the host refused 5\.9 MiB") as caught:
        write_pages([reserved(3000 * 1024), reserved(3001 * 1024)], tmp_path)
    found = caught.value
    assert (found.home, found.num_bytes, found.free_bytes) == ("host", 6001 * 1024, 6000 * 1024)


def test_a_machine_that_grows_is_given_the_time_to(tmp_path, monkeypatch):
    """It has 6000 kB; each MiB that is written makes it give one more, until it has no more."""
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(host_memory, "POLL_S", 0.01)
    monkeypatch.setattr(host_memory, "WAIT_S", {False: 0.05, True: 0.3})
    write(tmp_path, {"proc/meminfo": MEMINFO, **GROWS})
    lock, free, given = threading.Lock(), 6000, 0

    def written(most):
        def one(chunk):
            nonlocal free, given
            with lock:
                more = min(1024, most - given)
                free, given = free - 1024 + more, given + more
                text = MEMINFO.replace("6000", f"{free}")
                (tmp_path / "proc/new").write_text(text)
                os.replace(tmp_path / "proc/new", tmp_path / "proc/meminfo")

        return one

    monkeypatch.setattr(host_memory, "_write", written(10**9))
    write_pages([reserved(20 << 20)], tmp_path)
    assert given == 20 * 1024
    write(tmp_path, {"proc/meminfo": MEMINFO})
    free, given = 6000, 0
    monkeypatch.setattr(host_memory, "_write", written(2048))
    with pytest.raises(RefusedMemoryError) as caught:
        write_pages([reserved(20 << 20)], tmp_path)
    assert caught.value.num_bytes == 20 << 20 and caught.value.free_bytes == (6000 + 2048) * 1024


def test_a_forked_process_has_no_copy_of_it():
    program = (
        "import os, signal\nfrom llmq.hardware.host_memory import reserved, write_pages\n"
        "block = reserved(1 << 21); write_pages([block])\n"
        "child = os.fork()\nif not child: os._exit(int(block[0]))\n"
        "print(os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_addresses_that_there_are_not_are_a_lack_of_memory():
    with pytest.raises(MemoryError, match="4,294,967,296"):
        reserved(1 << 62)
    assert isinstance(reserved(0), np.ndarray) and reserved(0).nbytes == 0
