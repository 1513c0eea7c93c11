"""Every CUDA op against the reference: bf16 and fp32, odd and large shapes, all forms, accumulation, repeatability.

Outputs and scratch are poisoned first. Ops that only move, round or add in a fixed order equal the reference bit for
bit. The others are compared with the reference in f64 on the same stored inputs, E: with u the unit roundoff of the
output's dtype and w = 2^-24 that of f32, the bound is u |E| (1 + 2^-6) for the last rounding, whose operand may itself
be off, plus k w S for the f32 arithmetic before it, where S is the largest |E| and k counts roundings along the longest
chain of an element; for a sum over rows S is the sum of the magnitudes of what is added and k the number of rows.
"""

import inspect
from dataclasses import replace

import numpy as np
import pytest

from llmq.errors import UsageError
from llmq.operands import Output, Tensor, to_form
from llmq.ops import cuda, seam
from llmq.ops.cuda import embedding, launch
from llmq.ops.cuda.activation import NUMBERS as ACTIVATIONS
from llmq.ops.cuda.attention import attention_kernels
from llmq.ops.cuda.linear import linear_kernels
from llmq.ops.reference import OPS
from llmq.tensor import COLSUM, Form, num_norm_tiles

from .build import arguments_of, output, tensor
from .cases import Case, Sizes, make
from .cuda_build import Device

gpu = pytest.mark.gpu(emulated=True)
SIZES = {
    "odd": Sizes(b=2, t=37, c=88, hq=6, hkv=2, hd=16, f=40, v=203, vp=256),
    "large": Sizes(b=3, t=197, c=896, hq=14, hkv=2, hd=64, f=1208, v=5000, vp=5120),
}
EXACT = """
    adamw amax amax_scale apply_if_below apply_if_finite cache_write cast copy_to_device copy_to_host dropout
    embedding_forward embedding_noise last_norm_scale loss_sum repeat rope_backward rope_forward sample
    scale scale_columns_forward scale_update sgd virtual_tokens_forward
"""
INTEGERS = {"num_tokens", "num_hits", "hits", "new_seen", "next_tokens", "next_positions"}
# sums over rows: the inputs whose magnitudes make the sum of magnitudes
SUMS = {
    "d_weight": ("d_x", "res", "rstd", "d_res"),
    "d_q_weight": ("d_out", "qkv", "rstd"),
    "d_k_weight": ("d_out", "qkv", "rstd"),
    "d_bias": ("d_y", "d_x"),
    "d_gain": ("d_y", "x"),
    "partials": ("grad",),
    "d_virtual": ("d_out",),
    "sums": ("sensitivity", "uncertainty"),
}
# exp, division and log of the GPU err by up to 2 units; norms add a row of up to 896 over 32 lanes, then a butterfly
CHAIN = 64
UNIT = {"bf16": 2.0**-8, "fp32": 2.0**-24}


def inputs_of(case: Case, dtype: str) -> dict[str, Tensor | None]:
    """Stored inputs, with counts of tokens as integers."""
    found = {name: case.input(name, dtype) for name in case.inputs}
    if "num_tokens" in found:
        found["num_tokens"] = tensor(np.array([5], np.int32))
    return found


def outputs_of(case: Case, dtype: str, accumulate: bool = False) -> dict[str, Output]:
    """Poisoned outputs; with `accumulate` those of sums add to ones."""
    kinds = {name: "int32" if name in INTEGERS else case.dtype(name, dtype) for name in case.outputs}
    start = {name: np.ones(shape) if accumulate else None for name, shape in case.outputs.items()}
    return {name: output(shape, kinds[name], start=start[name]) for name, shape in case.outputs.items()}


def wide(x: Tensor | None, magnitude: bool = False) -> Tensor | None:
    """The tensor as f64."""
    if x is None or x.array.dtype.kind in "iu" or x.scale is not None:
        return x
    array = x.read().astype(np.float64)
    form = Form("fp64", "colsum") if x.form else None
    return Tensor(x.name, np.abs(array) if magnitude else array, x.shape, form)


def f64_values(case: Case, inputs: dict[str, Tensor | None], absolute: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """The reference in f64 on these stored inputs, some by magnitude."""
    read = [wide(x, name in absolute) for name, x in inputs.items()]
    written = {name: output(shape, "fp64") for name, shape in case.outputs.items()}
    OPS[case.op](*written.values(), *read, **case.numbers)
    return {name: o.tensors[0].array for name, o in written.items()}


def run_gpu(case: Case, outputs: dict[str, Output], inputs: dict[str, Tensor | None]) -> dict[str, np.ndarray]:
    """What the outputs hold after the CUDA op, by name."""
    device = Device()
    device.call(case.op, outputs, inputs, **case.numbers)
    return {name: device.host(o.tensors[0].array) for name, o in outputs.items() if o.wanted}


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def check(case: Case, dtype: str, *, accumulate: bool = False) -> None:
    """Runs the case on both backends and compares every output."""
    inputs = inputs_of(case, dtype)
    got = run_gpu(case, outputs_of(case, dtype, accumulate), inputs)
    if case.op in EXACT.split():
        expected = outputs_of(case, dtype, accumulate)
        OPS[case.op](*expected.values(), *inputs.values(), **case.numbers)
        for name, o in expected.items():
            assert same_bytes(got[name], o.tensors[0].array), f"{name} differs from the reference's bytes"
        return
    exact = f64_values(case, inputs)
    for name, value in got.items():
        e, kind = exact[name] + accumulate, case.dtype(name, dtype)
        if name in INTEGERS:
            assert np.array_equal(value, e), f"{name} differs from the reference"
            continue
        if name in SUMS:
            rows = max(int(np.prod(x.shape[:-1])) for x in inputs.values() if x is not None)
            chain, size = rows, f64_values(case, inputs, SUMS[name])[name] + accumulate
        else:
            chain, size = CHAIN, np.abs(e).max(initial=0)
        bound = UNIT[kind] * np.abs(e) * (1 + 2**-6) + chain * 2.0**-24 * size
        worst = np.abs(value.astype(np.float64) - e) - bound
        assert np.all(worst <= 0), f"{name}: {np.nanmax(worst)} beyond the bound, of {np.abs(e).max()}"


# quantize and nest write no value, gradients of adapters are of bf16 alone, CuPy is not emulated: tests of their own
OTHERS = [op for op in cuda.OPS if op not in ("quantize", "nest", "own_loss") and "low_rank" not in op]


@pytest.mark.gpu(emulated="bf16-odd")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("op", OTHERS)
def test_an_op_equals_the_reference(op, dtype, size):
    check(make(op, SIZES[size]), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_a_loss_of_ones_own_equals_the_reference(size):
    check(make("own_loss", SIZES[size]), "fp32")


OF_LAYERNORM = ("layernorm_forward", "layernorm_backward")
DTYPES_HERE, HEADS = ("bf16", "fp32"), ("rope_forward", "rope_backward", "qk_norm_forward", "qk_norm_backward")
# op, changed sizes, dtypes
OTHER_SHAPES = [
    # 14 and more pieces of 64 positions of a cache, added up 8 at a time
    ("attention_cached", {**vars(SIZES["large"]), "t": 1300}, DTYPES_HERE),
    # rows of one block, clusters of 2 to 8, padding, and rows that do not fit on chip
    *(
        ("cross_entropy", {"b": 1, "t": 9, "v": v, "vp": vp}, DTYPES_HERE)
        for v, vp in ((151936, 151936), (32000, 32000), (100003, 100096), (400000, 400000))
    ),
    *((f"rmsnorm_{way}ward", {"c": c}, ("bf16",)) for way in ("for", "back") for c in (1536, 2560, 3584, 5120, 8192)),
    *((op, {"c": c}, ("bf16",)) for op in ("post_norm_forward", *OF_LAYERNORM) for c in (2560, 8192)),
    # more columns than a block takes at once, and queries wider than keys
    *((f"wide_qk_norm_{way}ward", {"hq": 18, "hkv": 2, "hd": 256}, DTYPES_HERE) for way in ("for", "back")),
    *((op, {"hd": hd}, ("bf16",)) for op in HEADS for hd in (32, 96, 128, 256)),
    # heads whose half is odd the rotary embedding has in fp32 only
    *((op, {"hd": hd}, ("fp32",) if "rope" in op else DTYPES_HERE) for op in HEADS for hd in (6, 18, 34)),
    # biases, weights of norms, and matrices whose elements are no multiple of what a block takes at a time
    *(("adamw", {"vp": n, "c": c}, DTYPES_HERE) for n, c in ((1, 896), (1, 4), (7, 44), (1, 1152), (300, 24))),
]


@gpu
@pytest.mark.parametrize(("op", "changes", "dtypes"), OTHER_SHAPES, ids=str)
def test_an_op_equals_the_reference_in_other_shapes(op, changes, dtypes):
    for dtype in dtypes:
        check(make(op, replace(SIZES["odd"], **changes)), dtype)


@gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("op", ["swiglu_forward", "swiglu_backward", "activation_forward", "activation_backward"])
def test_every_activation_equals_the_reference(op, activation):
    case = make(op, SIZES["odd"])
    case.numbers["activation"] = activation
    for dtype in DTYPES_HERE:
        check(case, dtype)


@gpu
def test_activations_are_right_far_from_zero():
    """Relative to the value, but where f32 has no normal number for a factor of it; units of 2^-24."""
    x = np.linspace(-14, 14, 4097).astype(np.float32)[None]
    size = np.abs(x.astype(np.float64))
    units = {"silu": size + 8, "gelu": 1.5 * size**2 + 16, "gelu_tanh": 7 * (size + 0.045 * size**3) + 8, "relu2": 1}
    for activation in ACTIVATIONS:
        case = Case("activation_forward", {"act": x.shape}, {"x": x}, {"activation": activation})
        got = run_gpu(case, outputs_of(case, "fp32"), inputs_of(case, "fp32"))["act"]
        exact = f64_values(case, inputs_of(case, "fp32"))["act"]
        assert np.all(np.abs(got - exact) <= units[activation] * 2.0**-24 * np.abs(exact) + 2.0**-126 * size), (
            activation
        )


def test_an_activation_without_a_kernel_is_refused():
    case = make("activation_forward", SIZES["odd"])
    case.numbers["activation"] = "mish"
    with pytest.raises(UsageError, match="mish has no kernel for the GPU, which has silu, gelu, gelu_tanh, relu2"):
        cuda.OPS[case.op](case.output("act", "fp32"), case.input("x", "fp32"), **case.numbers)


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("op", ["embedding_backward", "bias_backward", "loss_sum", "sum_squares"])
def test_gradients_and_sums_accumulate(op, dtype):
    check(make(op, SIZES["large"]), dtype, accumulate=True)


@gpu
@pytest.mark.parametrize(
    ("op", "names"),
    [("rmsnorm_backward", 1), ("qk_norm_backward", 2), ("layernorm_backward", 2), ("wide_qk_norm_backward", 2)],
)
def test_the_gradient_of_a_norm_weight_accumulates_in_fp32(op, names):
    """And of its bias. The first output is written, the weights' gradients, of another dtype, are added to."""
    case = make(op, SIZES["large"])
    inputs, outputs = inputs_of(case, "bf16"), outputs_of(case, "bf16")
    for name in list(outputs)[1:]:
        outputs[name] = output(case.outputs[name], "fp32", start=np.ones(case.outputs[name]))
    assert len(outputs) == 1 + names
    got, exact = run_gpu(case, outputs, inputs), f64_values(case, inputs)
    for name in list(outputs)[1:]:
        size = f64_values(case, inputs, SUMS[name])[name] + 1
        assert np.all(np.abs(got[name] - exact[name] - 1) <= 591 * 2.0**-24 * size)


@gpu
@pytest.mark.parametrize(
    "op",
    [f"{name}_backward" for name in ("embedding", "rmsnorm", "layernorm", "qk_norm", "wide_qk_norm")] + ["sum_squares"],
)
def test_the_same_call_gives_the_same_bits(op):
    case = make(op, SIZES["large"])
    runs = [run_gpu(case, outputs_of(case, "bf16"), inputs_of(case, "bf16")) for _ in range(3)]
    assert all(same_bytes(a, b) for other in runs[1:] for a, b in zip(runs[0].values(), other.values(), strict=True))


TILED = [(1,), (7,), (896,), (20_001,), (3, 4), (129, 3), (257, 5), (300, 896), (3, 130, 16), (1000, 136)]


def partials_of(grad: np.ndarray, dtype: str) -> np.ndarray:
    """The partial sums of squares of a gradient, from the GPU."""
    written = output((num_norm_tiles(grad.shape),), "fp32")
    return run_gpu(Case("sum_squares", {}, {}), {"partials": written}, {"grad": tensor(grad, dtype)})["partials"]


@gpu
@pytest.mark.parametrize("shape", TILED, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_number_is_in_the_sum_of_squares_of_its_tile(shape, dtype):
    """Integers, whose sums are exact in every order: vectors, short tiles, widths that no access divides, pieces."""
    grad = np.random.default_rng(0).integers(-2, 3, shape).astype(np.float32)
    rows = grad.reshape(-1, shape[-1])
    expected = [np.sum(rows[first : first + 128] ** 2) for first in range(0, len(rows), 128)]
    assert np.array_equal(partials_of(grad, dtype), expected)


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(1000, 136), (1100, 260), (129, 3), (3, 130, 16), (200, 896)], ids=str)
def test_shards_of_whole_tiles_have_the_sums_of_squares_of_the_whole(shape, dtype):
    """Bit for bit, for any number of ranks: also where the last tile is short, and where it has another alignment."""
    rng = np.random.default_rng(0)
    grad = (rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 6, shape)).astype(np.float32)
    rows, whole = grad.reshape(-1, shape[-1]), partials_of(grad, dtype)
    for ranks in (1, 2, 3, 4, 8):
        each = 128 * -(-len(whole) // ranks)
        shards = [partials_of(rows[first : first + each], dtype) for first in range(0, len(rows), each)]
        assert same_bytes(np.concatenate(shards), whole)


@gpu
@pytest.mark.parametrize("broken", [np.inf, np.nan])
def test_a_gradient_that_is_not_finite_reaches_its_tile_alone(broken):
    grad = np.ones((300, 136), np.float32)
    grad[299, 135] = broken
    finite = np.isfinite(partials_of(grad, "bf16"))
    assert finite.tolist() == [True, True, False]


@gpu
@pytest.mark.parametrize("count", [1, 31, 1024, 1025, 100_003])
def test_the_norm_of_many_tiles_has_one_rounding(count):
    """The reference's bits: both add up in f64, whose order shows in no f32 of these."""
    case = make("grad_scale", SIZES["odd"])
    case.inputs["partials"] = np.random.default_rng(count).uniform(0, 1e-3, count)
    inputs, expected = inputs_of(case, "fp32"), outputs_of(case, "fp32")
    OPS["grad_scale"](*expected.values(), *inputs.values(), **case.numbers)
    got = run_gpu(case, outputs_of(case, "fp32"), inputs)
    assert all(same_bytes(got[name], o.tensors[0].array) for name, o in expected.items())


@gpu
@pytest.mark.parametrize(("count", "vocab"), [(30_000, 3), (180_000, 1000), (3_000, 2**18 + 1), (3_000, 2**19 + 3)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_embedding_backward_of_frequent_tokens_and_of_many(count, vocab, accumulate):
    """A token in hundreds of pieces, of more positions than a block lists in shared memory; more positions than its
    votes; vocabularies for which there are 256 and 512 blocks."""
    case = make("embedding_backward", replace(SIZES["odd"], b=1, t=count, c=8, v=vocab, vp=vocab))
    case.inputs["tokens"][0, -1] = vocab - 1  # type: ignore[index]
    check(case, "bf16", accumulate=accumulate)


@pytest.mark.parametrize(
    "count", [pytest.param(5_000, marks=gpu), pytest.param(embedding.MOST_TOKENS, marks=pytest.mark.gpu)]
)
def test_embedding_backward_of_as_many_tokens_as_there_may_be(count):
    """Nearly all the same, so that ranks are the largest; ones, whose sums up to 2^24 are exact. 18 bits of a token."""
    case = make("embedding_backward", replace(SIZES["odd"], b=1, t=1, c=8, v=2**18, vp=2**18))
    d_res, tokens = np.ones((1, count, 8), np.float32), np.zeros((1, count), np.int32)
    tokens[0, ::1000] = 2**18 - 1
    written = {"d_weight": output(case.outputs["d_weight"], "fp32")}
    got = run_gpu(case, written, {"d_res": tensor(d_res, "bf16"), "tokens": tensor(tokens)})["d_weight"]
    expected = np.zeros_like(got)
    expected[0], expected[-1] = count - len(tokens[0, ::1000]), len(tokens[0, ::1000])
    assert np.array_equal(got, expected)


@gpu
def test_two_long_lists_of_embedding_backward_lie_side_by_side(monkeypatch):
    """Blocks that list more positions than the shared memory of a small card holds."""
    small = launch.shared_bytes_limit(86)
    monkeypatch.setattr(launch, "shared_bytes_limit", lambda card=None: small)
    count, c = 5_000, 8
    case = make("embedding_backward", replace(SIZES["odd"], b=1, t=count, c=c, v=2, vp=2))
    case.inputs["tokens"] = np.arange(count, dtype=np.int32)[None] % 2  # 2500 of each, and 2048 fit
    check(case, "bf16")


@gpu
@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 1000, 32768, 262145, 1 << 20])
def test_the_loss_is_summed_in_the_tree_of_the_reference(count):
    rng = np.random.default_rng(count)
    sums = dict.fromkeys(("loss_total", "num_tokens", "num_hits"), (1,))
    case = Case("loss_sum", sums, {}, stat=frozenset({"loss_total"}))
    targets = rng.integers(-1, 3, count).astype(np.int32)
    targets[targets < 0] = -100
    case.inputs = {"loss": rng.uniform(0, 20, count).astype(np.float32), "targets": targets, "hits": targets % 2}
    case.stat |= {"loss"}
    check(case, "fp32")


IN_PLACE = ["cross_entropy", "dropout", "embedding_noise", "rope_forward", "rope_backward", "rmsnorm_backward"]
IN_PLACE += ["layernorm_backward", "post_norm_forward", "wide_qk_norm_backward"]
IN_PLACE += ["scale", "softcap_forward", "softcap_backward"]


@gpu
@pytest.mark.parametrize("op", IN_PLACE)
def test_an_output_may_take_the_memory_of_its_input(op):
    case = make(op, SIZES["large"])
    inputs, outputs = inputs_of(case, "bf16"), outputs_of(case, "bf16")
    plain = run_gpu(case, outputs, inputs)
    for name, source in seam.record(op).shares.items():
        got = run_gpu(case, {**outputs, name: replace(outputs[name], tensors=(inputs[source],))}, inputs)
        assert all(same_bytes(got[n], plain[n]) for n in got)


UNWANTED = [("cross_entropy", "d_logits"), ("rmsnorm_backward", "d_out"), ("rmsnorm_backward", "d_weight")]
UNWANTED += [("post_norm_forward", "out"), *(("layernorm_backward", name) for name in ("d_out", "d_weight", "d_bias"))]
UNWANTED += [("wide_qk_norm_forward", "out"), *(("wide_qk_norm_backward", name) for name in ("d_qkv", "d_q_weight"))]


@gpu
@pytest.mark.parametrize(("op", "unwanted"), UNWANTED)
def test_an_unwanted_output_changes_no_other(op, unwanted):
    case = make(op, SIZES["large"])
    inputs, outputs = inputs_of(case, "bf16"), outputs_of(case, "bf16")
    plain = run_gpu(case, outputs, inputs)
    got = run_gpu(case, {**outputs, unwanted: replace(outputs[unwanted], tensors=())}, inputs)
    assert got and all(same_bytes(got[name], plain[name]) for name in got)


@gpu
@pytest.mark.parametrize(
    ("op", "name"), [("rmsnorm_backward", "d_res"), ("layernorm_backward", "d_res"), ("layernorm_forward", "bias")]
)
def test_norms_without_a_residual_or_a_bias(op, name):
    case = make(op, SIZES["odd"])
    case.inputs[name] = None
    check(case, "bf16")


@gpu
def test_multiples_without_a_residual_or_a_cap():
    for op, absent, numbers in (
        ("scale", "residual", {}),
        ("softcap_forward", None, {"cap": np.inf}),
        ("softcap_backward", "y", {"cap": np.inf}),
    ):
        case = make(op, SIZES["odd"])
        case.inputs |= {absent: None} if absent else {}
        case.numbers |= numbers
        check(case, "bf16")


@gpu
def test_scores_of_a_cache_may_have_a_soft_cap():
    case = make("attention_cached", SIZES["large"])
    case.numbers["softcap"] = 0.7
    for dtype in DTYPES_HERE:
        check(case, dtype)


OF_NORMS = ("rmsnorm_forward", "rmsnorm_backward", "post_norm_forward", "qk_norm_forward", "qk_norm_backward")


@gpu
@pytest.mark.parametrize("op", OF_NORMS)
def test_the_weight_of_a_norm_may_be_added_to_one(op):
    case = make(op, SIZES["odd"])
    case.numbers = {**case.numbers, "offset": 1.0}
    for dtype in DTYPES_HERE:
        check(case, dtype)


@pytest.mark.parametrize("op", [*OF_NORMS, "token_linear"])
def test_another_offset_of_a_weight_is_refused(op):
    case = make(op, SIZES["odd"])
    call = arguments_of(op, *outputs_of(case, "bf16").values(), *inputs_of(case, "bf16").values(), **case.numbers)
    assert cuda.KERNELS[op].needed(call) >= 0
    with pytest.raises(UsageError, match=r"adds 0 or 1 to the weight of a norm, and offset is 0\.5: use --device cpu"):
        cuda.KERNELS[op].needed(replace(call, numbers={**call.numbers, "offset": 0.5}))


@gpu
@pytest.mark.parametrize("dtypes", ["bf16 bf16 bf16 bf16 bf16", "fp32 bf16 fp32 fp32 bf16", "fp32 fp32 bf16 bf16 fp32"])
@pytest.mark.parametrize("apply", [0.0, 1.0])
def test_adamw_equals_the_reference_bit_for_bit(dtypes, apply):
    """All mixes of dtypes, a 64-bit seed, in place; apply 0 leaves everything alone."""
    case = make("adamw", SIZES["large"])
    case.numbers |= {"seed": 0x123456789ABCDEF, "stream": 0x89ABCDEF}
    master, m, v, grad, weight = dtypes.split()
    kinds = {"master": master, "m": m, "v": v, "grad": grad}
    inputs = inputs_of(case, "fp32") | {name: tensor(case.inputs[name], kind) for name, kind in kinds.items()}
    inputs["apply"] = tensor(np.array([apply]), "fp32")
    states = {f"new_{n}": Output(n, inputs[n].shape, kinds[n], (inputs[n],)) for n in ("master", "m", "v")}
    outputs = {**states, "weight": output(case.outputs["weight"], weight)}
    got = run_gpu(case, outputs, inputs)
    OPS["adamw"](*outputs.values(), *inputs.values(), **case.numbers)
    assert all(same_bytes(got[name], o.tensors[0].array) for name, o in outputs.items())


@pytest.mark.gpu(emulated="bf16-44")
@pytest.mark.parametrize("columns", [44, 896])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_adamw_of_a_share_has_the_bits_of_the_whole(dtype, columns):
    """Random bits go by the element of the whole row."""
    case = make("adamw", replace(SIZES["odd"], vp=300, c=columns))
    whole = run_gpu(case, outputs_of(case, dtype), inputs_of(case, dtype))
    for start, stop in ((0, 128), (128, 300)):
        part = make("adamw", replace(SIZES["odd"], vp=stop - start, c=columns))
        part.inputs = {n: x[start:stop] if x is not None and len(x) == 300 else x for n, x in case.inputs.items()}
        part.numbers = {**case.numbers, "first": start * columns}
        got = run_gpu(part, outputs_of(part, dtype), inputs_of(part, dtype))
        assert all(same_bytes(np.ascontiguousarray(whole[name][start:stop]), value) for name, value in got.items())


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_adamw_of_extreme_numbers(dtype):
    """Zeros, subnormal, tiny and huge moments and gradients, beside usual ones: no quotient or root is off by a bit."""
    case, rng = make("adamw", SIZES["odd"]), np.random.default_rng(0)
    for name, largest in (("m", 25), ("v", 30), ("grad", 15)):
        size = 10.0 ** rng.uniform(-44, largest, case.outputs["weight"])
        size[rng.random(size.shape) < 0.3] = 0
        size[rng.random(size.shape) < 0.3] = 1e-6
        case.inputs[name] = size if name == "v" else size * rng.choice([-1, 1], size.shape)
    check(case, dtype)


ROW_OPS = [(op, name) for op in OPS for name in sorted(seam.record(op).rows) if "low_rank" not in op]  # in bf16 alone
FORM_OPS = [(op, name) for op in OPS for name in sorted(seam.record(op).forms)]


@pytest.mark.gpu(emulated="bf16-304-e4m3")
@pytest.mark.parametrize("quantized", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("dtype", "rows"), [("bf16", 37), ("bf16", 304), ("fp32", 64)])
@pytest.mark.parametrize(("op", "name"), FORM_OPS)
def test_every_form_is_a_function_of_the_rounded_value(op, name, dtype, rows, quantized):
    sizes, scale = (
        replace(SIZES["odd"], b=1, t=rows, c=896, hq=6, f=328),
        {"e4m3": 2.0**-9, "e5m2": 2.0**-14}[quantized],
    )
    check_forms(op, name, dtype, sizes, all_forms(op, dtype, quantized), 1.3 * scale)


@pytest.mark.gpu(emulated="304")
@pytest.mark.parametrize("rows", [304, 300])
@pytest.mark.parametrize("op", ["adamw", "cast", "rmsnorm_forward", "rmsnorm_backward"])
def test_pieces_of_rows_are_written_into_the_copies_of_the_whole(op, rows):
    """As when states are fetched from the host piece by piece, or where an MLP goes back a tile of tokens at a time:
    rows of the row-major copy, columns of the other."""
    case, device, is_norm = make(op, replace(SIZES["odd"], b=1, t=rows, vp=rows, c=88)), Device(), "norm" in op
    copies = (None, *(Form("e4m3", layout, "delayed") for layout in ("row", "col")))
    name = "weight" if op == "adamw" else next(iter(case.outputs))
    beside = {"dtype": "fp32", "forms": ()} if is_norm else {"dtype": "bf16"}
    whole, pieces = ({key: output(shape, **beside) for key, shape in case.outputs.items()} for _ in range(2))
    for outputs in (whole, pieces):
        outputs[name] = output(case.outputs[name], "bf16", copies, scale=0.02 if is_norm else 0.25, amax=0.0)
    inputs = inputs_of(case, "bf16")
    device.call(op, whole, inputs, **case.numbers)
    step = 128 if not is_norm else rows // 4 if rows % 16 else 64
    for start in range(0, rows, step):
        count = min(step, rows - start)

        def part(x, start=start, count=count):
            if x is None or len(x.shape) == 1:  # cells, and the weight of a norm
                return x
            if x.shape == (1, rows):  # statistics
                return replace(x, array=x.array[:, start : start + count], shape=(1, count))
            return x.chunk(start, count)

        cut = [part(o) if o.wanted else o for o in map(device.output, pieces.values())]
        first = {"first": start * 88} if op == "adamw" else {}
        cuda.OPS[op](*cut, *(part(device.tensor(x)) for x in inputs.values()), **case.numbers, **first)
    for key, o in whole.items():
        for target, other in zip(o.tensors, pieces[key].tensors, strict=True):
            assert same_bytes(device.host(other.array), device.host(target.array)), f"{key} in {target.form}"
        assert all(device.host(cell) == device.host(o.amax[dtype]) for dtype, cell in pieces[key].amax.items())


@gpu
@pytest.mark.parametrize("rows", [131, 304])
@pytest.mark.parametrize(
    ("op", "hd", "dtypes"),
    [
        # as many channels as models have: a block's columns are a run of the output's
        *((op, hd, ("bf16",)) for op in ("rope_backward", "qk_norm_backward") for hd in (64, 128)),
        # read by twos: no multiple of 4 is a head of qk_norm, or half a head of rope
        *((op, hd, DTYPES_HERE) for op, hd in (("rope_backward", 12), ("rope_backward", 20), ("rope_backward", 100))),
        ("qk_norm_backward", 18, DTYPES_HERE),
    ],
)
def test_every_form_of_heads(op, hd, dtypes, rows):
    for dtype in dtypes:
        sizes = replace(SIZES["odd"], b=1, t=rows, hq=5, hkv=2, hd=hd)
        check_forms(op, "d_qkv", dtype, sizes, all_forms(op, dtype, "e4m3"))


def all_forms(op: str, dtype: str, quantized: str) -> list[Form]:
    """Every copy that an op may write beside its value."""
    copies = [Form(quantized, "row", "delayed"), Form(quantized, "col", "delayed")]
    return [*copies, *([COLSUM] if seam.record(op).sums else []), *([Form("bf16")] if dtype == "fp32" else [])]


def check_forms(op: str, name: str, dtype: str, sizes: Sizes, copies: list[Form], scale: float = 1.3 * 2.0**-9) -> None:
    """Bytes of the row, transposed and bf16 copies and the amax equal those made from the value on the host; a column
    sum of 256 rows is within 256 roundings of the sum of magnitudes. Large values saturate."""
    case = make(op, sizes)
    inputs, outputs = inputs_of(case, dtype), outputs_of(case, dtype)
    outputs[name] = output(case.outputs[name], dtype, (None, *copies), scale=scale, amax=0.25)
    device = Device()
    device.call(op, outputs, inputs, **case.numbers)
    value = device.host(outputs[name].tensors[0].array)
    assert np.isfinite(value.astype(np.float32)).all()
    rounded = value.astype(np.float32)
    cell = device.host(outputs[name].amax["e4m3"])
    assert cell[0] == max(np.float32(0.25), np.abs(rounded).max())
    for target in outputs[name].tensors[1:]:
        assert target.form is not None
        got, expected = device.host(target.array), to_form(rounded, target.form, target.scale)
        if target.form.layout == "colsum":
            size = to_form(np.abs(rounded), target.form, None)
            assert np.all(np.abs(got - expected) <= 256 * 2.0**-24 * size)
        else:
            assert same_bytes(got, np.ascontiguousarray(expected)), target.form.key
    for only in outputs[name].tensors[1:]:  # each form alone, without the value
        alone = Device()
        single = {**outputs, name: replace(outputs[name], tensors=(only,), amax={})}
        alone.call(op, single, inputs, **case.numbers)
        assert same_bytes(alone.host(only.array), device.host(only.array))


@pytest.mark.gpu(emulated="bf16-sizes1-e4m3")
@pytest.mark.parametrize("quantized", ["e4m3", "e5m2"])
@pytest.mark.parametrize("sizes", [(203, 256), (5000, 5120), (151936, 151936)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("op", "name"), ROW_OPS)
def test_rows_are_a_function_of_the_rounded_value(op, name, dtype, sizes, quantized):
    """As every form above: with the value beside them, and alone."""
    rows = [Form(quantized, "row", "delayed")]
    check_forms(op, name, dtype, replace(SIZES["odd"], b=1, t=13, v=sizes[0], vp=sizes[1]), rows, 1.3 * 2.0**-12)


@pytest.mark.gpu(emulated="(208, 144)")
@pytest.mark.parametrize("shape", [(208, 144), (128, 128), (3, 37, 88), (1, 16), (130, 1), (5000, 896)], ids=str)
def test_rows_in_fp8_become_columns_byte_by_byte(shape):
    """Whole tiles, ragged ones, and widths that no 16 divides."""
    rows = tensor(np.random.default_rng(0).standard_normal(shape), "bf16", Form("e4m3", "row", "delayed"), 0.01)
    outputs = {"out": output(shape, "bf16", (Form("e4m3", "col", "delayed"),), scale=0.01)}
    device = Device()
    device.call("cast", outputs, {"x": rows})
    got = device.host(outputs["out"].tensors[0].array)
    assert same_bytes(got, np.ascontiguousarray(rows.array.reshape(-1, shape[-1]).T))


@gpu
@pytest.mark.parametrize("value", [0.0, np.inf, np.nan, 1e-38])
def test_a_scale_needs_a_finite_amax_and_waits_for_a_finite_step(value):
    case = make("amax_scale", SIZES["odd"])
    case.inputs["x"] = case.inputs["x"] * (value >= 1 or np.isnan(value))
    case.inputs["x"][1, 3, 5] = value
    check(case, "fp32")
    for apply in (0.0, 1.0):
        case = make("scale_update", SIZES["odd"])
        case.inputs["apply"] = np.array([apply])
        case.inputs["amax"][:4] = [value, np.inf, np.nan, 1]
        case.inputs["history"][:, 0] = 0
        check(case, "fp32")


@gpu
@pytest.mark.parametrize("broken", [np.inf, np.nan])
@pytest.mark.parametrize("name", ["partials", "loss_total"])
def test_a_step_that_is_not_finite_is_not_applied(name, broken):
    case = make("grad_scale", SIZES["odd"])
    case.inputs[name][0] = broken
    assert run_gpu(case, outputs_of(case, "fp32"), inputs_of(case, "fp32"))["apply"][0] == 0


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_logit_that_is_nan_is_lost(dtype):
    """Not even where nothing but NaN is in what a thread reads at once, or in all that it reads."""
    case = make("cross_entropy", SIZES["odd"])
    logits, targets = case.inputs["logits"], case.inputs["targets"]
    logits[1, :8], logits[2, 3], logits[3, :] = np.nan, np.nan, np.nan
    got = run_gpu(case, outputs_of(case, dtype), inputs_of(case, dtype))
    lost = np.isin(np.arange(len(targets)), (1, 2, 3)) & (targets != -100)
    assert lost.any() and np.array_equal(np.isnan(got["loss"]), lost) and not got["hits"][lost].any()


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("v", "vp"), [(203, 256), (32000, 32000), (100003, 100096), (400000, 400000)])
def test_of_equal_logits_the_first_is_the_one_that_is_right(v, vp, dtype):
    """Rows of one block, of clusters, and rows that are read twice, with targets at each of many maxima, beside one and
    far behind all; negative zero is zero."""
    case, rng = make("cross_entropy", replace(SIZES["odd"], b=1, t=24, v=v, vp=vp)), np.random.default_rng(v)
    logits, targets = rng.integers(-3, 1, (24, vp)).astype(np.float64), case.inputs["targets"]
    first = rng.integers(0, v, 24)
    for row, at in enumerate(first):  # no maximum before it, and one in three or so behind it
        logits[row, :at] = np.minimum(logits[row, :at], -1)
        logits[row, at] = -0.0
        targets[row] = (at, rng.integers(0, v), np.flatnonzero(logits[row, :v] == 0)[-1], (at + 1) % v, -100)[row % 5]
    logits[:, v:] = 9
    case.inputs["logits"] = logits
    got = run_gpu(case, outputs_of(case, dtype), inputs_of(case, dtype))["hits"]
    assert np.array_equal(got, (targets == first).astype(np.int32)) and 4 < got.sum() < 20
    check(case, dtype)


KERNELS = {**cuda.KERNELS, **linear_kernels(None), **attention_kernels(None)}


@pytest.mark.parametrize("op", KERNELS)
def test_a_launcher_takes_what_the_reference_takes(op):
    """And scratch, if it needs any. Operands that only go on to the kernel need no names."""
    kernel, (outputs, inputs, numbers) = KERNELS[op], seam.parse(OPS[op])
    signature, reference = inspect.signature(kernel.launch), inspect.signature(OPS[op]).parameters
    scratch = {"scratch": "scratch"} if kernel.scratch_bytes is not None else {}
    bound = signature.bind(*outputs, *inputs, **{name: name for name in numbers}, **scratch)
    assert ("scratch" in signature.parameters) == bool(scratch)
    for name, given in bound.arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            assert given == name or outputs == (given,)
        if parameter.kind == parameter.KEYWORD_ONLY and name != "scratch":
            assert parameter.default == reference[name].default


@gpu
def test_scratch_that_is_too_small_is_not_used():
    case = make("rmsnorm_backward", SIZES["odd"])
    device, outputs, inputs = Device(), outputs_of(case, "bf16"), inputs_of(case, "bf16")
    device.call(case.op, outputs, inputs)
    handles = [*map(device.output, outputs.values()), *map(device.tensor, inputs.values())]
    for given, size in ((None, 0), (device.scratch[:-4], device.scratch.nbytes - 4)):
        with pytest.raises(AssertionError, match=f"{device.scratch.nbytes} bytes of scratch .* {size} were given"):
            cuda.OPS[case.op](*handles, scratch=given)


@gpu
def test_importance_of_rows_and_of_vectors_is_that_of_the_reference():
    for shape in ((70, 300), (37,)):
        inputs = {n: tensor(np.random.default_rng(i).uniform(0, 1, shape), "fp32") for i, n in enumerate("su")}
        read = dict(zip(("sensitivity", "uncertainty"), inputs.values(), strict=True))
        case = Case("importance_sums", {"sums": shape[:1]}, {}, {"of_columns": False})
        got, exact = run_gpu(case, {"sums": output(shape[:1], "fp32")}, read), f64_values(case, read)
        np.testing.assert_allclose(got["sums"], exact["sums"], rtol=CHAIN * 2.0**-24)


@gpu
def test_a_step_that_is_refused_leaves_importance_as_it_was():
    case = make("importance", SIZES["odd"])
    case.inputs["apply"] = np.zeros(1)
    case.inputs["grad"] = case.inputs["grad"] * np.nan
    outputs = outputs_of(case, "fp32")
    before = {name: o.tensors[0].array.copy() for name, o in outputs.items()}
    got = run_gpu(case, outputs, inputs_of(case, "fp32"))
    assert all(same_bytes(got[name], value) for name, value in before.items())
