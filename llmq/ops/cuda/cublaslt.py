"""Matrix products through cuBLASLt in plain ints: a problem, its descriptors, its fastest algorithm, the call.

cuBLASLt thinks in column-major matrices; so does `Gemm` (`llmq.ops.cuda.linear` translates). Descriptors are built
once per problem. Its algorithm comes from the table of `llmq.ops.cuda.algorithms`, or is chosen once by timing what the
library proposes: on an H200 its first proposal is 0-18% slower than its best in bf16, and 0-39% in fp8. Its eight
proposals are enough: all 2112 configurations of the same kernels gain 0-4%, for ten seconds a problem.

Every algorithm gives the same bits each time: sums over split K go through the workspace in a fixed order, never
through atomics or the output (whose dtype would round partial sums).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from llmq.errors import UsageError
from llmq.ops.cuda.algorithms import Algorithms, Choice, fastest, is_capturing
from llmq.scaling import BLOCK

CUDA_TYPES = {"fp32": 0, "bf16": 14, "e4m3": 28, "e5m2": 29}  # cudaDataType_t
BYTES = {"fp32": 4, "bf16": 2, "e4m3": 1, "e5m2": 1}
FP8 = ("e4m3", "e5m2")
COMPUTE_32F = 68  # cublasComputeType_t: sums in f32, and f32 operands as they are (no TF32)
# cublasLtMatmulMatrixScale_t: one factor; one per row of op(A), column of op(B); per 128 of its numbers; per 128 x 128
SCALES = {"tensor": 0, "row": 3, "block": 4, "tile": 5}
WORKSPACE_BYTES = 32 * 2**20  # what the library may use
CANDIDATES = 64  # asked for; cuBLASLt 13.1 gives 8 for large problems
ALIGNMENT = 256  # bytes beyond which more alignment helps no kernel


@dataclass(frozen=True)
class Matrix:
    """An operand: `ld` elements from column to column; `scale` (fp8 only) is a key of SCALES."""

    dtype: str
    ld: int
    transposed: bool = False
    scale: str | None = None

    @property
    def key(self) -> str:
        """As the key of a problem has it: `bf16T896`."""
        return f"{self.dtype}{'NT'[self.transposed]}{self.ld}" + (f"*{self.scale}" if self.scale else "")


@dataclass(frozen=True)
class Gemm:
    """D (m,n) = alpha op(A) (m,k) op(B) (k,n) + C + bias (m,) per column, column-major, summed in f32.

    `c` is None (no C), "same" (C is D: the product is added to it) or "other" (another matrix of D's layout); `bias` a
    dtype; `fast` lets fp8 keep fewer bits of partial sums; `alignment` in bytes holds for every pointer.
    What alpha is decides nothing, so it is no part of a problem.
    """

    m: int
    n: int
    k: int
    a: Matrix
    b: Matrix
    d: Matrix
    bias: str | None = None
    c: str | None = None
    fast: bool = False
    alignment: int = ALIGNMENT

    @property
    def key(self) -> str:
        """Unique and readable: `9728x32768x896 bf16T896 bf16N896 -> bf16N9728 bias=bf16`."""
        shape = f"{self.m}x{self.n}x{self.k} {self.a.key} {self.b.key} -> {self.d.key}"
        apart = {f"bias={self.bias}": self.bias, f"c={self.c}": self.c, "fast": self.fast}
        apart[f"align={self.alignment}"] = self.alignment != ALIGNMENT
        return " ".join([shape, *(text for text, is_there in apart.items() if is_there)])

    def sizes(self) -> dict[str, int]:
        """Bytes of each matrix as it lies in memory, of a separate C, of the bias and the scales."""
        a = self.a.ld * (self.m if self.a.transposed else self.k) * BYTES[self.a.dtype]
        b = self.b.ld * (self.k if self.b.transposed else self.n) * BYTES[self.b.dtype]
        d = self.d.ld * self.n * BYTES[self.d.dtype]
        found = {"a": a, "b": b, "d": d, "c": d if self.c == "other" else 0}
        found["bias"] = self.m * BYTES[self.bias] if self.bias else 0
        for name, matrix, length in (("scale_a", self.a, self.m), ("scale_b", self.b, self.n)):
            blocks = -(-self.k // BLOCK)
            tiles = -(-length // BLOCK) * -(-blocks // 4) * 4
            counts = {None: 0, "tensor": 1, "row": length, "block": blocks * length, "tile": tiles}
            found[name] = 4 * counts[matrix.scale]
        return found


@dataclass(frozen=True)
class Pointers:
    """Addresses of one call; `c` equal to `d` where there is no other, 0 for what the problem does not have."""

    a: int
    b: int
    c: int
    d: int
    bias: int = 0
    scale_a: int = 0
    scale_b: int = 0


@dataclass
class _Built:
    """A problem's descriptors, and its algorithm once it is known."""

    operation: int
    a: int
    b: int
    d: int
    beta: np.ndarray
    algorithm: np.ndarray | None = None
    workspace_bytes: int = 0


class Gemms:
    """The matrix products of the current device, on CuPy's current stream. One host thread at a time."""

    def __init__(self, algorithms: Algorithms) -> None:
        from nvmath.bindings import cublasLt

        self.algorithms, self._lt = algorithms, cublasLt
        self._handle = cublasLt.create()
        self._one = np.ones(1, np.float32)
        self._built: dict[Gemm, _Built] = {}
        self.bound: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        """What `llmq.ops.cuda.linear` has bound, by the Output it writes."""

    def bind(self, problem: Gemm, pointers: Pointers, alpha: float = 1.0) -> Callable[[int], None]:
        """One product, ready to be run again and again, with the address of WORKSPACE_BYTES aligned to 256."""
        return partial(self.ready(problem, alpha), pointers)

    def ready(self, problem: Gemm, alpha: float = 1.0) -> Callable[[Pointers, int], None]:
        """Products of one problem, of the memory that each is given, with that of WORKSPACE_BYTES aligned to 256."""
        built = self.prepare(problem)
        algorithm, size = built.algorithm, built.workspace_bytes
        assert algorithm is not None
        factor = np.full(1, alpha, np.float32)

        def run(pointers: Pointers, workspace: int) -> None:
            self._point(problem, built, pointers)
            self._multiply(built, pointers, factor, algorithm, (workspace if size else 0, size))

        return run

    def prepare(self, problem: Gemm) -> _Built:
        """Makes ready for a problem. One that the table lacks is timed: not within a capture.

        Timing takes memory of its own, as much as the operands have: prepare before the rest is allocated.
        """
        built = self._built.get(problem) or self._build(problem)
        if built.algorithm is None:
            self._choose(problem, built)
        return built

    def close(self) -> None:
        """Gives descriptors and handle back."""
        for built in self._built.values():
            self._lt.matmul_desc_destroy(built.operation)
            for layout in (built.a, built.b, built.d):
                self._lt.matrix_layout_destroy(layout)
        self._built = {}
        self._lt.destroy(self._handle)

    # descriptors

    def _build(self, problem: Gemm) -> _Built:
        lt, p = self._lt, problem
        names = lt.MatmulDescAttribute
        operation = lt.matmul_desc_create(COMPUTE_32F, CUDA_TYPES["fp32"])
        self._set(operation, names.TRANSA, int(p.a.transposed))
        self._set(operation, names.TRANSB, int(p.b.transposed))
        if p.bias:
            self._set(operation, names.EPILOGUE, int(lt.Epilogue.BIAS))
            if p.bias != p.d.dtype:
                self._set(operation, names.BIAS_DATA_TYPE, CUDA_TYPES[p.bias])
        if p.fast:
            self._set(operation, names.FAST_ACCUM, 1)
        for matrix, mode in ((p.a, names.A_SCALE_MODE), (p.b, names.B_SCALE_MODE)):
            if matrix.scale is not None:
                self._set(operation, mode, SCALES[matrix.scale])
        shapes = ((p.a, p.m, p.k), (p.b, p.k, p.n), (p.d, p.m, p.n))
        a, b, d = (
            lt.matrix_layout_create(CUDA_TYPES[x.dtype], *((c, r) if x.transposed else (r, c)), x.ld)
            for x, r, c in shapes
        )
        self._built[p] = _Built(operation, a, b, d, np.full(1, 0 if p.c is None else 1, np.float32))
        return self._built[p]

    def _set(self, operation: int, name: Any, value: int) -> None:
        cell = np.array([value], self._lt.get_matmul_desc_attribute_dtype(name))
        self._lt.matmul_desc_set_attribute(operation, name, cell.ctypes.data, cell.nbytes)

    def _point(self, problem: Gemm, built: _Built, pointers: Pointers) -> None:
        names = self._lt.MatmulDescAttribute
        if problem.bias:
            self._set(built.operation, names.BIAS_POINTER, pointers.bias)
        for matrix, name, pointer in (
            (problem.a, names.A_SCALE_POINTER, pointers.scale_a),
            (problem.b, names.B_SCALE_POINTER, pointers.scale_b),
        ):
            if matrix.scale is not None:
                assert pointer and pointer % 16 == 0, "cuBLASLt reads scales at 16-byte aligned addresses only"
                self._set(built.operation, name, pointer)

    def _multiply(
        self, built: _Built, p: Pointers, alpha: np.ndarray, algorithm: np.ndarray, workspace: tuple[int, int]
    ) -> None:
        """Puts a product on the current stream; `workspace` is an address, and the bytes there."""
        matrices = (p.a, built.a, p.b, built.b, built.beta.ctypes.data, p.c, built.d, p.d, built.d)
        place = (algorithm.ctypes.data, *workspace, _stream())
        self._lt.matmul(self._handle, built.operation, alpha.ctypes.data, *matrices, *place)

    # algorithms

    def _choose(self, problem: Gemm, built: _Built) -> None:
        """Sets the algorithm of a problem, from the table or by timing."""
        # the library looks at bias and scale pointers when it judges an algorithm, but reads nothing there
        self._point(problem, built, Pointers(0, 0, 0, 0, ALIGNMENT, ALIGNMENT, ALIGNMENT))
        known = self.algorithms.find(problem.key)
        if known is not None and (checked := self._checked(built, known)) is not None:
            built.algorithm, built.workspace_bytes = checked
            return
        assert not is_capturing(_stream()), f"{problem.key} was not prepared before the graph's capture"
        proposals = self._proposals(problem, built)
        if not len(proposals):
            raise UsageError(refusal(problem))

        def launch(index: int, memory: dict[str, int]) -> bool:
            given = {name: memory[name] for name in ("a", "b", "d", "bias", "scale_a", "scale_b")}
            pointers = Pointers(c=memory["c"] or memory["d"], **given)
            self._point(problem, built, pointers)
            workspace = memory["workspace"], int(proposals["workspace_size"][index])
            try:
                self._multiply(built, pointers, self._one, proposals["algo"][index : index + 1], workspace)
            except self._lt.cuBLASLtError:
                return False
            return True

        dtypes = {"a": problem.a.dtype, "b": problem.b.dtype, "c": problem.d.dtype, "bias": problem.bias}
        sizes = {**problem.sizes(), "workspace": WORKSPACE_BYTES}
        index, best_us, first_us = fastest(launch, len(proposals), sizes, dtypes, _stream(), problem.key)
        best = proposals["algo"][index : index + 1].copy()
        built.algorithm, built.workspace_bytes = best, int(proposals["workspace_size"][index])
        self.algorithms.add(problem.key, Choice(best.tobytes().hex(), best_us, first_us, len(proposals)))

    def _checked(self, built: _Built, algorithm: bytes) -> tuple[np.ndarray, int] | None:
        """A stored algorithm with the workspace it needs, or None if the library refuses it."""
        lt = self._lt
        stored = np.frombuffer(algorithm, lt.matmul_algo_dtype).copy()
        result = np.zeros(1, lt.matmul_heuristic_result_dtype)
        layouts = (built.a, built.b, built.d, built.d)
        try:
            lt.matmul_algo_check(self._handle, built.operation, *layouts, stored.ctypes.data, result.ctypes.data)
        except lt.cuBLASLtError:
            return None
        fits = int(result["state"][0]) == 0 and int(result["workspace_size"][0]) <= WORKSPACE_BYTES
        return (stored, int(result["workspace_size"][0])) if fits else None

    def _proposals(self, problem: Gemm, built: _Built) -> np.ndarray:
        """The library's algorithms for a problem, best guess first."""
        lt = self._lt
        names = lt.MatmulPreferenceAttribute
        preference = lt.matmul_preference_create()
        sides = [getattr(names, f"MIN_ALIGNMENT_{side}_BYTES") for side in "ABCD"]
        limits = {
            names.MAX_WORKSPACE_BYTES: WORKSPACE_BYTES,
            names.REDUCTION_SCHEME_MASK: int(lt.ReductionScheme.COMPUTE_TYPE),  # over split K: in f32, in the workspace
            **dict.fromkeys(sides, problem.alignment),
        }
        for name, value in limits.items():
            cell = np.array([value], lt.get_matmul_preference_attribute_dtype(name))
            lt.matmul_preference_set_attribute(preference, name, cell.ctypes.data, cell.nbytes)
        results = np.zeros(CANDIDATES, lt.matmul_heuristic_result_dtype)
        found = np.zeros(1, np.int32)
        layouts = (built.a, built.b, built.d, built.d)
        where = (preference, CANDIDATES, results.ctypes.data, found.ctypes.data)
        try:
            lt.matmul_algo_get_heuristic(self._handle, built.operation, *layouts, *where)
        except lt.cuBLASLtError:  # NOT_SUPPORTED: what `refusal` explains
            found[0] = 0
        finally:
            lt.matmul_preference_destroy(preference)
        results = results[: found[0]]
        return results[(results["state"] == 0) & (results["workspace_size"] <= WORKSPACE_BYTES)]


def refusal(problem: Gemm) -> str:
    """Why no algorithm takes a problem, as far as the library's rules are known."""
    p, reasons = problem, []
    quantized = [name for name, x in (("A", p.a), ("B", p.b)) if x.dtype in FP8]
    if quantized:
        if not p.a.transposed or p.b.transposed:
            reasons.append("both fp8 operands must have the summed axis innermost: give the copy that has")
        if p.a.dtype == p.b.dtype == "e5m2":
            reasons.append("e5m2 times e5m2 does not exist: keep one operand in e4m3")
        sizes = {"m": p.m, "k": p.k, "ld of A": p.a.ld, "ld of B": p.b.ld, "ld of D": p.d.ld}
        odd = [f"{name} {size}" for name, size in sizes.items() if size % 16]
        if odd:
            reasons.append(f"fp8 needs multiples of 16, not {', '.join(odd)}: use --matmul-dtype bf16")
        if p.alignment < 16:
            columns = "columns of a wider matrix begin at a multiple of 16"
            reasons.append(f"fp8 needs addresses aligned to 16 bytes, not {p.alignment}: {columns}")
        scales = {p.a.scale, p.b.scale}
        if scales & {"block", "tile"} and (p.m % 4 or p.n % 4):
            reasons.append(f"scales per 128 numbers need multiples of 4, not m {p.m}, n {p.n}: use other scales")
        elif scales - {"tensor"}:
            reasons.append("scales per row and per block exist on compute capability 9.0, from cuBLAS 12.9 on")
        if p.bias == "fp32":
            reasons.append("fp8 products add a bias in bf16 only: use --model-dtype bf16")
    elif p.a.dtype != p.b.dtype or (p.a.dtype == "fp32" and p.d.dtype != "fp32"):
        reasons.append(f"{p.a.dtype} times {p.b.dtype} into {p.d.dtype} does not exist")
    reasons = reasons or ["this GPU or this version of the library lacks it"]
    return f"cuBLASLt has no algorithm for the matrix product {p.key}: {'; '.join(reasons)}"


def device_key() -> str:
    """What an algorithm is valid for: GPU, its multiprocessors, the library's version, and what it was asked for."""
    import cupy
    from nvmath.bindings import cublasLt

    facts = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    gpu = f"{facts['name'].decode()}, {facts['multiProcessorCount']} SMs"
    asked = f"workspace {WORKSPACE_BYTES}, reductions {int(cublasLt.ReductionScheme.COMPUTE_TYPE)}"
    return f"{gpu}, cuBLASLt {cublasLt.get_version()}, {asked}"


def _stream() -> int:
    import cupy

    return int(cupy.cuda.get_current_stream().ptr)
