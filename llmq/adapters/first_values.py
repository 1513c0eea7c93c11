"""The values that rows of a new adapter begin with, where these follow from the weights that it adapts.

PiSSA and OLoRA take what an adapter begins with out of the weight, so that the model computes what it did: W - s B A +
s B A. With magnitudes (DoRA) an adapter begins with the norms of the weight's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmq.adapters.targets import MAGNITUDE
from llmq.files.source import Values
from llmq.files.tensor_files import norms_of
from llmq.model.config import ModelConfig
from llmq.model.parameters import parameter_rows
from llmq.row import Row

if TYPE_CHECKING:
    from llmq.adapters.lora import Lora

TAKEN_OUT = ("pissa", "olora")  # inits whose first product is taken out of the base
WHOLE = 512  # rows or columns up to which a matrix is decomposed as a whole
OVERSAMPLED, BLOCKS = 8, 8  # directions beside the rank, and powers, of the Krylov space of larger ones
OF_WEIGHTS = ("norms", *TAKEN_OUT)  # inits that follow from weights


class FirstAdapter:
    """The rows of a new adapter on the weights of `model`.

    Magnitudes are the norms of the model's rows. Of pissa and olora the first s B A are taken out of the weights.
    """

    def __init__(self, adapters: Lora, config: ModelConfig, model: Values) -> None:
        self.adapters, self.model = adapters, model
        self._weights = {row.name: row for row in parameter_rows(config)}
        self._last: tuple[str, dict[str, tuple[np.ndarray, np.ndarray]]] = ("", {})

    def pairs(self, site: str, weight: np.ndarray | None = None) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The first A and B of each module of a site, by name; those of the last one that was asked for are kept."""
        if self._last[0] != site:
            if weight is None:
                ((_, weight),) = self.model([self._weights[f"{site}.weight"]])
            self._last = (
                site,
                {
                    t.module.name: first_pair(
                        self.adapters.init, weight[t.module.start : t.module.stop], t.rank, t.scale
                    )
                    for t in self.adapters.by_site[site]
                },
            )
        return self._last[1]

    def base(self, rows: Sequence[Row]) -> Iterator[tuple[Row, np.ndarray]]:
        """The values of the model's rows, less what is taken out of them."""
        for row, value in self.model(rows):
            yield row, self._less(row, value)

    def _less(self, row: Row, value: np.ndarray) -> np.ndarray:
        is_split = self.adapters.takes_out and row.name in self._weights and row.name.endswith(".weight")
        if not is_split or row.site not in self.adapters.by_site:
            return value
        rest, pairs = value.astype(np.float32), self.pairs(row.site or "", value)
        for target in self.adapters.by_site[row.site or ""]:
            a, b = pairs[target.module.name]
            rest[target.module.start : target.module.stop] -= np.float32(target.scale) * (b @ a)
        return rest

    def values(self, rows: Sequence[Row]) -> Iterator[tuple[Row, np.ndarray]]:
        """The values of rows: those that follow from weights, and others as in the model. A weight that is among the
        rows is read once."""
        made: dict[str, list[Row]] = {}
        for row in rows:
            if row.init in OF_WEIGHTS:
                made.setdefault(row.name.partition(".lora_")[0] + ".weight", []).append(row)
        others = [row for row in rows if row.init not in OF_WEIGHTS]
        named = {row.name for row in others}
        for row, value in self.model(others):
            yield row, self._less(row, value)
            yield from self._made(row, value, made.get(row.name, ()))
        for row, value in self.model([self._weights[name] for name in made if name not in named]):
            yield from self._made(row, value, made[row.name])

    def _made(self, weight: Row, value: np.ndarray, rows: Sequence[Row]) -> Iterator[tuple[Row, np.ndarray]]:
        """The rows of an adapter that follow from a weight."""
        parts = {part.name.removesuffix(".weight"): part for part in weight.parts}
        for row in rows:
            if row.init == "norms":
                part = parts[row.parts[0].name.removesuffix(f".{MAGNITUDE}")]
                yield row, norms_of(value[part.start : part.stop])
                continue
            pairs = self.pairs(weight.site or "", value)
            which = 0 if ".lora_A." in row.parts[0].name else 1
            yield row, np.concatenate([pairs[part.name.partition(".lora_")[0]][which] for part in row.parts])


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
