"""Host memory: what is written is rounded, what is read is a copy, copies in other forms have their own shape."""

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from llmq.backends import Launch, in_turn, parts
from llmq.backends.host import HostMemory
from llmq.hardware.host_memory import peak_resident_bytes
from llmq.tensor import DTYPES, Form, Ref


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
def test_host_memory_rounds_what_is_written(dtype):
    memory = HostMemory({"x": Ref("x", "weight", (3, 5), dtype)}, {"device": 0})
    values = np.linspace(-3, 3, 15).reshape(3, 5)
    memory.write("x", values)
    assert np.array_equal(memory.read("x"), values.astype(DTYPES[dtype]))
    copy = memory.read("x")
    memory.fill("x", 0)
    assert copy.any() and not memory.array("x").any()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3", "int8"])
def test_what_is_set_needs_no_second_array(dtype):
    """A model's states fill most of the host: a copy of them would not fit, and takes longer than the write itself."""
    size = 1 << 20
    memory = HostMemory({"x": Ref("x", "m", (size,), "fp32", form=None if dtype == "fp32" else Form(dtype))}, {})
    values = np.ones(size, np.float32)
    tracemalloc.start()
    try:
        for value in (0, 1, 0):
            memory.fill("x", value)
            assert (memory.array("x") == value).all()
        memory.write("x", values)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2.5 * size  # the comparison's booleans, and NumPy's buffers


def test_a_transposed_copy_has_its_own_shape_and_dtype():
    memory = HostMemory(
        {"x": Ref("x", "weight", (2, 3, 5), "bf16", form=Form("e4m3", "col", "delayed"))}, {"device": 0}
    )
    assert memory.array("x").shape == (5, 6) and memory.array("x").dtype == DTYPES["e4m3"]


def test_the_peak_of_a_process_is_its_own(tmp_path):
    """Not that of the process that started it, which getrusage's is on Linux; that is asked without /proc."""
    size = 300 << 20
    held = np.ones(size, np.uint8)
    command = "from llmq.hardware.host_memory import peak_resident_bytes; print(peak_resident_bytes())"
    child = int(subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout)
    assert 0 < child < size < peak_resident_bytes() and held.all()
    assert peak_resident_bytes(tmp_path) >= peak_resident_bytes() // 2


def test_what_runs_python_parts_a_program():
    """A part waits for what is its own: all lanes meet at its beginning."""

    def run(of):
        return lambda: done.append(of)

    done: list[int] = []
    launches = [
        Launch(run(0)),
        Launch(run(1), "to_host", (0,)),
        Launch(run(2), is_python=True),
        Launch(run(3), waits=(1,)),
    ]
    launches.append(Launch(run(4), "comm", (1, 3)))
    found = list(parts(launches))
    assert [[each.is_python for each in part] for part in found] == [[False] * 2, [True], [False] * 2]
    assert [[each.waits for each in part] for part in found] == [[(), (0,)], [()], [(), (0,)]]
    in_turn([run for part in found for run in (each.run for each in part)])()
    assert done == [0, 1, 2, 3, 4] and list(parts([])) == [[]]
