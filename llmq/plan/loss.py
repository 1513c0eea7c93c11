"""The loss of a run by its name: ours, that of a plug-in, or a function of the caller's, whose gradient is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from llmq.blocks.head import CrossEntropy, LogitsReader
from llmq.blocks.own_loss import OwnLoss
from llmq.errors import UsageError
from llmq.ops.reference.own_loss import OWN_ARRAYS
from llmq.plugins import Table, called, split, table
from llmq.tensor import DTYPES, IGNORED

if TYPE_CHECKING:
    from llmq.options.maths import LossOptions

# A class of LogitsReader, made from the vocabulary's size, the weight of the z-loss and as keywords its own options; or
# a function (xp, logits, targets, own options) of a chunk of M tokens, which returns losses (M,) and the gradient of
# their sum (M,V): `xp` is NumPy or CuPy, logits (M,V) are f32, targets (M,) int32 are -100 where none is trained.
LOSSES: Table[Any] = table("loss", {"cross_entropy": CrossEntropy}, needs=("__call__",))

TOKENS, COLUMNS, STEP, SPREAD = 6, 8, 1e-2, 3.0  # of the check: rows, logits of each, difference, size of logits
OFF_ALL, OFF_OWN = 2e-3, 1e-2  # tolerance: of the largest difference of all, and of the logit's own


@dataclass(frozen=True)
class Loss:
    """A reader of logits by its name in `LOSSES`."""

    name: str = "cross_entropy"

    def reader(self, vocab_size: int, z_loss: float) -> LogitsReader:
        """What reads the model's logits. UsageError."""
        made: LogitsReader = LOSSES.call(self.name, vocab_size, z_loss)
        return made

    def logit_bytes(self, dtype: str) -> int:
        """What a logit in this dtype takes of a chunk's memory."""
        return DTYPES[dtype].itemsize

    def check(self, vocab_size: int) -> None:
        """Nothing: readers are ops, with tests of their own."""


@dataclass(frozen=True)
class FunctionLoss(Loss):
    """A function, with options of its own."""

    function: Any = field(kw_only=True)
    own: Mapping[str, Any] = field(kw_only=True, hash=False)

    def reader(self, vocab_size: int, z_loss: float) -> LogitsReader:
        """What gives it the logits. UsageError for a z-loss."""
        if z_loss:
            raise UsageError(f"--z-loss {z_loss:g} is a term of cross_entropy: leave it out, or add it to {self.name}")
        return OwnLoss(self.of_chunk, vocab_size)

    def logit_bytes(self, dtype: str) -> int:
        """With what the function is taken to need, in f32."""
        return super().logit_bytes(dtype) + OWN_ARRAYS * DTYPES["fp32"].itemsize

    def of_chunk(self, xp: Any, logits: Any, targets: Any) -> tuple[Any, Any]:
        """Losses (M,) and d_logits (M,V), both 0 where a target is ignored. UsageError for what has other shapes."""
        found = called(f"loss {self.name}", self.function, xp, logits, targets, **self.own)
        several = found if isinstance(found, (tuple, list)) else (found,)
        shapes = [getattr(one, "shape", type(one).__name__) for one in several]
        if shapes != [targets.shape, logits.shape]:
            said = f"--loss {self.name} returned {', '.join(map(str, shapes))}"
            raise UsageError(f"{said}: return arrays (losses, d_logits) of shapes {targets.shape} and {logits.shape}")
        is_trained = targets != IGNORED
        return xp.where(is_trained, found[0], 0), xp.where(is_trained[:, None], found[1], 0)

    def check(self, vocab_size: int) -> None:
        """Compares the gradient with finite differences of the losses, in f64 at random logits: of each token at its
        target, at the largest logits and at some others. UsageError names the worst place."""
        draw = np.random.default_rng(0)
        x = SPREAD * draw.standard_normal((TOKENS, vocab_size))
        targets = draw.integers(0, vocab_size, TOKENS).astype(np.int32)
        targets[-1] = IGNORED
        others = draw.integers(0, vocab_size, (TOKENS, COLUMNS // 2))
        columns = np.column_stack([np.maximum(targets, 0), np.argsort(x)[:, : -COLUMNS // 2 : -1], others])
        losses, gradient = self.of_chunk(np, x.copy(), targets.copy())
        if not (np.isfinite(losses).all() and np.isfinite(gradient).all()):
            raise UsageError(f"--loss {self.name} is not finite at random logits of size {SPREAD:g}: losses {losses}")
        rows, slopes = np.arange(TOKENS), []
        for column in columns.T:  # one logit of every token at once: the loss of each is a function of its own alone
            ends = []
            for way in (STEP, -STEP):
                moved = x.copy()
                moved[rows, column] += way
                ends.append(self.of_chunk(np, moved, targets.copy())[0])
            slopes.append((ends[0] - ends[1]) / (2 * STEP))
        found, claimed = np.array(slopes).T, np.take_along_axis(gradient, columns, axis=1)
        allowed = OFF_ALL * np.abs(found).max() + OFF_OWN * np.abs(found) + 1e-9
        off = np.abs(claimed - found) / allowed
        if off.max() <= 1:
            return
        row, at = np.unravel_index(np.argmax(off), off.shape)
        raise UsageError(
            f"--loss {self.name} has another gradient than its losses: at token {row} with target {targets[row]}, "
            f"d_logits of logit {columns[row, at]} is {claimed[row, at]:.6g}, and finite differences are "
            f"{found[row, at]:.6g} (within {allowed[row, at]:.2g}): return the gradient of the sum of the losses, each "
            "of which follows from its own token's logits"
        )


CROSS_ENTROPY = Loss()


def resolve(options: LossOptions) -> Loss:
    """What the option names. PluginError."""
    name, own = split(options.loss)
    found = LOSSES[name]
    is_reader = isinstance(found, type) and issubclass(found, LogitsReader)
    return Loss(options.loss) if is_reader else FunctionLoss(options.loss, function=found, own=own)
