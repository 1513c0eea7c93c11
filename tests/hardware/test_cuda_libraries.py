"""The CUDA packages of an environment: each way to be incomplete or mixed has one message with its fix."""

import subprocess
import sys
from pathlib import Path

import pytest

from llmq.hardware import cuda_driver

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
    """CUDA 12's packages run on newer drivers too."""
    environment(major)
    assert cuda_driver.library_problem(cuda) is None


def test_no_cupy_names_the_extra_of_the_driver(environment):
    for cuda, extra in ((12, 2), "cuda12"), ((13, 0), "cuda13"):
        environment(13, without=GOOD[13])
        problem = cuda_driver.library_problem(cuda)
        assert problem.what == "CuPy is not installed" and problem.fix == f"pip install 'llmq-train[{extra}]'"
        assert problem.has_gpu


def test_both_cupies(environment):
    environment(13, also={"cupy-cuda12x": "14.2.0"})
    problem = cuda_driver.library_problem((13, 0))
    assert "cupy-cuda12x and cupy-cuda13x are both installed" in problem.what
    assert problem.fix == "pip uninstall -y cupy-cuda12x cupy-cuda13x, then pip install 'llmq-train[cuda13]'"


def test_cupy_that_is_too_new_for_the_driver(environment):
    environment(13)
    problem = cuda_driver.library_problem((12, 4))
    assert "cupy-cuda13x needs NVIDIA driver 580 or later" in problem.what and "CUDA 12.4" in problem.what
    assert "pip uninstall -y cupy-cuda13x and pip install 'llmq-train[cuda12]'" in problem.fix


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


def test_a_library_of_the_system_will_do(environment):
    environment(12, without=["nvidia-cudnn-cu12"], paths={"cudnn": "/usr/lib/libcudnn.so.9"})
    assert cuda_driver.library_problem((12, 2)) is None


def test_libraries_of_the_other_cuda(environment):
    environment(12, paths={"cublasLt": "/site/nvidia/cu13/lib/libcublasLt.so.13"})
    problem = cuda_driver.library_problem((13, 0))
    assert "CuPy is for CUDA 12, and the cuBLASLt that is found for 13" in problem.what
    assert problem.fix == "pip install 'llmq-train[cuda12]' in a new environment"


def test_packages_that_overwrite_each_other(environment):
    """cuDNN and NCCL have the same file names for both versions of CUDA."""
    environment(13, also={"nvidia-cudnn-cu12": "9.28"})
    assert "nvidia-cudnn-cu12 and nvidia-cudnn-cu13 are both installed" in cuda_driver.library_problem((13, 0)).what
    environment(13, without=["nvidia-nccl-cu13"], also={"nvidia-nccl-cu12": "2.32"})
    assert cuda_driver.library_problem((13, 0)).what == "NCCL (nvidia-nccl-cu13) is missing"


def test_bindings_of_the_other_cuda(environment):
    environment(12, also={"cuda-bindings": "13.5.0"})
    problem = cuda_driver.library_problem((12, 2))
    assert problem.what == "cuda-bindings 13.5.0 is not for CUDA 12, as CuPy is"
    assert problem.fix == "pip install 'llmq-train[cuda12]'"


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
