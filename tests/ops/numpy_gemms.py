"""Matrix products of cuBLASLt on the memory of the host, in NumPy."""

import ctypes
from types import SimpleNamespace

import numpy as np

from llmq.tensor import DTYPES


class NumpyGemms:
    """Column-major products by the letter of `Gemm`, at addresses of the host."""

    algorithms = SimpleNamespace(save=lambda: None)

    def __init__(self):
        self.problems, self.bound = [], {}

    def bind(self, problem, pointers, alpha=1.0):
        self.problems.append(problem)
        return lambda workspace: self.run(problem, pointers, alpha)

    def ready(self, problem, alpha):
        return lambda pointers, workspace: self.run(problem, pointers, alpha)

    def run(self, p, at, alpha):
        a = self.operand(at.a, p.a, p.m, p.k) * self.scales(at.scale_a, p.a, p.m, p.k)
        b = self.operand(at.b, p.b, p.k, p.n) * self.scales(at.scale_b, p.b, p.n, p.k).T
        value = np.float32(alpha) * (a @ b)
        if p.bias:
            value += self.matrix(at.bias, p.bias, p.m, 1, p.m)
        if p.c:
            assert (at.c == at.d) == (p.c == "same")
            value += self.matrix(at.c, p.d.dtype, p.m, p.n, p.d.ld)
        d = self.matrix(at.d, p.d.dtype, p.m, p.n, p.d.ld)
        d[...] = value.astype(d.dtype)

    def operand(self, address, matrix, rows, columns):
        shape = (columns, rows) if matrix.transposed else (rows, columns)
        stored = self.matrix(address, matrix.dtype, *shape, matrix.ld).astype(np.float32)
        return stored.T if matrix.transposed else stored

    def matrix(self, address, dtype, rows, columns, ld):
        assert ld >= rows
        kind = DTYPES[dtype]
        raw = (ctypes.c_char * (((columns - 1) * ld + rows) * kind.itemsize)).from_address(address)
        return np.ndarray((rows, columns), kind, raw, 0, (kind.itemsize, ld * kind.itemsize))

    def scales(self, address, matrix, outer, k):
        """Factors of an operand seen as (outer, k), by the layouts in cuBLAS's documentation of scaling modes."""
        blocks = -(-k // 128)
        if matrix.scale == "row":
            return self.matrix(address, "fp32", outer, 1, outer)
        if matrix.scale == "block":
            return np.repeat(self.matrix(address, "fp32", outer, blocks, outer), 128, axis=1)[:, :k]
        if matrix.scale == "tile":
            pitch, count = -(-blocks // 4) * 4, -(-outer // 128)
            tiles = self.matrix(address, "fp32", pitch, count, pitch)[:blocks].T
            return np.repeat(np.repeat(tiles, 128, axis=0), 128, axis=1)[:outer, :k]
        return self.matrix(address, "fp32", 1, 1, 1) if address else np.ones((1, 1))
