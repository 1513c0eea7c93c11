"""Products of at most four rows: which problems the kernel takes, its numbers, and that it compiles."""

from dataclasses import replace

import numpy as np
import pytest

from llmq.ops.cuda import compile as cuda_compile
from llmq.ops.cuda import cublaslt, linear, thin_matmul
from llmq.ops.cuda.cublaslt import Gemm, Matrix
from llmq.ops.reference import OPS
from llmq.tensor import Ref

from .build import output, tensor
from .cuda_build import Device

PLAIN = Gemm(m=96, n=1, k=64, a=Matrix("bf16", 64, True), b=Matrix("bf16", 64), d=Matrix("bf16", 96))


class ThinGemms:
    """The products of `Gemms` that need no cuBLASLt."""

    def __init__(self):
        self.bound = {}

    def bind(self, problem, pointers, alpha=1.0):
        """One product."""
        assert thin_matmul.takes(problem)
        return thin_matmul.bound(problem, pointers, alpha)


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"n": 4, "c": "same", "bias": "bf16", "d": Matrix("fp32", 96)}, True),
        ({"n": 5}, False),
        ({"k": 60}, False),
        ({"a": Matrix("bf16", 68, True)}, False),
        ({"alignment": 8}, False),
        ({"a": Matrix("bf16", 96)}, False),
        ({"b": Matrix("bf16", 64, True)}, False),
        ({"bias": "fp32"}, False),
        ({"a": Matrix("e4m3", 64, True, "tensor"), "b": Matrix("e4m3", 64, False, "tensor")}, False),
    ],
)
def test_few_rows_of_plain_operands_with_the_summed_axis_innermost_are_taken(change, taken):
    assert thin_matmul.takes(replace(PLAIN, **change)) == taken


def test_the_products_of_a_token_are_taken_and_those_of_a_batch_are_not():
    for tokens, taken in ((1, True), (4, True), (64, False)):
        x, w = Ref("x", "activation", (tokens, 1, 64), "bf16"), Ref("w", "weight", (96, 64), "bf16")
        y, residual = (Ref(name, "activation", (tokens, 1, 96), "bf16") for name in ("y", "res"))
        problem = linear.planned_problem("linear_forward", y, False, [x, w, None, residual])
        assert thin_matmul.takes(problem) == taken
    gemms = object.__new__(cublaslt.Gemms)  # no library is asked
    assert gemms.prepare([PLAIN]) == []


@pytest.mark.gpu(emulated=True)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize(("n", "k"), [(37, 64), (130, 1032), (4099, 72)], ids=str)
def test_the_kernel_computes_the_linear_map(n, k, rows, dtype):
    """In every split of a row, with a bias and a residual, alone and in the output's own memory.

    Bound: the rounding of y, and gamma of a lane's sum, the lanes' and the split's, at most k roundings.
    """
    rng, device = np.random.default_rng([n, rows]), Device()
    x, weight, bias = (tensor(rng.standard_normal(shape), dtype) for shape in ((rows, 1, k), (n, k), (n,)))
    residual = tensor(rng.standard_normal((rows, 1, n)), dtype)
    launch = linear.linear_kernels(ThinGemms())["linear_forward"].launch
    scratch = device.array(np.zeros(cublaslt.WORKSPACE_BYTES // 1024, np.uint8))
    scratch = type("Scratch", (), {"nbytes": cublaslt.WORKSPACE_BYTES, "data": scratch.data})
    for given in ((None, None), (bias, residual)):
        exact, got = output((rows, 1, n), "fp64"), output((rows, 1, n), dtype)
        wide = [one and tensor(one.read().astype(np.float64)) for one in (x, weight, *given)]
        OPS["linear_forward"](exact, *wide, alpha=0.5)
        if given[1] is not None:
            got.tensors[0].array[...] = residual.array
            given = (bias, replace(residual, array=got.tensors[0].array))
        launch(device.output(got), *(device.tensor(one) for one in (x, weight, *given)), alpha=0.5, scratch=scratch)
        found = device.host(got.tensors[0].array).astype(np.float64)
        expected = exact.tensors[0].array
        terms = np.abs(wide[0].array).reshape(rows, k) @ np.abs(wide[1].array).T
        unit = 2.0**-8 if dtype == "bf16" else 2.0**-24
        bound = unit * np.abs(expected) * (1 + 2**-6) + (k + 4) * 2.0**-24 * (terms[:, None] + np.abs(expected))
        assert (np.abs(found - expected) <= bound).all()


@pytest.mark.parametrize("capability", [90, *(pytest.param(n, marks=pytest.mark.slow) for n in (80, 86, 89, 100, 120))])
def test_the_kernel_compiles_without_spills(capability):
    """Of one and of four rows, with the splits of small and large weights."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc")
    for kind, access in (("bf16", 8), ("float", 4)):
        for rows, split in ((1, 1), (1, 8), (4, 1), (4, 4)):
            constants = {"T": kind, "D": kind, "K": 3584, "M": rows, "N": access, "SPLIT": split}
            constants |= {"BIAS": 1, "RESIDUAL": 1}
            _, log = cuda_compile.compiled("thin_matmul", capability, constants)
            used = cuda_compile.resources(log)["thin_matmul"]
            assert not used.spill_bytes and used.registers <= 96 and "warning" not in log, (used, constants)
