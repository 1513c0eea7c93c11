"""Programs bound to memory: which bytes of a storage a call gets."""

from types import SimpleNamespace

import numpy as np
import pytest

from llmq.backends.host import HostMemory
from llmq.engine.bound_plan import Binder
from llmq.ops.record import Call, Result
from llmq.ops.reference import OPS
from llmq.plan.names import storage_name
from llmq.plan.passes.place import Placement
from llmq.tensor import Form, Ref, stored_bytes

LOW, A, QKV = (Ref(n, "batch", shape, "fp32") for n, shape in (("low", (12, 4)), ("a", (8, 4)), ("qkv", (2, 6, 40))))


def run(op, out, *inputs, places=None):
    """Binds and runs a program of one linear map; the memory afterwards."""
    call = Call(op, (Result(out, (out.form,)),), inputs, {}, "forward")
    program = SimpleNamespace(calls=(call,), places=places or {}, births={}, deaths={})
    plan = SimpleNamespace(scales=(), programs={"one": program}, persistent={})
    memory = HostMemory({storage_name(ref): ref for ref in (LOW, A, QKV)}, {"device": 4096})
    rng = np.random.default_rng(0)
    for ref in (LOW, A, QKV):
        memory.write(storage_name(ref), rng.standard_normal(ref.shape))
    return plan, memory


def test_a_branch_is_added_onto_columns_of_a_value():
    """As the adapter of one projection adds to the fused qkv: read and written in place."""
    piece = QKV.columns(16, 8)
    plan, memory = run("linear_forward", piece, LOW, A, None, piece)
    before = memory.read("batch:qkv").reshape(12, 40)
    (launch,) = Binder(plan, "one", memory).launches(OPS, None, poison=False)
    launch.run()
    expected = before.copy()
    expected[:, 16:24] += memory.read("batch:low") @ memory.read("batch:a").T
    np.testing.assert_allclose(memory.read("batch:qkv").reshape(12, 40), expected, rtol=1e-6)


@pytest.mark.parametrize("layout", ["row", "col"])
def test_columns_of_an_activation_are_a_view_in_either_layout(layout):
    ref = Ref("x", "activation", (2, 6, 40), "bf16", form=Form("fp32", layout))
    piece = ref.chunk(2, 6).columns(16, 8)
    plan, memory = run("linear_wgrad", A, LOW, LOW, places={storage_name(ref): Placement(256, stored_bytes(ref))})
    seen = []
    plan.programs["one"].calls = (Call("linear_wgrad", (Result(A, (None,)),), (piece, LOW), {}, "backward"),)
    whole = memory.place("device", 256, (40, 12) if layout == "col" else (12, 40), np.dtype(np.float32))
    whole[...] = np.arange(480).reshape(whole.shape)
    (launch,) = Binder(plan, "one", memory).launches(
        {"linear_wgrad": lambda _, x, __: seen.append(x)}, None, poison=False
    )
    launch.run()
    (x,) = seen
    rows = whole.T if layout == "col" else whole
    np.testing.assert_array_equal(x.read(), rows[2:8, 16:24])
    assert np.shares_memory(x.array, whole) and x.shape == (6, 8)


def test_an_op_that_takes_no_columns_does_not_get_them():
    plan, memory = run("cast", QKV.columns(0, 8), QKV.columns(8, 8))
    with pytest.raises(AssertionError, match="cast reads and writes no columns alone"):
        Binder(plan, "one", memory).launches(OPS, None, poison=False)
