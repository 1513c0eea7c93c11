"""`--lora-rank auto`: ranks by the spectra of the first gradients, within a budget of parameters.

An adapter of rank R follows at best the R largest singular values of its map's gradient (Wang et al., "LoRA-GA:
Low-Rank Adaptation with Gradient Approximation", 2024), and to first order their squares are what a small step along
them takes off the loss. Each rank of a map with N outputs and K inputs costs N + K parameters. Within a map later ranks
bring less, so that taking the best share of the loss per parameter, one rank after the other, is as good as any choice
up to the last rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import numpy as np

MOST_RANK = 256  # of any map


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
