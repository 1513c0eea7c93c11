"""What a device reaches at best: the host's here, and on a GPU a share of its papers' peaks."""

import time

import numpy as np
import pytest

from llmq.bench import ceilings as bench_ceilings
from llmq.bench.ceilings import measure_ceilings
from llmq.hardware import cards as gpus
from llmq.hardware import device


def test_the_hosts_copy_counts_both_directions(monkeypatch):
    monkeypatch.setattr(device, "measured_peak", {"fp32": 3e9}.get)
    times = iter(range(100))
    monkeypatch.setattr(bench_ceilings.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(np, "copyto", lambda target, source: target.shape == source.shape or pytest.fail("shapes"))
    found = measure_ceilings("cpu", ["bf16", "e4m3", "bf16"])
    assert found.flops == {"bf16": 3e9, "e4m3": 3e9} and found.bytes_per_s == bench_ceilings.HOST_COPY_BYTES


@pytest.mark.gpu
def test_a_gpu_reaches_a_good_part_of_its_peak_in_a_few_seconds():
    where = device.pick("cuda")
    dtypes = ["bf16", "e4m3"] if where.capability >= device.OLDEST_FP8 else ["bf16"]
    measure_ceilings("cuda", dtypes)  # chooses algorithms
    start = time.perf_counter()
    found = measure_ceilings("cuda", dtypes)
    assert time.perf_counter() - start < 5 and set(found.flops) == set(dtypes)
    if where.card in (gpus.named("H100 SXM"), gpus.named("H200")):
        assert all(0.5 < found.flops[dtype] / where.card.peaks[dtype] < 1 for dtype in dtypes)
        assert 2e12 < found.bytes_per_s < 4.9e12
