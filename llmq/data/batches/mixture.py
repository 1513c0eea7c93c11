"""Several sources of samples in one sequence, each with its share of the tokens.

Which source has which place is the chairman assignment problem: after any number of places, each source shall have had
its share of them, give or take less than one. Tijdeman's rule does that: of the sources that are behind enough, the one
goes next that would be late first ("The chairman assignment problem", Discrete Mathematics 32, 1980). The rule goes
place by place; but shares of whole numbers a_i / P repeat after P places, so a table of one period says in O(1) which
source has any place, and how often it had one before. The k-th time takes place k of the source's own sequence, which
goes through its samples in permuted epochs, as a source alone would.

Drawing each place's source at random was refused: after n places the counts would be off by about sqrt(n).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from llmq.data.batches.rows import Rows, Samples, mixed
from llmq.data.tokens.tokenizer import TemplateNote
from llmq.errors import DataError, UsageError

LARGEST_PERIOD = 1 << 17  # places: a table of 1 MiB, made in about 0.1 s


@dataclass(frozen=True)
class Share:
    """What a source gives to the first n samples of a mixture."""

    name: str
    weight: float  # as given
    samples: int
    share: float  # of the n samples, and so of their tokens: all samples have seq_len of them
    epochs: float  # passes over the source


class Mixture(Samples):
    """Samples of several sources, numbered through; `order` says which of them is at a place.

    An epoch of the mixture is as many samples as all sources have; how often each source is seen in it is its weight's
    business.
    """

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float], names: Sequence[str]) -> None:
        """Raises UsageError if a weight is not above 0 or the weights take too long to repeat, DataError if a source
        has no sample."""
        assert len(sources) == len(weights) > 0
        super().__init__(sources[0].form, [file for source in sources for file in source.token_files])
        self.sources, self.weights, self.names = tuple(sources), tuple(weights), tuple(names)
        self.parts = whole_parts(weights)
        self.period = sum(self.parts)
        empty = [name for name, source in zip(self.names, sources, strict=True) if not source.num_windows]
        if empty:
            raise DataError(
                f"{', '.join(empty)}: no sample of seq_len {self.seq_len}: lower seq_len, or give more data there"
            )
        self._starts = np.cumsum([0, *(source.num_windows for source in sources)])
        self.num_windows = int(self._starts[-1])
        if any(source.limits for source in sources):
            # A row of a source without borders is one document here.
            docs, longest = zip(*(source.limits or (1, self.seq_len) for source in sources), strict=True)
            self.limits = max(docs), max(longest)
        self._source = assignment(self.parts)  # (period,): which source has each place
        self._count = np.empty(self.period, np.int64)  # (period,): how often it stood at places before
        for n, part in enumerate(self.parts):
            self._count[self._source == n] = np.arange(part)

    def facts(self) -> dict[str, str]:
        """Those of each source."""
        each = zip(self.names, self.sources, strict=True)
        return {f"{name}: {what}": value for name, source in each for what, value in source.facts().items()}

    def order(self, places: np.ndarray, seed: int) -> np.ndarray:
        """Which sample (n,) int64 is at each of `places` (n,) of the mixture's endless sequence."""
        periods, at = np.divmod(np.asarray(places, np.int64), self.period)
        which, counts = self._source[at], self._count[at]
        samples = np.empty(len(at), np.int64)
        for n, source in enumerate(self.sources):
            mine = which == n
            draws = periods[mine] * self.parts[n] + counts[mine]
            samples[mine] = self._starts[n] + source.order(draws, mixed(seed, n))
        return samples

    def read(self, samples: np.ndarray) -> Rows:
        """The samples with the numbers `samples` (n,), counted through the sources in their order."""
        samples = np.asarray(samples, np.int64)
        which = np.searchsorted(self._starts, samples, side="right") - 1
        whole = Rows.empty(len(samples), self.seq_len, self.limits[0] if self.limits else None)
        for n, source in enumerate(self.sources):
            (mine,) = np.nonzero(which == n)
            if mine.size:
                whole.put(mine, source.read(samples[mine] - self._starts[n]))
        return whole

    def shares(self, num_samples: int) -> list[Share]:
        """What each source gives to the first `num_samples` samples."""
        periods, rest = divmod(num_samples, self.period)
        more = np.bincount(self._source[:rest], minlength=len(self.sources)).tolist()
        counts = [periods * part + one for part, one in zip(self.parts, more, strict=True)]
        each = zip(self.names, self.weights, counts, self.sources, strict=True)
        total = max(num_samples, 1)
        return [Share(name, weight, n, n / total, n / source.num_windows) for name, weight, n, source in each]

    def templates(self) -> list[tuple[TemplateNote, float]]:
        """Those of each source, by the weights, whatever there is of it."""
        each = zip(self.sources, self.parts, strict=True)
        return [(note, share * part / self.period) for source, part in each for note, share in source.templates()]

    def identity(self) -> list[list[int]]:
        """What decides, beside the samples themselves, what is read at a place; for checkpoints."""
        return [[source.num_windows, part] for source, part in zip(self.sources, self.parts, strict=True)]


def whole_parts(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the ratio of `weights`, as small as can be: (3, 7) for 0.3 and 0.7.

    Weights are taken as they are written: 0.1 is a tenth, not the nearest binary fraction.
    """
    bad = [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]
    if bad:
        raise UsageError(f"the weight {bad[0]} is not a number above 0: leave a source out to give it no share")
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    scaled = [int(weight * scale) for weight in exact]
    common = math.gcd(*scaled)
    parts = tuple(weight // common for weight in scaled)
    if sum(parts) > LARGEST_PERIOD:
        raise UsageError(
            f"the weights {', '.join(f'{weight:g}' for weight in weights)} are exact only every {sum(parts)} samples, "
            f"but at most {LARGEST_PERIOD} are planned for: give weights with fewer digits"
        )
    return parts


def assignment(parts: Sequence[int]) -> np.ndarray:
    """Which source (period,) int64 has each place of a period, the sum of all parts, by Tijdeman's rule.

    After n places source i has had between n * parts[i] / period - 1 and + 1 of them, bounds excluded.
    """
    period, scale = sum(parts), max(2 * len(parts) - 2, 1)
    behind = [0] * len(parts)  # times period: share of the places so far, less the places had
    chosen = np.empty(period, np.int64)
    for place in range(period):
        best, best_slack, best_part = -1, 0, 1
        for n, part in enumerate(parts):
            behind[n] += part
            # Places until the source would be late are slack / part; compared without dividing, so exactly.
            slack = (scale - 1) * period - scale * behind[n]
            if scale * behind[n] >= period and (best < 0 or slack * best_part < best_slack * part):
                best, best_slack, best_part = n, slack, part
        assert best >= 0  # that there is always one is the theorem
        behind[best] -= period
        chosen[place] = best
    return chosen
