"""Kernels of cuda/ compiled for the CPU: the source that NVRTC gets, assembly made into calls, by the system's g++."""

import ctypes
import hashlib
import os
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from llmq.ops.cuda import compile as cuda_compile

HEADER, SHARED_CODE = (Path(__file__).with_name(f"emulation.{kind}") for kind in ("h", "cpp"))
OPTIONS = (
    *("-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"),
    *("-w", "-fPIC", "-shared", "-pthread", "-fno-gnu-unique"),  # a library's `__shared__` storage is its own
    *("-fno-exceptions", "-fno-rtti"),  # for g++, which takes longer than most kernels run
)
ENTRY = re.compile(r'extern "C" __global__ void( CLUSTERED)?\s+(\w+)')
SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")


def without_assembly(source: str) -> str:
    """`source` with each asm statement as a call `ptx::opcode(outputs..., inputs...)`."""
    found, at = [], 0
    for start in re.finditer(r"\basm(?: volatile)?\(", source):
        end = _closing(source, start.end() - 1)
        found += [source[at : start.start()], _call(source[start.end() : end])]
        at = end + 1
    return "".join([*found, source[at:]])


def _closing(text: str, start: int) -> int:
    """Where the bracket at `start` is closed."""
    depth, in_text = 0, False
    for i in range(start, len(text)):
        if text[i] == '"':
            in_text = not in_text
        elif not in_text:
            depth += {"(": 1, ")": -1}.get(text[i], 0)
            if not depth:
                return i
    raise ValueError("a bracket is never closed")


def _call(statement: str) -> str:
    template = "".join(re.findall(r'"([^"]*)"', re.match(r'\s*((?:"[^"]*"\s*)+)', statement)[1]))  # type: ignore[index]
    opcode = re.sub(r"\W", "_", template.split()[0].rstrip(";"))
    operands, at = [], 0
    while match := re.compile(r'"[=+]?[a-z]"\s*\(').search(statement, at):
        at = _closing(statement, match.end() - 1)
        operands.append(statement[match.end() : at])
    return f"ptx::{opcode}({', '.join(operands)})"


def entries(name: str) -> dict[str, bool]:
    """The kernels of `cuda/<name>.cu`, and whether their blocks come in clusters."""
    text = (cuda_compile.cuda_folder() / f"{name}.cu").read_text("utf-8")
    while bounds := re.search(r"__launch_bounds__\(", text):
        text = text[: bounds.start()] + text[_closing(text, bounds.end() - 1) + 1 :]
    return {entry: bool(clustered) for clustered, entry in ENTRY.findall(text)}


def translated(name: str, constants: Mapping[str, int | str]) -> str:
    """C++ of `cuda/<name>.cu`, with a function `emulated_ENTRY` for each kernel."""
    source = cuda_compile.source(name, dict(constants))
    source = SHARED.sub(r"\1* \2 = static_cast<\1*>(emulation::dynamic_shared());", source)
    calls = "".join(f"EMULATED({entry})\n" for entry in entries(name))
    return f"{without_assembly(source)}\n{calls}"


class Kernels:
    """Compiled kernels in a folder, by source."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def kernel(self, name: str, entry: str, constants: Mapping[str, int | str]) -> Any:
        """The kernel as CuPy's function: called with grid, block, arguments and bytes of shared memory."""
        library = _library(self.folder, translated(name, constants))
        run = getattr(library, f"emulated_{entry}")
        run.restype = ctypes.c_char_p
        cluster = int(constants["CLUSTER"]) if entries(name)[entry] else 1

        def call(grid: tuple[int, ...], block: tuple[int], arguments: tuple[Any, ...], *, shared_mem: int = 0) -> None:
            values = [np.array(x, np.uint64) if type(x) is int else np.asarray(x) for x in arguments]
            pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
            sizes = (ctypes.c_uint * 3)(*grid, *[1] * (3 - len(grid)))
            threads, shared = ctypes.c_uint(block[0]), ctypes.c_size_t(shared_mem)
            failure = run(sizes, threads, shared, ctypes.c_uint(cluster), pointers)
            assert failure is None, f"{entry}: {failure.decode()}"

        call.max_dynamic_shared_size_bytes = 0  # type: ignore[attr-defined]
        return call


@cache
def _library(folder: Path, source: str) -> ctypes.CDLL:
    """The shared library of a source; `folder` may be other processes', too."""
    header = _made(folder, HEADER.read_text("utf-8"), "h", ".h.gch", [])
    include = f'#include "{str(header).removesuffix(".gch")}"\n'
    common = _made(folder, include + SHARED_CODE.read_text("utf-8"), "cpp", ".so", [])
    # The libraries of C++ come with what is common to all kernels: linking them again took as long as a small kernel.
    return ctypes.CDLL(str(_made(folder, include + source, "cpp", ".so", ["-nostdlib", str(common)])))


def _made(folder: Path, text: str, kind: str, suffix: str, options: list[str]) -> Path:
    """What the compiler makes of a text, under a name that follows from it."""
    name = hashlib.sha256(repr((text, OPTIONS)).encode()).hexdigest()[:24]
    source, made = folder / f"{name}.{kind}", folder / f"{name}{suffix}"
    if not made.exists():
        temporary = folder / f"{name}.{os.getpid()}"
        temporary.write_text(text, "utf-8")
        temporary.replace(source)
        command = ["g++", *OPTIONS, str(source), *options, "-o", str(temporary)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert not done.returncode, done.stderr[:4000]
        temporary.replace(made)
    return made
