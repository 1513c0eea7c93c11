"""Other programs on one GPU, to stand beside ours: a preset's random weights in bf16, drawn by transformers.

    python tests/rivals.py lora Qwen2.5-7B --base nf4          PEFT with Liger's kernels, beside llmq-bench
    python tests/rivals.py generate Qwen2.5-0.5B --tokens 200  transformers' `generate`, beside llmq-generate

LoRA of rank 16 is on all linear maps of the layers, which are in bf16 or in bitsandbytes' nf4 with double quantization;
Liger's fused kernels; attention by PyTorch's flash kernels; AdamW, fused. It prints tokens per second of forward,
backward and an update every few micro-batches, and the most memory that PyTorch had reserved.

Generation continues the same prompt greedily, one sequence, to the same number of tokens. For each it prints
milliseconds a step (without the first, which reads the prompt), the rate at which weights are read, and how many tokens
agree before the first that differs: in bf16 both round, and random weights leave the best two logits close.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from llmq.generation.prompts import Question
from llmq.generation.text import Writer
from llmq.model.config import to_hf
from llmq.model.presets import PRESETS
from llmq.options.commands import GenerateOptions

PROMPT = (785, 6722, 315, 9625, 374)  # The capital of France is, in Qwen2.5's tokens
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def made(model: str) -> Any:
    """A preset with random weights."""
    config: Any = transformers.AutoConfig.for_model(**to_hf(PRESETS[model]))
    torch.manual_seed(0)
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def in_nf4(model: Any) -> None:
    """The layers' linear maps in bitsandbytes' nf4, one at a time."""
    import bitsandbytes as bnb

    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, own in [(n, m) for n, m in part.named_children() if isinstance(m, torch.nn.Linear)]:
                about = {"bias": own.bias is not None, "compute_dtype": torch.bfloat16, "quant_type": "nf4"}
                held = bnb.nn.Linear4bit(own.in_features, own.out_features, device="meta", **about)
                weight = bnb.nn.Params4bit(own.weight.data.cpu(), requires_grad=False, quant_type="nf4")
                held.weight, held.bias = weight.to("cuda"), own.bias
                setattr(part, name, held)
    torch.cuda.empty_cache()


def lora(options: argparse.Namespace) -> None:
    """Prints the speed and the memory of PEFT."""
    import peft
    from liger_kernel import transformers as liger

    {"qwen2": liger.apply_liger_kernel_to_qwen2, "llama": liger.apply_liger_kernel_to_llama}[
        to_hf(PRESETS[options.model])["model_type"]
    ]()
    model = made(options.model)
    model.config.use_cache = False
    if options.base == "nf4":
        in_nf4(model)
    about: Any = {"r": options.rank, "lora_alpha": 2 * options.rank, "target_modules": NAMES, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(model, peft.LoraConfig(**about))
    if options.checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    torch.cuda.reset_peak_memory_stats()
    update = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    tokens = torch.randint(0, 1000, (options.batch_size, options.seq_len), device="cuda")
    begin = 0.0
    for step in range(options.steps + 1):
        for _ in range(options.micro_batches):
            model(input_ids=tokens, labels=tokens).loss.backward()
        update.step()
        update.zero_grad()
        torch.cuda.synchronize()
        begin = begin if step else time.perf_counter()  # after one of warm-up
    rate = options.steps * options.micro_batches * tokens.numel() / (time.perf_counter() - begin)
    print(f"peft {peft.__version__}: {rate:,.0f} tokens/s, {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB")


class Clock(BaseStreamer):
    """When each token came: reading it waits for the GPU."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """A token, after the prompt."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing more comes."""


def theirs(folder: str, tokens: int, compiled: bool) -> Iterator[tuple[str, float, list[int]]]:
    """Name, milliseconds a step and tokens of each way in which transformers generates."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda")
    numbers = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    prompt = torch.tensor([PROMPT], device="cuda")
    given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), **numbers}
    for name, way in {
        "transformers": {},
        **({"compiled": {"cache_implementation": "static"}} if compiled else {}),
    }.items():
        for _ in range(2):  # the first run compiles, and warms up
            clock = Clock()
            out = model.generate(**given, **way, streamer=clock)
        yield name, 1e3 * (clock.times[-1] - clock.times[1]) / (tokens - 1), out[0, len(PROMPT) :].tolist()


def generation(options: argparse.Namespace) -> None:
    """Prints a line for each way to generate."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        made(options.model).save_pretrained(folder)
        torch.cuda.empty_cache()
        writer = Writer(GenerateOptions(model=folder, device="cuda", max_tokens=options.tokens, ignore_end=True))
        for _ in range(2):
            writer.course.steps, writer.course.steps_s = 0, 0.0
            (answer,) = writer.answers([Question({}, tokens=PROMPT)])
        ours = ("llmq-generate", 1e3 * writer.course.steps_s / writer.course.steps, list(answer.tokens))
        for name, ms, new in [ours, *theirs(folder, options.tokens, options.compiled)]:
            same = next((n for n, pair in enumerate(zip(ours[2], new, strict=True)) if pair[0] != pair[1]), len(new))
            speed = f"{1e3 / ms:,.1f} tokens/s, weights read at {writer.weight_bytes / ms / 1e6:,.0f} GB/s"
            print(f"{name}: {ms:.3f} ms a step, {speed}; {same} tokens agree")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("lora", "generate"))
    parser.add_argument("model", choices=list(PRESETS))
    parser.add_argument("--base", choices=("bf16", "nf4"), default="bf16")
    for name, number in {"rank": 16, "batch-size": 16, "seq-len": 1024, "micro-batches": 4, "steps": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--checkpointing", action="store_true", help="Gradient checkpointing.")
    parser.add_argument("--tokens", type=int, default=200, help="New tokens.")
    parser.add_argument("--folder", help="Where the weights go for a while; by default that of temporary files.")
    parser.add_argument("--compiled", action="store_true", help="transformers' static cache and torch.compile, too.")
    parsed = parser.parse_args()
    print(f"{parsed}\nPyTorch {torch.__version__}, transformers {transformers.__version__}")
    (lora if parsed.what == "lora" else generation)(parsed)
