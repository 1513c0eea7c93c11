"""EVA: A begins with the directions in which the inputs of a map vary most, and maps share their ranks by how much.

Paischer et al., "One Initialization to Rule them All: Fine-tuning via Explained Variance Adaptation", 2024; in the
steps of PEFT's `initialize_lora_eva_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llmq.adapters.first_values import principal
from llmq.adapters.targets import Target

SIMILAR = 0.99  # cosine of a direction with what it was a batch before, from which on it has settled (PEFT's tau)


class Directions:
    """The `count` principal directions of inputs that come in batches: incremental PCA (Ross et al., "Incremental
    Learning for Robust Visual Tracking", 2008), in memory for those and one batch."""

    def __init__(self, count: int) -> None:
        self.count, self.seen = count, 0
        self.vectors = np.empty((0, 0), np.float32)  # (count, K), largest first; the largest number of each is above 0
        self.shares = np.empty(0)  # of the variance of all inputs, along each
        self.settled = np.zeros(count, bool)
        self._values = np.empty(0, np.float32)
        self._mean = self._squares = np.empty(0)  # squares: sums of those of deviations, by column

    def add(self, x: np.ndarray) -> None:
        """Takes inputs x (n,K). A batch of fewer than `count` is left out, as in PEFT."""
        n = len(x)
        if n < self.count:
            return
        mean = x.mean(0, dtype=np.float64)
        rows = x.astype(np.float32) - mean.astype(np.float32)
        squares = np.square(x - mean).sum(0, dtype=np.float64)
        before, self.seen = self.seen, self.seen + n
        if before:
            apart = self._mean - mean
            shift = np.sqrt(before / self.seen * n) * apart
            rows = np.vstack([self._values[:, None] * self.vectors, rows, shift.astype(np.float32)])
            squares += self._squares + before * n / self.seen * np.square(apart)
            mean = (self._mean * before + mean * n) / self.seen
        _, values, vectors = principal(rows, self.count)
        largest = np.take_along_axis(vectors, np.abs(vectors).argmax(1)[:, None], 1)
        vectors = vectors * np.sign(largest)
        if before:
            # Vectors have the length 1.
            self.settled = (vectors * self.vectors).sum(1) >= SIMILAR
        self.vectors, self._values, self._mean, self._squares = vectors, values, mean, squares
        self.shares = np.square(values.astype(np.float64)) / max(squares.sum(), np.finfo(np.float64).tiny)


class Eva:
    """The directions of the inputs of the sites of `targets`, and the ranks that these get by them.

    A map may have `rho` times its rank, and all together have as many as without it: the directions with the largest
    shares of the variance of their inputs. With 1 each keeps its own rank. Maps that read the same inputs have one set
    of directions.
    """

    def __init__(self, targets: Sequence[Target], rho: float) -> None:
        self.targets, self._shares_out = tuple(targets), rho > 1
        self.by_site: dict[str, list[Target]] = {}
        for target in targets:
            self.by_site.setdefault(target.module.site, []).append(target)
        most = {site: max(round(t.rank * rho) for t in found) for site, found in self.by_site.items()}
        self.directions = {site: Directions(count) for site, count in most.items()}
        self.ranks = {t.module.name: most[t.module.site] if self._shares_out else t.rank for t in targets}

    @property
    def unsettled(self) -> tuple[str, ...]:
        """The sites that have a direction which is used and has not settled: those that look at the next batch."""
        return tuple(site for site, found in self.directions.items() if not found.settled[: self._used(site)].all())

    def _used(self, site: str) -> int:
        return max(self.ranks[target.module.name] for target in self.by_site[site])

    def share(self) -> None:
        """Sets `ranks` by what has been seen; one of 0 is a map without an adapter."""
        if not self._shares_out or not all(found.seen for found in self.directions.values()):
            return
        # As in PEFT: those that read the same inputs come last, and the first of them has the largest rank.
        firsts = [found[0] for found in self.by_site.values()]
        names = {t.module.name for t in firsts}
        order = [*firsts, *(t for t in self.targets if t.module.name not in names)]
        shares = [(share, t.module.name) for t in order for share in self.directions[t.module.site].shares]
        budget = sum(target.rank for target in self.targets)
        chosen = sorted(shares, key=lambda one: -one[0])[:budget]
        ranks = dict.fromkeys((t.module.name for t in self.targets), 0)
        for _, name in chosen:
            ranks[name] += 1
        for found in self.by_site.values():
            first = found[0].module.name
            for name in (t.module.name for t in found[1:]):
                if ranks[name] > ranks[first]:
                    ranks[first], ranks[name] = ranks[name], ranks[first]
        self.ranks = ranks

    def first(self) -> Mapping[str, np.ndarray]:
        """A (R,K) that each map with an adapter begins with, by its name."""
        return {
            target.module.name: self.directions[target.module.site].vectors[:rank]
            for target in self.targets
            if (rank := self.ranks[target.module.name])
        }
