"""The first values of adapters that are a part of the weight which they adapt: PiSSA and OLoRA.

What they begin with is taken out of the weight, so that the model computes what it did: W - s B A + s B A.
"""

from __future__ import annotations

import numpy as np

TAKEN_OUT = ("pissa", "olora")  # inits whose first product is taken out of the base
WHOLE = 512  # matrices of up to so many rows or columns are decomposed as a whole
OVERSAMPLED, BLOCKS = 8, 8  # directions beside the rank, and powers, of the Krylov space of larger ones


def first_pair(init: str, weight: np.ndarray, rank: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """A (R,K) and B (N,R) in f32 that an adapter of a weight (N,K) begins with.

    pissa: the principal singular values and vectors, B = U sqrt(S / s), A = sqrt(S / s) V^T (PiSSA; Meng et al., 2024).
    olora: of W = Q R the first columns of Q and rows of R (OLoRA; Bueyuekakyuez, 2024).
    """
    w = weight.astype(np.float32)
    if init == "olora":
        q, _ = np.linalg.qr(w[:, :rank])  # later columns change no earlier ones
        return q.T @ w, q
    u, s, vt = principal(w, rank)
    root = np.sqrt(s / np.float32(scale))
    return root[:, None] * vt, u * root


def principal(w: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The `rank` largest singular values of w (N,K), with vectors (N,R) and (R,K).

    Of a large matrix those in a block Krylov space of it (Musco and Musco, "Randomized Block Krylov Methods for
    Stronger and Faster Approximate Singular Value Decomposition", 2015), which is the same in every run.
    """
    if min(w.shape) <= max(WHOLE, (BLOCKS + 1) * (rank + OVERSAMPLED)):
        u, s, vt = np.linalg.svd(w, full_matrices=False)
        return u[:, :rank], s[:rank], vt[:rank]
    space = np.empty((w.shape[0], 0), np.float32)
    block = w @ np.random.default_rng(0).standard_normal((w.shape[1], rank + OVERSAMPLED), np.float32)
    for _ in range(BLOCKS + 1):
        for _ in range(2):  # the second time removes what rounding left
            block = np.linalg.qr(block - space @ (space.T @ block))[0]
        space = np.concatenate([space, block], axis=1)
        block = w @ (w.T @ block)
    low = space.T @ w
    squares, turn = np.linalg.eigh((low @ low.T).astype(np.float64))
    u, s = turn[:, ::-1][:, :rank].astype(np.float32), np.sqrt(squares[::-1][:rank]).astype(np.float32)
    return space @ u, s, (u.T @ low) / s[:, None]
