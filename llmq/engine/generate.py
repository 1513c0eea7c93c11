"""Text after a prompt: an engine for a model's weights, and tokens drawn from its logits one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmq.backends import open_backend
from llmq.engine.engine import Engine
from llmq.files.source import ModelSource, initial_parameters
from llmq.model.config import from_folder
from llmq.model.optimizer import Hyperparameters
from llmq.plan.memory import Memory
from llmq.plan.plan import make_plan
from llmq.plan.precision import Precision
from llmq.plan.spec import Spec


def open_engine(
    folder: Path,
    *,
    seq_len: int,
    from_scratch: bool = False,
    seed: int = 0,
    device: str = "cpu",
    precision: Precision | None = None,
) -> Engine:
    """An engine with the weights in `folder`, or with those that `seed` draws for its config.json.

    It reads `seq_len` tokens back, in fp32 without a `precision`. `device` is cpu or cuda. Errors are those of the
    folder's config and weights.
    """
    source = ModelSource(str(folder), from_folder(folder), folder, None, from_scratch, False)
    backend = open_backend(device)
    spec = Spec(source.config, precision or Precision(), Memory(), Hyperparameters(), 1, seq_len)
    plan = make_plan(spec, backend.scratch_bytes)
    engine = Engine(plan, backend)
    engine.load(initial_parameters(source, plan.rows, seed))
    return engine


def complete(
    engine: Engine, prompt: Sequence[int], count: int, *, temperature: float, seed: int, stop: int | None = None
) -> list[int]:
    """At most `count` tokens that follow `prompt`; `stop` ends the text and is left out.

    Token i is drawn with the i-th uniform number of `seed` from softmax(logits / temperature); temperature 0 takes the
    most likely one. The same weights, prompt and seed give the same text.
    """
    tokens, draws = list(prompt), np.random.default_rng(seed).random(count)
    for draw in draws:
        logits = engine.next_logits(np.array(tokens, np.int32)).astype(np.float64)
        if temperature:
            weights = np.cumsum(np.exp((logits - logits.max()) / temperature))
            token = int(np.searchsorted(weights, draw * weights[-1], side="right"))
        else:
            token = int(logits.argmax())
        if token == stop:
            break
        tokens.append(token)
    return tokens[len(prompt) :]
