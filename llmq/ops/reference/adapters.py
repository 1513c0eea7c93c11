"""What adapters and the other methods that train beside a frozen model compute.

- LoRA: both gradients of B, for so small a rank R that reading d_y is all that takes time.
- A gain for each column of a linear map's outputs: trained (IA3), or a magnitude over a norm, as in DoRA (Liu et al.,
  "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024), which norms the rows of W + s B A to the magnitudes m. With
  P = W A^T and G = A A^T the squares of the norms are |w|^2 + 2 s b P + s^2 b G b^T for each row w of W, b of B:
  W + s B A is never made.
- AdaLoRA (Zhang et al., "Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning", 2023): W + s B diag(E) A. Of
  A (R,K) and B (N,R) the products A A^T and B^T B are kept near the identity. Which entries of E are kept follows from
  the importance of every parameter: its sensitivity |w g|, and how uncertain that is, smoothed over the steps.
- Virtual tokens: trained vectors in place of what a model computes at the first positions of each document. Prompt
  tuning has them in place of embeddings, prefix tuning in place of the keys and values of every layer, which are the
  last channels of packed heads.
"""

import math

import numpy as np

from llmq.operands import Output, Tensor, slices
from llmq.ops.reference.linear import gradient_multiply_adds, linear_dgrad, linear_wgrad
from llmq.ops.reference.swiglu import halves, swiglu_backward
from llmq.ops.seam import Arguments, op
from llmq.ops.temporaries import Temporaries, product
from llmq.tensor import DTYPES, NORM_ROWS, stored_bytes


@op(
    family="linears wgrad",
    takes_columns=True,
    products=2,
    multiply_adds=gradient_multiply_adds,
    temporaries=lambda a: max(product("d_low", "d_y", "up")(a), product("d_up", "d_y", "low")(a)),
)
def low_rank_backward(
    d_low: Output, d_up: Output, /, d_y: Tensor, low: Tensor, up: Tensor, *, alpha: float = 1.0
) -> None:
    """d_low (...,R), d_up (N,R) <- d_y (...,N), low (...,R), up (N,R): alpha d_y up, alpha d_y^T low.

    What `linear_dgrad` and `linear_wgrad` make, for so small a rank R that reading d_y is all that takes time.
    """
    linear_dgrad(d_low, d_y, up, None, alpha=alpha)
    linear_wgrad(d_up, d_y, low, alpha=alpha)


def _halves_temporaries(a: Temporaries) -> int:
    """The gradient beside its value as rounded, then the products of a half."""
    of_half = max(product(f"d_{half}_b", "d_act", f"{half}_low")(a) for half in ("gate", "up"))
    return a.copies("gate_up", "d_act") + 2 * a.size("gate_up") + of_half


def _multiply_adds(call: Arguments) -> int:
    """Of each of the four products."""
    rank = call.reads["gate_low"].shape[-1]
    return math.prod(call.reads["d_act"].shape) * rank


@op(
    family="swiglu",
    rows={"d_gate_up"},
    takes_columns=True,
    products=4,
    multiply_adds=_multiply_adds,
    temporaries=_halves_temporaries,
)
def swiglu_low_rank_backward(
    d_gate_up: Output,
    d_gate_low: Output,
    d_up_low: Output,
    d_gate_b: Output,
    d_up_b: Output,
    /,
    d_act: Tensor,
    gate_up: Tensor,
    gate_low: Tensor,
    up_low: Tensor,
    gate_b: Tensor,
    up_b: Tensor,
    *,
    gate_alpha: float,
    up_alpha: float,
    activation: str = "silu",
) -> None:
    """`swiglu_backward`, and `low_rank_backward` of the gradient's halves.

    d_gate_up (B,T,2F) <- d_act (B,T,F), gate_up (B,T,2F); of gate and of up, whose gradient is read as rounded to its
    dtype, d_low (B,T,R), d_b (F,R) <- low (B,T,R), b (F,R).
    """
    rounded = Tensor("d_gate_up", np.empty(gate_up.shape, DTYPES[d_gate_up.dtype]), gate_up.shape)
    written = Output("d_gate_up", gate_up.shape, d_gate_up.dtype, (rounded,))
    swiglu_backward(written, d_act, gate_up, activation=activation)
    d_gate_up.write(rounded.read())
    gate, up = (Tensor("half", half, half.shape) for half in halves(rounded.array))
    low_rank_backward(d_gate_low, d_gate_b, gate, gate_low, gate_b, alpha=gate_alpha)
    low_rank_backward(d_up_low, d_up_b, up, up_low, up_b, alpha=up_alpha)


@op(family="adapters", shares={"y": "residual"}, temporaries=lambda a: a.copies("x", "residual") + a.size("y"))
def scale_columns_forward(y: Output, /, x: Tensor, gain: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """y (...,N) <- x (...,N), gain (N,), bias (N,) or None, residual (...,N) or None: gain x + bias + residual.

    The gain may have any shape of N numbers.
    """
    value = x.read() * gain.read().reshape(-1)
    if bias is not None:
        value += bias.read()
    if residual is not None:
        value += residual.read().reshape(value.shape)
    y.write(value)


@op(family="adapters", forms={"d_x"}, temporaries=lambda a: a.copies("d_y", "x") + a.size("x") + a.writing("d_x"))
def scale_columns_backward(d_x: Output, d_gain: Output, /, d_y: Tensor, x: Tensor, gain: Tensor) -> None:
    """d_x (...,N), d_gain (N,) <- d_y (...,N), x (...,N), gain (N,): gain d_y, and the sum of d_y x over rows."""
    d = d_y.read()
    if d_gain.wanted:
        d_gain.write(np.sum((d * x.read()).reshape(-1, d.shape[-1]), axis=0).reshape(d_gain.shape))
    if d_x.wanted:
        d_x.write(d * gain.read().reshape(-1))


# The weight is read in slices.
@op(family="adapters", temporaries=lambda a: a.copies("up") + 3 * a.size("up"))
def output_gain(
    gain: Output,
    norm: Output,
    /,
    weight: Tensor | None,
    through: Tensor | None,
    gram: Tensor | None,
    up: Tensor | None,
    magnitude: Tensor | None,
    *,
    scale: float,
    first: int,
) -> None:
    """gain (N,), norm (N,) <- weight (N,K), through = weight A^T (N,S), gram = A A^T (S,S), up (N,R), magnitude.

    norm = |weight + scale B A| of each row with B = up, gain = magnitude / norm. A is rows [first, first + R) of S,
    which may be those of several adapters. Without a weight the gain is the magnitude (in any shape of N numbers), and
    1 where there is none either.
    """
    kind = np.float64 if gain.dtype == "fp64" else np.float32
    m = np.ones(gain.shape, kind) if magnitude is None else magnitude.read().reshape(gain.shape)
    if weight is None or through is None or gram is None or up is None:
        gain.write(m)
        return
    mine = slice(first, first + up.shape[-1])
    b, p, g = up.read(), through.read()[:, mine], gram.read()[mine, mine]
    squares = np.empty(b.shape[0], b.dtype)
    for start, count in slices(weight.shape):
        w = weight.chunk(start, count).read()
        squares[start : start + count] = np.sum(w * w, axis=1)
    squares += scale * np.sum(b * (2 * p + scale * (b @ g)), axis=1)
    value = np.sqrt(np.maximum(squares, 0))
    norm.write(value)
    gain.write(m / value)


@op(family="adapters")
def output_gain_backward(d_magnitude: Output, /, d_gain: Tensor, norm: Tensor | None) -> None:
    """d_magnitude (N,) <- d_gain (N,), norm (N,) or None: d_gain / norm, which passes no gradient."""
    value = d_gain.read() if norm is None else d_gain.read() / norm.read()
    d_magnitude.write(value.reshape(d_magnitude.shape))


@op(family="adapters", temporaries=lambda a: 4 * a.size("coefficient") + math.prod(a.inputs["targets"].shape))
def orthogonality(
    coefficient: Output, /, gram: Tensor, targets: Tensor, *, weight: float, first: int, present: int
) -> None:
    """coefficient (R,S) <- gram (S,S), targets (B,T): what gives the gradient of a matrix, by its products.

    G are rows and columns [first, first + R) of gram, the products of an adapter's rows of A, or columns of B. The
    gradient of weight |G - I|, the Frobenius norm, times the number n of trained targets (those that are not -100), is
    2 weight n (G - I) / |G - I| times A, or B times that; 0 where the norm is 0. Columns beside G are 0. I has its
    first `present` entries: what follows them is not there, and zero.
    """
    value, rank = gram.read(), coefficient.shape[0]
    mine = slice(first, first + rank)
    apart = value[mine, mine] - np.diag((np.arange(rank) < present).astype(value.dtype))
    norm = np.sqrt(np.sum(apart * apart))
    count = np.count_nonzero(targets.read() >= 0)
    factor = value.dtype.type(2 * weight * count) / norm if norm else norm
    found = np.zeros(coefficient.shape, value.dtype)
    found[:, mine] = factor * apart
    coefficient.write(found)


@op(family="optimizer", for_each_row=True, temporaries=lambda a: a.copies("weight", "grad") + 4 * a.size("sensitivity"))
def importance(
    new_sensitivity: Output,
    new_uncertainty: Output,
    /,
    sensitivity: Tensor,
    uncertainty: Tensor,
    weight: Tensor,
    grad: Tensor,
    scale: Tensor,
    apply: Tensor,
    *,
    beta_1: float,
    beta_2: float,
) -> None:
    """new_sensitivity, new_uncertainty <- those before, weight, grad (one shape), cells scale, apply (1,).

    With i = |weight scale grad|: sensitivity <- beta_1 sensitivity + (1 - beta_1) i, uncertainty <- beta_2 uncertainty
    + (1 - beta_2) |i - new sensitivity|. Nothing is written where apply is 0. The new may be the memory of the old.
    """
    if not float(apply.read()[0]):
        return
    s, u = sensitivity.read(), uncertainty.read()
    kind = s.dtype.type
    now = np.abs(weight.read() * (grad.read().reshape(s.shape) * scale.read()[0])).astype(s.dtype, copy=False)
    s = kind(beta_1) * s + kind(1 - beta_1) * now
    u = kind(beta_2) * u + kind(1 - beta_2) * np.abs(now - s)
    new_sensitivity.write(s)
    new_uncertainty.write(u)


@op(family="optimizer", for_each_row=True, temporaries=lambda a: 2 * a.size("sensitivity"))
def importance_sums(sums: Output, /, sensitivity: Tensor, uncertainty: Tensor, *, of_columns: bool) -> None:
    """sums <- sensitivity times uncertainty (N,R): (P,R), of each column of 128 rows, or (N,), of each row.

    P = ceil(N / 128), so that shares of whole tiles have the sums of the whole. Of vectors (N,) the products.
    """
    product = sensitivity.read() * uncertainty.read()
    if not of_columns:
        sums.write(product.reshape(sums.shape[0], -1).sum(axis=1))
        return
    tiles = range(0, math.prod(product.shape[:-1]), NORM_ROWS)
    sums.write(np.stack([product[first : first + NORM_ROWS].sum(axis=0) for first in tiles]).reshape(sums.shape))


def _others(call: Arguments) -> int:
    """Bytes of real tokens, where the output lies in its input's memory or is unwanted; a row has one document or
    more."""
    given, (count, width) = next(iter(call.reads.values())), (call.numbers["num_virtual"], call.numbers["channels"])
    replaced = given.shape[0] * min(count, given.shape[1]) * width * DTYPES[given.dtype].itemsize
    passes = 2 if call.in_place else int(not (call.writes.get("out") or call.writes.get("d_x")))
    return passes * (stored_bytes(given) - replaced)


@op(family="adapters", shares={"out": "x"}, untouched=_others)
def virtual_tokens_forward(
    out: Output, /, x: Tensor, virtual: Tensor, positions: Tensor, *, num_virtual: int, channels: int, start: int = 0
) -> None:
    """out (B,T,W) <- x (B,T,W), virtual (N,D), positions (B,T) int32.

    out is x, but for the last D channels of a token at position `start` + p, p < N, of its document, which are
    virtual[p]. N is `num_virtual`, D the `channels`, up to W. With ids for positions they are rows of these tokens.
    """
    found, at = np.array(x.read()), positions.read() - start
    there = (at >= 0) & (at < num_virtual)
    found[there, found.shape[-1] - channels :] = virtual.read()[at[there]]
    out.write(found)


@op(family="adapters", shares={"d_x": "d_out"}, untouched=_others)
def virtual_tokens_backward(
    d_x: Output,
    d_virtual: Output,
    /,
    d_out: Tensor,
    positions: Tensor,
    *,
    num_virtual: int,
    channels: int,
    start: int = 0,
) -> None:
    """d_x (B,T,W), d_virtual (N,D) <- d_out (B,T,W), positions (B,T) int32.

    d_virtual[p] is the sum of d_out over the documents, in their order, and d_x is zero there.
    """
    found, at = np.array(d_out.read()), positions.read() - start
    there, first = (at >= 0) & (at < num_virtual), found.shape[-1] - channels
    sums = np.zeros((num_virtual, channels), found.dtype)
    np.add.at(sums, at[there], found[there, first:])
    d_virtual.write(sums)
    found[there, first:] = 0
    d_x.write(found)
