"""Programs bound to memory: which bytes of a storage a call gets."""

from types import SimpleNamespace

import numpy as np
import pytest

from llmq.backends.host import HostMemory
from llmq.bind import bind
from llmq.ops.reference import OPS
from llmq.plan.program import Operand, Placement, Result, Step
from llmq.tensor import Form, Ref, stored_bytes

LOW, A, QKV = (Ref(n, "batch", shape, "fp32") for n, shape in (("low", (12, 4)), ("a", (8, 4)), ("qkv", (2, 6, 40))))


def run(op, out, *inputs, residual=None, places=None):
    """Binds and runs a program of one linear map; the memory afterwards."""
    given = [None if ref is None else Operand(ref.name, ref) for ref in inputs]
    step = Step(op, (Result(out, (Operand(out.name, out),)),), tuple(given), {}, "forward")
    program = SimpleNamespace(steps=(step,), places=places or {}, births={}, deaths={})
    plan = SimpleNamespace(scales=(), programs={"one": program}, persistent={})
    memory = HostMemory({ref.name: ref for ref in (LOW, A, QKV)}, 4096)
    rng = np.random.default_rng(0)
    for ref in (LOW, A, QKV):
        memory.write(ref.name, rng.standard_normal(ref.shape))
    return plan, memory


def test_a_branch_is_added_onto_columns_of_a_value():
    """As the adapter of one projection adds to the fused qkv: read and written in place."""
    piece = QKV.columns(16, 8)
    plan, memory = run("linear_forward", piece, LOW, A, None, piece)
    before = memory.read("qkv").reshape(12, 40)
    (call,) = bind(plan, "one", memory, OPS, poison=False)
    call()
    expected = before.copy()
    expected[:, 16:24] += memory.read("low") @ memory.read("a").T
    np.testing.assert_allclose(memory.read("qkv").reshape(12, 40), expected, rtol=1e-6)


@pytest.mark.parametrize("layout", ["row", "col"])
def test_columns_of_an_activation_are_a_view_in_either_layout(layout):
    ref = Ref("x", "activation", (2, 6, 40), "bf16", form=Form("fp32", layout))
    piece = ref.chunk(2, 6).columns(16, 8)
    plan, memory = run("linear_wgrad", A, LOW, LOW, places={"x": Placement(256, stored_bytes(ref))})
    seen = []
    step = Step("linear_wgrad", (Result(A, (Operand("a", A),)),), (Operand("x", piece), Operand("low", LOW)), {}, "")
    plan.programs["one"].steps = (step,)
    whole = memory.place(256, (40, 12) if layout == "col" else (12, 40), np.dtype(np.float32))
    whole[...] = np.arange(480).reshape(whole.shape)
    (call,) = bind(plan, "one", memory, {"linear_wgrad": lambda _, x, __: seen.append(x)}, poison=False)
    call()
    (x,) = seen
    rows = whole.T if layout == "col" else whole
    np.testing.assert_array_equal(x.read(), rows[2:8, 16:24])
    assert np.shares_memory(x.array, whole) and x.shape == (6, 8)


def test_a_call_that_needs_scratch_gets_that_of_its_lane_and_no_other_gets_any():
    plan, memory = run("cast", QKV, QKV)
    copied = Step("copy_to_host", plan.programs["one"].steps[0].outputs, (Operand("qkv", QKV),), {}, "")
    small = Step("amax_scale", copied.outputs, copied.inputs, {}, "")
    plan.programs["one"].steps = (*plan.programs["one"].steps, copied, small)
    given = {}
    ops = {
        op: lambda *_, op=op, **numbers: given.update({op: numbers}) for op in ("cast", "copy_to_host", "amax_scale")
    }
    storages = SimpleNamespace(array=lambda name: name if "scratch" in name else memory.array(name))
    sizes = {"cast": 8, "copy_to_host": 4, "amax_scale": 0}
    for call in bind(plan, "one", storages, ops, lambda step: sizes[step.op], poison=False):
        call()
    expected = {"cast": "workspace:scratch.main", "copy_to_host": "workspace:scratch.copy"}
    assert given == {**{op: {"scratch": name} for op, name in expected.items()}, "amax_scale": {}}
    for call in bind(plan, "one", storages, ops, poison=False):
        call()
    assert given == {op: {} for op in sizes}


def test_an_op_that_takes_no_columns_does_not_get_them():
    plan, memory = run("cast", QKV.columns(0, 8), QKV.columns(8, 8))
    with pytest.raises(AssertionError, match="cast reads and writes no columns alone"):
        bind(plan, "one", memory, OPS, poison=False)
