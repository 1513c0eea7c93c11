"""AdaLoRA (Zhang et al., "Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning", 2023): W + s B diag(E) A.

Of A (R,K) and B (N,R) the products A A^T and B^T B are kept near the identity. Which entries of E are kept follows from
the importance of every parameter: its sensitivity |w g|, and how uncertain that is, smoothed over the steps.
"""

import math

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.seam import op
from llmq.tensor import NORM_ROWS


@op(family="adapters", temporaries=lambda a: 4 * a.size("coefficient") + math.prod(a.inputs["targets"].shape))
def orthogonality(
    coefficient: Output, /, gram: Tensor, targets: Tensor, *, weight: float, first: int, present: int
) -> None:
    """coefficient (R,S) <- gram (S,S), targets (B,T): what gives the gradient of a matrix, by its products.

    G are rows and columns [first, first + R) of gram, the products of an adapter's rows of A, or columns of B. The
    gradient of weight |G - I|, the Frobenius norm, times the number n of trained targets (those that are not -100), is
    2 weight n (G - I) / |G - I| times A, or B times that; 0 where the norm is 0. Columns beside G are 0. I has its
    first `present` entries: what lies behind them is not there, and zero.
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
