"""Numbers of 4 and 8 bits: golden bytes of bitsandbytes, the specification's rounding, and how far values move."""

import hashlib

import ml_dtypes
import numpy as np
import pytest
from ops.build import tensor

from llmq.few_bits import DYNAMIC, E2M1, LEVELS, NF4, e2m1_codes, mean_of, nested, nf4_codes, packed, unpacked
from llmq.model.held import held_copy, held_value
from llmq.operands import Tensor
from llmq.scaling import HELD, Nested
from llmq.tensor import Form, Ref

# quantize_4bit(w, blocksize=64, compress_statistics=True, quant_type="nf4") of bitsandbytes 0.50.2 on the CPU
CODES = "7e920fa1f0357dd0b7782f9f4079ada772feb191726a777634e48b11e0c14409"
NESTED = "0c1c2d3dbcceddecfb0c1b2b3aa5c9d9e9fa0c1c2c3cbacfdfefff0c1c2c3baf"
ABSMAX = Form("nf4", "row", "absmax")
SCALE, OFFSET = "4e648b3d", "f614923d"


def golden():
    """(32, 64): rows of many magnitudes, whose bits no library of random numbers decides."""
    at = np.arange(2048)
    units = ((at * 7919 + 13) % 4093 - 2046) / 2046
    return (units**3 * (1 + at // 64 % 9) / 64).astype(np.float32).reshape(32, 64)


def test_nf4_has_the_bytes_of_bitsandbytes():
    blocks = tensor(golden(), None, ABSMAX)
    codes, absmax = blocks.array, blocks.scale
    offset = np.frombuffer(bytes.fromhex(OFFSET), np.float32)[0]
    found, scales, _ = nested(absmax, offset)
    assert nested(absmax)[2] == pytest.approx(offset, rel=1e-6), "PyTorch sums in another order"
    assert hashlib.sha256(codes.tobytes()).hexdigest() == CODES
    assert found.tobytes().hex() == NESTED
    assert scales.tobytes().hex() == SCALE


def test_the_nearest_level_is_taken():
    x = np.linspace(-1, 1, 40001, dtype=np.float32)
    nearest = np.abs(x[:, None] - NF4).argmin(axis=1)
    assert np.array_equal(nf4_codes(x), nearest)
    middles = (NF4[:-1] + NF4[1:]) / np.float32(2)
    assert np.array_equal(nf4_codes(middles), np.arange(15)), "halfway it is the lower"


def test_e2m1_rounds_to_nearest_even():
    middles = (E2M1[:-1] + E2M1[1:]) / np.float32(2)
    x = np.concatenate([np.linspace(-6, 6, 40001, dtype=np.float32), middles, -middles, np.float32([0.0, -0.0])])
    assert np.array_equal(e2m1_codes(x), x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8))
    every = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert LEVELS["mxfp4"].tobytes() == every.tobytes()


@pytest.mark.parametrize("dtype", LEVELS)
def test_two_codes_are_a_byte(dtype):
    codes = np.random.default_rng(0).integers(0, 16, (3, 5, 8), np.uint8)
    stored = packed(codes, dtype)
    assert stored.shape == (3, 5, 4) and np.array_equal(unpacked(stored, dtype), LEVELS[dtype][codes])
    assert packed(np.array([1, 2], np.uint8), dtype).tolist() == [0x12 if dtype == "nf4" else 0x21]


def test_dynamic_numbers_are_sorted_and_end_at_one():
    assert len(set(DYNAMIC.tolist())) == 256 and np.all(np.diff(DYNAMIC) > 0)
    assert DYNAMIC[-1] == 1 and 0 in DYNAMIC and DYNAMIC[0] == -DYNAMIC[-2]


def test_exponents_are_those_of_the_specification():
    """2^(floor(log2 of the largest) - 2), as e8m0; 0 for a block of zeros, NaN where one is not finite."""
    x = np.zeros((6, 70), np.float32)
    x[0], x[1, 40], x[2, 3], x[3, :32], x[4, 0], x[5, 69] = 1.0, -6.5, 2.0**-130, 2.0**127, np.inf, 3.0
    scales = HELD["exponents"]
    made = scales.made(scales.amax(np.abs(x)), 6.0)
    floor = np.array(
        [[0, 0, 0], [-125, 2, -125], [-127, -125, -125], [127, -125, -125], [0, -125, -125], [-125, -125, 1]]
    )
    right = np.clip(floor - 2 + 127, 0, 254)
    right[4, 0] = 255
    assert np.array_equal(made, right)
    powers = scales.spread(made, x.shape)
    expected = np.repeat(made.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), 32, axis=1)[:, :70]
    np.testing.assert_array_equal(powers, expected)


@pytest.mark.parametrize(
    ("form", "most", "bits"),
    [
        # by half a step of a row's 127; of a sixth of 1 at most, half of 0.3, of the largest; of 2 in 6
        (Form("int8", "row", "rowwise"), 0.5 / 127, 8),
        (Form("nf4", "row", "nested256"), 0.17, 4),
        (Form("mxfp4", "row", "exponents"), 0.25, 4),
    ],
    ids=lambda one: one.dtype if isinstance(one, Form) else "",
)
def test_values_move_no_further_than_half_a_step(form, most, bits):
    """Of the largest of the numbers under their scale; and the bytes are as many as the bits say."""
    value = np.random.default_rng(0).standard_normal((130, 256)).astype(np.float32)
    numbers, scale = held_copy(Ref("w", "weight", value.shape, "fp32", form=form), value)
    found = held_value(Tensor("w", numbers, value.shape, form, scale), "fp32")
    block = {"int8": 256, "nf4": 64, "mxfp4": 32}[form.dtype]
    largest = np.abs(value.reshape(-1, block)).max(axis=1, keepdims=True)
    error = np.abs(found - value).reshape(-1, block) / largest
    assert 0 < error.max() <= most and numbers.nbytes * 8 == value.size * bits


@pytest.mark.parametrize("count", [1, 5, 1024, 1025, 70_001])
def test_a_mean_is_rounded_once(count):
    x = np.random.default_rng(count).random(count, np.float32) ** 8
    assert mean_of(x) == np.float32(np.sum(x.astype(np.longdouble)) / count)


def test_groups_of_scales_repeat_what_tensors_share():
    """A row that is fused of tensors with 300 and 20 scales has groups of four, which stand for the same."""
    absmax = np.random.default_rng(0).random(320).astype(np.float32) + 1
    stored = Nested(4).stored(absmax, [0, 300, 320])
    assert stored.shape == Nested(4).shape(320, 64) == (1024 + 8 * 80 + 320,)
    apart = [
        Nested(256).absmax(Nested(256).stored(part, [0, len(part)]), len(part)) for part in np.split(absmax, [300])
    ]
    assert Nested(4).absmax(stored, 320).tobytes() == np.concatenate(apart).tobytes()
    np.testing.assert_allclose(np.concatenate(apart), absmax, rtol=0.02)
