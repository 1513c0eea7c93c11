"""Makes a virtual environment with the checkout installed in it, as `tools/test.sh` and `tools/quickstart.sh` need.

Runs before anything is installed, so it needs the standard library only. With uv where there is one (seconds), else
venv and pip. A stamp in the folder says what was installed, so that a second call does nothing and needs no network.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from llmq.hardware import cuda_driver, cuda_libraries

CHECKOUT = Path(__file__).resolve().parents[2]
OLDEST_PYTHON = (3, 10)
OLDEST_PIP = "pip>=22.3"  # the pip of Python 3.10.0 cannot install a pyproject.toml editable
# Bytes of the GPU's libraries to download, and on disk: CuPy 14.2, cuDNN 9.28, NCCL 2.32, cuBLAS 12.9.3 and 13.10.
CUDA_BYTES = {"cuda12": (1_900_000_000, 3_140_000_000), "cuda13": (1_420_000_000, 2_360_000_000)}


class EnvironmentProblem(Exception):
    """The environment cannot be made; says what is missing and how to get it."""


def stamp(extras: list[str], packages: list[str]) -> str:
    """Fingerprint of what an environment with these extras and packages is made from."""
    parts = [str(CHECKOUT), (CHECKOUT / "pyproject.toml").read_text("utf-8"), *extras, "", *packages]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def cuda_extra() -> str | None:
    """The extra with the libraries for this machine's GPU, by its driver; None if there is none that llmq can use.

    Says why on stderr where there is a driver all the same.
    """
    driver = cuda_driver.read()
    if driver is None:
        return None
    if problem := cuda_driver.problem(driver):
        print(f"the GPU's libraries are left out: {problem}", file=sys.stderr, flush=True)
        return None
    return cuda_libraries.extra(driver.cuda)


def check_space(folder: Path, extra: str) -> None:
    """Tells the size of the GPU's libraries. EnvironmentProblem if the disk has no room for them."""
    download, installed = CUDA_BYTES[extra]
    needed = download + installed  # an installer unpacks what it has downloaded
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    sizes = f"{download / 1e9:.1f} GB to download, {installed / 1e9:.1f} GB on disk ({free / 1e9:.1f} GB are free)"
    print(f"with the libraries for the GPU ({extra}): {sizes}", file=sys.stderr, flush=True)
    if free < needed:
        raise EnvironmentProblem(
            f"installing the libraries for the GPU in {folder} takes {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are "
            "free: make room, or do without the GPU: bash tools/quickstart.sh --cpu"
        )


def venv_problem() -> str | None:
    """What keeps this Python from making an environment with pip in it, with the fix; None if nothing does."""
    if all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        return None
    package = "python{}.{}-venv".format(*sys.version_info)
    return (
        f"this Python ({sys.executable}) comes without venv or ensurepip: "
        f"install the package {package} (sudo apt install {package}), or uv"
    )


def works(folder: Path, uv: str | None) -> bool:
    """Whether `folder` is an environment that can be installed into: its Python runs, is new enough, has pip or uv."""
    check = f"import sys; sys.exit(sys.version_info < {OLDEST_PYTHON})" + ("" if uv else "; import pip")
    try:
        return not subprocess.run([folder / "bin" / "python", "-c", check], capture_output=True, check=False).returncode
    except OSError:
        return False


def make_commands(folder: Path, uv: str | None) -> list[list[str]]:
    """The commands that make an empty environment in `folder`. Raises EnvironmentProblem if something else is there."""
    if folder.exists() and not (folder / "pyvenv.cfg").is_file() and any(folder.iterdir()):
        raise EnvironmentProblem(f"{folder} exists and is not a virtual environment: move it away")
    if uv:
        return [[uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)]]
    problem = venv_problem()
    if problem:
        raise EnvironmentProblem(problem)
    return [[sys.executable, "-m", "venv", "--clear", str(folder)]]


def install_commands(folder: Path, requirements: list[str], uv: str | None) -> list[list[str]]:
    """The commands that install `requirements` into the environment in `folder`."""
    python = str(folder / "bin" / "python")
    if uv:
        return [[uv, "pip", "install", "--quiet", "--python", python, *requirements]]
    # Twice quiet: errors only.
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-warn-script-location"]
    return [[*pip, OLDEST_PIP], [*pip, *requirements]]


def make(folder: Path, extras: list[str], packages: list[str]) -> bool:
    """Brings `folder` up to date; False if it was already. Raises EnvironmentProblem.

    An environment that works is kept, with whatever else is in it. One with the GPU's libraries serves without, too.
    """
    wanted = stamp(extras, packages)
    without_gpu = [extra for extra in extras if extra not in CUDA_BYTES]
    made = {stamp(kinds, more) for kinds in (extras, without_gpu) for more in ([], packages)}
    stamp_file = folder / "llmq-stamp"
    python_exists = (folder / "bin" / "python").exists()  # false for a link to a Python that is gone
    if python_exists and stamp_file.is_file() and wanted in stamp_file.read_text("ascii").split():
        return False
    for extra in CUDA_BYTES.keys() & set(extras):
        check_space(folder, extra)
    uv = shutil.which("uv")
    selected = f"{CHECKOUT}[{','.join(extras)}]" if extras else str(CHECKOUT)
    steps = [] if works(folder, uv) else make_commands(folder, uv)
    steps += install_commands(folder, ["-e", selected, *packages], uv)
    # A user's settings for other environments must not redirect this one.
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "PIP_TARGET", "PIP_USER")}
    stamp_file.unlink(missing_ok=True)
    notes = set(CHECKOUT.glob("*.egg-info"))
    print(f"installing llmq and what it needs into {folder} (once)", file=sys.stderr, flush=True)
    for step in steps:
        code = subprocess.run(step, env=environ, check=False).returncode
        if code:
            raise EnvironmentProblem(f"{folder} is not complete: `{' '.join(step)}` failed with exit code {code}")
    for left_behind in set(CHECKOUT.glob("*.egg-info")) - notes:  # by setuptools, which has no more use for it
        shutil.rmtree(left_behind)
    stamp_file.write_text("".join(f"{line}\n" for line in sorted(made)), "ascii")
    return True


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 2, with one line that says why, where the environment cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m llmq.quickstart.environment", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml; repeatable")
    parser.add_argument("--cuda", action="store_true", help="the extra for this machine's GPU, if it has a usable one")
    parser.add_argument("--package", action="append", default=[], help="another requirement; repeatable")
    asked = parser.parse_args(arguments)
    gpu = cuda_extra() if asked.cuda else None
    try:
        make(asked.folder.absolute(), asked.extra + ([gpu] if gpu else []), asked.package)
    except EnvironmentProblem as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
