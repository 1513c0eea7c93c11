"""The results of `llmq-bench`: plain data that is kept of a measurement, the JSON file, and what is printed.

The file is one object: `kind` ("llmq-bench"), `schema`, version, time and command, the system, the card's peaks and
the measured ceilings, and one of `results` per configuration. Times are milliseconds where the name ends in `_ms`, else
seconds; unknown values are null.
"""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

import llmq
from llmq.bench.configuration import Configuration, name_of
from llmq.bench.ladder import Ladder, Machine
from llmq.disk import shown, storage
from llmq.engine.measure import Speed
from llmq.engine.predict import predicted_rate
from llmq.hardware import nvml
from llmq.hardware.cards import TERA
from llmq.hardware.nvml import Reading
from llmq.training.records import to_json

KIND, SCHEMA = "llmq-bench", 3
WIDEST = 1000  # characters of a table
COLUMNS = (
    *("model", "dtype", "micro-batch", "tokens/s (least to most)", "predicted", "SOL", "of the ceilings", "memory"),
    *("SM clock", "power"),
)
LIBRARIES = ("driver", "cuBLASLt", "cuDNN", "cupy", "cupy-cuda13x", "cupy-cuda12x", "numpy", "blas")

Result = Mapping[str, Any]


def result_of(
    one: Configuration, speed: Speed, found: Ladder, machine: Machine, *, num_gpus: int = 1
) -> dict[str, Any]:
    """The result of a configuration. `speed` is that of all GPUs, memory and readings are those of one. Tokens/s are
    predicted by the planner's model."""
    plan, gpu, (median, low, high) = speed.plan, machine.where.gpu, speed.tokens_per_second
    spec, options = plan.spec, one.options().to_flat()
    nvml_bytes = [reading.used_bytes for reading in speed.readings if reading.used_bytes is not None]
    return {
        "model": one.model,
        "dtype": one.dtype,
        "batch_size": spec.batch_size,
        "seq_len": spec.seq_len,
        "tokens_per_step": speed.tokens_per_step,
        "precision": asdict(spec.precision),
        "settings": asdict(spec.memory),
        "deterministic": one.where.kind == "cpu" or one.options().system.deterministic,
        "gpus": 1,
        "zero_level": None,
        "scaling": None,
        "tokens_per_second": {"median": median, "min": low, "max": high},
        "predicted_tokens_per_second": predicted_rate(plan, machine.where.card, speed.tokens_per_step),
        **{name: options[name] for name in ("lora_rank", "dora", "base_dtype")},
        "sol": median / num_gpus * spec.light_s(machine.peaks),
        "ceiling_share": found.share,
        "step_s": list(speed.seconds),
        "first_step_s": speed.first_step_s,
        "losses": list(speed.losses),
        "memory": {
            "plan_bytes": plan.total_bytes,
            "used_bytes": speed.peak_bytes,
            "nvml_bytes": max(nvml_bytes, default=None),
        },
        "gpu": {**gpu_during(speed.readings), "other_processes": nvml.num_others(gpu.uuid) if gpu else None},
        "micro_batch_ms": found.micro_batch_ms,
        "gaps_ms": found.gaps_ms,
        "ladder": [asdict(rung) for rung in found.rungs],
    }


def gpu_during(readings: Sequence[Reading]) -> dict[str, Any]:
    """The GPU during the measured steps: medians, the highest temperature, the share of readings slowed by a reason."""

    def known(name: str) -> list[float]:
        return [value for reading in readings if (value := getattr(reading, name)) is not None]

    reasons = [reading.throttled for reading in readings if reading.throttled is not None]
    slowed = sorted({reason for found in reasons for reason in found})
    return {
        "sm_mhz": statistics.median(known("sm_mhz")) if known("sm_mhz") else None,
        "watts": statistics.median(known("watts")) if known("watts") else None,
        "celsius": max(known("celsius"), default=None),
        "throttled": {r: sum(r in found for found in reasons) / len(reasons) for r in slowed} if reasons else None,
        "readings": len(readings),
    }


def document(results: Sequence[Result], command: str, machine: Machine) -> dict[str, Any]:
    """The whole file."""
    about = {"kind": KIND, "schema": SCHEMA, "version": llmq.__version__, "command": command}
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    facts = {"system": machine.system, "peaks": machine.peaks, "ceilings": asdict(machine.ceilings)}
    return dict(to_json({**about, "made": made, **facts, "results": results}))


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Writes the file; StorageError if that fails."""
    with storage(path, advice="name another place with --save"):
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", "utf-8")


def show_machine(console: Console, machine: Machine) -> None:
    """Prints the device, its libraries, and its measured ceilings: `NVIDIA H200; driver 580.65.06 (CUDA 13.0), cuBLASLt
    13.1.0`, `bf16 745 TFLOP/s (75% of the peak), copy 4210 GB/s`."""
    kind, _, name = str(machine.system["device"]).partition(": ")
    names = [name for name in LIBRARIES if name in machine.system and (kind != "cuda" or name not in ("numpy", "blas"))]
    say(console, f"{name}; {', '.join(f'{name} {machine.system[name]}' for name in names)}")
    parts, peaks = [], machine.peaks
    for dtype, rate in machine.ceilings.flops.items():
        share = f" ({100 * rate / peaks[dtype]:.0f}% of the peak)" if dtype in peaks else ""
        parts.append(f"{dtype} {rate / TERA:.3g} TFLOP/s{share}")
    copy = f"copy {machine.ceilings.bytes_per_s / 1e9:,.0f} GB/s"
    say(console, f"Measured ceilings: {', '.join([*parts, copy])}")


def show(console: Console, result: Result) -> None:
    """Prints the speed of a configuration, the state of the device meanwhile, and the ladder."""
    rate, memory, scaling = result["tokens_per_second"], result["memory"], result["scaling"]
    lines = [
        f"\n{name_of(result)}, {result['tokens_per_step']:,} tokens a step: {rate['median']:,.0f} tokens/s "
        f"({rate['min']:,.0f} to {rate['max']:,.0f} over {len(result['step_s'])} steps)",
        f"  {result['sol']:.1%} of the speed of light, {result['ceiling_share']:.1%} of the measured "
        f"ceilings; first step after {result['first_step_s']:.1f} s",
    ]
    if predicted := _predicted(result):
        lines.append(f"  predicted: {predicted} tokens/s")
    if result["gpus"] > 1:
        share = f"x{scaling:.3g} of one ({scaling / result['gpus']:.1%})" if scaling else "too large for one GPU"
        lines.append(f"  {result['gpus']} GPUs: {share}")
    seen = f", {shown(memory['nvml_bytes'])} in use on the card" if memory["nvml_bytes"] else ""
    lines.append(f"  memory: {shown(memory['plan_bytes'])} planned, {shown(memory['used_bytes'])} taken{seen}")
    for line in [*lines, *(f"  {line}" for line in gpu_lines(result["gpu"]))]:
        say(console, line)
    _show_ladder(console, result)


def show_all(console: Console, results: Sequence[Result], wanted: Sequence[str]) -> None:
    """Prints one table of all results, and which of the `wanted` names did not fit."""
    _show_table(console, COLUMNS, [_cells(result) for result in results], texts=3)
    if absent := [name for name in wanted if name not in {name_of(result) for result in results}]:
        say(console, f"Too large for the memory that is free: {', '.join(absent)}")


def gpu_lines(gpu: Mapping[str, Any]) -> list[str]:
    """NVML's readings of the GPU during the steps, and other processes on it."""
    if not gpu["readings"]:
        return []
    known = {"SM clock {:,.0f} MHz": gpu["sm_mhz"], "{:.0f} W": gpu["watts"], "up to {} C": gpu["celsius"]}
    facts = [text.format(value) for text, value in known.items() if value is not None]
    slowed = [f"{reason} {100 * share:.0f}% of the time" for reason, share in (gpu["throttled"] or {}).items()]
    facts += [f"slowed by: {', '.join(slowed)}"] if slowed else []
    others = gpu["other_processes"]
    who = "no other process on the card" if others == 0 else "NVML does not say who else is on the card"
    if others:
        who = f"Warning: {others} other process{'es' if others > 1 else ''} on the card: not a free card's speed"
    return [*([", ".join(facts)] if facts else []), who]


def _show_ladder(console: Console, result: Result) -> None:
    rows, whole, gaps = [], result["micro_batch_ms"], result["gaps_ms"]
    for rung in result["ladder"]:
        reached = f"{rung['roofline_ms'] / rung['ms']:.0%}" if rung["ms"] > 0 else ""
        times = (f"{rung['ms']:.3f}", f"{rung['ms'] / whole:.1%}", f"{rung['roofline_ms']:.3f}", reached)
        rows.append((rung["family"], *times))
    rows.append(("gaps" if gaps >= 0 else "overlap", f"{gaps:.3f}", f"{gaps / whole:.1%}", "", ""))
    roofline = sum(rung["roofline_ms"] for rung in result["ladder"])
    rows.append(("micro-batch", f"{whole:.3f}", "100%", f"{roofline:.3f}", f"{roofline / whole:.0%}"))
    titles = ("family", "ms of a micro-batch", "share", "roofline ms", "reached")
    _show_table(console, titles, rows, total=True)


def _show_table(
    console: Console, titles: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = 1, total: bool = False
) -> None:
    """A table, of which the first columns (`texts` of them) are words and the others numbers; a line before a `total`.
    Nothing is lost: it is folded to a terminal, elsewhere as wide as it is."""
    table = Table(*(Column(title, overflow="fold") for title in titles[:texts]))
    for title in titles[texts:]:
        table.add_column(title, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row, end_section=total and row is rows[-2])
    if not console.is_terminal:
        console.width = WIDEST
    console.print(table)


def _cells(result: Result) -> tuple[str, ...]:
    rate, gpu = result["tokens_per_second"], result["gpu"]
    return (
        result["model"],
        result["dtype"],
        f"{result['batch_size']}x{result['seq_len']}",
        f"{rate['median']:,.0f} ({rate['min']:,.0f} to {rate['max']:,.0f})",
        _predicted(result) or "-",
        f"{result['sol']:.1%}",
        f"{result['ceiling_share']:.1%}",
        shown(result["memory"]["plan_bytes"]),
        "-" if gpu["sm_mhz"] is None else f"{gpu['sm_mhz']:.0f} MHz",
        "-" if gpu["watts"] is None else f"{gpu['watts']:.0f} W",
    )


def _predicted(result: Result) -> str:
    """`24,034 (-0.5%)`: tokens/s by the planner's model, and what that is more than was measured; empty without one."""
    predicted, measured = result.get("predicted_tokens_per_second"), result["tokens_per_second"]["median"]
    return "" if predicted is None else f"{predicted:,.0f} ({100 * (predicted / measured - 1):+.1f}%)"


def say(console: Console, text: str) -> None:
    """Prints a line unchanged."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
