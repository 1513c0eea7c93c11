"""Makes a virtual environment with this checkout installed: python3 tools/environment.py FOLDER [--extra NAME] ...

Runs before anything is installed, so it needs the standard library only. It installs with uv if there is one, else with
venv and pip. A stamp in the folder lists what was installed: a second call does nothing and needs no network.
"""

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

from llmq.hardware import cuda_driver  # noqa: E402

OLDEST_PYTHON = (3, 10)
OLDEST_PIP = "pip>=22.3"  # the pip of Python 3.10.0 cannot install a pyproject.toml editable
# Bytes of the GPU's libraries to download, and on disk: CuPy 14.2, cuDNN 9.28, NCCL 2.32, cuBLAS 12.9.3 and 13.10.
CUDA_BYTES = {"cuda12": (1_900_000_000, 3_140_000_000), "cuda13": (1_420_000_000, 2_360_000_000)}


class EnvironmentProblem(Exception):
    """The environment cannot be made; says what is missing and how to get it."""


def cuda_extra() -> list[str]:
    """The extra with the libraries for this machine's GPU; none, and on stderr why, if llmq cannot use the GPU."""
    driver = cuda_driver.read()
    if driver is None:
        return []
    if problem := cuda_driver.problem(driver):
        print(f"the GPU's libraries are left out: {problem}", file=sys.stderr)
        return []
    return [cuda_driver.extra(driver.cuda)]


def check_space(folder: Path, extra: str) -> None:
    """Says how large the GPU's libraries are. EnvironmentProblem if the disk has no room for them."""
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    download, disk = CUDA_BYTES[extra]
    sizes = f"{download / 1e9:.1f} GB to download, {disk / 1e9:.1f} GB on disk ({free / 1e9:.1f} GB are free)"
    print(f"with the libraries for the GPU ({extra}): {sizes}", file=sys.stderr)
    if free < download + disk:  # an installer unpacks what it has downloaded
        advice = "make room, or do without the GPU: bash tools/quickstart.sh --cpu"
        raise EnvironmentProblem(
            f"the libraries for the GPU take {(download + disk) / 1e9:.1f} GB in {folder}: {advice}"
        )


def works(folder: Path, uv: str | None) -> bool:
    """Whether `folder` is an environment that can be installed into: its Python runs, is new enough, has pip or uv."""
    check = f"import sys; sys.exit(sys.version_info < {OLDEST_PYTHON})" + ("" if uv else "; import pip")
    try:
        return not subprocess.run([folder / "bin" / "python", "-c", check], capture_output=True, check=False).returncode
    except OSError:
        return False


def making(folder: Path, uv: str | None) -> list[str]:
    """The command that makes an empty environment in `folder`. EnvironmentProblem if that cannot be done."""
    if folder.exists() and not (folder / "pyvenv.cfg").is_file() and any(folder.iterdir()):
        raise EnvironmentProblem(f"{folder} exists and is not a virtual environment: move it away")
    if uv:
        return [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)]
    if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        advice = "sudo apt install python{}.{}-venv, or install uv".format(*sys.version_info)
        raise EnvironmentProblem(f"this Python ({sys.executable}) comes without venv or ensurepip: {advice}")
    return [sys.executable, "-m", "venv", "--clear", str(folder)]


def make(folder: Path, extras: list[str], packages: list[str]) -> None:
    """Brings `folder` up to date. Raises EnvironmentProblem.

    An environment that works is kept, with whatever else is in it. One with more than what is asked for serves as well.
    """
    project = str(CHECKOUT) + (CHECKOUT / "pyproject.toml").read_text("utf-8")
    wanted = {hashlib.sha256(project.encode()).hexdigest(), *extras, *packages}
    stamp, python = folder / "llmq-stamp", folder / "bin" / "python"  # which may be a link to a Python that is gone
    if python.exists() and stamp.is_file() and wanted <= set(stamp.read_text("utf-8").splitlines()):
        return
    for extra in CUDA_BYTES.keys() & set(extras):
        check_space(folder, extra)
    uv = shutil.which("uv")
    steps = [] if works(folder, uv) else [making(folder, uv)]
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-warn-script-location"]
    steps += [] if uv else [[*pip, OLDEST_PIP]]
    install = [uv, "pip", "install", "--quiet", "--python", str(python)] if uv else pip
    selected = f"{CHECKOUT}[{','.join(extras)}]" if extras else str(CHECKOUT)
    steps += [[*install, "-e", selected, *packages]]
    # A user's settings for other environments must not redirect this one.
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "PIP_TARGET", "PIP_USER")}
    stamp.unlink(missing_ok=True)
    print(f"installing llmq and what it needs into {folder} (once)", file=sys.stderr)
    for step in steps:
        if code := subprocess.run(step, env=environ, check=False).returncode:
            raise EnvironmentProblem(f"{folder} is not complete: `{' '.join(step)}` failed with exit code {code}")
    stamp.write_text("\n".join(sorted(wanted)), "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml; repeatable")
    parser.add_argument("--cuda", action="store_true", help="the extra for this machine's GPU, if llmq can use it")
    parser.add_argument("--package", action="append", default=[], help="another requirement; repeatable")
    asked = parser.parse_args()
    try:
        make(asked.folder.absolute(), asked.extra + (cuda_extra() if asked.cuda else []), asked.package)
    except EnvironmentProblem as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
