"""The update: sums of squares of gradients, the global norm with clipping, and AdamW (Loshchilov and Hutter, 2019).

Gradients arrive as sums over tokens; one number, `scale`, makes them the clipped gradient of the mean loss. `apply` is
0 when the step is not finite: then nothing is written, and the host need not look before the next step.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from llmq.operands import SLICE, Output, Tensor, slices
from llmq.ops.reference.eight_bits import store, store_root
from llmq.ops.reference.random import MASTER, M, V, random_bits, stochastic_round_bf16
from llmq.ops.seam import Function, op
from llmq.ops.temporaries import Temporaries
from llmq.tensor import DTYPES, NORM_ROWS


@op(family="optimizer", for_each_row=True)
def sum_squares(partials: Output, /, grad: Tensor) -> None:
    """partials (P,) <- grad (any shape), P = ceil(rows / 128) over its flattened leading axes, 1 for a vector.

    Each is the sum of squares of 128 rows, in an order that depends on these rows alone: shards of whole tiles have the
    bits of the whole matrix, so that the norm is the same for any number of ranks.
    """
    num_rows, tiles = math.prod(grad.shape[:-1]), []
    for first in range(0, num_rows, NORM_ROWS):
        sums = []
        for start, count in slices((min(NORM_ROWS, num_rows - first), grad.shape[-1])):
            g = grad.chunk(first + start, count).read()
            sums.append(np.sum(g * g))
        tiles.append(np.sum(sums))
    partials.write(np.array(tiles))


@op(family="optimizer")
def grad_scale(
    norm: Output,
    scale: Output,
    apply: Output,
    /,
    partials: Tensor,
    loss_total: Tensor,
    num_tokens: Tensor,
    *,
    grad_clip: float,
) -> None:
    """norm (1,), scale (1,), apply (1,) <- partials (P,) sums of squares, loss_total (1,), num_tokens (1,).

    norm = sqrt(sum(partials)) / tokens, that of the mean loss's gradient, the sum in f64; scale = min(1, grad_clip /
    norm) / tokens (grad_clip 0: no clipping); apply = 1 if norm and loss are finite, else 0. Without tokens norm and
    scale are 0.
    """
    tokens, squares = float(num_tokens.read()[0]), partials.read()
    total = np.sqrt(np.sum(squares, dtype=np.float64, keepdims=True)).astype(squares.dtype)
    finite = np.isfinite(total) & np.isfinite(loss_total.read())
    value = total / tokens if tokens else np.zeros_like(total)
    clip = grad_clip / float(value[0]) if grad_clip and value[0] > grad_clip else 1.0
    norm.write(value)
    scale.write(np.full_like(value, clip / tokens if tokens else 0.0))
    apply.write(finite.astype(value.dtype))


SLICES_OF_CODES = 15  # that are there at once, with states in 8 bits


def _temporaries(a: Temporaries) -> int:
    """Those of slices, which are more than of other ops if a state beside the master is held in 8 bits."""
    states = list(a.inputs)[1 : list(a.inputs).index("grad")]
    has_codes = any(a.inputs[name].form is not None for name in states)
    return SLICES_OF_CODES * a.width * max(a.inputs["grad"].shape[-1], SLICE) if has_codes else 0


def rule(held: set[str]) -> Callable[[Function], Function]:
    """`op` of an optimizer's rule."""
    made: dict[str, Any] = {"forms": {"weight"}, "sums": False, "cast_from": {"weight": "new_master"}, "held": held}
    return op(family="optimizer", for_each_row=True, temporaries=_temporaries, **made)


@rule(held={"new_master", "new_m", "new_v"})
def adamw(
    new_master: Output,
    new_m: Output,
    new_v: Output,
    weight: Output,
    /,
    master: Tensor,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    scale: Tensor,
    apply: Tensor,
    learning_rate: Tensor,
    step: Tensor,
    *,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    weight_decay: float,
    seed: int,
    stream: int,
    first: int = 0,
    rate: float = 1.0,
) -> None:
    """new_master, new_m, new_v, weight <- master, m, v, grad (one shape); the other four are (1,).

    g = grad * scale, m = beta_1 m + (1 - beta_1) g, v = beta_2 v + (1 - beta_2) g^2, and with lr = learning_rate * rate
    and `step` counting from 1,
    master = master (1 - lr weight_decay) - lr (m / (1 - beta_1^step)) / (sqrt(v / (1 - beta_2^step)) + epsilon).
    The update uses m and v before they are rounded for storage. What is stored in bf16 is rounded stochastically, with
    bits addressed by (seed, step, stream, element), where elements of a share count from `first`; `weight` is made from
    the master as stored, and is not wanted of one in 8 bits. States in 8 bits are rounded so, too, of v the root
    (llmq/ops/reference/eight_bits.py). new_* may be the memory of master, m and v. With apply 0 nothing is written.
    """
    if apply.read()[0] == 0:
        return
    count, lr = int(step.read()[0]), float(learning_rate.read()[0]) * rate
    bias_1, bias_2 = 1 - beta_1**count, 1 - beta_2**count
    for start, rows in slices(master.shape):
        address = (seed, count, stream, first + start * master.shape[-1])
        g = grad.chunk(start, rows).read() * scale.read()
        first_moment = beta_1 * m.chunk(start, rows).read() + (1 - beta_1) * g
        second_moment = beta_2 * _read_v(v.chunk(start, rows)) + (1 - beta_2) * (g * g)
        update = (first_moment / bias_1) / (np.sqrt(second_moment / bias_2) + epsilon)
        updated = master.chunk(start, rows).read() * (1 - lr * weight_decay) - lr * update
        write(new_m.chunk(start, rows), first_moment, M, *address)
        write(new_v.chunk(start, rows), second_moment, V, *address)
        write_master(new_master, weight, master, updated, (start, rows), *address)


def write_master(
    new_master: Output, weight: Output, master: Tensor, updated: np.ndarray, piece: tuple[int, int], *address: int
) -> None:
    """Rows (start, count) of a master and the copies of its weight, or of one that is held in 8 bits alone."""
    if master.form is None:
        updated = _stored(updated, new_master.dtype, MASTER, *address)
        weight.chunk(*piece).write(updated)
        new_master.chunk(*piece).write(updated)
    else:
        assert not weight.wanted, f"{weight.name}: copies of a weight in {master.form} are made of it"
        write(new_master.chunk(*piece), updated, MASTER, *address)


def _read_v(v: Tensor) -> np.ndarray:
    """v, of which a form of 8 bits has the root."""
    root = v.read()
    return root * root if v.form is not None else root


def write(target: Output, value: np.ndarray, purpose: str, seed: int, step: int, stream: int, first: int) -> None:
    """A state as `_stored`, or in the form of 8 bits that it is held in."""
    if not target.wanted or target.tensors[0].form is None:
        target.write(_stored(value, target.dtype, purpose, seed, step, stream, first))
        return
    bits = random_bits(seed, step, stream, purpose, value.size, first).reshape(value.shape)
    put = store_root if purpose == V else store
    put(target.tensors[0], value.astype(np.float32, copy=False), bits)


def _stored(value: np.ndarray, dtype: str, purpose: str, seed: int, step: int, stream: int, first: int) -> np.ndarray:
    """`value` as stored in `dtype`: bf16 is rounded stochastically, with the bits of elements from `first` on."""
    if dtype != "bf16":
        return value.astype(DTYPES[dtype], copy=False)
    bits = random_bits(seed, step, stream, purpose, value.size, first)
    return stochastic_round_bf16(value, bits.reshape(value.shape))
