"""`llmq-bench op`: which ops there are, the shapes that it is asked for, and the products as cuBLASLt will see them."""

import math

import numpy as np
import pytest
from ops.test_cuda_linear import HostArray

from llmq.bench import ops as op_bench
from llmq.bench.op_command import ATTENTION, LINEAR, listing, products, sizes_of
from llmq.bench.ops import MODELS, Sizes, base, cases
from llmq.cli import bench, shell
from llmq.errors import UsageError
from llmq.ops.cuda.cublaslt import refusal
from llmq.ops.cuda.linear import linear_kernels
from llmq.ops.seam import record
from llmq.tensor import Output, Tensor, stored_shape

SMALL = Sizes("small", 2, 16, 48, 4, 2, 16, 64, 97)


def test_every_op_that_is_timed_is_listed():
    lines = dict(line.split(": ", 1) if ": " in line else (line, "") for line in listing().splitlines())
    assert {base(name) for name in op_bench.CASES} | {*LINEAR, *ATTENTION} == set(lines)
    assert lines["adamw"].startswith("adamw bf16, adamw fp32") and "swiglu_backward+fp8" in lines["swiglu_backward"]


def test_an_op_is_all_its_variants_and_a_variant_itself():
    names = [name for name, _ in cases("adamw")]
    assert len(names) == 4 and all(name.startswith("adamw ") for name in names)
    assert [name for name, _ in cases("cast+fp8")] == ["cast+fp8"]
    assert len(list(cases())) == len(op_bench.CASES) and not list(cases("linear_forward"))


def test_options_of_training_are_refused_before_an_op(capsys):
    assert shell.run(bench.command, ["--save=x.json", "--markdown", "op", "--list"]) == 2
    assert "--save, --markdown: not for llmq-bench op" in capsys.readouterr().err
    assert shell.run(bench.command, ["op", "--list"]) == 0


def test_a_shape_is_a_model_and_its_micro_batch():
    found = sizes_of("qwen2.5-0.5b:32x1024")
    named = MODELS[0]
    assert (found.b, found.t, found.c, found.hq, found.hkv, found.hd, found.f, found.v) == (
        named.b, named.t, named.c, named.hq, named.hkv, named.hd, named.f, named.v,
    )  # fmt: skip
    for text in ("Qwen2.5-0.5B", "Qwen2.5-0.5B:32", "Qwen2.5-0.5B:0x16", ":1x2", "32x1024"):
        with pytest.raises(UsageError, match=r"is not MODEL:BxT, such as"):
            sizes_of(text)
    with pytest.raises(UsageError, match="there is no preset 'gpt'"):
        sizes_of("gpt:1x16")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["matmul"], "there is no op 'matmul' to time: known are embedding_forward, "),
        (["swiglu_forward", "--shape=7B"], "--shape 7B is not MODEL:BxT"),
        (["swiglu_forward"], "llmq-bench op times ops on a GPU: there is no NVIDIA driver"),
    ],
)
def test_bad_input_is_one_message(arguments, says, capsys, monkeypatch):
    monkeypatch.setattr("llmq.hardware.cuda_driver.load", lambda: None)
    assert shell.run(bench.command, ["op", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_the_list_needs_no_gpu(capsys):
    assert shell.run(bench.command, ["op", "--list"]) == 0
    assert "rmsnorm_forward+fp8" in capsys.readouterr().out


class HostArrays:
    """Zeros of the host in the place of the GPU's arrays."""

    def tensor(self, shape, dtype="bf16", form=None, high=0):
        kind = op_bench.DTYPES[form.dtype if form else dtype]
        scale = HostArray(np.zeros(64, np.float32)) if form else None
        if scale:
            scale.data.ptr -= scale.data.ptr % 16
        return Tensor("x", HostArray(np.zeros(stored_shape(shape, form), kind)), shape, form, scale)

    def output(self, shape, dtype="bf16", forms=(None,)):
        return Output("y", shape, dtype, tuple(self.tensor(shape, dtype, form) for form in forms))


class NotedGemms:
    """Notes problems instead of solving them."""

    def __init__(self):
        self.problems, self.bound = [], {}

    def bind(self, problem, pointers, alpha):
        self.problems.append(problem)
        return lambda workspace: None


@pytest.mark.parametrize("op", LINEAR)
def test_a_product_is_posed_as_in_training(op):
    """FLOPs are those of the problem, fp8 has the summed axis innermost, and a weight's gradient is added to."""
    gemms = NotedGemms()
    found = list(products(op, SMALL))
    for product in found:
        made, kernel = product.make(HostArrays()), linear_kernels(gemms)[op]
        scratch = kernel.needed(made.arguments)
        assert scratch > 0
        made.bound(kernel, HostArray(np.zeros(scratch, np.uint8)))()
    tokens, names = 2 * 16, ("qkv", "o", "gate+up", "down", "head")
    sides = [(8 * 16, 48), (48, 64), (2 * 64, 48), (48, 64), (112, 48)]
    assert [p.name for p in found] == [f"{op} {dtype} {name}, small" for dtype in ("bf16", "e4m3") for name in names]
    assert [p.flops for p in found] == [2 * tokens * n * k for n, k in sides] * 2
    for product, problem in zip(found, gemms.problems, strict=True):
        assert product.flops == problem.flops and problem.a.dtype == problem.b.dtype == product.dtype
        assert problem.c == ("same" if op == "linear_wgrad" else None)
        if product.dtype == "e4m3":
            assert problem.a.transposed and not problem.b.transposed
            assert "this GPU or this version of the library lacks it" in refusal(problem), "nothing that we know of"


class NumpyArrays(op_bench.Arrays):
    """Arrays of NumPy in the place of the GPU's."""

    def __init__(self):
        self.cupy, self.num_bytes = np, 0

    def tensor(self, shape, dtype="bf16", form=None, high=0):
        array = np.zeros(stored_shape(shape, form), op_bench.DTYPES[form.dtype if form else dtype])
        return Tensor("x", array, shape, form, np.ones(1, np.float32) if form else None)


def test_bytes_of_what_is_timed_by_hand():
    """In place, by the rows of a table that are touched, and with the scales of a copy."""
    (b, t, c, hq, hkv, hd, v), tokens = (2, 16, 48, 4, 2, 16, 97), 2 * 16
    made = {name: maker(NumpyArrays(), SMALL) for name, maker in cases() if "quantize" not in name}
    found = {name: record(one.op).num_bytes(one.arguments) for name, one in made.items()}
    turned = 2 * tokens * (hq + hkv) * hd
    tables = 4 * (t * hd + tokens)
    assert found["rope_forward+in place"] == 2 * turned + tables
    assert found["rope_forward"] == 2 * 2 * tokens * (hq + 2 * hkv) * hd + tables
    assert found["adamw bf16"] == 7 * 2 * 128 * c + 4 * 4
    assert found["cross_entropy"] == 2**13 * (2 * 2 * v + 4 + 4)
    rows = made["embedding_backward"].different_tokens
    assert found["embedding_backward"] == 2 * 2 * rows * c + 2 * tokens * c + 4 * tokens and rows < tokens
    assert found["embedding_forward"] == 2 * rows * c + 2 * tokens * c + 4 * tokens
    x = NumpyArrays().tensor((b, t, 128))
    blocks = op_bench.Invocation(
        "quantize", (NumpyArrays().output(x.shape, forms=op_bench.BLOCKS[:1]), NumpyArrays().output((1,), forms=()), x)
    )
    assert record("quantize").num_bytes(blocks.arguments) == tokens * 128 * (2 + 1) + 4 * tokens, (
        "one scale for each row of 128"
    )


def test_attention_counts_the_keys_that_are_seen():
    (forward,), (backward,) = (list(products(op, SMALL)) for op in ATTENTION)
    seen = math.comb(17, 2) * 2 * 4  # of 16 queries, in two sequences and four heads
    assert forward.flops == 2 * 2 * seen * 16 and backward.flops == 5 * 2 * seen * 16
    assert (
        forward.row(1e-3 * forward.flops, 2e9)
        == f"| attention_forward, small | 0 | {1e-3 * forward.flops:.1f} | 0 | 50% |"
    )


@pytest.mark.gpu
def test_ops_are_timed_on_a_gpu(capsys):
    for op in ("rmsnorm_forward", "linear_wgrad", "attention_backward"):
        assert shell.run(bench.command, ["op", op, "--shape=Qwen2.5-0.5B:2x256"]) == 0
        rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"| {op}")]
        assert rows and all(float(row.split("|")[3]) > 0 for row in rows)
