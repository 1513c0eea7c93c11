"""llmq-generate and transformers' `generate` on one GPU: `python tests/generate_rival.py Qwen2.5-0.5B --tokens 200`.

A preset's random weights, drawn by transformers in bf16, are saved to a folder that both read. Both continue the same
prompt greedily, one sequence, to the same number of tokens. For each it prints milliseconds a step (without the first,
which reads the prompt), the rate at which weights are read, and how many tokens agree before the first that differs: in
bf16 both round, and random weights leave the best two logits close.
"""

from __future__ import annotations

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


class Clock(BaseStreamer):
    """When each token came: reading it waits for the GPU."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """A token, after the prompt."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing more comes."""

    @property
    def step_ms(self) -> float:
        """Without the prompt and the first token."""
        return 1e3 * (self.times[-1] - self.times[1]) / (len(self.times) - 2)


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=[name for name, config in PRESETS.items() if config.vocab_size > max(PROMPT)])
    parser.add_argument("--tokens", type=int, default=200, help="New tokens.")
    parser.add_argument("--folder", help="Where the weights go for a while; by default that of temporary files.")
    parser.add_argument("--compiled", action="store_true", help="transformers' static cache and torch.compile, too.")
    return parser.parse_args()


def theirs(folder: str, tokens: int, compiled: bool) -> Iterator[tuple[str, float, list[int]]]:
    """Name, milliseconds a step and tokens of each way in which transformers generates."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda")
    numbers = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    ways: dict[str, dict[str, Any]] = {"transformers": {}}
    if compiled:
        ways["transformers, static cache, compiled"] = {"cache_implementation": "static"}
    prompt = torch.tensor([PROMPT], device="cuda")
    for name, way in ways.items():
        for _ in range(2):  # the first run compiles, and warms up
            clock = Clock()
            given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
            out = model.generate(**given, **numbers, **way, streamer=clock)
        yield name, clock.step_ms, out[0, len(PROMPT) :].tolist()


def ours(folder: str, tokens: int) -> tuple[float, list[int], int]:
    """Milliseconds a step, tokens, and bytes of weights that a step reads."""
    writer = Writer(GenerateOptions(model=folder, device="cuda", max_tokens=tokens, ignore_end=True))
    for _ in range(2):
        writer.course.steps, writer.course.steps_s = 0, 0.0
        (answer,) = writer.answers([Question({}, tokens=PROMPT)])
    return 1e3 * writer.course.steps_s / writer.course.steps, list(answer.tokens), writer.weight_bytes


def main() -> None:
    """Prints a line for each."""
    options = parsed()
    config: Any = transformers.AutoConfig.for_model(**to_hf(PRESETS[options.model]))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        torch.manual_seed(0)
        with torch.device("cuda"):
            made: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        made.save_pretrained(folder)
        del made
        torch.cuda.empty_cache()
        step_ms, tokens, weight_bytes = ours(folder, options.tokens)
        found = [("llmq-generate", step_ms, tokens), *theirs(folder, options.tokens, options.compiled)]
    versions = f"PyTorch {torch.__version__}, transformers {transformers.__version__}, {torch.cuda.get_device_name()}"
    print(f"{options.model}, bf16, one sequence, {options.tokens} tokens; {versions}")
    for name, ms, new in found:
        same = next((n for n, (one, other) in enumerate(zip(tokens, new, strict=True)) if one != other), len(tokens))
        speed = f"{1e3 / ms:,.1f} tokens/s, {ms:.3f} ms a step, weights read at {weight_bytes / ms / 1e6:,.0f} GB/s"
        print(f"{name}: {speed}; {same} tokens agree")


if __name__ == "__main__":
    main()
