"""Hugging Face's Trainer on one GPU: plain transformers, Liger's kernels, and `llmq.torch.patch_model`.

    python tests/rivals_in_torch.py Qwen2.5-0.5B
    python tests/rivals_in_torch.py Qwen2.5-7B --lora
    python tests/rivals_in_torch.py Qwen2.5-7B --optimizer sgd --ways liger llmq e4m3
    python tests/rivals_in_torch.py Qwen2.5-0.5B --accuracy

A preset's random weights in bf16 train on random tokens under autocast, each way in a process of its own, one after the
other. It prints tokens per second of the median step after the warm-up, the most memory that PyTorch had allocated and
reserved, and the first and the last loss, and then each way beside Liger. LoRA is PEFT's, of rank 16 on all linear maps
of the layers.

`--accuracy` prints how far losses of batches of 64 tokens in bf16 are from those in f64, which transformers computes:
the root mean square of the errors, plain and patched.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch
import transformers
from rivals import NAMES, made

from llmq.model.presets import PRESETS

WAYS = ("transformers", "liger", "llmq", "e4m3")
RESULT = "result: "


def patched(model: Any, way: str) -> None:
    """Puts the kernels of one way into a model."""
    if way == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model.get_base_model() if hasattr(model, "get_base_model") else model)
    elif way != "transformers":
        from llmq.torch import patch_model

        print(patch_model(model, linear="e4m3" if way == "e4m3" else "bf16"), flush=True)


class Tokens(torch.utils.data.Dataset):
    """Random rows."""

    def __init__(self, rows: int, length: int) -> None:
        self.rows = torch.randint(0, 1000, (rows, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[row], "labels": self.rows[row]}


class Clock(transformers.TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Waits for the GPU."""
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def train(options: argparse.Namespace, way: str) -> dict[str, Any]:
    """Trains in this process: what is printed of it."""
    model = made(options.model)
    model.config.use_cache = False
    if options.lora:
        import peft

        about: Any = {"r": options.rank, "lora_alpha": 2 * options.rank, "target_modules": NAMES}
        model = peft.get_peft_model(model, peft.LoraConfig(**about, task_type="CAUSAL_LM"))
        if options.checkpointing:
            model.enable_input_require_grads()
    patched(model, way)
    clock = Clock()
    rows = options.batch_size * options.accumulation
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            gradient_accumulation_steps=options.accumulation,
            gradient_checkpointing=options.checkpointing,
            bf16=not options.pure,
            optim=options.optimizer,
            learning_rate=1e-5,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        data = Tokens(rows * options.steps, options.seq_len)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[clock])
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
    took = [after - before for before, after in pairwise(clock.times[options.warm_up :])]
    if options.profile:
        profile(trainer, options.profile)
    return {
        "tokens_per_second": rows * options.seq_len / statistics.median(took),
        "fastest": rows * options.seq_len / min(took),
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "losses": [round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry][
            :: options.steps - 1
        ],
    }


def profile(trainer: Any, lines: int) -> None:
    """Prints where the time of a forward and backward goes."""
    rows = trainer.train_dataset.rows[: trainer.args.per_device_train_batch_size].cuda()
    given = {"input_ids": rows, "labels": rows}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(2):
            trainer.training_step(trainer.model, dict(given))
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=lines, max_name_column_width=60))
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=lines, max_name_column_width=60))


def accuracy(options: argparse.Namespace) -> None:
    """Prints the errors of losses in bf16."""
    from llmq.torch import patch_model, unpatch_model

    draw = torch.Generator("cuda").manual_seed(0)
    batches = [torch.randint(0, 1000, (1, 64), device="cuda", generator=draw) for _ in range(options.batches)]

    def losses(model: Any) -> list[float]:
        """Of the batches, by the model itself."""
        with torch.no_grad():
            return [model(input_ids=tokens, labels=tokens).loss.item() for tokens in batches]

    model = made(options.model).train()
    found = {"transformers": losses(model)}
    for way, linear in {"llmq": "bf16", "e4m3": "e4m3"}.items():
        patch_model(model, linear=linear)
        found[way] = losses(model)
        unpatch_model(model)
    model.double().loss_function = in_f64
    right = losses(model)
    errors = {
        way: statistics.fmean((a - b) ** 2 for a, b in zip(one, right, strict=True)) ** 0.5
        for way, one in found.items()
    }
    for way, error in errors.items():
        print(f"{way}: {error:.3e} from f64, {error / errors['transformers']:.2f} times transformers' own")


def in_f64(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    """transformers' loss, without its cast to f32."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def compare(options: argparse.Namespace) -> None:
    """Runs each way in a process of its own, and prints a line for it."""
    found: dict[str, dict[str, Any]] = {}
    for way in options.ways:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        output = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
        lines = output.splitlines()
        results = [line.removeprefix(RESULT) for line in lines if line.startswith(RESULT)]
        if not results:
            print(f"{way}: no result\n" + "\n".join(lines[-options.tail :]), flush=True)
            continue
        if options.profile:
            print(output, flush=True)
        one = found[way] = json.loads(results[0])
        memory = f"{one['allocated_gib']:.2f} GiB allocated, {one['reserved_gib']:.2f} reserved"
        print(f"{way}: {one['tokens_per_second']:,.0f} tokens/s, {memory}, losses {one['losses']}", flush=True)
    liger = found.get("liger")
    for way, one in found.items() if liger else ():
        speed, memory = (one[key] / liger[key] for key in ("tokens_per_second", "allocated_gib"))
        print(f"{way} beside liger: {speed:.3f} times the speed, {memory:.3f} times the memory")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=list(PRESETS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:3])
    for name, number in {
        "batch-size": 8,
        "seq-len": 1024,
        "accumulation": 1,
        "steps": 12,
        "warm-up": 4,
        "rank": 16,
        "batches": 400,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--optimizer", default="adamw_torch_fused", help="As TrainingArguments(optim=...).")
    parser.add_argument("--lora", action="store_true", help="PEFT's LoRA in place of all weights.")
    parser.add_argument("--checkpointing", action="store_true", help="Gradient checkpointing.")
    parser.add_argument("--pure", action="store_true", help="Without autocast.")
    parser.add_argument("--profile", type=int, default=0, help="Lines of the profiler's tables to print.")
    parser.add_argument("--accuracy", action="store_true", help="Losses beside f64 instead.")
    parser.add_argument("--tail", type=int, default=15, help="Lines to print of a process that fails.")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.way:
        print(RESULT + json.dumps(train(parsed, parsed.way)))
    else:
        print(f"{parsed}\nPyTorch {torch.__version__}, transformers {transformers.__version__}", flush=True)
        (accuracy if parsed.accuracy else compare)(parsed)
