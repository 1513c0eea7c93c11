"""The device of a run: the choice, the facts, the memory with a container's limit, the peak rates."""

import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import pytest
from fake_cuda import H200, RTX_2080, RTX_4085, FakeDriver, install

import llmq
from llmq.disk import shown
from llmq.errors import MemoryLimitError, UsageError
from llmq.hardware import cards as gpus
from llmq.hardware import cuda_driver, device, nvml
from llmq.hardware.cuda_driver import Problem
from llmq.hardware.device import CPU, Device
from llmq.options.run import SystemOptions

AUTO, CUDA = SystemOptions(), SystemOptions(device="cuda")


@pytest.fixture
def machine(monkeypatch):
    """Sets the driver and what is wrong with its libraries."""

    def pretend(driver=None, libraries=None):
        install(monkeypatch, driver)
        monkeypatch.setattr(cuda_driver, "library_problem", lambda cuda: libraries)
        monkeypatch.setattr(cuda_driver, "versions", lambda: {"cuDNN": "9.28.0"})
        monkeypatch.setattr(nvml, "read", lambda uuid: None)

    return pretend


def test_without_a_driver_auto_is_the_cpu_and_says_nothing(machine):
    machine()
    assert device.pick_device(AUTO) == CPU == device.pick_device(SystemOptions(device="cpu"))
    with pytest.raises(UsageError, match=r"--device cuda: there is no NVIDIA driver .*; or use --device cpu"):
        device.pick_device(CUDA)


def test_auto_takes_a_usable_gpu(machine):
    machine(FakeDriver())
    for options in (AUTO, CUDA):
        picked = device.pick_device(options)
        assert (picked.kind, picked.gpu.name, picked.card.name) == ("cuda", "NVIDIA H200", "H200")
        assert picked.capability == (9, 0) and picked.note is None
    assert device.pick_device(SystemOptions(device="cpu")) == CPU


def test_a_rank_uses_the_gpu_of_its_number(machine, monkeypatch):
    machine(FakeDriver(gpus=(H200, RTX_4085, RTX_2080)))
    current = []
    pretended = SimpleNamespace(Device=lambda index: SimpleNamespace(use=lambda: current.append(index)))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=pretended))
    first = device.pick_device(AUTO)
    second = device.use(first, lambda count: count - 2)
    assert current == [1] == [second.gpu.index] and second.gpu.name == "NVIDIA GeForce RTX 4085"
    assert first.gpu.index == 0 and device.use(CPU, lambda count: 1) is CPU
    with pytest.raises(UsageError, match=r"GPU 2, NVIDIA GeForce RTX 2080, has compute capability 7\.5, below 8\.0"):
        device.use(first, lambda count: 2)
    assert current == [1]


NO_CUPY = Problem("CuPy is not installed", "pip install 'llmq-train[cuda13]'", has_gpu=True)


@pytest.mark.parametrize(
    ("state", "note"),
    [
        (
            {"driver": FakeDriver(), "libraries": NO_CUPY},
            "a GPU is there, but CuPy is not installed: training on the CPU "
            "(for the GPU: pip install 'llmq-train[cuda13]')",
        ),
        ({"driver": FakeDriver(gpus=(RTX_2080,))}, "a GPU is there, but NVIDIA GeForce RTX 2080 has compute"),
        ({"driver": FakeDriver(failure=100)}, "the NVIDIA driver (CUDA 13.0) sees no GPU: training on the CPU"),
    ],
)
def test_auto_says_why_a_gpu_is_left_alone_and_cuda_is_never_the_cpu(state, note, machine, monkeypatch, tmp_path):
    machine(**state)
    read = device.cuda_driver.read
    monkeypatch.setattr(device.cuda_driver, "read", lambda: read(tmp_path))
    picked = device.pick_device(AUTO)
    assert picked.kind == "cpu" and picked.note.startswith(note) and "\n" not in picked.note
    assert device.system_facts(picked)["gpu"] == picked.note
    with pytest.raises(UsageError, match=r"--device cuda: .*; or use --device cpu"):
        device.pick_device(CUDA)
    assert device.pick_device(SystemOptions(device="cpu")) == CPU


def test_a_problem_of_the_machine_is_reported_whatever_is_installed(machine):
    machine(FakeDriver(cuda=11080), libraries=NO_CUPY)
    assert "too old" in device.cuda_backend_problem().what
    machine(FakeDriver(), libraries=NO_CUPY)
    assert device.cuda_backend_problem() is NO_CUPY


def test_a_gpu_that_is_not_here_is_planned_for_by_name_or_size(machine):
    machine()
    picked = device.pick_device(SystemOptions(device="cuda", gpu="NVIDIA H200"))
    known = gpus.named("H200")
    assert picked == Device("cuda", planned=known) == device.pick_device(SystemOptions(gpu="h200"))
    assert device.memory_bytes(picked) == (known.total_bytes, known.free_bytes)
    assert device.peaks(picked) == known.peaks
    facts = device.system_facts(picked)
    assert facts["device"] == "cuda: H200 (planned for, not used)" and "uuid" not in facts
    assert facts["peak"].startswith("989.4 TFLOP/s bf16, NVIDIA H200")
    picked = device.pick_device(SystemOptions(gpu="24GiB"))
    assert device.memory_bytes(picked) == (24 * 2**30, 24 * 2**30 - gpus.CONTEXT_BYTES) and device.has_fp8(picked)
    facts = device.system_facts(picked)
    assert facts["device"] == "cuda: 24 GiB (planned for, not used)" and not {"peak", "SMs"} & facts.keys()
    assert facts["compute capability"].startswith("9.0, assumed")
    message = "--gpu RTX 4085 is not a known card: give a size such as 24GiB, or one of RTX 40"
    with pytest.raises(UsageError, match=message):
        device.pick_device(SystemOptions(gpu="RTX 4085"))


def test_a_named_gpu_is_for_dry_runs_only():
    with pytest.raises(UsageError, match="--gpu H200 only plans: add --dry-run"):
        llmq.train(model="m", train_file="t.bin", gpu="H200")
    with pytest.raises(UsageError, match="--gpu H200 plans for a GPU, but --device is cpu"):
        llmq.train(model="m", train_file="t.bin", gpu="H200", device="cpu", dry_run=True)


def test_the_device_is_refused_before_the_model_is_opened(machine, monkeypatch):
    """A card that is too old is refused before any download."""
    machine(FakeDriver(gpus=(RTX_2080,)))
    monkeypatch.setattr("llmq.training.prepare.open_source", lambda *given: pytest.fail("opened"))
    with pytest.raises(UsageError, match=r"compute capability 7\.5, below 8\.0"):
        llmq.train(model="someone/model", train_file="t.bin", device="cuda")


def card(name):
    """A card that is planned for; the CPU without a name."""
    return Device("cuda", planned=gpus.named(name)) if name else CPU


@pytest.mark.parametrize(
    ("name", "dtype", "problem"),
    [
        ("A100 80GB", "bf16", r"packed rows in bf16 need .* capability 9\.0 or later, and A100.* has 8\.0"),
        ("RTX 4090", "bf16", r"compute capability 9\.0 or later, and RTX 4090 .* has 8\.9"),
        ("RTX 4090", "fp32", None),
        ("H200", "bf16", None),
        (None, "bf16", None),
    ],
)
def test_packed_rows_in_bf16_need_hopper(name, dtype, problem):
    """Our own kernels for f32, and the CPU, take them everywhere."""
    found = device.packing_problem(card(name), dtype)
    assert found is None if problem is None else re.search(problem, found)


BY_BLOCK = "needs .* 9\\.0.*has {}: use --fp8-scaling delayed or current"


@pytest.mark.parametrize(
    ("name", "scaling", "refused"),
    [
        ("A100 80GB", "delayed", r"e4m3 needs .* 8\.9 .*A100 80GB .*has 8\.0: use --matmul-dtype bf16"),
        *((name, scaling, None) for name in ("H200", None) for scaling in ("delayed", "rowwise", "blockwise")),
        *((name, scaling, None) for name in ("RTX 4090", "B200", "RTX 5090") for scaling in ("delayed", "current")),
        *(
            (name, scaling, f"{scaling} {BY_BLOCK.format(capability)}")
            for scaling in ("rowwise", "blockwise")
            for name, capability in (("RTX 4090", "8.9"), ("B200", "10.0"), ("RTX 5090", "12.0"))
        ),
    ],
)
def test_fp8_needs_a_card_that_has_it_and_its_scales(name, scaling, refused):
    with pytest.raises(UsageError, match=refused) if refused else nullcontext():
        device.refuse_dtypes(card(name), "e4m3", "bf16", scaling=scaling)
    device.refuse_dtypes(card(name), "bf16", "fp32", scaling=scaling)


def test_facts_of_a_gpu(machine, monkeypatch):
    machine(FakeDriver(used=10 * 2**30))
    picked = device.pick_device(AUTO)
    facts = device.system_facts(picked)
    assert facts["device"] == "cuda: NVIDIA H200" and facts["uuid"] == picked.gpu.uuid
    assert facts["compute capability"] == "9.0" and facts["SMs"] == 132
    assert facts["memory"] == f"10.0 GiB / {shown(H200[3])}"
    assert facts["driver"].endswith("(CUDA 13.0)") and facts["cuDNN"] == "9.28.0"
    assert not {"power limit", "pcie", "largest clock"} & facts.keys()  # unknown
    monkeypatch.setattr(
        nvml, "read", lambda uuid: nvml.Reading(driver="580.1", max_watts=700, pcie_generation=5, pcie_lanes=16)
    )
    facts = device.system_facts(picked)
    assert facts["driver"] == "580.1 (CUDA 13.0)" and facts["power limit"] == "700 W"
    assert facts["pcie"] == "generation 5, 16 lanes"


def test_a_gpu_that_is_full_is_reported(machine):
    machine(FakeDriver(context_failure=2))
    with pytest.raises(MemoryLimitError, match=r"NVIDIA H200 cannot be used now: .*OUT_OF_MEMORY.*nvidia-smi"):
        device.memory_bytes(device.pick_device(AUTO))


def test_an_unknown_card_is_measured_and_the_log_says_so(machine, monkeypatch):
    machine(FakeDriver(gpus=(RTX_4085,)))
    monkeypatch.setattr(device, "measured_cuda_peak", {"fp16": 1.01e14, "fp32": 5e13}.get)
    picked = device.pick_device(AUTO)
    assert picked.card is None
    assert device.peaks(picked) == {"bf16": 1.01e14, "fp32": 5e13, "e4m3": 2.02e14}
    assert device.system_facts(picked)["peak"] == "101 TFLOP/s bf16, measured, since this card is not in llmq's table"


def test_facts_name_what_is_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "tokenizers", raising=False)
    facts = device.system_facts()
    assert facts["numpy"] == version("numpy") == np.__version__
    assert facts["device"].startswith("cpu: ") and len(facts["device"]) > 5
    assert facts["cores"] >= 1
    assert "blas" in facts and "python" in facts and facts["memory"].count("iB") == 2
    assert not {"torch", "transformers", "matplotlib", "tokenizers"} & facts.keys()


def test_processes_of_a_run_share_host_memory(monkeypatch):
    monkeypatch.setattr(device, "host_memory_bytes", lambda: (2**40, 2**30))
    limited = SystemOptions(host_memory_limit="256MiB")
    found = [
        device.host_bytes(options, replace(device.CPU, num_sharing=count))
        for options in (SystemOptions(), limited)
        for count in (1, 4)
    ]
    assert found == [2**30, 2**28, 2**28, 2**26]
