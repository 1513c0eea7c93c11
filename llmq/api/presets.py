"""Configurations to begin with; options of one's own go with them, and before theirs."""

from __future__ import annotations

from typing import Any

from llmq.api.config import Config


def full(**options: Any) -> Config:
    """All weights are trained, in bf16."""
    return Config(**options)


def lora(**options: Any) -> Config:
    """LoRA of rank 16 on all linear maps of a frozen model."""
    return Config(lora_rank=16).replace(**options)


def qlora(**options: Any) -> Config:
    """LoRA of rank 16 on a model held in 4 bits (NF4)."""
    return Config(lora_rank=16, base_dtype="nf4").replace(**options)


def fp8(**options: Any) -> Config:
    """All weights are trained, with matrix products in fp8, which takes an H100, an RTX 40 card, or a newer one."""
    return Config(matmul_dtype="e4m3").replace(**options)


def tiny(**options: Any) -> Config:
    """A model of 50 million parameters from random weights, in short rows: minutes on a CPU."""
    about = {"model": "tiny_llama3_50m", "from_scratch": True, "seq_len": 128, "batch_size": 4, "grad_accumulation": 1}
    return Config(**about, steps=50, eval_num_steps=4).replace(**options)
