"""Which copy of which operand each matmul reads: what can be wrong here changes precision, not shapes."""

import pytest

from llmq.ops.record import Recorder
from llmq.sites.fp8 import Fp8Linear
from llmq.stores.replicated import bundle_tree
from llmq.tensor import COLSUM, Form, Ref


def ref(name, *shape):
    """A bf16 activation."""
    return Ref(name, "activation", shape, "bf16")


# scalings of: rows of activations and gradients, their transposed copies, both copies of the weight
SCALINGS = {
    "delayed": ("delayed", "delayed", "delayed"),
    "current": ("current", "current", "current"),
    "rowwise": ("rowwise", "current", "rowwise"),
    "blockwise": ("blockwise", "blockwise", "tilewise"),
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
def test_every_matmul_reads_its_operands_with_the_summed_axis_innermost(gradient, scaling):
    x, y, d_x, d_y, residual = (ref("x", 4, 8), ref("y", 4, 16), ref("d_x", 4, 8), ref("d_y", 4, 16), ref("r", 4, 16))
    w = bundle_tree({"weight": Ref("w", "weight", (16, 8), "bf16"), "bias": Ref("b", "weight", (16,), "bf16")})
    dw = bundle_tree({"weight": Ref("w", "grad", (16, 8), "bf16"), "bias": Ref("b", "grad", (16,), "bf16")})
    site, ops = Fp8Linear("layers.0.mlp.up", gradient, scaling), Recorder()
    site.forward(ops, None, y, x, w, residual)
    site.backward(ops, None, None, d_x, dw, d_y, x, w)

    rows, columns, weight = SCALINGS[scaling]

    def form(dtype, layout):
        return Form(dtype, layout, {"row": rows, "col": columns}[layout])

    def of_weight(layout):
        return w.weight.as_form(Form("e4m3", layout, weight))

    assert [(call.op, tuple(result.ref for result in call.outputs), call.inputs) for call in ops.calls] == [
        ("linear_forward", (y,), (x.as_form(form("e4m3", "row")), of_weight("row"), w.bias, residual)),
        ("linear_dgrad", (d_x,), (d_y.as_form(form(gradient, "row")), of_weight("col"), None)),
        ("linear_wgrad", (dw.weight,), (d_y.as_form(form(gradient, "col")), x.as_form(form("e4m3", "col")))),
        ("bias_backward", (dw.bias,), (d_y.as_form(COLSUM),)),
    ]


def test_a_site_without_bias_makes_no_column_sums():
    w = bundle_tree({"weight": Ref("w", "weight", (16, 8), "bf16")})
    dw = bundle_tree({"weight": Ref("w", "grad", (16, 8), "bf16")})
    ops = Recorder()
    Fp8Linear("layers.0.mlp.up", "e4m3", "current").backward(
        ops, None, None, ref("d_x", 4, 8), dw, ref("d_y", 4, 16), ref("x", 4, 8), w
    )
    assert [call.op for call in ops.calls] == ["linear_dgrad", "linear_wgrad"]
