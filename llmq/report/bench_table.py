"""The runs of `llmq-bench`: checked, measured one after the other, printed as tables, saved as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llmq import device as devices
from llmq import sol
from llmq.backends import open_backend
from llmq.config import ModelConfig, from_folder
from llmq.errors import StorageError, UsageError
from llmq.plan.memory import Memory, fewest_chunks
from llmq.plan.precision import Precision
from llmq.plan.recompute import ROLES
from llmq.presets import preset
from llmq.report.bench import Clock, CudaClock, Speed, measure
from llmq.rows import padded_vocab
from llmq.tensor import DTYPES

PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision("bf16", "bf16", m="bf16", v="bf16", master="bf16", grad="bf16"),
    "e4m3": Precision("bf16", "e4m3", m="bf16", v="bf16", master="bf16", grad="bf16"),
}


def run(
    models: list[str],
    dtypes: list[str],
    device: str,
    save: str | None,
    *,
    batch_size: int,
    seq_len: int,
    tokens_per_step: int,
    steps: int,
    warmup: int,
    recompute: str,
    lmhead_chunks: int,
) -> int:
    """Measures every model in every dtype; returns the exit code."""
    configs = {name: _config(name) for name in models}
    if unknown := [name for name in dtypes if name not in PRECISIONS]:
        raise UsageError(f"--dtypes {', '.join(unknown)}: known are {', '.join(PRECISIONS)}")
    flags = tuple(f"recompute_{name}" for name in recompute.split(",") if name)
    if unknown := [flag for flag in flags if flag not in ROLES]:
        raise UsageError(f"--recompute {recompute}: known are {', '.join(flag[10:] for flag in ROLES)}")
    if tokens_per_step % (batch_size * seq_len):
        raise UsageError(
            f"--tokens-per-step {tokens_per_step} is not a multiple of a micro-batch, {batch_size} x {seq_len}: "
            f"use {max(1, tokens_per_step // (batch_size * seq_len)) * batch_size * seq_len}"
        )
    where = devices.pick(device)
    clock = CudaClock() if where.kind == "cuda" else Clock()
    results, console = [], Console()
    for name, config in configs.items():
        for dtype in dtypes:
            precision = PRECISIONS[dtype]
            logit_bytes = padded_vocab(config) * DTYPES[precision.model].itemsize
            memory = Memory(flags, lmhead_chunks or fewest_chunks(batch_size * seq_len, logit_bytes))
            speed = measure(
                config,
                precision,
                memory,
                open_backend(where.kind),
                clock,
                batch_size=batch_size,
                seq_len=seq_len,
                tokens_per_step=tokens_per_step,
                steps=steps,
                warmup=warmup,
            )
            results.append(_result(name, dtype, where, speed))
            _show(console, results[-1])
    if save:
        try:
            Path(save).write_text(json.dumps(results, indent=1) + "\n")
        except OSError as error:
            raise StorageError(f"{save} cannot be written: {error.strerror}") from error
    return 0


def _config(name: str) -> ModelConfig:
    return from_folder(Path(name)) if Path(name).is_dir() else preset(name)


def _result(name: str, dtype: str, where: devices.Device, speed: Speed) -> dict[str, Any]:
    """What is known of one run, as JSON."""
    plan = speed.plan
    median, low, high = speed.tokens_per_second
    dtypes = {"matmul_dtype": plan.precision.matmul, "head_dtype": plan.precision.head}
    light = sol.seconds_per_token(plan.config, plan.seq_len, devices.peaks(where), **dtypes)
    return {
        "model": name,
        "dtype": dtype,
        "batch_size": plan.batch_size,
        "seq_len": plan.seq_len,
        "tokens_per_step": speed.tokens_per_step,
        "tokens_per_second": {"median": median, "min": low, "max": high},
        "sol": median * light,
        "first_step_s": speed.first_step_s,
        "memory_bytes": plan.total_bytes,
        "micro_step_ms": speed.micro_step_ms,
        "update_ms": speed.update_ms,
        "system": devices.system_facts(where),
    }


def _show(console: Console, r: dict[str, Any]) -> None:
    rate = r["tokens_per_second"]
    console.print(
        f"{r['model']} {r['dtype']} {r['batch_size']}x{r['seq_len']}: {rate['median']:,.0f} tokens/s "
        f"({rate['min']:,.0f} to {rate['max']:,.0f}), {100 * r['sol']:.1f}% of the speed of light, "
        f"{r['memory_bytes'] / 2**30:.1f} GiB, first step after {r['first_step_s']:.1f} s",
        highlight=False,
    )
    micro_step_ms = 1e3 * r["batch_size"] * r["seq_len"] / rate["median"]
    table = Table("family", "ms of a micro-batch", "share")
    for name, ms in sorted(r["micro_step_ms"].items(), key=lambda item: -item[1]):
        table.add_row(name, f"{ms:.3f}", f"{100 * ms / micro_step_ms:.1f}%")
    per_micro_step = r["update_ms"] * r["batch_size"] * r["seq_len"] / r["tokens_per_step"]
    table.add_row("optimizer", f"{per_micro_step:.3f}", f"{100 * per_micro_step / micro_step_ms:.1f}%")
    rest = micro_step_ms - sum(r["micro_step_ms"].values()) - per_micro_step
    table.add_row("rest (gaps, overlap)", f"{rest:.3f}", f"{100 * rest / micro_step_ms:.1f}%")
    console.print(table)
