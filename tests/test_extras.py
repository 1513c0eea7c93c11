"""What `llmq-train[cuda12]` and `[cuda13]` install, as the package index resolves it: everything, and nothing else."""

import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OFFLINE = ("error sending request", "dns error", "Failed to fetch", "Could not connect", "network connectivity")
LISTED = {  # under both, by the name without CUDA's version
    *("cuda-bindings", "cupy", "nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cudnn"),
    *("nvidia-cudnn-frontend", "nvidia-ml-py", "nvidia-nccl", "nvmath-python"),
}
BROUGHT = {"cuda-core", "cuda-pathfinder"}
OLD_PYTHON = {"backports-strenum"}  # cuda-core on 3.10
SUFFIXES = {"cuda12": ("-cu12", "-cuda12x"), "cuda13": ("-cu13", "-cuda13x")}


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
