"""What callbacks ask of a run that all of its ranks carry out: the loss on data, a parameter, text.

Callbacks run on the first rank. While they do, the others wait for what these ask (`serve`), do their part of it, and
wait again, until the first rank says that it is done. What is asked is checked before the others hear of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmq.data.batches.batch import Batch
from llmq.data.batches.loader import eval_batches
from llmq.data.batches.named_data import open_beside
from llmq.data.rows.given import called, placed_beside
from llmq.engine.engine import Engine
from llmq.engine.generate import check_prompts
from llmq.errors import UsageError
from llmq.generation.prompts import Answer, questions_of
from llmq.training.evaluation import sums_of
from llmq.training.ready import Ready

DONE = "done"  # ends a moment


def ask(run: Ready, engine: Engine, what: str, *about: Any, own: Any = None) -> Any:
    """What a request comes to, on the first rank; `about` is what JSON has, `own` what this rank alone has of it."""
    with run.ranks.long(f"what a callback asks: {what}"):
        run.ranks.agreed((what, about))
        return WORK[what](run, engine, own, *about)


def end(run: Ready, told: Sequence[Any]) -> None:
    """Ends what the others serve, which has `told` as its result."""
    run.ranks.agreed((DONE, told))


def serve(run: Ready, engine: Callable[[], Engine]) -> Any:
    """Carries out what the first rank asks until it ends that; what it tells then."""
    while True:
        what, about = run.ranks.agreed(("", ()))
        if what == DONE:
            return about
        WORK[what](run, engine(), None, *about)


def batches_of(run: Ready, data: Any) -> tuple[int, Iterable[Batch]]:
    """Data as `Trainer.train(train=...)` takes it, as a number of batches, whose rows lie as the run's. UsageError and
    DataError, which call it `data`."""
    name, is_tokens = placed_beside("data", data)
    files = [name]
    if not is_tokens:
        room, log = run.data.tokens_per_row, run.log
        with called({} if isinstance(data, str | os.PathLike) else {"data": name}):
            files = open_beside(name, run.asked.source, run.source, room, say=log.say, task=log.task)
    rows, size = run.data.beside("data", files), run.data.batch_size
    batches = eval_batches(rows, size)
    return -(-rows.num_windows // size), batches if run.ranks.size == 1 else list(batches)


def _from_first(run: Ready, batches: Iterable[Batch] | None) -> Iterable[Batch]:
    """The batches that the first rank has, on all ranks."""
    if run.ranks.size == 1:
        return batches or ()
    names = ("tokens", "targets") if run.data.limits is None else ("tokens", "targets", "borders")
    found = (
        run.ranks.agreed_array(None if batches is None else np.stack([getattr(batch, name) for batch in batches]))
        for name in names
    )
    rows = (Batch(*arrays) for arrays in zip(*found, strict=True))
    return [replace(batch, num_virtual=run.data.train.num_virtual) for batch in rows]


def _loss(run: Ready, engine: Engine, own: Iterable[Batch] | None, count: int | None) -> float:
    """The loss on `count` batches that the first rank has, or on the held-out data; NaN without trained tokens."""
    if count is None:
        count, batches = run.data.held_out(run.log.eval_steps(last=False))
    else:
        batches = iter(_from_first(run, own))
    with run.log.task("Evaluating") as report:
        found = sums_of(engine, run.ranks.world, count, batches, report=report)
    assert found is not None, "nothing stops it"
    sums, _ = found
    return sums.mean_loss if sums.tokens else math.nan


def _parameter(run: Ready, engine: Engine, own: None, name: str) -> np.ndarray:
    """A whole parameter, padded, by the name of its row."""
    return engine.parameter(name)


def prompts_of(run: Ready, asked: object, max_tokens: int, stop: Sequence[str], samples: int) -> list[list[int]]:
    """Questions of a Python caller as tokens. UsageError for what the run has no room for, and wrong settings."""
    if (written := run.samples) is None:
        raise UsageError(
            "run.generate() needs a cache of keys and values in the plan of the run: add --sample-length N "
            "(sample_length=N), the most tokens of a prompt and its answer"
        )
    if max_tokens < 1:
        raise UsageError(f"run.generate(max_tokens={max_tokens}): use 1 or more")
    if samples < 1 or (samples > 1 and not written.temperature):
        raise UsageError(
            f"run.generate(samples={samples}): use 1; or more in a run with a --sample-temperature above 0, without "
            "which they would be the same"
        )
    if not all(isinstance(text, str) and text for text in stop):
        raise UsageError(f"run.generate(stop={stop!r}): give a text, or a list of them")
    written.reader.stops(stop)  # which takes a tokenizer
    prompts = [list(written.reader.tokens(question)) for question in questions_of(asked)]
    room = "that the plan has room for: use fewer, or a larger --sample-length"
    check_prompts(prompts, max_tokens, written.length, f"max_tokens={max_tokens}", room, where="run.generate(): ")
    return prompts


def _texts(run: Ready, engine: Engine, own: None, prompts: list[list[int]], *about: Any) -> list[Answer]:
    """Answers to prompts, which each rank writes for itself."""
    assert run.samples is not None
    with run.log.task("Completing prompts") as report:
        return run.samples.answers(engine, prompts, *about, report=report)


WORK: Mapping[str, Callable[..., Any]] = {"loss": _loss, "parameter": _parameter, "texts": _texts}
