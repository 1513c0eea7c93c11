"""NF4 and int8 against bitsandbytes' CPU build: codes, scales, nested bytes, and what they stand for."""

import numpy as np
import pytest

pytest.importorskip("bitsandbytes", reason="the judge is bitsandbytes")
pytest.importorskip("torch", reason="bitsandbytes is on torch")

import torch
from bitsandbytes import functional
from ops.build import tensor

from llmq.few_bits import DYNAMIC, nested
from llmq.model.held import held_copy, held_value
from llmq.operands import Tensor
from llmq.tensor import Form, Ref

pytestmark = pytest.mark.judge

SHAPES = [(1, 64), (5, 64), (48, 48), (96, 320), (257, 1024), (1024, 896)]
EVERY = pytest.mark.parametrize("shape", SHAPES, ids=str)


def weight(shape, seed=0):
    """Rows of all magnitudes, one of zeros, in bf16."""
    torch.manual_seed(seed)
    value = torch.randn(shape) * 0.02 * torch.rand(shape[0], 1)
    value[shape[0] // 2 :: 7] = 0
    return value.bfloat16()


def held(value, form, borders=()):
    array = value.float().numpy()
    numbers, scale = held_copy(Ref("w", "weight", array.shape, "bf16", form=form), array, borders)
    return Tensor("w", numbers, array.shape, form, scale)


@EVERY
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_nf4_is_that_of_bitsandbytes(shape, dtype):
    value = weight(shape)
    codes, state = functional.quantize_4bit(value, blocksize=64, compress_statistics=True, quant_type="nf4")
    _, plain = functional.quantize_4bit(value, blocksize=64, quant_type="nf4")
    blocks = tensor(value.float().numpy(), None, Form("nf4", "row", "absmax"))
    own, absmax = blocks.array, blocks.scale
    assert own.tobytes() == codes.numpy().tobytes() and absmax.tobytes() == plain.absmax.numpy().tobytes()
    assert state.state2.code.numpy().tobytes() == DYNAMIC.tobytes()
    offset = float(state.offset)
    found, scales, mean = nested(absmax, offset)
    assert found.tobytes() == state.absmax.numpy().tobytes()
    assert scales.tobytes() == state.state2.absmax.numpy().tobytes() and mean == np.float32(offset)
    assert nested(absmax)[2] == pytest.approx(offset, rel=1e-6), "which sums in another order"
    if shape[1] % 64:
        return  # where blocks go across rows, bitsandbytes' CPU build does not read back what it has written
    copy = held(value, Form("nf4", "row", "nested256"))
    state.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    right = functional.dequantize_4bit(codes, state).float().numpy()
    if nested(absmax)[2] == np.float32(offset):
        np.testing.assert_array_equal(held_value(copy, dtype).astype(np.float32), right)
    else:  # a scale may be the next of the 256
        np.testing.assert_allclose(held_value(copy, dtype).astype(np.float32), right, rtol=0.05)


def test_a_fused_row_has_the_bytes_of_each_tensor():
    """q, k and v, of which each has its mean and its groups of 256 scales."""
    parts = [weight((rows, 128), seed) * 2.0**seed for seed, rows in enumerate((96, 48, 48))]
    copy = held(torch.cat(parts), Form("nf4", "row", "nested32"), (96, 144, 192))
    for part, start in zip(parts, (0, 96, 144), strict=True):
        codes, state = functional.quantize_4bit(part, blocksize=64, compress_statistics=True, quant_type="nf4")
        right, found = functional.dequantize_4bit(codes, state).float().numpy(), held_value(copy, "bf16")
        assert copy.array[start : start + len(part)].tobytes() == codes.numpy().tobytes()
        np.testing.assert_allclose(found[start : start + len(part)].astype(np.float32), right, rtol=0.05)


@EVERY
def test_int8_rows_are_those_of_bitsandbytes(shape):
    """Scales are the largest of a row over 127; codes are one off where its fp16 comes to the other side of a half."""
    value = weight(shape)
    codes, largest, _ = functional.int8_vectorwise_quant(value.half())
    copy = held(value.half().bfloat16(), Form("int8", "row", "rowwise"))
    own = np.abs(value.half().bfloat16().float().numpy()).max(axis=1)
    np.testing.assert_array_equal(copy.scale, np.where(own > 0, own / np.float32(127), np.float32(1)))
    np.testing.assert_allclose(copy.scale[own > 0] * 127, largest.numpy()[own > 0], rtol=2**-8)
    apart = np.abs(copy.array.astype(int) - codes.numpy())
    assert apart.max() <= 1 and (apart > 0).mean() < 0.25
