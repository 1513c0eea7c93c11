"""What an installation carries: the CUDA sources are found in a checkout and in a wheel, through one function."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import llmq
from llmq.ops.cuda import compile as cuda_compile

ROOT = Path(__file__).parents[1]
ASK = (
    "from llmq.ops.cuda.compile import cuda_folder as f; print(f(), *sorted(p.name for p in f().iterdir()), sep='\\n')"
)


def files(folder: Path) -> set[str]:
    """Names of the files below `folder`, relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_checkout_finds_its_own_folder():
    assert cuda_compile.cuda_folder() == ROOT / "cuda"


def test_kernels_are_found_by_the_name_of_their_op(tmp_path, monkeypatch):
    """A wheel's own copy comes first: a folder `cuda` beside site-packages/llmq belongs to somebody else."""
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
