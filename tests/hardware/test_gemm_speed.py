"""The GPU's speed as a run begins: a line where all is well, a warning that names what slows the card down."""

import time

import pytest
from fake_cuda import H200, RTX_4085, FakeDriver

from llmq.hardware import cards as gpus
from llmq.hardware import device, gemm_speed, nvml
from llmq.hardware.cuda_driver import Gpu
from llmq.hardware.device import CPU, Device
from llmq.hardware.gemm_speed import measure
from llmq.hardware.nvml import Reading

HERE = Device("cuda", gpu=Gpu(0, *H200[:1], "GPU-1", *H200[1:]))
HOT = Reading(
    sm_mhz=600, max_sm_mhz=1980, watts=312.4, max_watts=700.0, celsius=91, throttled=("temperature", "power cap")
)


@pytest.fixture
def gpu(monkeypatch):
    """Sets the rate of a product, what NVML says then and under load, and the processes that it counts."""

    def pretend(rate, reading=None, loaded=None, others=0):
        monkeypatch.setattr(device, "measured_cuda_peak", {"fp16": rate}.get)
        monkeypatch.setattr(nvml, "read", lambda uuid: reading if uuid == "GPU-1" else pytest.fail(uuid))
        monkeypatch.setattr(nvml, "num_others", lambda uuid: others)
        monkeypatch.setattr(
            gemm_speed, "_while_working", lambda uuid, flops: loaded if loaded else pytest.fail("not slow")
        )

    return pretend


def test_a_good_card_has_a_line_and_no_warning(gpu):
    gpu(7.12e14, Reading(throttled=("power cap",)))
    found = measure(HERE)
    assert found.line == "712 TFLOP/s, 72% of the card's peak" and found.warning is None
    gpu(5.5e14)  # without NVML
    assert measure(HERE).warning is None


def test_a_slow_card_is_named_with_what_nvml_says_under_load(gpu):
    gpu(4e14, Reading(sm_mhz=345), HOT, others=2)
    assert measure(HERE).warning == (
        "This GPU is slow: matrix products run at 400 TFLOP/s, 40% of the card's peak of 989.4 (SM clock 600 of 1980 "
        "MHz; 312 of 700 W; 91 C; slowed down by temperature, power cap; 2 other processes on it)"
    )
    gpu(4e14, None, Reading(), others=None)
    assert measure(HERE).warning.endswith("40% of the card's peak of 989.4 (NVML does not say why)")


@pytest.mark.parametrize("reason", sorted(gemm_speed.BROKEN))
def test_a_throttled_card_is_named_at_any_speed(reason, gpu):
    assert reason in nvml.THROTTLE.values()
    gpu(8e14, Reading(throttled=(reason,)), Reading(sm_mhz=1200, throttled=(reason,)))
    warning = measure(HERE).warning
    assert warning.startswith("This GPU is being slowed down: ") and f"slowed down by {reason})" in warning


def test_only_a_known_card_that_is_here_is_measured(monkeypatch):
    monkeypatch.setattr(device, "measured_cuda_peak", lambda dtype: pytest.fail("measured"))
    driver = FakeDriver(gpus=(RTX_4085,))
    unknown = Device("cuda", gpu=Gpu(0, driver.gpus[0][0], "GPU-1", (8, 9), 80, 2**34))
    for where in (CPU, Device("cuda", planned=gpus.named("H200")), unknown):
        assert measure(where) is None


@pytest.mark.gpu
def test_a_gpu_is_measured_in_no_time():
    where = device.pick("cuda")
    device.measured_cuda_peak("fp16")  # cuBLAS is loaded
    device.measured_cuda_peak.cache_clear()
    start = time.perf_counter()
    found = measure(where)
    assert time.perf_counter() - start < 0.5
    if found is not None:
        assert 0.05 < found.share < 1.05
        loaded = gemm_speed._while_working(where.gpu.uuid, found.flops)
        assert loaded is None or loaded.watts is None or loaded.watts > 0
