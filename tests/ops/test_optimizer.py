"""Global norm and clip; AdamW against scalar arithmetic and torch, stochastic rounding, steps not applied."""

import math

import ml_dtypes
import numpy as np
import pytest

from llmq.operands import SLICE, Tensor
from llmq.ops.reference.random import MASTER, M, V, random_bits, stochastic_round_bf16
from llmq.tensor import Form, num_norm_tiles

from .build import output, run
from .cases import LARGE, ODD, make

NUMBERS = {"beta_1": 0.9, "beta_2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "seed": 5, "stream": 2}
CLIPS = {0.0: 1.0, 1.0: 1.0, 0.5: 1.0, 0.25: 0.5, 0.125: 0.25}  # of a norm of 0.5, and what it is multiplied with
BIG = (3, SLICE // 4, 7)  # several slices, the last one short


@pytest.mark.parametrize(
    "shape", [(1,), (5,), (300,), (3, 4), (128, 2), (129, 2), (3, 130, 5), BIG, (2, SLICE + 1)], ids=str
)
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_sums_of_squares_of_128_rows(shape, dtype):
    """Of the flattened leading axes. Integers up to 8: every sum is exact in f32 as long as it is below 2^24."""
    grad = np.random.default_rng(0).integers(-8, 9, shape).astype(np.float64)
    rows = grad.reshape(-1, shape[-1])
    expected = [np.sum(rows[first : first + 128] ** 2) for first in range(0, len(rows), 128)]
    assert num_norm_tiles(shape) == len(expected)
    written = output((len(expected),), "fp64" if dtype == "fp64" else "fp32")
    (partials,) = run("sum_squares", [written], grad, dtype=dtype)
    np.testing.assert_array_equal(partials, expected)


def partials_of(grad, dtype):
    """The partial sums of squares of a gradient."""
    return run("sum_squares", [output((num_norm_tiles(grad.shape),), "fp32")], grad, dtype=dtype)[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_shards_of_whole_tiles_give_the_norm_of_the_whole(ranks, dtype):
    """Bit for bit, whatever the order in which 12 decimal places of magnitudes would be added otherwise."""
    rng = np.random.default_rng(ranks)
    shapes = [(1000, 24), (77, 8), (300,), (3, 130, 16), (1025, SLICE // 512 + 1)]
    grads = [rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 6, shape) for shape in shapes]
    whole = np.concatenate([partials_of(grad, dtype) for grad in grads])
    sharded = []
    for grad in grads:
        rows, each = grad.reshape(-1, grad.shape[-1]), 128 * -(-num_norm_tiles(grad.shape) // ranks)
        sharded += [partials_of(rows[first : first + each], dtype) for first in range(0, len(rows), each)]
    assert np.concatenate(sharded).tobytes() == whole.tobytes()
    assert scaled(np.concatenate(sharded), dtype="fp32") == scaled(whole, dtype="fp32")


def test_the_norm_of_as_many_tiles_as_70b_has_is_right_to_one_rounding():
    """A sum in f32, one after the other, would be off by far more."""
    partials = np.random.default_rng(0).uniform(0, 1e-3, 100_000).astype(np.float32)
    norm = scaled(partials, tokens=1.0, grad_clip=0.0, dtype="fp32")[0]
    assert norm == np.float32(math.sqrt(math.fsum(partials.tolist())))


def scaled(partials, loss=1.0, tokens=4.0, grad_clip=1.0, dtype="fp64"):
    arrays = [np.array(a, np.float64) for a in (partials, [loss], [tokens])]
    return [float(a[0]) for a in run("grad_scale", [(1,)] * 3, *arrays, dtype=dtype, grad_clip=grad_clip)]


@pytest.mark.parametrize(
    ("squares", "tokens", "grad_clip", "expected"),
    [
        *(([9.0, 16.0], 10.0, clip, [0.5, factor / 10, 1.0]) for clip, factor in CLIPS.items()),
        ([0.0, 0.0], 2.0, 1.0, [0.0, 0.5, 1.0]),
        ([0.0], 0.0, 1.0, [0.0, 0.0, 1.0]),
    ],
)
def test_the_norm_of_the_mean_loss_is_clipped(squares, tokens, grad_clip, expected):
    """It is not squared; no trained token and no gradient are no errors."""
    assert scaled(squares, loss=tokens, tokens=tokens, grad_clip=grad_clip) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["partials", "loss", "both without tokens"])
def test_a_step_that_is_not_finite_is_not_applied(bad, where):
    partials = [1.0, 1.0 if where == "loss" else bad]
    loss = 1.0 if where == "partials" else bad
    assert scaled(partials, loss, tokens=0.0 if "without" in where else 4.0)[2] == 0.0


def step(state, grad, *, number, lr=1e-2, scale=1.0, apply=1.0, dtype="fp64", **changed):
    """One update of state = [master, m, v]; returns the new state."""
    cell_dtype = "fp64" if dtype == "fp64" else "fp32"
    cells = [Tensor("cell", np.array([a], cell_dtype.replace("fp", "float")), (1,)) for a in (scale, apply, lr)]
    number = np.array([number], np.int32)
    outputs = [grad.shape] * 4
    return run("adamw", outputs, *state, grad, *cells, number, dtype=dtype, **{**NUMBERS, **changed})


def test_adamw_is_its_formula():
    rng = np.random.default_rng(0)
    master, m, grad = rng.standard_normal((3, 4, 5))
    v = rng.uniform(0, 1, (4, 5))
    new_master, new_m, new_v, weight = step([master, m, v], grad, number=3, scale=0.5)
    for i in np.ndindex(4, 5):
        g = 0.5 * grad[i]
        first = 0.9 * m[i] + (1 - 0.9) * g
        second = 0.95 * v[i] + (1 - 0.95) * g * g
        update = (first / (1 - 0.9**3)) / (math.sqrt(second / (1 - 0.95**3)) + 1e-8)
        assert new_m[i] == pytest.approx(first, rel=1e-13)
        assert new_v[i] == pytest.approx(second, rel=1e-13)
        assert new_master[i] == pytest.approx(master[i] * (1 - 1e-2 * 0.1) - 1e-2 * update, rel=1e-12)
    np.testing.assert_array_equal(weight, new_master)


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_a_step_that_is_not_applied_touches_nothing(dtype):
    """Bit for bit, also where gradient and states hold NaN, and in every form of the weight."""
    case = make("adamw", ODD)
    case.inputs["apply"] = np.zeros(1)
    case.inputs["grad"] = np.full_like(case.inputs["grad"], np.nan)
    forms = [None, Form("e4m3", "row", "delayed"), Form("e5m2", "col", "delayed")]
    weight = case.output("weight", dtype, forms=forms, amax=0.5)
    before = [t.array.tobytes() for t in weight.tensors]
    written = case.call(dtype, weight=weight)
    assert [t.array.tobytes() for t in weight.tensors] == before
    assert weight.amax["e4m3"][0] == 0.5
    for name in ("new_master", "new_m", "new_v"):
        assert written[name].tensors[0].array.tobytes() == case.output(name, dtype).tensors[0].array.tobytes()


def test_bf16_states_are_rounded_with_the_bits_of_their_address():
    """The f32 result, rounded stochastically; each of m, v, master with its own purpose; the weight is the master."""
    rng = np.random.default_rng(0)
    state = [
        a.astype(ml_dtypes.bfloat16).astype(np.float32)
        for a in (*rng.standard_normal((2, *BIG)), rng.uniform(0, 1, BIG))
    ]
    grad = rng.standard_normal(BIG).astype(np.float32)
    exact = step(state, grad, number=6, dtype="fp32")
    outputs = [output(BIG, "bf16") for _ in range(3)] + [output(BIG, "fp32")]
    cells = [np.ones(1), np.ones(1), np.full(1, 1e-2), np.array([6], np.int32)]
    stored = run("adamw", outputs, *state, grad, *cells, dtype="fp32", **NUMBERS)
    for purpose, value, got in zip((MASTER, M, V), exact[:3], stored[:3], strict=True):
        bits = random_bits(5, 6, 2, purpose, value.size).reshape(BIG)
        np.testing.assert_array_equal(got, stochastic_round_bf16(value, bits))
    np.testing.assert_array_equal(stored[3], stored[0].astype(np.float32))


def test_an_update_smaller_than_half_a_bf16_step_arrives_on_average():
    """Master 1, n elements, each moved by 1e-4 < 2^-8: nearest rounding would lose it. A deviation is <= gap / 2."""
    n, lr = 1 << 16, 1e-4
    ones, zeros = np.ones((1, n)), np.zeros((1, n))
    new_master = step([ones, zeros, zeros], -ones, number=1, lr=lr, dtype="bf16", weight_decay=0.0)[0]
    moved = new_master.astype(np.float64).mean() - 1
    assert abs(moved - lr) <= 5 * 2**-7 / 2 / math.sqrt(n)
    assert moved > lr / 4


def test_the_compute_copy_is_the_stored_master_rounded_to_nearest():
    case = make("adamw", LARGE)
    forms = [None, Form("e4m3", "row", "delayed")]
    weight = output(case.outputs["weight"], "bf16", forms, scale=0.05)
    master = case.values("fp32", weight=weight)["new_master"]
    np.testing.assert_array_equal(weight.tensors[0].array, master.astype(ml_dtypes.bfloat16))


@pytest.mark.judge
@pytest.mark.parametrize(("dtype", "bound"), [("fp64", 1e-12), ("fp32", 1e-4)])
def test_torch_agrees_over_20_steps(dtype, bound):
    """Change of the parameters, norm-wise, with clipping on the norm of the mean gradient."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    start, tokens, clip = rng.standard_normal((64, 48)), 7.0, 0.9
    parameter = torch.nn.Parameter(torch.tensor(start))
    judge = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    state = [start, np.zeros_like(start), np.zeros_like(start)]
    for n in range(20):
        grad = rng.standard_normal(start.shape) * (n % 3) / 10  # sums over tokens; some above the clip, some zero
        (partial,) = run("sum_squares", [(1,)], grad, dtype=dtype)
        cells = [partial, np.ones(1), np.array([tokens])]
        norm, scale, apply = (float(a[0]) for a in run("grad_scale", [(1,)] * 3, *cells, dtype=dtype, grad_clip=clip))
        parameter.grad = torch.tensor(grad / tokens)
        expected = float(torch.nn.utils.get_total_norm([parameter.grad]))
        assert norm == pytest.approx(expected, rel=1e-6)
        parameter.grad *= min(1, clip / expected) if expected else 1  # clip_grad_norm_ has norm + 1e-6 here
        judge.step()
        state = step(state, grad, number=n + 1, lr=1e-3, scale=scale, apply=apply, dtype=dtype)[:3]
    change = parameter.detach().numpy() - start
    assert np.linalg.norm(state[0] - start - change) <= bound * np.linalg.norm(change)
