"""`llmq.quick_start`: a strategy by name, made into options that are printed, and a run."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from llmq.api import presets
from llmq.api.config import Config
from llmq.api.trainer import Trainer, named_data
from llmq.errors import MemoryLimitError, UsageError, nearest
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
    "lora": {**presets.lora().options},
    "qlora": {**presets.qlora().options},
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
        raise UsageError(f"strategy is {strategy!r}: give auto, {', '.join(STRATEGIES)}{nearest(strategy, STRATEGIES)}")
    base = Config(model=model, **options)
    where = device.pick(base.options.get("device", "auto"))
    found = {"gpus": num_gpus if num_gpus is not None else 0 if where.kind == "cuda" else 1}
    if strategy == "auto" and where.card is not None:
        found["fit"] = True
    names = AUTO if strategy == "auto" else (strategy,)
    configs = [Config(**STRATEGIES[name], **found).replace(**base.options) for name in names]
    with named_data(configs[0], data, val) as named:  # once, as an iterator is read once
        for config in configs[:-1]:
            with suppress(MemoryLimitError):
                Trainer(config, **named).plan(console=io.StringIO())
                break
        else:
            config = configs[-1]  # whether it fits or not
        print(f"Strategy {strategy}:", config.explain(only_changes=True), sep="\n")
        return Trainer(config, **named).train(callbacks=callbacks)
