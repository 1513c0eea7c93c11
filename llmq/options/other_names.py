"""Names of options that other trainers have, and llmq has not: what they are here.

A name that takes the same values is another name of its option, and stands there. Here are those that stand for one of
two values, and those in whose place others are used.
"""

from __future__ import annotations

from typing import Any

STANDS_FOR: dict[str, tuple[str, dict[bool, Any]]] = {
    "bf16": ("model_dtype", {True: "bf16", False: "fp32"}),
    "assistant_only_loss": ("train_on", {True: "assistant", False: "all"}),
}
_NO_LISA = "LISA is no longer there: use --lora-rank 16, or --train-only 'layers.2[0-3],norm' for some of the layers"
_SHARED = "use --zero-level 3, which shares out weights, gradients and states, or 2, which keeps weights whole"
INSTEAD = {
    "bf16": "use --model-dtype bf16 or fp32",
    "assistant_only_loss": "use --train-on assistant or all",
    "fp16": "use --model-dtype bf16, the default: fp16 needs its loss scaled, which llmq does not do yet",
    **dict.fromkeys(("use_lora", "use_peft"), "use --lora-rank 16"),
    **dict.fromkeys(("qlora", "load_in_4bit"), "use --lora-rank 16 --base-dtype nf4"),
    "load_in_8bit": "use --lora-rank 16 --base-dtype int8",
    "fsdp": _SHARED,
    **dict.fromkeys(("deepspeed", "deepspeed_config"), f"{_SHARED}; --offload-optimizer keeps states in host memory"),
    **dict.fromkeys(("nodes", "nnodes"), "start llmq-launch --nnodes {value} on each machine"),
    **dict.fromkeys(("lisa", "lisa_activated_layers", "lisa_interval", "lisa_interval_steps"), _NO_LISA),
    "optim": "use --optimizer adamw or sgd; --opt-m-dtype int8 --opt-v-dtype int8 keeps AdamW's states in 8 bits",
    "report_to": "leave it out; llmq-plot draws the log of a run, and llmq-export-wandb sends it to Weights & Biases",
}
