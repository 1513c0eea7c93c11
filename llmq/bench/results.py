"""The results of `llmq-bench` as plain data: what is kept of a measurement, the JSON file, and a comparison of two.

The file is one object: `kind` ("llmq-bench"), `schema`, version, time and command, the system, the card's peaks and
the measured ceilings, and one of `results` per configuration. Times are milliseconds where the name ends in `_ms`, else
seconds; unknown values are null.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import llmq
from llmq.bench.ceilings import Machine
from llmq.bench.ladder import Ladder
from llmq.disk import storage
from llmq.engine.measure import Speed
from llmq.engine.predict import predicted_rate
from llmq.errors import DataError, UsageError
from llmq.hardware import nvml
from llmq.hardware.nvml import Reading
from llmq.training.records import to_json

KIND, SCHEMA = "llmq-bench", 1
# in two results that can be compared
SAME = (
    *("model", "dtype", "batch_size", "seq_len", "gpus", "zero_level", "lora_rank", "dora", "base_dtype"),
    "adapters_at_once",
)
# shown where they differ
SETTINGS = (
    *("tokens_per_step", "precision", "recompute", "on_host", "fused_update"),
    *("zero_copy", "write_combined", "persistent_quants"),
    *("lmhead_chunks", "seq_tiles", "attn_bwd_chunks", "deterministic"),
)
# what older files lack
UNSAID: dict[str, Any] = {"deterministic": True, "gpus": 1, "zero_level": None, "lora_rank": None, "dora": False}
UNSAID |= {"base_dtype": None, "on_host": [], "fused_update": False, "seq_tiles": 1, "adapters_at_once": 1}
UNSAID |= {"zero_copy": False, "write_combined": False, "persistent_quants": True}

Result = Mapping[str, Any]


def result_of(
    model: str,
    dtype: str,
    speed: Speed,
    found: Ladder,
    machine: Machine,
    deterministic: bool,
    *,
    gpus: int = 1,
    zero_level: int | None = None,
    communication: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The result of one configuration; of several GPUs with what their `communication` costs.

    `speed` is that of all GPUs, memory and readings are those of one. Tokens/s are predicted by the planner's model.
    """
    plan, gpu, (median, low, high) = speed.plan, machine.where.gpu, speed.tokens_per_second
    spec = plan.spec
    nvml_bytes = [reading.used_bytes for reading in speed.readings if reading.used_bytes is not None]
    return {
        "model": model,
        "dtype": dtype,
        "batch_size": spec.batch_size,
        "seq_len": spec.seq_len,
        "tokens_per_step": speed.tokens_per_step,
        "precision": asdict(spec.precision),
        "recompute": [flag.removeprefix("recompute_") for flag in spec.memory.flags],
        "on_host": [*spec.memory.offload, *spec.memory.host],
        "fused_update": spec.memory.fused,
        "zero_copy": spec.memory.zero_copy,
        "write_combined": spec.memory.write_combined,
        "persistent_quants": spec.memory.persistent_quants,
        "lmhead_chunks": spec.memory.head_chunks,
        "seq_tiles": spec.memory.seq_tiles,
        "attn_bwd_chunks": spec.memory.attention_chunks,
        "deterministic": deterministic,
        "gpus": gpus,
        "zero_level": zero_level,
        "communication": communication,
        "tokens_per_second": {"median": median, "min": low, "max": high},
        "predicted_tokens_per_second": predicted_rate(plan, machine.where.card, speed.tokens_per_step),
        **spec.adapters.facts(),
        "sol": median / gpus * spec.light_s(machine.peaks),
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
    return dict(to_json({**about, "made": made, **machine.facts(), "results": results}))


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Writes the file; StorageError if that fails."""
    with storage(path, advice="name another place with --save"):
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", "utf-8")


def load(path: Path) -> dict[str, Any]:
    """Reads a file of `save`; DataError if it is absent, something else, or of another schema."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(f"--compare {path} cannot be read: {error.strerror}: name a file that --save wrote") from error
    except ValueError as error:
        raise DataError(f"--compare {path} is not JSON: {error}: name a file that --save wrote") from error
    if not isinstance(content, dict) or content.get("kind") != KIND or not isinstance(content.get("results"), list):
        raise DataError(f"--compare {path} is not a result of llmq-bench: name a file that --save wrote")
    if content.get("schema") != SCHEMA:
        raise DataError(
            f"--compare {path} has schema {content.get('schema')!r}, and this llmq reads {SCHEMA}: measure again with "
            f"this version and --save (the file is of llmq {content.get('version', 'unknown')})"
        )
    wrong = [f"results[{n}] {why}" for n, row in enumerate(content["results"]) if (why := _damage(row))]
    if content["results"] and not isinstance(content.get("system"), dict):
        wrong.append("system is not there")
    if wrong:
        raise DataError(f"--compare {path} is damaged: {'; '.join(wrong)}: name another file, or measure again")
    return content


def _damage(row: Any) -> str:
    """Why a result cannot be compared; empty if it can."""
    if not isinstance(row, dict):
        return "is not an object"
    rate, rungs = row.get("tokens_per_second"), row.get("ladder")
    valid = {
        **{key: isinstance(row.get(key), str) for key in ("model", "dtype")},
        **{key: isinstance(row.get(key), int) for key in ("batch_size", "seq_len")},
        "gaps_ms": _is_number(row.get("gaps_ms")),
        "tokens_per_second": isinstance(rate, dict) and _is_number(rate.get("median")) and rate["median"] > 0,
        "ladder": isinstance(rungs, list)
        and all(isinstance(r, dict) and isinstance(r.get("family"), str) and _is_number(r.get("ms")) for r in rungs),
    }
    wrong = [key for key, is_valid in valid.items() if not is_valid]
    return f"has no valid {', '.join(wrong)}" if wrong else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Change:
    """One configuration before and after: tokens/s, ms of each family, and which settings differ."""

    name: str
    tokens_per_second: tuple[float, float]
    families: Mapping[str, tuple[float | None, float | None]]  # None: the family is not there
    settings: Mapping[str, tuple[Any, Any]]

    @property
    def percent(self) -> float:
        """How much faster, in percent of before."""
        return percent(*self.tokens_per_second)


def percent(old: float, new: float) -> float:
    """The change from `old` to `new` in percent of `old`."""
    return 100 * (new / old - 1)


def name_of(result: Result) -> str:
    """`Qwen2.5-0.5B bf16 32x1024`, `Qwen2.5-0.5B bf16 32x1024 on 2 GPUs, level 1`, `Qwen2.5-7B bf16 16x1024, rank 16 on
    nf4`."""
    gpus, level = result.get("gpus", 1), result.get("zero_level")
    many = f" on {gpus} GPUs, level {level}" if gpus > 1 else ""
    size = f"{result['batch_size']}x{result['seq_len']}"
    return f"{result['model']} {result['dtype']} {size}{many}{adapters_in_words(result)}"


def adapters_in_words(about: Mapping[str, Any]) -> str:
    """`, rank 16 on nf4`, `, DoRA of rank 16`, `, 8 adapters of rank 16`; empty where the whole model is trained."""
    base, many = f" on {about['base_dtype']}" if about.get("base_dtype") else "", about.get("adapters_at_once") or 1
    method = f"{many} adapters of rank" if many > 1 else "DoRA of rank" if about.get("dora") else "rank"
    return f", {method} {about['lora_rank']}{base}" if about.get("lora_rank") else ""


def require_common(old: Mapping[str, Any], wanted: Sequence[tuple[str, str, int]]) -> None:
    """UsageError if no (model, dtype, seq_len) of `wanted` is in a file: raised before anything is measured."""
    if not {(r["model"], r["dtype"], r["seq_len"]) for r in old["results"]} & set(wanted):
        raise _nothing_common(old["results"])


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[Change], list[str]]:
    """Changes of the configurations in both, and names of those in one only; UsageError if none is in both."""
    before, after = (
        {tuple({**UNSAID, **r}[key] for key in SAME): r for r in content["results"]} for content in (old, new)
    )
    changes = [_change(before[key], result, old, new) for key, result in after.items() if key in before]
    lone = [
        name_of(r) for one, other in ((before, after), (after, before)) for key, r in one.items() if key not in other
    ]
    if not changes:
        raise _nothing_common(old["results"])
    return changes, lone


def _nothing_common(results: Sequence[Result]) -> UsageError:
    there = ", ".join(name_of(result) for result in results) or "no results"
    return UsageError(f"nothing to compare: the old file has {there}: measure one of these")


def _change(old: Result, new: Result, old_file: Mapping[str, Any], new_file: Mapping[str, Any]) -> Change:
    rungs = [{rung["family"]: rung["ms"] for rung in result["ladder"]} for result in (old, new)]
    for found, result in zip(rungs, (old, new), strict=True):
        found["gaps"] = result["gaps_ms"]
    old, new = {**UNSAID, **old}, {**UNSAID, **new}
    settings = {name: (old[name], new[name]) for name in SETTINGS if name in old and name in new}
    settings |= {name: (old_file["system"].get(name), new_file["system"].get(name)) for name in ("device", "driver")}
    return Change(
        name_of(new),
        (old["tokens_per_second"]["median"], new["tokens_per_second"]["median"]),
        {family: (rungs[0].get(family), rungs[1].get(family)) for family in {**rungs[1], **rungs[0]}},
        {name: pair for name, pair in settings.items() if pair[0] != pair[1]},
    )
