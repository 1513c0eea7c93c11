"""`score` of a loaded model beside a run's evaluation, in one process: random weights in bf16, rows of one length.

    python tests/reading_speed.py Qwen2.5-7B                     a preset, or a folder with a config.json
    python tests/reading_speed.py FOLDER --device cpu --batch-size 2 --seq-len 64

The run trains the last norm alone, so that evaluation has the whole model and nothing else. Both get the same batches
from the host; then `score` gets all of them in one call, from the host and from the GPU. It prints tokens per second,
the best of some rounds in turn, and by how much the two losses differ.
"""

import argparse
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np

from llmq.adapters.part import PartOfModel
from llmq.api.load import LoadedModel
from llmq.backends.opening import open_backend
from llmq.data.batches.batch import Batch
from llmq.engine.engine import Engine
from llmq.generation.weights import ModelWeights
from llmq.hardware import device
from llmq.model.optimizer import Hyperparameters
from llmq.model.parameters import padded_vocab
from llmq.plan.memory import Memory, fewest_chunks
from llmq.plan.plan import make_plan
from llmq.plan.precision import Precision
from llmq.plan.spec import Spec

ROUNDS = 5


def engine_of(weights: ModelWeights, kind: str, dtype: str, batch_size: int, seq_len: int) -> Engine:
    """An engine of training with these weights, whose logits are cut as those of a run."""
    config, tokens = weights.config, batch_size * seq_len
    logit_bytes = padded_vocab(config) * (2 if dtype == "bf16" else 4)
    gpu_bytes = device.memory_bytes(device.pick(kind))[0] if kind == "cuda" else 0
    memory = Memory(head_chunks=fewest_chunks(tokens, logit_bytes, gpu_bytes))
    precision = Precision(dtype, dtype, m=dtype, v=dtype, master=dtype, grad=dtype)
    about = (config, precision, memory, Hyperparameters(), batch_size, seq_len)
    backend = open_backend(kind)
    plan = make_plan(Spec(*about, adapters=PartOfModel.named("model.norm", config)), backend.scratch_bytes)
    engine = Engine(plan, backend)
    engine.load(weights.values()(plan.rows))
    return engine


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batches", type=int, default=6)
    asked = parser.parse_args()
    dtype, shape = "bf16" if asked.device == "cuda" else "fp32", (asked.batch_size, asked.seq_len)
    weights = ModelWeights.find(asked.model, from_scratch=True)
    engine = engine_of(weights, asked.device, dtype, *shape)
    model = LoadedModel(weights, dtype, asked.device, *shape)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, weights.config.vocab_size, (asked.batches * shape[0], shape[1] + 1)).astype(np.int32)
    parts = np.split(ids, asked.batches)
    tokens, targets = (np.ascontiguousarray(part) for part in (ids[:, :-1], ids[:, 1:]))
    cases: dict[str, Callable[[], float]] = {
        "evaluate": lambda: sum(engine.evaluate(Batch(part[:, :-1], part[:, 1:]))[0] for part in parts),
        "score, a batch a call": lambda: -sum(float(model.score(p[:, :-1], p[:, 1:]).sum()) for p in parts),
        "score, one call": lambda: -float(model.score(tokens, targets).sum()),
    }
    if asked.device == "cuda":
        on_gpu = [import_module("cupy").asarray(part) for part in (tokens, targets)]
        cases["score, one call, ids on the GPU"] = lambda: -float(model.score(*on_gpu).sum())
    best, losses = dict.fromkeys(cases, float("inf")), dict.fromkeys(cases, 0.0)
    for number in range(ROUNDS + 1):  # the first compiles and captures
        for name, run in cases.items():
            began = time.perf_counter()
            losses[name] = run() / targets.size
            best[name] = min(best[name], time.perf_counter() - began) if number else best[name]
    print(f"{Path(asked.model).name}, {dtype}, {shape[0]} x {shape[1]}, {asked.batches} batches")
    for name, seconds in best.items():
        ratio, off = best["evaluate"] / seconds, abs(losses[name] - losses["evaluate"])
        print(f"{name:32} {targets.size / seconds:>10,.0f} tokens/s  {ratio:.3f} of evaluate  loss {off:.1e} apart")


if __name__ == "__main__":
    main()
