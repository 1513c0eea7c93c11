"""`--log-gpu-util`: a reading of the GPU every N steps, taken while the step runs; an error where there is none."""

import json
from types import SimpleNamespace

import fake_gpu
import pytest
from fake_cuda import H200

import llmq
from llmq.errors import UsageError
from llmq.hardware import cards as gpus
from llmq.hardware import nvml
from llmq.hardware.cuda_driver import Gpu
from llmq.hardware.device import CPU, Device
from llmq.report.read import read_log
from llmq.training.hooks import GpuWatch
from llmq.training.progress import Progress
from llmq.training.records import GpuRecord
from llmq.training.trackers import numbers_of

HERE = Device("cuda", gpu=Gpu(0, *H200[:1], "GPU-1", *H200[1:]))
READING = nvml.Reading(
    used_bytes=3 * 2**30,
    sm_mhz=1755,
    memory_mhz=3201,
    watts=654.6,
    celsius=61,
    throttled=("power cap",),
    gpu_percent=99,
    memory_percent=40,
    pcie_rx_kb_s=12_400,
    pcie_tx_kb_s=3_000,
)
RECORD = GpuRecord(7, 1755, 3201, 654.6, 61, ("power cap",), 3072.0, 12_400, 3_000, 99, 40)


@pytest.fixture
def readings(monkeypatch):
    """What NVML says, and how it was asked."""
    asked = []
    monkeypatch.setattr(nvml, "read", lambda uuid, traffic=False: asked.append((uuid, traffic)) or READING)
    return asked


def read(watch, *steps):
    """The records of these steps, of which each was computed and then done."""
    for step in steps:
        watch.during_step(SimpleNamespace(progress=Progress(step=step - 1)))
        watch.after_step(None, SimpleNamespace(step=step))


def test_a_reading_is_a_record_of_its_step(readings):
    found = []
    read(GpuWatch(HERE, 7, found.append), *range(1, 9))
    assert found == [RECORD] and readings == [("GPU-1", False), ("GPU-1", True)]


def test_what_nvml_does_not_say_is_none(monkeypatch):
    found, answers = [], iter([READING, None])
    monkeypatch.setattr(nvml, "read", lambda uuid, traffic=False: next(answers))
    read(GpuWatch(HERE, 7, found.append), 7)
    assert found == [GpuRecord(7)]
    assert GpuRecord(7).line() == "[G] step     7" and GpuRecord(7, watts=99.6).line() == "[G] step     7 | 100 W"


def test_the_line_has_its_documented_form():
    line = "[G] step     7 | SM 1755 MHz | 655 W | 61 C | 3072 MiB | PCIe 12/3 MB/s | busy 99% | power cap"
    assert RECORD.line() == line


def test_it_needs_nvml(monkeypatch):
    monkeypatch.setattr(nvml, "read", lambda uuid: None)
    with pytest.raises(UsageError, match=r"--log-gpu-util 3 needs NVML, .*pip install nvidia-ml-py"):
        GpuWatch(HERE, 3, print)
    GpuWatch(HERE, 0, print), GpuWatch(CPU, 0, print), GpuWatch(Device("cuda", planned=gpus.named("H200")), 3, print)


@pytest.fixture
def given(given, monkeypatch):
    """Options of a smaller run, on a GPU that is not there."""
    fake_gpu.install(monkeypatch)
    monkeypatch.setattr(nvml, "read", lambda uuid, traffic=False: READING)
    return {**given, "steps": 7, "warmup": 0, "eval_file": None, "eval_every_n_steps": 0}


def test_every_n_steps_of_a_run_are_in_its_log(given):
    result = llmq.train(**given, log_gpu_util=3)
    log, printed = read_log(result.log_path), given["console"].getvalue()
    assert list(log.gpu["step"]) == [3, 6] and list(log.gpu["watts"]) == [654.6] * 2
    assert printed.count("[G] step") == 2 and printed.index("[T] step     3") < printed.index("[G] step     3")
    records = [json.loads(line) for line in result.log_path.read_text().splitlines()]
    (first, _) = [record for record in records if record["type"] == "gpu"]
    assert first["throttled"] == ["power cap"] and first["pcie_rx_kb_s"] == 12_400
    sent = numbers_of(first)  # to trackers
    assert sent["gpu/sm_mhz"] == 1755 and sent["gpu/pcie_tx_kb_s"] == 3000


def test_on_the_cpu_it_is_refused_before_anything_is_made(given, tmp_path):
    with pytest.raises(UsageError, match="--log-gpu-util 3 needs a GPU, and this run is on the CPU: leave it out"):
        llmq.train(**given, device="cpu", log_gpu_util=3)
    assert not (tmp_path / "runs").exists()
