"""Linear maps whose products are in e4m3: copies of a tensor with one scale for the whole, measured when it is made.

Activations and gradients are copied at each call, once for the maps that read the same tensor. Weights keep their own
dtype. The scale of one that is trained lasts until an optimizer's next step, its copies as long as a product: rows in
forward, columns in backward, as products in fp8 sum over what lies innermost. A frozen one keeps its rows.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from llmq.tensor import LARGEST, Form
from llmq.torch.forwards import ours
from llmq.torch.kernels import NAMES, Copy, product_dtype, ready, run, takes
from llmq.torch.library import op

ROWS, COLUMNS = Form("e4m3", "row", "current"), Form("e4m3", "col", "current")
WHOLE = 16  # what the sizes of a product in fp8 are multiples of
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Two = tuple[torch.Tensor, torch.Tensor]


# copies


def _fake_copies(x: torch.Tensor, columns: bool) -> Three:
    rows = x.numel() // x.shape[-1]
    turned = (x.shape[-1], -(-rows // WHOLE) * WHOLE) if columns else (0, 0)
    byte: Any = {"dtype": torch.uint8}
    return x.new_empty((rows, x.shape[-1]), **byte), x.new_empty(turned, **byte), x.new_empty(1, dtype=torch.float32)


@op("quantize_e4m3(Tensor x, bool columns) -> (Tensor, Tensor, Tensor)", _fake_copies)
def quantize_e4m3(x: torch.Tensor, columns: bool) -> Three:
    """Bytes of x (...,K) in e4m3: rows (M,K), columns (K,M') or none, M' the next multiple of 16; their scale (1,)."""
    rows, turned, scale = _fake_copies(x, columns)
    flat = ready(x).view(rows.shape)
    run("amax_scale", (scale,), (flat,), limit=LARGEST["e4m3"])
    copies = [Copy(rows, scale, ROWS, flat.shape, NAMES[x.dtype])]
    if columns:
        count = rows.shape[0]
        if turned.shape[1] > count:
            turned[:, count:] = 0
        copies.append(Copy(turned[:, :count], scale, COLUMNS, flat.shape, NAMES[x.dtype]))
    run("cast", (tuple(copies),), (flat,))
    return rows, turned, scale


def rows_of(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes (N,K) of a weight, rounded to `dtype` before, with this scale."""
    rows = weight.new_empty(weight.shape, dtype=torch.uint8)
    run("cast", ((Copy(rows, scale, ROWS, weight.shape, NAMES[dtype]),),), (ready(weight.detach()),))
    return rows


def columns_of(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The transpose (K,N) of `rows_of`: of the weight, or of these bytes."""
    found = weight.new_empty(weight.shape[::-1], dtype=torch.uint8)
    is_copy = weight.dtype is torch.uint8
    of = Copy(weight, scale, ROWS, weight.shape, NAMES[dtype]) if is_copy else ready(weight.detach())
    run("cast", ((Copy(found, scale, COLUMNS, weight.shape, NAMES[dtype]),),), (of,))
    return found


def product(
    left: torch.Tensor, right: torch.Tensor, scales: Two, dtype: torch.dtype, bias: Any = None, fast: bool = True
) -> torch.Tensor:
    """left (M,K) right (N,K)^T of e4m3 bytes with these scales, plus bias (N,) or None, in `dtype`.

    `fast` keeps fewer bits of partial sums, as llmq does but for gradients of weights.
    """
    if not left.is_cuda:
        y = left.new_empty((left.shape[0], right.shape[0]), dtype=dtype)
        copies = [Copy(x, scale, ROWS, x.shape, "bf16") for x, scale in zip((left, right), scales, strict=True)]
        run("linear_forward", (y,), (*copies, bias, None))
        return y
    in_epilogue = bias if dtype is torch.bfloat16 else None
    kind = torch.float8_e4m3fn
    y = torch._scaled_mm(
        left.view(kind), right.view(kind).T, *scales, bias=in_epilogue, out_dtype=dtype, use_fast_accum=fast
    )
    return y if bias is None or in_epilogue is not None else y.add_(bias)


# the map


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, _, x_columns, x_scale, w_rows, w_scale = inputs
    # The rows of a weight that is trained would live as long as the activations.
    ctx.save_for_backward(x_columns, x_scale, weight if weight.requires_grad else w_rows, w_scale)
    ctx.needs = [x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad]
    ctx.dtype = weight.dtype


def _backward(ctx: Any, d_y: torch.Tensor) -> tuple[Any, ...]:
    found = linear_e4m3_backward(d_y, *ctx.saved_tensors, *ctx.needs)
    d_x, d_weight, d_bias = (one if needed else None for one, needed in zip(found, ctx.needs, strict=True))
    return d_x, d_weight if d_weight is None else d_weight.to(ctx.dtype), d_bias, None, None, None, None, None


def _fake(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@op(
    "linear_e4m3(Tensor x, Tensor weight, Tensor? bias, Tensor x_rows, Tensor x_columns, Tensor x_scale,"
    " Tensor w_rows, Tensor w_scale) -> Tensor",
    _fake,
    _keep,
    _backward,
)
def linear_e4m3(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *copies: torch.Tensor
) -> torch.Tensor:
    """y (...,N) <- the copies of x (...,K) and weight (N,K), which only say where gradients go, and bias (N,)."""
    x_rows, _, x_scale, w_rows, w_scale = copies
    y = product(x_rows, w_rows, (x_scale, w_scale), x.dtype, None if bias is None else bias.to(x.dtype))
    return y.view(*x.shape[:-1], weight.shape[0])


def _fake_backward(d_y: torch.Tensor, *given: Any) -> Three:
    _, _, weight, _, of_x, of_weight, of_bias = given
    return (
        d_y.new_empty((*d_y.shape[:-1], weight.shape[1]) if of_x else 0),
        d_y.new_empty(weight.shape if of_weight else 0),
        d_y.new_empty(weight.shape[0] if of_bias else 0),
    )


@op(
    "linear_e4m3_backward(Tensor d_y, Tensor x_columns, Tensor x_scale, Tensor weight, Tensor w_scale, bool of_x,"
    " bool of_weight, bool of_bias) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
def linear_e4m3_backward(
    d_y: torch.Tensor,
    x_columns: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    of_x: bool,
    of_weight: bool,
    of_bias: bool,
) -> Three:
    """Gradients of x, weight and bias, empty where not asked for <- d_y (...,N), a copy of x, weight or its rows."""
    rows, columns, scale = quantize_e4m3(d_y, of_weight)
    d_x, d_weight, d_bias = (d_y.new_empty(0) for _ in range(3))
    if of_x:
        d_x = product(rows, columns_of(weight, w_scale, d_y.dtype), (scale, w_scale), d_y.dtype)
        d_x = d_x.view(*d_y.shape[:-1], weight.shape[1])
    if of_weight:
        d_weight = product(columns, x_columns, (scale, x_scale), d_y.dtype, fast=False)
    if of_bias:
        d_bias = d_y.reshape(-1, weight.shape[0]).sum(0)
    return d_x, d_weight, d_bias


# the module


NOTHING: Any = (lambda: None, None, None)


class _Last(threading.local):
    """The copies of the tensor that a thread copied last: which that is, in what state, and they."""

    kept = NOTHING


_last = _Last()
_steps = [0]  # of all optimizers: fused ones write weights whose `_version` stays


def _count_step(*_: Any) -> None:
    _steps[0] += 1


register_optimizer_step_post_hook(_count_step)


def weight_copy(module: Any, dtype: torch.dtype) -> Two:
    """Rows and scale of a map's weight in e4m3, made when it has changed since."""
    weight = module.weight
    if torch.compiler.is_compiling():
        rows, _, scale = quantize_e4m3(weight.detach().to(dtype), False)
        return rows, scale
    step = _steps[0] if weight.requires_grad else None
    about = (weight.data_ptr(), _version(weight), dtype, step, torch.is_inference_mode_enabled())
    known, rows, scale = vars(module).get("_llmq_copy", (None, None, None))
    if known != about:
        rows, _, scale = quantize_e4m3(weight.detach().to(dtype), False)
        vars(module)["_llmq_copy"] = about, None if weight.requires_grad else rows, scale
    return rows_of(weight, scale, dtype) if rows is None else rows, scale


def forget_copy(module: Any) -> None:
    """Has the copy of a weight made anew: PEFT merges adapters into weights whose `_version` stays."""
    vars(module).pop("_llmq_copy", None)


def input_copies(x: torch.Tensor, columns: bool, is_shared: bool) -> Three:
    """Copies of what a map reads, kept for the next map if that may read it too: q, k and v do, and gate and up."""
    if torch.compiler.is_compiling():
        traced: Three = quantize_e4m3(x.detach(), columns)
        return traced
    of, known, copies = _last.kept
    about = _version(x), columns
    if of() is not x or known != about:
        _last.kept = copies = NOTHING  # their memory is free before others are made
        copies = quantize_e4m3(x.detach(), columns)
        if is_shared:
            _last.kept = weakref.ref(x), about, copies
    found: Three = copies
    return found


def _version(x: torch.Tensor) -> int | None:
    """Which of the values that x has had: torch counts none for tensors of `inference_mode`."""
    return None if x.is_inference() else x._version


def forward_of(name: str) -> Any:
    """The forward of a map of this name in its parent."""
    is_shared = name not in ("o_proj", "down_proj")

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.to(product_dtype(x))
        if not takes(x) or x.dtype is torch.float64:
            own: torch.Tensor = type(self).forward(self, x)
            return own
        trains = torch.is_grad_enabled() and self.weight.requires_grad
        copies = input_copies(x, trains, is_shared)
        y: torch.Tensor = linear_e4m3(x, self.weight, self.bias, *copies, *weight_copy(self, x.dtype))
        return y

    vars(forward)["is_shared"] = is_shared
    return ours(forward)


def why_map_left(module: Any) -> str | None:
    """For sizes that no product in fp8 has, and GPUs without fp8."""
    odd = [str(size) for size in module.weight.shape if size % WHOLE]
    if odd:
        return f"its size {' and '.join(odd)} is no multiple of {WHOLE}, which fp8 needs"
    if module.weight.is_cuda and torch.cuda.get_device_capability(module.weight.device) < (8, 9):
        return "its GPU has no fp8, which compute capability 8.9 and later have"
    return None
