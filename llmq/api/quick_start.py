"""`llmq.quick_start`: a strategy by name, made into options that are printed, and a run."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmq.api.config import Config
from llmq.api.trainer import Trainer, named_data
from llmq.errors import MemoryLimitError, UsageError
from llmq.hardware import device
from llmq.training.callbacks import Callback, RunFunction
from llmq.training.records import TrainResult

STRATEGIES: dict[str, dict[str, Any]] = {
    "standard": {},
    "ddp": {"zero_level": 0},
    "zero1": {"zero_level": 1},
    "zero2": {"zero_level": 2},
    "zero3": {"zero_level": 3},
    "offload": {"offload_optimizer": True, "recompute_block": True},
    "lora": {"lora_rank": 16},
    "qlora": {"lora_rank": 16, "base_dtype": "nf4"},
    "hybrid": {"offload_optimizer": True, "zero_level": 3},
}
AUTO = ("standard", "lora", "qlora")  # the first that fits, with --fit


def quick_start(
    model: str,
    strategy: str = "auto",
    num_gpus: int | None = None,
    data: Any = None,
    val: Any = None,
    callbacks: Sequence[Callback | RunFunction] = (),
    **options: Any,
) -> TrainResult:
    """Trains `model` on `data` by a strategy, whose options are printed; `options` go before them.

    auto: all weights, else LoRA, else LoRA on 4 bits, whichever fits first, on a known card with batch and recomputing
    by --fit.
    standard: all weights on each GPU. ddp, zero1, zero2, zero3: what GPUs share: nothing, states, gradients, weights.
    offload: optimizer states on the host, activations recomputed. hybrid: states on the host, the rest shared. lora,
    qlora: LoRA of rank 16, on 4 bits.

    `num_gpus` is 0 for all that CUDA sees (None: all, or the CPU without any). `data` is what `Trainer.train` takes.
    UsageError for a strategy that is none; MemoryLimitError where not even LoRA on 4 bits fits.
    """
    if strategy not in ("auto", *STRATEGIES):
        raise UsageError(f"strategy is {strategy!r}: give auto, {', '.join(STRATEGIES)}")
    base = Config(model=model, **options)
    where = device.pick(base.options.get("device", "auto"))
    found = {"gpus": num_gpus if num_gpus is not None else 0 if where.kind == "cuda" else 1}
    if strategy == "auto" and where.card is not None:
        found["fit"] = True
    configs = list(_configs(strategy, base, found))
    with named_data(configs[0], data, val) as named:  # once, as an iterator is read once
        for number, config in enumerate(configs, 1):
            trainer = Trainer(config, **named)
            if number < len(configs):
                try:
                    trainer.plan(console=io.StringIO())
                except MemoryLimitError:
                    continue
            print(f"Strategy {strategy}:", config.explain(only_changes=True), sep="\n")
            return trainer.train(callbacks=callbacks)
    raise AssertionError("the last strategy is tried whether it fits or not")


def _configs(strategy: str, base: Config, found: Mapping[str, Any]) -> Iterator[Config]:
    """What to try, in order; what was asked for goes before what a strategy sets."""
    for name in AUTO if strategy == "auto" else (strategy,):
        yield Config(**STRATEGIES[name], **found).replace(**base.options)
