"""What an installation carries: the CUDA sources in a checkout and in a wheel, and the libraries that its extras bring,
as the package index resolves them: everything, and nothing else."""

import os
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

import llmq
from llmq.ops.cuda import compile as cuda_compile

ROOT = Path(__file__).parents[1]
OFFLINE = ("error sending request", "dns error", "Failed to fetch", "Could not connect", "network connectivity")
LISTED = {  # under both, by the name without CUDA's version
    *("cuda-bindings", "cupy", "nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cudnn"),
    *("nvidia-cudnn-frontend", "nvidia-ml-py", "nvidia-nccl", "nvmath-python"),
}
BROUGHT = {"cuda-core", "cuda-pathfinder"}
OLD_PYTHON = {"backports-strenum"}  # cuda-core on 3.10
SUFFIXES = {"cuda12": ("-cu12", "-cuda12x"), "cuda13": ("-cu13", "-cuda13x")}
ASK = (
    "from llmq.ops.cuda.compile import cuda_folder as f; print(f(), *sorted(p.name for p in f().iterdir()), sep='\\n')"
)


def files(folder: Path) -> set[str]:
    """Names of the files below `folder`, relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_checkout_finds_its_own_folder():
    assert cuda_compile.cuda_folder() == ROOT / "cuda"


def test_kernels_are_found_by_the_name_of_their_op(tmp_path, monkeypatch):
    """A wheel's own copy comes first: a folder `cuda` beside site-packages/llmq is not ours."""
    (tmp_path / "llmq" / "_cuda").mkdir(parents=True)
    (tmp_path / "cuda").mkdir()
    for path in ("llmq/_cuda/rmsnorm.cu", "llmq/_cuda/common.cuh", "cuda/other.cu"):
        (tmp_path / path).touch()
    monkeypatch.setattr(cuda_compile, "PACKAGE", tmp_path / "llmq")
    assert cuda_compile.cuda_folder() == tmp_path / "llmq" / "_cuda"


@pytest.mark.slow
def test_the_wheel_carries_the_package_and_the_cuda_sources(tmp_path):
    """Built from a copy by the build backend itself, unpacked, and asked."""
    copy = tmp_path / "checkout"
    for name in ("llmq", "cuda"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    (copy / "cuda" / "probe.cu").write_text("// a kernel\n")
    build = [sys.executable, "-c", f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"]
    built = subprocess.run(build, cwd=copy, capture_output=True, text=True, check=False)
    assert not built.returncode, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)

    assert files(site / "llmq" / "_cuda") == files(copy / "cuda")
    assert files(site / "llmq") - {f"_cuda/{name}" for name in files(copy / "cuda")} == files(copy / "llmq")
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {"llmq"}
    environ = {**os.environ, "PYTHONPATH": str(site)}
    asked = subprocess.run(
        [sys.executable, "-c", ASK], cwd=site, env=environ, capture_output=True, text=True, check=True
    )
    folder, *names = asked.stdout.split("\n")
    assert Path(folder) == site / "llmq" / "_cuda"
    assert "probe.cu" in names


def test_the_package_shows_what_it_has():
    assert set(llmq.__all__) <= set(dir(llmq))


# Extras


def plain(name: str, extra: str) -> str:
    """A package's name without the CUDA version of this extra; that of the other one stays, and is found out."""
    for suffix in SUFFIXES[extra]:
        name = name.removesuffix(suffix)
    return name


@cache
def resolved(extra: str | None, python: str, machine: str) -> dict[str, str]:
    """Version of each package that llmq with an extra installs, by name; skips where there is no package index."""
    uv = pytest.importorskip("uv", reason="pip install uv").find_uv_bin()
    command = [uv, "pip", "compile", "pyproject.toml", "--python-version", python, "--no-header", "--no-annotate"]
    command += ["--python-platform", f"{machine}-manylinux_2_28", "--quiet", *(["--extra", extra] if extra else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode and any(text in done.stderr for text in OFFLINE):
        pytest.skip(f"the package index cannot be reached: {done.stderr.strip().splitlines()[-1]}")
    assert not done.returncode, done.stderr
    return dict(line.split(";")[0].strip().split("==") for line in done.stdout.splitlines() if "==" in line)


@pytest.mark.judge
@pytest.mark.sample("sweep")
@pytest.mark.parametrize(("python", "machine"), [("3.10", "x86_64"), ("3.13", "x86_64"), ("3.13", "aarch64")])
@pytest.mark.parametrize("extra", SUFFIXES)
def test_an_extra_is_the_libraries_and_nothing_else(extra, python, machine):
    """No cufft, cusolver, cusparse or cutlass-dsl, nothing of the other CUDA."""
    found = resolved(extra, python, machine)
    added = {plain(name, extra) for name in found.keys() - resolved(None, python, machine).keys()}
    assert added == LISTED | BROUGHT | (OLD_PYTHON if python == "3.10" else set())
    for name, number in found.items():
        if plain(name, extra) in ("cuda-bindings", "nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime"):
            assert f"cuda{number.partition('.')[0]}" == extra, name


def test_the_extras_list_the_same_for_both_versions_of_cuda():
    """Without asking the package index."""
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for extra in SUFFIXES:
        assert {plain(requirement.split(">")[0], extra) for requirement in extras[extra]} == LISTED
