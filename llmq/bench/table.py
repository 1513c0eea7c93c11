"""What `llmq-bench` shows: lines and ladders on the console, Markdown for a README, and the comparison with a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from llmq.bench.results import Change, Result, name_of, percent
from llmq.disk import shown
from llmq.hardware.cards import TERA

WIDEST = 1000  # characters of a table
COLUMNS = (
    *("model", "dtype", "micro-batch", "tokens/s (least to most)", "predicted", "SOL", "of the ceilings", "memory"),
    *("SM clock", "power"),
)
RANKS = (
    "configuration",
    "tokens/s",
    "predicted",
    "scaling",
    "sums of a layer",
    "gathers of a layer",
    "exposed in a step",
)
LIBRARIES = ("driver", "cuBLASLt", "cuDNN", "cupy", "cupy-cuda13x", "cupy-cuda12x", "numpy", "blas")


@dataclass(frozen=True)
class Grid:
    """A table, of which the first columns (`texts` of them) are words and the others numbers."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1

    def put(self, console: Console, *, total: bool = False) -> None:
        """Prints it without losing anything: folded to a terminal, elsewhere as wide as it is; a line before a
        `total`."""
        columns = (Column(title, overflow="fold") for title in self.titles[: self.texts])
        numbers = (Column(title, justify="right", overflow="fold") for title in self.titles[self.texts :])
        table = Table(*columns, *numbers)
        for row in self.rows:
            table.add_row(*row, end_section=total and row is self.rows[-2])
        if not console.is_terminal:
            console.width = WIDEST
        console.print(table)

    def markdown(self) -> list[str]:
        """Its lines."""
        titles, *rows = (f"| {' | '.join(row)} |" for row in (self.titles, *self.rows))
        return [titles, f"|{'---|' * len(self.titles)}", *rows]


def show_machine(console: Console, facts: Mapping[str, Any]) -> None:
    """Prints the device, its libraries, and its measured ceilings."""
    _say(console, machine(facts["system"]))
    _say(console, f"Measured ceilings: {ceilings_line(facts)}")


def machine(system: Mapping[str, Any]) -> str:
    """`NVIDIA H200; driver 580.65.06 (CUDA 13.0), cuBLASLt 13.1.0, cuDNN 9.19.0, cupy-cuda13x 14.2.0`."""
    device = str(system["device"])
    kind = device.partition(":")[0]
    names = [name for name in LIBRARIES if name in system and (kind != "cuda" or name not in ("numpy", "blas"))]
    return f"{device.partition(': ')[2]}; {', '.join(f'{name} {system[name]}' for name in names)}"


def ceilings_line(facts: Mapping[str, Any]) -> str:
    """`bf16 745 TFLOP/s (75% of the peak), copy 4210 GB/s`."""
    parts, peaks, ceilings = [], facts["peaks"], facts["ceilings"]
    for dtype, rate in ceilings["flops"].items():
        share = f" ({100 * rate / peaks[dtype]:.0f}% of the peak)" if dtype in peaks else ""
        parts.append(f"{dtype} {rate / TERA:.3g} TFLOP/s{share}")
    return ", ".join([*parts, f"copy {ceilings['bytes_per_s'] / 1e9:,.0f} GB/s"])


def show(console: Console, result: Result) -> None:
    """Prints the speed of a configuration, the state of the device meanwhile, and the ladder."""
    rate, memory = result["tokens_per_second"], result["memory"]
    _say(
        console,
        f"\n{name_of(result)}, {result['tokens_per_step']:,} tokens a step: {rate['median']:,.0f} tokens/s "
        f"({rate['min']:,.0f} to {rate['max']:,.0f} over {len(result['step_s'])} steps)",
    )
    _say(
        console,
        f"  {_percent(result['sol'])} of the speed of light, {_percent(result['ceiling_share'])} of the measured "
        f"ceilings; first step after {result['first_step_s']:.1f} s",
    )
    if predicted := _predicted(result):
        _say(console, f"  predicted: {predicted} tokens/s")
    seen = f", {shown(memory['nvml_bytes'])} in use on the card" if memory["nvml_bytes"] else ""
    _say(console, f"  memory: {shown(memory['plan_bytes'])} planned, {shown(memory['used_bytes'])} taken{seen}")
    for line in gpu_lines(result["gpu"]):
        _say(console, f"  {line}")
    _ladder(result).put(console, total=True)
    if note := beyond(result):
        _say(console, note)


def show_sizes(console: Console, results: Sequence[Result], wanted: Sequence[str]) -> None:
    """Prints one table of all results, and which of the `wanted` names did not fit."""
    Grid(COLUMNS, [_cells(result) for result in results], texts=3).put(console)
    if absent := [name for name in wanted if name not in {name_of(result) for result in results}]:
        _say(console, f"Too large for the memory that is free: {', '.join(absent)}")


def show_ranks(console: Console, results: Sequence[Result]) -> None:
    """Prints one table of what was measured on several GPUs, beside one; nothing if nothing was."""
    if any(result["gpus"] > 1 for result in results):
        Grid(RANKS, [_rank_cells(result) for result in results]).put(console)


def beyond(result: Result) -> str:
    """A note if a share is above 100%, which nothing can reach; empty if none is."""
    shares = [result["sol"], result["ceiling_share"]]
    reached = [rung["roofline_ms"] / rung["ms"] for rung in result["ladder"] if rung["ms"] > 0]
    if max(shares) > 1:
        return (
            f"{name_of(result)} above 100%: the peaks were measured while other work took the machine; measure again "
            "when it is idle"
        )
    if max(reached, default=0) > 1:
        return f"{name_of(result)}: ops above 100% found their data in a cache, or the ceilings were measured too low"
    return ""


def gpu_lines(gpu: Mapping[str, Any]) -> list[str]:
    """NVML's readings of the GPU during the steps, and other processes on it."""
    if not gpu["readings"]:
        return []
    facts = [f"SM clock {gpu['sm_mhz']:,.0f} MHz" if gpu["sm_mhz"] is not None else ""]
    facts.append(f"{gpu['watts']:.0f} W" if gpu["watts"] is not None else "")
    facts.append(f"up to {gpu['celsius']} C" if gpu["celsius"] is not None else "")
    slowed = [f"{reason} {100 * share:.0f}% of the time" for reason, share in (gpu["throttled"] or {}).items()]
    facts.append(f"slowed by: {', '.join(slowed)}" if slowed else "")
    others = gpu["other_processes"]
    lines = [", ".join(fact for fact in facts if fact)]
    if others:
        lines.append(
            f"Warning: {others} other process{'es' if others > 1 else ''} on the card: not a free card's speed"
        )
    else:
        lines.append("no other process on the card" if others == 0 else "NVML does not say who else is on the card")
    return [line for line in lines if line]


def _ladder(result: Result) -> Grid:
    rows, whole, gaps = [], result["micro_batch_ms"], result["gaps_ms"]
    for rung in result["ladder"]:
        reached = f"{100 * rung['roofline_ms'] / rung['ms']:.0f}%" if rung["ms"] > 0 else ""
        times = (f"{rung['ms']:.3f}", f"{100 * rung['ms'] / whole:.1f}%", f"{rung['roofline_ms']:.3f}", reached)
        rows.append((rung["family"], *times))
    rows.append((gaps_name(gaps), f"{gaps:.3f}", f"{100 * gaps / whole:.1f}%", "", ""))
    roofline = sum(rung["roofline_ms"] for rung in result["ladder"])
    rows.append(("micro-batch", f"{whole:.3f}", "100%", f"{roofline:.3f}", f"{100 * roofline / whole:.0f}%"))
    return Grid(("family", "ms of a micro-batch", "share", "roofline ms", "reached"), rows)


def gaps_name(ms: float) -> str:
    """The name of the difference between a step and the sum of its ops."""
    return "gaps" if ms >= 0 else "overlap"


def show_changes(console: Console, path: str, changes: Sequence[Change], lone: Sequence[str]) -> None:
    """Prints the comparison with a file."""
    for change in changes:
        old, new = change.tokens_per_second
        _say(console, f"\n{change.name} against {path}: {old:,.0f} -> {new:,.0f} tokens/s, {change.percent:+.1f}%")
        for name, (before, after) in change.settings.items():
            _say(console, f"  {name}: {_differing(before, after)}")
        rows = []
        for family, (before, after) in change.families.items():
            by = "" if not before or after is None else f"{percent(before, after):+.1f}%"
            rows.append((family, *("-" if ms is None else f"{ms:.3f}" for ms in (before, after)), by))
        Grid(("family", "ms before", "ms now", "change"), rows).put(console)
    if lone:
        _say(console, f"In one of the two only: {', '.join(lone)}")


def _differing(before: Any, after: Any) -> str:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        return ", ".join(f"{name} {before.get(name)} -> {after.get(name)}" for name in names)
    return f"{before} -> {after}"


def markdown(content: Mapping[str, Any]) -> str:
    """The results as Markdown: the command line and the machine, a table of speeds, a table of ladders."""
    results = content["results"]
    head = f"`{content['command']}` on {machine(content['system'])}. Measured ceilings: {ceilings_line(content)}."
    ranks = []
    if any(result.get("gpus", 1) > 1 for result in results):
        ranks = [*Grid(RANKS, [_rank_cells(result) for result in results]).markdown(), ""]
    speeds = Grid(COLUMNS, [_cells(result) for result in results]).markdown()
    about = "Milliseconds of a micro-batch by family of ops, and in brackets what the measured ceilings would take:"
    notes = [f"\n{note}" for result in results if (note := beyond(result))]
    return "\n".join([head, "", *ranks, *speeds, "", about, "", *_ladders(results).markdown(), *notes])


def _ladders(results: Sequence[Result]) -> Grid:
    """The ladders of several results side by side."""
    rungs = [{rung["family"]: rung for rung in result["ladder"]} for result in results]
    rows = []
    for family in {name: None for found in rungs for name in found}:
        cells = [f"{r['ms']:.2f} ({r['roofline_ms']:.2f})" if (r := found.get(family)) else "-" for found in rungs]
        rows.append((family, *cells))
    rows.append(("gaps (negative: overlap)", *(f"{result['gaps_ms']:.2f}" for result in results)))
    sums = [sum(rung["roofline_ms"] for rung in result["ladder"]) for result in results]
    whole = (f"{result['micro_batch_ms']:.2f} ({ms:.2f})" for result, ms in zip(results, sums, strict=True))
    rows.append(("micro-batch", *whole))
    return Grid(("family", *map(name_of, results)), rows)


def _cells(result: Result) -> tuple[str, ...]:
    rate, gpu = result["tokens_per_second"], result["gpu"]
    return (
        result["model"],
        result["dtype"],
        f"{result['batch_size']}x{result['seq_len']}",
        f"{rate['median']:,.0f} ({rate['min']:,.0f} to {rate['max']:,.0f})",
        _predicted(result) or "-",
        _percent(result["sol"]),
        _percent(result["ceiling_share"]),
        shown(result["memory"]["plan_bytes"]),
        "-" if gpu["sm_mhz"] is None else f"{gpu['sm_mhz']:.0f} MHz",
        "-" if gpu["watts"] is None else f"{gpu['watts']:.0f} W",
    )


def _predicted(result: Result) -> str:
    """`24,034 (-0.5%)`: tokens/s by the planner's model, and what that is more than was measured; empty without one."""
    predicted, measured = result.get("predicted_tokens_per_second"), result["tokens_per_second"]["median"]
    return "" if predicted is None else f"{predicted:,.0f} ({percent(measured, predicted):+.1f}%)"


def _rank_cells(result: Result) -> tuple[str, ...]:
    name, rate, found = name_of(result), f"{result['tokens_per_second']['median']:,.0f}", result["communication"]
    if found is None:
        return (name, rate, _predicted(result), *[""] * 4)
    scaling, gpus = found["scaling"], result["gpus"]
    return (
        name,
        rate,
        _predicted(result),
        "too large for one GPU" if scaling is None else f"x{scaling:.3g} ({_percent(scaling / gpus)})",
        *(_gigabytes(found[f"{what}_bytes_per_s"]) for what in ("reduce", "gather")),
        f"{found['exposed_ms']:.1f} ms ({_percent(found['exposed_share'])})",
    )


def _gigabytes(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e9:.3g} GB/s"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
