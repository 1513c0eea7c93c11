"""The driver, its GPUs, and each way to have none; CUDA's packages, and each way to be incomplete or mixed."""

import ctypes
import subprocess
import sys
from pathlib import Path

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


def test_a_version_that_is_unknown_is_left_out(monkeypatch, tmp_path):
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


def test_a_driver_without_the_functions_of_later_ones_is_said_to_be_too_old(monkeypatch):
    """cuDeviceGetUuid_v2 came with CUDA 11.4."""
    monkeypatch.delattr(FakeDriver, "cuDeviceGetUuid_v2")
    install(monkeypatch, FakeDriver(cuda=11020))
    driver = cuda_driver.read()
    assert driver.gpus == () and driver.num_gpus == 1
    assert "too old for CUDA 12" in cuda_driver.problem(driver).what and cuda_driver.problem(driver).has_gpu


def test_hidden_gpus_differ_from_absent_ones(monkeypatch):
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


ROOT = Path(__file__).parents[2]
GOOD = {
    major: {
        cupy: "14.2.0",
        "cuda-bindings": f"{major}.9.1",
        "nvmath-python": "1.0.0",
        "nvidia-cudnn-frontend": "1.28.0",
        **{library.packages[major]: "1" for library in cuda_driver.LIBRARIES},
    }
    for major, cupy in cuda_driver.CUPY.items()
}
PATHS = {
    "cublasLt": "/site/nvidia/libcublasLt.so.{}",
    "cudart": "/site/nvidia/libcudart.so.{}",
    "nvrtc": "/site/nvidia/libnvrtc.so.{}",
    "cudnn": "/site/nvidia/cudnn/lib/libcudnn.so.9",
    "nccl": "/site/nvidia/nccl/lib/libnccl.so.2",
}


@pytest.fixture
def environment(monkeypatch):
    """Sets what is installed: packages for `major`, without some and with others; libraries are where packages are."""

    def install(major, without=(), also=(), paths=None):
        packages = {name: number for name, number in GOOD[major].items() if name not in without} | dict(also)
        have = {
            library.name
            for library in cuda_driver.LIBRARIES
            if any(name in packages for name in library.packages.values())
        }
        have.add("cudart")  # comes with the others
        where = {name: path.format(major) for name, path in PATHS.items() if name in have} | (paths or {})
        monkeypatch.setattr(cuda_driver, "installed", packages.get)
        monkeypatch.setattr(cuda_driver, "load_library", where.get)

    return install


@pytest.mark.parametrize(
    ("cuda", "extra"), [((12, 0), "cuda12"), ((12, 9), "cuda12"), ((13, 0), "cuda13"), ((14, 1), "cuda13")]
)
def test_the_driver_chooses_the_extra(cuda, extra):
    assert cuda_driver.extra(cuda) == extra


@pytest.mark.parametrize(("major", "cuda"), [(12, (12, 0)), (13, (13, 0)), (12, (13, 1)), (13, (14, 0))])
def test_a_whole_environment_has_no_problem(major, cuda, environment):
    """CUDA 12's packages run on newer drivers too; a library of the system will do."""
    environment(major)
    assert cuda_driver.library_problem(cuda) is None
    environment(major, without=[f"nvidia-cudnn-cu{major}"], paths={"cudnn": "/usr/lib/libcudnn.so.9"})
    assert cuda_driver.library_problem(cuda) is None


IN_A_NEW_ONE = "pip install 'llmq-train[cuda{}]' in a new environment"


@pytest.mark.parametrize(
    ("major", "changes", "cuda", "what", "fix"),
    [
        (13, {"without": GOOD[13]}, (12, 2), "CuPy is not installed", "pip install 'llmq-train[cuda12]'"),
        (13, {"without": GOOD[13]}, (13, 0), "CuPy is not installed", "pip install 'llmq-train[cuda13]'"),
        (
            *(13, {"also": {"cupy-cuda12x": "14.2.0"}}, (13, 0)),
            "cupy-cuda12x and cupy-cuda13x are both installed",
            "pip uninstall -y cupy-cuda12x cupy-cuda13x, then pip install 'llmq-train[cuda13]'",
        ),
        (
            *(13, {}, (12, 4)),
            "cupy-cuda13x needs NVIDIA driver 580 or later, and this one runs CUDA 12.4 at most",
            "update the driver, or pip uninstall -y cupy-cuda13x and pip install 'llmq-train[cuda12]'",
        ),
        (
            *(12, {"paths": {"cublasLt": "/site/nvidia/cu13/lib/libcublasLt.so.13"}}, (13, 0)),
            "CuPy is for CUDA 12, and the cuBLASLt that is found for 13",
            IN_A_NEW_ONE.format(12),
        ),
        # cuDNN and NCCL have the same file names for both versions of CUDA
        (
            *(13, {"also": {"nvidia-cudnn-cu12": "9.28"}}, (13, 0)),
            "nvidia-cudnn-cu12 and nvidia-cudnn-cu13 are both installed",
            IN_A_NEW_ONE.format(13),
        ),
        (
            *(13, {"without": ["nvidia-nccl-cu13"], "also": {"nvidia-nccl-cu12": "2.32"}}, (13, 0)),
            "NCCL (nvidia-nccl-cu13) is missing",
            "pip install 'llmq-train[cuda13]'",
        ),
        (
            *(12, {"also": {"cuda-bindings": "13.5.0"}}, (12, 2)),
            "cuda-bindings 13.5.0 is not for CUDA 12, as CuPy is",
            "pip install 'llmq-train[cuda12]'",
        ),
    ],
)
def test_each_way_to_be_mixed_has_its_message_and_its_fix(major, changes, cuda, what, fix, environment):
    environment(major, **changes)
    problem = cuda_driver.library_problem(cuda)
    assert problem.what.startswith(what) and problem.fix == fix and problem.has_gpu


@pytest.mark.parametrize("major", GOOD)
def test_each_missing_package_is_named(major, environment):
    needed = [name for name in GOOD[major] if not name.startswith("cupy")]
    for name in needed:
        environment(major, without=[name])
        problem = cuda_driver.library_problem((13, 0))
        assert name in problem.what and problem.what.endswith(" is missing")
        assert problem.fix == f"pip install 'llmq-train[cuda{major}]'"
    environment(major, without=needed)
    what = cuda_driver.library_problem((13, 0)).what
    assert all(name in what for name in needed) and what.endswith(" are missing")


class FakeLibrary:
    """Every version function, with the numbers of a real environment."""

    def ncclGetVersion(self, pointer):
        pointer._obj.value = 23203

    def cudaRuntimeGetVersion(self, pointer):
        pointer._obj.value = 13020

    def nvrtcVersion(self, major, minor):
        major._obj.value, minor._obj.value = 13, 5

    def __getattr__(self, name):
        def ask():
            return {"cublasLtGetVersion": 131000, "cudnnGetVersion": 92800}[name]

        return ask


def test_versions_are_those_of_the_loaded_libraries(environment, monkeypatch):
    environment(13, without=["nvidia-nccl-cu13", "nvmath-python"])
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda path: FakeLibrary())
    assert cuda_driver.versions() == {
        "CUDA runtime": "13.2",
        "cuBLASLt": "13.10.0",
        "cuDNN": "9.28.0",
        "NVRTC": "13.5",
        "cupy-cuda13x": "14.2.0",
        "cuda-bindings": "13.9.1",
        "nvidia-cudnn-frontend": "1.28.0",
    }
    environment(13)
    assert cuda_driver.versions()["NCCL"] == "2.32.3"


PATHFINDER = """
class DynamicLibNotFoundError(RuntimeError): pass
class Found: abs_path = "/site/libcublasLt.so.13"
def load_nvidia_dynamic_lib(name):
    if name == "cublasLt": return Found()
    raise DynamicLibNotFoundError(name)
"""


def test_nvidias_packages_are_found_beside_the_checkouts_own_folder(tmp_path):
    """`cuda/` of the checkout comes first on the path of every command that is run there."""
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "pathfinder.py").write_text(PATHFINDER)
    code = "from llmq.hardware import cuda_driver as c; print(c.load_library('cublasLt'), c.load_library('nccl'))"
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]; {code}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "/site/libcublasLt.so.13 None"
