"""Arrays as callers have them: NumPy's and CuPy's, whatever has `__dlpack__`, and bare memory of the GPU.

DLPack is read here, because neither NumPy nor older CuPy take bf16 from it. No bytes are copied.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple, NoReturn

import numpy as np

from llmq.errors import UsageError
from llmq.tensor import DTYPES, LARGEST

NAMES = {DTYPES[name]: name for name in ("fp64", "fp32", "fp16", "bf16", "e4m3", "e5m2", "int32", "int8", "uint8")}
HOST, CUDA, PINNED = 1, 2, 3  # DLDeviceType
KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
CODES = {(0, 8): "int8", (0, 32): "int32", (1, 8): "uint8", (2, 16): "fp16", (2, 32): "fp32", (2, 64): "fp64"}
CODES |= {(4, 16): "bf16", (10, 8): "e4m3", (12, 8): "e5m2"}  # (DLDataTypeCode, bits)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class DeviceArray(NamedTuple):
    """Memory of a GPU by its address: `shape` of `dtype` (a name, such as bf16), contiguous or with `strides` in bytes.

    `owner` keeps the memory alive. It takes less than a microsecond to make, and nothing waits.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    device: int = 0
    strides: tuple[int, ...] | None = None
    owner: Any = None


class Operand(NamedTuple):
    """An array of one call: `place` is the NumPy array of the host, or an address on the GPU `device`."""

    place: Any
    shape: tuple[int, ...]
    dtype: str
    device: int | None  # None: the host
    strides: tuple[int, ...] | None  # in bytes; None: contiguous


class _Tensor(ctypes.Structure):
    """DLTensor, with which a DLManagedTensor begins (DLPack before 1.0)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Held:
    """Memory of the host for NumPy, which keeps this alive, and with it the capsule."""

    def __init__(self, capsule: Any, interface: dict[str, Any]) -> None:
        self.capsule, self.__array_interface__ = capsule, interface


def as_array(x: Any) -> Any:
    """`x` (NumPy, CuPy, anything with `__dlpack__`, a `DeviceArray`) as a NumPy array, or a CuPy array on CUDA.

    No bytes are copied. bf16 has the dtype of ml_dtypes; fp8 is uint8 in CuPy. UsageError for what is no array, for
    dtypes that llmq does not have, and for tensors that need a gradient.
    """
    if isinstance(x, np.ndarray) or _is_cupy(type(x)):
        return x
    found = x if isinstance(x, DeviceArray) else _from_dlpack(x)
    return _cupy_array(found) if isinstance(found, DeviceArray) else found


def operand(x: Any, name: str) -> Operand:
    """`x` as a call takes it; UsageError, which says of what, as `as_array`."""
    kind = type(x)
    if kind is np.ndarray or _is_cupy(kind):
        dtype = NAMES.get(x.dtype) or _refused(x.dtype, name)
        strides = None if x.flags.c_contiguous else x.strides
        if kind is np.ndarray:
            return Operand(x, x.shape, dtype, None, strides)
        memory = x.data  # `x.device` would be made anew, which takes microseconds
        return Operand(memory.ptr, x.shape, dtype, memory.device_id, strides)
    if kind is Operand:
        return x
    if kind is DeviceArray:
        return Operand(*x[:5])
    return operand(x.view(np.ndarray) if isinstance(x, np.ndarray) else _from_dlpack(x, name), name)


def empty(shape: tuple[int, ...], dtype: str, device: int | None) -> Any:
    """A NumPy array, or a CuPy array of the current GPU."""
    if device is None:
        return np.empty(shape, DTYPES[dtype])
    import cupy

    return cupy.empty(shape, stored(dtype))


def stored(dtype: str) -> np.dtype:
    """Dtype of arrays of a GPU that hold numbers of a dtype: CuPy has none for fp8."""
    return DTYPES["uint8" if dtype in LARGEST else dtype]


def strides_of(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Those of a contiguous array, in bytes."""
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _is_cupy(kind: type) -> bool:
    return kind.__module__.split(".", 1)[0] == "cupy"


def _refused(dtype: object, name: str) -> NoReturn:
    raise UsageError(f"{name} has the dtype {dtype}, which llmq lacks: use fp32, bf16, fp64 or int32")


def _from_dlpack(x: Any, name: str = "x") -> np.ndarray | DeviceArray:
    """What DLPack says of `x`: an array over the host's memory, or an address on a GPU."""
    if not hasattr(x, "__dlpack__"):
        raise UsageError(f"{name} is a {type(x).__name__}, not an array: use NumPy, CuPy, or anything with __dlpack__")
    try:
        kind = x.__dlpack_device__()[0]
        capsule = x.__dlpack__(stream=_stream()) if kind == CUDA else x.__dlpack__()
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        fix = "detach() it, and move it to the CPU or a CUDA GPU"
        raise UsageError(f"{name} does not give its memory away ({error}): {fix}") from error
    about = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    if about.device_type not in (HOST, CUDA, PINNED):
        raise UsageError(f"{name} is on a device of DLPack's type {about.device_type}: move it to the CPU or CUDA")
    kind = f"{KINDS.get(about.code, f'code {about.code} of ')}{about.bits}{f'x{about.lanes}' * (about.lanes > 1)}"
    dtype = CODES.get((about.code, about.bits)) if about.lanes == 1 else None
    dtype = dtype or _refused(kind, name)
    shape = tuple(about.shape[: about.ndim])
    itemsize = DTYPES[dtype].itemsize
    strides = tuple(itemsize * n for n in about.strides[: about.ndim]) if about.strides else None
    address = (about.data or 0) + about.byte_offset
    if about.device_type == CUDA:
        whole = strides_of(shape, itemsize)
        # axes of one may have any
        if strides and all(n == 1 or found == step for n, found, step in zip(shape, strides, whole, strict=True)):
            strides = None
        return DeviceArray(address, shape, dtype, about.device, strides, capsule)
    interface = {"version": 3, "shape": shape, "typestr": f"|V{itemsize}", "strides": strides, "data": (address, False)}
    if not math.prod(shape):
        return np.empty(shape, DTYPES[dtype])
    return np.asarray(_Held(capsule, interface)).view(DTYPES[dtype])


def _stream() -> int:
    """CuPy's current stream as DLPack names it: 1 is the default one."""
    import cupy

    return int(cupy.cuda.get_current_stream().ptr) or 1


def _cupy_array(x: DeviceArray) -> Any:
    import cupy

    dtype = stored(x.dtype)
    strides = x.strides or strides_of(x.shape, dtype.itemsize)
    extent = sum((n - 1) * step for n, step in zip(x.shape, strides, strict=True)) + dtype.itemsize
    memory = cupy.cuda.UnownedMemory(x.address, extent if math.prod(x.shape) else 0, x, x.device)
    return cupy.ndarray(x.shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)
