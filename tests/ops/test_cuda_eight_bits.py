"""AdamW with moments in 8 bits on the GPU: bit for bit the reference, in every mix of dtypes, width and form."""

from dataclasses import replace

import numpy as np
import pytest

from llmq.operands import Output, Tensor
from llmq.ops.reference import OPS
from llmq.optimizers.adamw import M, V
from llmq.stores.fetched_weights import MASTER_FORM
from llmq.tensor import DTYPES, Form, scale_shape

from .build import output, tensor
from .cases import Sizes, make
from .cuda_build import Device

SIZE = Sizes(b=1, t=8, c=896, hq=6, hkv=2, hd=16, f=40, v=203, vp=300)
COPIES = [None, Form("e4m3", "row", "delayed"), Form("e4m3", "col", "delayed")]


def held(value, space, dtype):
    """A state in `dtype`: plain, or codes that may be anything with scales from tiny to usual."""
    forms = {"m": M.form(dtype), "v": V.form(dtype), "master": MASTER_FORM if dtype == "none" else None}
    form = forms[space]
    if form is None:
        return tensor(value, dtype)
    rng = np.random.default_rng(value.shape)
    codes = rng.integers(0, 127, value.shape).astype(np.uint8)  # 127 of e4m3 is NaN
    if space != "v":
        codes |= rng.integers(0, 2, value.shape).astype(np.uint8) << 7
    scale = (10.0 ** rng.uniform(-9, -1, scale_shape(value.shape, form))).astype(np.float32)
    scale = form.scales.made(scale, 1.0)
    return Tensor(space, codes.view(DTYPES[form.dtype]), value.shape, form, scale)


def check(shape, m, v, *, master="fp32", weight=(None,), dtype="bf16", apply=1.0, zeros=0.0):
    """In place, on both backends."""
    case = make("adamw", replace(SIZE, vp=shape[0], c=shape[1]))
    case.numbers |= {"seed": 0x123456789ABCDEF, "stream": 0x89ABCDEF, "first": 128 * shape[1]}
    empty = np.random.default_rng(1).random(shape) < zeros
    case.inputs["grad"] = np.where(empty, 0, case.inputs["grad"])
    inputs = {name: case.input(name, "fp32") for name in case.inputs}
    inputs |= {"master": held(case.inputs["master"], "master", master), "grad": tensor(case.inputs["grad"], dtype)}
    inputs |= {name: held(case.inputs[name], name, kind) for name, kind in (("m", m), ("v", v))}
    inputs["apply"] = tensor(np.array([apply]), "fp32")
    inputs["step"] = tensor(np.array([3], np.int32))
    kinds = {"master": master, "m": m, "v": v}
    outputs = {
        f"new_{name}": Output(name, shape, "fp32" if inputs[name].form else kinds[name], (inputs[name],))
        for name in kinds
    }
    outputs["weight"] = output(shape, dtype, weight, scale=0.01, amax=0.0 if len(weight) > 1 else None)
    device = Device()
    before = inputs["m"].array.tobytes()
    device.call("adamw", outputs, inputs, **case.numbers)
    arrays = {name: [t.array for t in o.tensors] for name, o in outputs.items()}
    arrays |= {f"{name} scale": [inputs[name].scale] for name in kinds if inputs[name].form}
    got = {name: [device.host(array) for array in found] for name, found in arrays.items()}
    OPS["adamw"](*outputs.values(), *inputs.values(), **case.numbers)
    for name, found in arrays.items():
        for one, other in zip(got[name], found, strict=True):
            assert one.tobytes() == other.tobytes(), name
    assert (inputs["m"].array.tobytes() == before) == (apply == 0)


CASES = [
    # blocks that fill rows of lanes, and the last ones of rows that they do not divide
    *(
        (shape, kind, kind, {})
        for shape in ((1, 896), (37, 128), (300, 24), (300, 44), (129, 200), (2, 1152))
        for kind in ("e4m3", "int8")
    ),
    *(
        ((130, 256), m, v, {"master": master})
        for m, v in (("e4m3", "fp32"), ("bf16", "int8"), ("int8", "e4m3"), ("fp32", "e4m3"))
        for master in ("bf16", "fp32")
    ),
    # copies of the weight beside them
    *(
        (shape, "int8", "e4m3", {"master": master, "weight": COPIES})
        for shape in ((300, 128), (137, 304))
        for master in ("bf16", "fp32")
    ),
    # blocks without gradients, and steps that are not applied
    *(
        ((3, 256), m, v, change)
        for m, v in (("e4m3", "int8"), ("int8", "e4m3"))
        for change in ({"zeros": 1.0}, {"zeros": 0.9}, {"apply": 0.0})
    ),
    # weights without masters
    *(
        (shape, m, v, {"master": "none", "weight": (), "dtype": dtype})
        for shape in ((130, 256), (300, 44), (3, 896))
        for m, v in (("int8", "e4m3"), ("bf16", "bf16"), ("fp32", "fp32"))
        for dtype in ("bf16", "fp32")
    ),
]


@pytest.mark.gpu(emulated=True)
@pytest.mark.parametrize(("shape", "m", "v", "changes"), CASES, ids=str)
def test_adamw_with_states_in_8_bits_equals_the_reference(shape, m, v, changes):
    check(shape, m, v, **changes)
