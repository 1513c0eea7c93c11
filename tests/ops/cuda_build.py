"""Handles of the reference copied to the GPU, so that one case runs on both; what a compiler says of kernels."""

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from llmq.operands import Output, Tensor
from llmq.ops import cuda
from llmq.ops.cuda import compile
from llmq.ops.cuda.compile import Constants
from llmq.ops.reference import OPS
from llmq.tensor import DTYPES

from .build import arguments_of

FP8 = (DTYPES["e4m3"], DTYPES["e5m2"])


class Device:
    """Copies arrays to the GPU once each: handles that share memory on the host share it there."""

    def __init__(self) -> None:
        self.arrays: dict[int, Any] = {}
        self.kept: list[np.ndarray] = []
        self.scratch: Any = None  # of the last call

    def array(self, array: np.ndarray) -> Any:
        """The CuPy array of a host array; fp8 is uint8."""
        import cupy

        if id(array) not in self.arrays:
            raw = cupy.asarray(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            dtype = np.uint8 if array.dtype in FP8 else array.dtype
            self.arrays[id(array)] = raw.view(dtype).reshape(array.shape)
            self.kept.append(array)
        return self.arrays[id(array)]

    def tensor(self, tensor: Tensor | None) -> Tensor | None:
        """A tensor over the GPU's bytes."""
        if tensor is None:
            return None
        scale = None if tensor.scale is None else self.array(tensor.scale)
        return replace(tensor, array=self.array(tensor.array), scale=scale)

    def output(self, output: Output) -> Output:
        """An output over the GPU's bytes."""
        amax = {name: self.array(cell) for name, cell in output.amax.items()}
        return replace(output, tensors=tuple(self.tensor(t) for t in output.tensors), amax=amax)

    def host(self, array: np.ndarray) -> np.ndarray:
        """What the GPU's copy of a host array holds now."""
        return self.arrays[id(array)].view(np.uint8).reshape(-1).get().view(array.dtype).reshape(array.shape)

    def call(self, op: str, outputs: dict[str, Output], inputs: dict[str, Tensor | None], **numbers: Any) -> None:
        """Runs `op` on copies of these on the GPU."""
        self.run(op, [self.output(o) for o in outputs.values()], [self.tensor(t) for t in inputs.values()], **numbers)

    def run(self, op: str, outputs: Sequence[Output], inputs: Sequence[Tensor | None], **numbers: Any) -> None:
        """Runs `op` on what is on the GPU, with scratch of exactly the size asked for, poisoned."""
        import cupy

        call = arguments_of(op, *outputs, *inputs, **numbers)
        size = cuda.KERNELS[op].needed(call)
        self.scratch = cupy.full(size, 0xFF, cupy.uint8) if size else None
        given = {"scratch": self.scratch} if size else {}
        cuda.OPS[op](*outputs, *inputs, **numbers, **given)
        cupy.cuda.get_current_stream().synchronize()


def on_both(
    op: str, outputs: dict[str, Output], inputs: dict[str, Tensor | None], **numbers: Any
) -> list[tuple[Tensor, Tensor]]:
    """What the reference and the GPU leave in each form of each output, from the same start."""
    given, device = deepcopy(outputs), Device()
    with np.errstate(invalid="ignore", over="ignore"):
        OPS[op](*outputs.values(), *inputs.values(), **numbers)
    device.call(op, given, inputs, **numbers)
    pairs = []
    for name, output in outputs.items():
        for right, found in zip(output.tensors, given[name].tensors, strict=True):
            scale = None if found.scale is None else device.host(found.scale)
            pairs.append((right, replace(found, array=device.host(found.array), scale=scale)))
    return pairs


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of a kernel: registers and spilled bytes per thread, static shared bytes per block."""

    registers: int
    spill_bytes: int
    shared_bytes: int


def compiled(name: str, capability: int, constants: Constants) -> tuple[dict[str, Resources], str]:
    """What ptxas says of each kernel of a source, by name, and the whole log; the test is skipped without NVRTC."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc")
    _, log = compile.compiled(name, capability, constants)
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        numbers = [
            int(match.group(1)) if (match := re.search(pattern, part)) else 0
            for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes smem")
        ]
        found[part.split("'")[0]] = Resources(*numbers)
    return found, log
