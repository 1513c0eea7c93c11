"""PEFT's LoRA with Liger's kernels, to stand beside llmq-bench: `python tests/adapter_rival.py Qwen2.5-7B --base nf4`.

A preset's random weights on one GPU in bf16, or with the layers' linear maps in bitsandbytes' nf4 with double
quantization, and LoRA of rank 16 on all of these; Liger's fused kernels; attention by PyTorch's flash kernels; AdamW,
fused. It prints tokens per second of forward, backward and an update every few micro-batches, and the most memory that
PyTorch had reserved. Needs peft, liger-kernel and, for nf4, bitsandbytes.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import liger_kernel
import peft
import torch
import transformers
from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_qwen2

from llmq.model.config import to_hf
from llmq.model.presets import PRESETS

LIGER = {"qwen2": apply_liger_kernel_to_qwen2, "llama": apply_liger_kernel_to_llama}


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=list(PRESETS))
    parser.add_argument("--base", choices=("bf16", "nf4"), default="bf16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, default=4, help="In a step.")
    parser.add_argument("--steps", type=int, default=2, help="After one of warm-up.")
    parser.add_argument("--checkpointing", action="store_true", help="Gradient checkpointing.")
    return parser.parse_args()


def in_nf4(model: Any) -> None:
    """The layers' linear maps in bitsandbytes' nf4, one at a time."""
    import bitsandbytes as bnb

    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, own in list(part.named_children()):
                if not isinstance(own, torch.nn.Linear):
                    continue
                about = {"bias": own.bias is not None, "compute_dtype": torch.bfloat16, "quant_type": "nf4"}
                held = bnb.nn.Linear4bit(own.in_features, own.out_features, device="meta", **about)
                weight = bnb.nn.Params4bit(own.weight.data.cpu(), requires_grad=False, quant_type="nf4")
                held.weight, held.bias = weight.to("cuda"), own.bias
                setattr(part, name, held)


def made(options: argparse.Namespace) -> Any:
    """The model with its adapters."""
    config: Any = transformers.AutoConfig.for_model(**to_hf(PRESETS[options.model]))
    config.use_cache = False
    LIGER[config.model_type]()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if options.base == "nf4":
        in_nf4(model)
        torch.cuda.empty_cache()
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    about: Any = {"r": options.rank, "lora_alpha": 2 * options.rank, "target_modules": names, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(model, peft.LoraConfig(**about))
    if options.checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


def main() -> None:
    """Prints a line."""
    options = parsed()
    model = made(options)
    torch.cuda.reset_peak_memory_stats()
    update = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    shape = (options.batch_size, options.seq_len)
    tokens = torch.randint(0, 1000, shape, device="cuda")

    def step() -> None:
        for _ in range(options.micro_batches):
            model(input_ids=tokens, labels=tokens).loss.backward()
        update.step()
        update.zero_grad()
        torch.cuda.synchronize()

    step()
    begin = time.perf_counter()
    for _ in range(options.steps):
        step()
    took = time.perf_counter() - begin
    rate = options.steps * options.micro_batches * tokens.numel() / took
    versions = f"PyTorch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}"
    print(f"{options}\n{versions}, Liger {getattr(liger_kernel, '__version__', '')}, {torch.cuda.get_device_name()}")
    print(f"{rate:,.0f} tokens/s, {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
