"""What LoRA finds out on a run's first batches before it is planned: the ranks of maps, and what A begins with.

`--lora-rank auto` chooses ranks by the spectra of the first gradients, within a budget of parameters. An adapter of
rank R follows at best the R largest singular values of its map's gradient (Wang et al., "LoRA-GA: Low-Rank Adaptation
with Gradient Approximation", 2024), and to first order their squares are what a small step along them takes off the
loss. Each rank of a map with N outputs and K inputs costs N + K parameters. Within a map later ranks bring less, so
that taking the best share of the loss per parameter, one rank after the other, is as good as any choice up to the last
rank.

EVA begins A with the directions in which the inputs of a map vary most, and maps share their ranks by how much
(Paischer et al., "One Initialization to Rule them All: Fine-tuning via Explained Variance Adaptation", 2024; in the
steps of PEFT's `initialize_lora_eva_weights`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmq.adapters.first_values import principal
from llmq.adapters.method import FirstBatches, Found, RanksByMap
from llmq.adapters.targets import Target
from llmq.errors import UsageError

if TYPE_CHECKING:
    from llmq.adapters.lora import Lora

MOST_RANK = 256  # of any map
SIMILAR = 0.99  # cosine of a direction with what it was a batch before, from which on it has settled (PEFT's tau)


def ranks_by_gradients(adapters: Lora, batches: FirstBatches) -> Found:
    """The ranks of --lora-rank auto. UsageError where the budget is less than a rank of any map."""
    assert adapters.budget is not None
    modules = {target.module.name: target.module for target in adapters.targets}
    costs = {name: module.inputs + module.outputs for name, module in modules.items()}
    if adapters.budget < (least := min(costs.values())):
        raise UsageError(
            f"--lora-budget {adapters.budget} is less than the {least} parameters of the smallest adapter of rank 1: "
            "raise it"
        )
    spectra = {}
    for site, whole in batches.gradients(list(adapters.by_site)):
        for of in (target.module for target in adapters.by_site[site]):
            spectra[of.name] = spectrum(whole[of.start : of.start + of.outputs])
    ranks = ranks_within(adapters.budget, costs, spectra)
    total = sum(costs[name] * rank for name, rank in ranks.items())
    found = {t.module.name: (rank := ranks[t.module.name], t.alpha or 2.0 * rank) for t in adapters.targets}
    said = f"--lora-rank auto uses {total:,} of {adapters.budget:,} parameters, by {batches.seen} micro-batches"
    return found, {}, (said, *lines_of(found))


def first_by_inputs(adapters: Lora, batches: FirstBatches) -> Found:
    """The ranks and the first A of EVA. As in PEFT, alpha grows with the rank.

    UsageError where a rank is larger than a map's inputs, or no batch has as many trained tokens as that.
    """
    eva = Eva(adapters.targets, adapters.rho)
    for target in adapters.targets:
        if (most := eva.ranks[target.module.name]) > target.module.inputs:
            raise UsageError(
                f"--lora-rank {target.rank} with --eva-rho {adapters.rho:g} may give {target.module.name} the rank "
                f"{most}, and it has {target.module.inputs} inputs: use smaller ones"
            )
    for _ in batches.inputs(lambda: eva.unsettled, lambda site, x: eva.directions[site].add(x)):
        eva.share()
    if missing := [site for site, found in eva.directions.items() if not found.seen]:
        most = max(eva.directions[site].count for site in missing)
        raise UsageError(
            f"--lora-init eva needs {most} trained tokens in a micro-batch, rank times --eva-rho, and none of the "
            f"first {batches.seen} has them: use a larger --batch-size or --seq-len, or a smaller rank"
        )
    ranks = {t.module.name: (own := eva.ranks[t.module.name], t.alpha * own / t.rank) for t in adapters.targets}
    first = {f"{name}.lora_A.weight": value for name, value in eva.first().items()}
    unsettled = (
        f", in which {len(eva.unsettled)} of {len(eva.by_site)} inputs have not settled" if eva.unsettled else ""
    )
    return ranks, first, (f"--lora-init eva took {batches.seen} micro-batches{unsettled}", *lines_of(ranks))


def lines_of(ranks: RanksByMap) -> Iterator[str]:
    """The ranks of each kind of map, layer by layer: `q_proj: 8 8 12`."""
    kinds: dict[str, list[str]] = {}
    for name, (rank, _) in ranks.items():
        kinds.setdefault(name.rpartition(".")[2], []).append(str(rank))
    yield from (f"Ranks of {kind}: {' '.join(found)}" for kind, found in kinds.items())


def spectrum(gradient: np.ndarray) -> np.ndarray:
    """The squares of the singular values of a gradient (N,K), the largest first, at most MOST_RANK of them."""
    g = gradient.astype(np.float32)
    g = g if len(g) <= g.shape[1] else g.T
    largest = np.abs(g).max(initial=0)
    scaled = g / largest if largest else g  # the square of a small number may be none
    squares = np.linalg.eigvalsh((scaled @ scaled.T).astype(np.float64))
    return np.maximum(squares[::-1][:MOST_RANK], 0) * float(largest) ** 2


def ranks_within(budget: int, costs: Mapping[str, int], spectra: Mapping[str, np.ndarray]) -> dict[str, int]:
    """The rank of each map, of `costs` parameters a rank; all together have at most `budget`. Some have none."""
    ranks = dict.fromkeys(costs, 0)
    order = {name: index for index, name in enumerate(costs)}  # of two that are alike the first one

    def next_of(name: str) -> tuple[float, int, str]:
        return -float(spectra[name][ranks[name]]) / costs[name], order[name], name

    heap = [next_of(name) for name in costs]
    heapq.heapify(heap)
    while heap:
        gain, _, name = heapq.heappop(heap)
        if not gain or costs[name] > budget:
            continue  # no later rank of this map is worth more, or costs less
        ranks[name] += 1
        budget -= costs[name]
        if ranks[name] < len(spectra[name]):
            heapq.heappush(heap, next_of(name))
    return ranks


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
