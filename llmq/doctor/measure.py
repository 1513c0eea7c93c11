"""What `llmq-doctor` measures on GPUs, in processes of their own, which a library may hang or crash.

`python -m llmq.doctor.measure gpu INDEX LOCK` measures one GPU, `python -m llmq.doctor.measure all-reduce COUNT` the
links between the first COUNT. Each writes lines of JSON as soon as it has something.
"""

import json
import sys
import time
from functools import partial
from typing import Any

import numpy as np
from filelock import FileLock

from llmq.bench.ladder import heated, measure_ceilings
from llmq.bench.results import gpu_during
from llmq.hardware import cuda_driver, nvml
from llmq.hardware.device import OLDEST_FP8

HOST_BYTES = 2**28  # of a copy between host and GPU
REDUCED = 2**26  # f32 values of each GPU in an all-reduce
TIMES = 10
FP32 = 7  # ncclDataType_t
SUM = 0  # ncclRedOp_t


def main(what: str, number: str, lock: str = "") -> None:
    """Measures, and prints."""
    if what == "all-reduce":
        say(**all_reduce(int(number)))
        return
    import cupy

    driver = cuda_driver.read()
    assert driver is not None
    cuda_driver.library_problem(driver.cuda)  # loads the libraries where they are found
    gpu = driver.gpus[int(number)]
    cupy.cuda.Device(gpu.index).use()
    watch = nvml.Background(gpu.uuid, every_s=0.05)
    found = measure_ceilings("cuda", ["bf16", *(["e4m3"] if gpu.capability >= OLDEST_FP8 else [])])
    say(flops=dict(found.flops), copy=found.bytes_per_s, gpu=gpu_during(watch.stop()))
    with FileLock(lock):  # GPUs share the host's memory
        say(**host_copies())


def say(**found: Any) -> None:
    """A line for the process that started this one."""
    print(json.dumps(found), flush=True)


def host_copies() -> dict[str, Any]:
    """Bytes/s to the GPU and back, and whether the host's side could be locked."""
    import cupy

    from llmq.backends.cuda_memory import pinned

    host, is_locked = pinned(HOST_BYTES)
    array, copy = cupy.empty(HOST_BYTES, np.uint8), cupy.cuda.runtime.memcpyAsync

    def start(target: int, source: int, way: int) -> None:
        copy(target, source, HOST_BYTES, way, cupy.cuda.get_current_stream().ptr)

    ways = {"to_device": (array.data.ptr, host.ctypes.data, 1), "to_host": (host.ctypes.data, array.data.ptr, 2)}
    return {name: HOST_BYTES / heated(partial(start, *way)) for name, way in ways.items()} | {"locked": is_locked}


def all_reduce(count: int) -> dict[str, Any]:
    """NCCL's bus bandwidth in bytes/s, and whether the sums are right: links that are wrongly set up give others."""
    import cupy
    from cupy.cuda import nccl

    driver = cuda_driver.read()
    assert driver is not None
    cuda_driver.library_problem(driver.cuda)
    ranks = []
    for index, communicator in enumerate(nccl.NcclCommunicator.initAll(list(range(count)))):
        with cupy.cuda.Device(index):
            values = cupy.full(REDUCED, index + 1, np.float32)
            cupy.cuda.runtime.deviceSynchronize()
            ranks.append((communicator, values, cupy.empty_like(values), cupy.cuda.Stream(non_blocking=True)))

    def reduce(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            nccl.groupStart()
            for index, (communicator, source, target, stream) in enumerate(ranks):
                with cupy.cuda.Device(index):
                    communicator.allReduce(source.data.ptr, target.data.ptr, REDUCED, FP32, SUM, stream.ptr)
            nccl.groupEnd()
        for _, _, _, stream in ranks:
            stream.synchronize()
        return (time.perf_counter() - began) / times

    reduce(3)
    seconds, right = reduce(TIMES), []
    for index, (_, _, target, _) in enumerate(ranks):
        with cupy.cuda.Device(index):
            right.append(bool((target == count * (count + 1) // 2).all()))
    bus = 2 * (count - 1) / count * 4 * REDUCED / seconds
    return {"bus": bus, "right": all(right)}


if __name__ == "__main__":
    main(*sys.argv[1:])
