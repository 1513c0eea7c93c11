"""Sums of what ranks have sent, on the GPU: every byte equals the reference's, which adds in the same order."""

import numpy as np
import pytest

from llmq.operands import Output, Tensor
from llmq.ops.reference import OPS
from llmq.tensor import Form

from .build import output, tensor
from .cuda_build import Device
from .test_quantize import uneven

pytestmark = pytest.mark.gpu(emulated="300-896")
TILES = Form("e4m3", "row", "tilewise")


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("rows", "columns"), [(300, 896), (128, 16), (1, 4864), (896, 1168)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_compressed_pieces_are_added_by_the_scales_of_their_tiles(rows, columns, dtype, rank, accumulate):
    """Rows that fill up the last tiles are read by nothing: they are NaN."""
    places = -(-rows // 128) * 128
    values = np.full((2, places, columns), np.nan, np.float32)
    values[:, :rows] = uneven((2 * rows, columns)).reshape(2, rows, columns)
    written = output(values.shape, "fp32", (TILES,))
    pieces = Tensor("pieces", written.tensors[0].array, values.shape, TILES, written.tensors[0].scale)
    for place in range(2):
        part = pieces.chunk(place * places, rows)
        Output("piece", part.shape, "fp32", (part,)).write(values[place, :rows])
        pieces.array[place, rows:] = np.nan
    start = np.ones((rows, columns)) if accumulate else None
    expected, got = ({"out": output((rows, columns), dtype, start=start)} for _ in range(2))
    inputs = {"own": tensor(uneven((rows, columns)), dtype), "pieces": pieces}
    OPS["sum_pieces"](*expected.values(), *inputs.values(), rank=rank)
    device = Device()
    device.call("sum_pieces", got, inputs, rank=rank)
    right, found = expected["out"].tensors[0].array, device.host(got["out"].tensors[0].array)
    assert np.isfinite(right.astype(np.float32)).all()
    assert right.tobytes() == found.tobytes()
