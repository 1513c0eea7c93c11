"""The driver: what it says of itself and its GPUs, and every way in which it has none to give."""

import ctypes

import pytest
from fake_cuda import H200, MIG, RTX_2080, RTX_4090, FakeDriver, install

from llmq.hardware import cuda_driver


def test_a_gpu_as_cuda_names_it(monkeypatch, tmp_path):
    install(monkeypatch, FakeDriver(gpus=(H200, RTX_4090)))
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia/version").write_text("580.65.06\n")
    driver = cuda_driver.read(tmp_path)
    assert (driver.cuda, driver.version, str(driver)) == ((13, 0), "580.65.06", "580.65.06 (CUDA 13.0)")
    first, second = driver.gpus
    assert first == cuda_driver.Gpu(0, H200[0], "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", (9, 0), 132, H200[3])
    assert second.index == 1 and second.uuid == "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"
    assert cuda_driver.problem(driver) is None


def test_a_part_of_a_gpu_has_its_own_kind_of_name(monkeypatch):
    install(monkeypatch, FakeDriver(gpus=(MIG,)))
    assert cuda_driver.read().gpus[0].uuid.startswith("MIG-0001")


def test_a_version_that_nobody_says_is_left_out(monkeypatch, tmp_path):
    """WSL2 has no /sys/module/nvidia."""
    install(monkeypatch, FakeDriver(cuda=12040))
    driver = cuda_driver.read(tmp_path)
    assert driver.version is None and str(driver) == "(CUDA 12.4)"


@pytest.mark.parametrize(
    ("driver", "said", "fix", "has_gpu"),
    [
        (None, "no NVIDIA driver (libcuda.so.1)", "install the driver", False),
        (FakeDriver(cuda=11080), "too old for CUDA 12", "driver 580 or later (525 at least)", True),
        (FakeDriver(failure=803), "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "restart", False),
        (FakeDriver(failure=999), "error 999", "nvidia-smi", False),
        (FakeDriver(failure=100), "sees no GPU", "--gpus all", False),
        (FakeDriver(gpus=()), "sees no GPU", "--gpus all", False),
        (FakeDriver(gpus=(RTX_2080,)), "capability 7.5, below 8.0", "RTX 30", True),
        (
            FakeDriver(gpus=(RTX_2080, H200)),
            "capability 7.5, below 8.0",
            "CUDA_VISIBLE_DEVICES=GPU-10111213-1415-1617-1819-1a1b1c1d1e1f takes the NVIDIA H200",
            True,
        ),
    ],
)
def test_each_problem_has_its_message_and_its_fix(driver, said, fix, has_gpu, monkeypatch):
    install(monkeypatch, driver)
    problem = cuda_driver.problem(cuda_driver.read())
    assert said in problem.what and fix in problem.fix and problem.has_gpu == has_gpu
    assert str(problem) == f"{problem.what}: {problem.fix}"


def test_a_driver_without_the_functions_of_later_ones_is_told_to_be_too_old(monkeypatch):
    """cuDeviceGetUuid_v2 came with CUDA 11.4."""
    monkeypatch.delattr(FakeDriver, "cuDeviceGetUuid_v2")
    install(monkeypatch, FakeDriver(cuda=11020))
    driver = cuda_driver.read()
    assert driver.gpus == () and driver.num_gpus == 1
    assert "too old for CUDA 12" in cuda_driver.problem(driver).what and cuda_driver.problem(driver).has_gpu


def test_hidden_gpus_are_told_from_absent_ones(monkeypatch):
    install(monkeypatch, FakeDriver(failure=100))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    problem = cuda_driver.problem(cuda_driver.read())
    assert "CUDA_VISIBLE_DEVICES=7 leaves no GPU" in problem.what and "nvidia-smi -L" in problem.fix


def test_the_oldest_driver_and_card_that_work(monkeypatch):
    install(monkeypatch, FakeDriver(cuda=12000, gpus=(("NVIDIA A100-SXM4-40GB", (8, 0), 108, 2**35),)))
    assert cuda_driver.problem(cuda_driver.read()) is None


def test_memory_is_asked_of_the_gpu_itself_and_the_context_is_put_back(monkeypatch):
    fake = install(monkeypatch, FakeDriver(gpus=(H200, RTX_4090), used=5000))
    gpu = cuda_driver.read().gpus[1]
    assert cuda_driver.memory_bytes(gpu) == (RTX_4090[3], RTX_4090[3] - 5000)
    assert fake.contexts == []
    fake.context_failure = 2
    with pytest.raises(OSError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        cuda_driver.memory_bytes(gpu)


def test_no_library_is_no_driver(monkeypatch):
    def absent(name):
        assert name == "libcuda.so.1"
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    cuda_driver.load.cache_clear()
    try:
        assert cuda_driver.read() is None and cuda_driver.cuda_version() is None
    finally:
        cuda_driver.load.cache_clear()


def test_where_a_gpu_is_on_the_bus(monkeypatch):
    driver = install(monkeypatch, FakeDriver(gpus=(H200, H200, H200)))
    assert [cuda_driver.pci_address(index) for index in range(3)] == ["0000:18:00.0", "0000:19:00.0", "0000:1a:00.0"]
    driver.no_address = 3  # CUDA_ERROR_NOT_INITIALIZED
    assert cuda_driver.pci_address(0) == ""
