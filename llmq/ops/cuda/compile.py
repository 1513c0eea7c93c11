"""Kernels made from `cuda/*.cu` by NVRTC, one cubin per (source, constants, card), kept on disk.

A source includes nothing but the `.cuh` files beside it, which are pasted in: no CUDA headers are needed, and the key
of the cache covers every byte that is compiled. Shapes and dtypes are constants, so that loops unroll and nothing is
decided per element. CuPy's own compilation is not used: it flushes subnormal numbers to zero (-ftz=true), and its cache
does not see headers.

Cubins lie in the folder `kernels` of the cache (`llmq/disk.py`), under names that hold a hash of their content: a
damaged one is made again. Where that folder takes none, they stay in memory until the process ends.
"""

import hashlib
import os
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from llmq.disk import cache_folder, replace_file

PACKAGE = Path(__file__).parents[2]
INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)
# 177: a header's constant that this kernel does not use
# A sum is fused with a product only where the source says so: else the bits of a value would depend on its forms.
OPTIONS = ("--std=c++17", "--fmad=false", "--ptxas-options=-v", "-diag-suppress=177")
Constants = Mapping[str, int | str]  # numbers and type names
_lock = threading.Lock()
_modules: dict[tuple[Any, ...], Any] = {}
notices: list[str] = []
"""What the user should know of the cache: why kernels are not kept."""


def cuda_folder() -> Path:
    """Folder with the `.cu` and `.cuh` files: `cuda/` of a checkout, `llmq/_cuda` of an installed wheel."""
    carried = PACKAGE / "_cuda"
    return carried if carried.is_dir() else PACKAGE.parent / "cuda"


def source(name: str, constants: Constants) -> str:
    """The text of `cuda/<name>.cu` with every header pasted in once, and `constants` where it includes "constants".

    Numbers become `constexpr int`, strings types. They are no macros, which would reach into NVRTC's own headers.
    """
    seen: set[str] = set()

    def paste(match: re.Match[str]) -> str:
        header = match.group(1)
        if header == "constants":
            lines = (
                f"using {key} = {value};\n" if isinstance(value, str) else f"constexpr int {key} = {value};\n"
                for key, value in sorted(constants.items())
            )
            return "".join(lines)
        if header in seen:
            return ""
        seen.add(header)
        return INCLUDE.sub(paste, (cuda_folder() / header).read_text("utf-8"))

    return INCLUDE.sub(paste, (cuda_folder() / f"{name}.cu").read_text("utf-8"))


def compiled(name: str, capability: int, constants: Constants) -> tuple[bytes, str]:
    """Cubin and compiler's log of `cuda/<name>.cu` for a compute capability (90 is 9.0). Needs no GPU.

    From 9.0 on the card's own instruction set is used, features of no other card included.
    """
    from cuda.bindings import nvrtc

    def check(answer: tuple[Any, ...]) -> Any:
        if answer[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC: {answer[0].name}")
        return answer[1] if len(answer) == 2 else None

    suffix = "a" if capability >= 90 else ""
    options = [*OPTIONS, f"-arch=sm_{capability}{suffix}"]
    program = check(nvrtc.nvrtcCreateProgram(source(name, constants).encode(), f"{name}.cu".encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    raw = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program)))  # written in place, which no bytes may be
    check(nvrtc.nvrtcGetProgramLog(program, raw))
    log = raw.rstrip(b"\0 ").decode()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"{name}.cu does not compile for sm_{capability} with {dict(constants)}:\n{log}")
    cubin = bytearray(check(nvrtc.nvrtcGetCUBINSize(program)))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    check(nvrtc.nvrtcDestroyProgram(program))
    return bytes(cubin), log


def cubin_file(name: str, capability: int, constants: Constants) -> Path:
    """File with the cubin, compiled unless it is there already and whole; in memory if the cache cannot keep it."""
    from cuda.bindings import nvrtc

    version = nvrtc.nvrtcVersion()[1:]
    parts = (source(name, constants), version, capability, OPTIONS)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    folder = cache_folder("kernels")
    for path in folder.glob(f"{name}-{key}-*.cubin"):
        with suppress(OSError):  # another process has just removed it, or it may not be removed
            if path.stem.rsplit("-", 1)[1] == _digest(path.read_bytes()):
                return path
            path.unlink()
    cubin, _ = compiled(name, capability, constants)
    path = folder / f"{name}-{key}-{_digest(cubin)}.cubin"
    try:
        replace_file(path, cubin)
    except OSError as error:
        notice = f"Compiled kernels are not kept for the next run: {folder}: {error.strerror or error}"
        if notice not in notices:
            notices.append(notice)
        return _in_memory(path.name, cubin)
    return path


def _in_memory(name: str, content: bytes) -> Path:
    """A file without a disk. It stays open: CuPy remembers modules by their path, which must not be another's later."""
    handle = os.memfd_create(name)
    with os.fdopen(handle, "wb", closefd=False) as file:
        file.write(content)
    return Path(f"/proc/self/fd/{handle}")


def kernel(name: str, entry: str, constants: Constants) -> Any:
    """The kernel `entry` of `cuda/<name>.cu` as a CuPy function for the current device. Any thread may call."""
    import cupy

    key = (name, device_facts(cupy.cuda.runtime.getDevice())[0], tuple(sorted(constants.items())))
    with _lock:
        if key not in _modules:
            _modules[key] = cupy.RawModule(path=str(cubin_file(name, key[1], constants)))
        return _modules[key].get_function(entry)


@cache
def device_facts(device: int) -> tuple[int, int]:
    """Compute capability of a device (90 for 9.0), and number of its multiprocessors."""
    import cupy

    found = cupy.cuda.Device(device)
    return int(found.compute_capability), int(found.attributes["MultiProcessorCount"])


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
