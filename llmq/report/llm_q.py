"""Reads the JSON logs of llm.q, the trainer in C++ (github.com/IST-DASLab/llmq), as records of ours.

Such a log is one array of objects, each with its kind as `log`, a `step`, and a `time` in UTC. It is written by
formatting text: numbers that are not finite are the words nan and inf, quotes in texts are not escaped, and a killed
process leaves half an object. So each object is read on its own. Options, GPUs, data and memory become the header.

llm.q counts steps from 0, and evaluates and saves before the update of a step: what it says of update 6 is a record of
our step 7, and its evaluation at 6 is one after 6 updates.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from llmq.disk import MIB

BEGINS = re.compile(rb"\s*\[\s*(?:\{\s*\"log\"\s*:|\]\s*$)")
ENTRY = re.compile(r",?\s*^\s*(?=\{\s*\"log\"\s*:)", re.MULTILINE)
LAST = re.compile(r"\s*,?\s*\]?\s*$")
WORDS = re.compile(r'"(?:\\.|[^"\\])*"|-?\b(?:nan|inf)\b')  # texts, which stay, and numbers that JSON has no word for
NON_FINITE = {"nan": '"NaN"', "-nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}
OF_TEXT = re.compile(r'\{\s*"log"\s*:\s*"(?:cmd|option|info)"')  # with texts that nothing escapes
SAVING = "saving checkpoint to `"

Record = dict[str, Any]


def is_log(content: bytes) -> bool:
    """Whether a file is such a log."""
    return BEGINS.match(content) is not None


def records(content: bytes, bad: list[str]) -> list[Record]:
    """The log as records of ours, the header first; adds to `bad` what is wrong with an object by its number."""
    entries = []
    found = ENTRY.split(content.decode("utf-8", "replace"))[1:]
    for number, text in enumerate(found, 1):
        try:
            entries.append(_parse(LAST.sub("", text)))
        except (ValueError, RecursionError) as error:
            if number < len(found):  # else what a killed process did not finish
                bad.append(f"  object {number}: {error}")
    about = _About(entries)
    return [about.header(), *(one for entry in entries for one in _records(entry, about))]


def _parse(text: str) -> Record:
    try:
        entry = json.loads(WORDS.sub(lambda word: NON_FINITE.get(word[0], word[0]), text))
    except ValueError:
        if not OF_TEXT.match(text):
            raise
        return {"log": "info", "type": "message", "step": 0, "message": text}
    step = entry.get("step", 0)
    if type(step) is not int or not 0 <= step < 2**62:
        raise ValueError(f"step is {step!r}, not a count")
    return {**entry, "step": step}


class _About:
    """What the objects of a log say of the whole run."""

    def __init__(self, entries: list[Record]) -> None:
        self.options: Record = {}
        self.kinds: dict[str, Record] = {}  # the first object of each kind: of several GPUs, that of the first rank
        self.data: Record = {}
        for entry in entries:
            if entry["log"] == "option":
                self.options[str(entry.get("name")).replace("-", "_")] = entry.get("value")
            elif entry["log"] == "dataset":
                tokens = {name: entry.get(name) for name in ("files", "tokens", "seed")}
                self.data[str(entry.get("split"))] = [{"path": str(entry.get("split")), **tokens}]
            elif isinstance(entry["log"], str):
                self.kinds.setdefault(entry["log"], entry)
        self.started = next((seconds for entry in entries if (seconds := _time(entry)) is not None), None)

    def header(self) -> Record:
        """A header of ours."""
        card, command = self.kinds.get("gpu-model", {}), self.kinds.get("cmd", {}).get("cmd")
        device, host = self._memory()
        paths = {"train": self.options.get("train_file"), "eval": self.options.get("eval_file")}
        for split, path in paths.items():
            if path and split in self.data:
                self.data[split][0]["path"] = str(path)
        system = {"trainer": "llm.q", "device": f"cuda: {card['name']}"} if "name" in card else {"trainer": "llm.q"}
        memory = _number(card, "memory")
        return {
            "type": "header",
            "schema": 1,
            "time": self.started,
            "options": self.options,
            "system": system | ({} if memory is None else {"memory": f"{memory / 2**30:.1f} GiB"}),
            "model": {"path": self.options.get("arch")} if self.options.get("arch") else None,
            "dataset": {**self.data, **({"command": command} if command else {})} or None,
            "allocator": device or None,
            "host_memory": host or None,
        }

    def _memory(self) -> tuple[dict[str, float], dict[str, float]]:
        """MiB by name on the device, and on the host where there are any."""
        stats = self.kinds.get("allocator", {}).get("stats")
        device, host = dict[str, float](), dict[str, float]()
        for one in stats if isinstance(stats, list) else ():
            if not isinstance(one, dict):
                continue
            name, sizes = str(one.get("name")), {key: _number(one, key) or 0.0 for key in one}
            device[name] = (sizes.get("device") or sizes.get("amount", 0.0)) / MIB
            if hosted := sum(sizes.get(key, 0.0) for key in ("managed", "pinned", "pageable")):
                host[name] = hosted / MIB
        return device, host


def _records(entry: Record, about: _About) -> Iterator[Record]:
    """The records of an object that is no part of the header."""
    kind, step, when = entry["log"], entry["step"], {"time": _time(entry)}
    if kind == "step":
        yield {"type": "train", "step": step + 1, **when, **_train(entry, about)}
        own = {name: entry[name] for name in ("loss_1k", "lse_max", "lse_mean") if name in entry}
        if own:
            yield {"type": "metrics", "step": step + 1, **when, "values": own}
    elif kind == "eval":
        speed = _speed(entry, "eval_tokens")
        yield {"type": "eval", "step": step, **when, **speed, "epoch": entry.get("epoch"), "loss": entry.get("loss")}
    elif kind == "gpu" and entry.get("id") == about.kinds["gpu"].get("id"):
        yield {"type": "gpu", "step": step + 1, **when, **_gpu(entry, about)}
    elif kind == "info" and entry.get("type") == "time-breakdown":
        yield {"type": "metrics", "step": step + 1, **when, "values": _breakdown(entry)}
    elif kind == "abs-maxes" and isinstance(found := entry.get("abs_maxes"), list):
        sizes = [size for one in found if isinstance(one, dict) and (size := _number(one, "value")) is not None]
        yield {"type": "metrics", "step": step + 1, **when, "values": {"abs_max": max(sizes, default=None)}}
    elif kind == "info":
        yield from _message(str(entry.get("message")), step, when)


def _train(entry: Record, about: _About) -> Record:
    speed, light = _speed(entry, "step_tokens"), _number(about.kinds.get("sol", {}), "tps")
    sol = speed["tps"] / light if light and speed["tps"] is not None else None
    return {**speed, "sol": sol, **{name: entry.get(name) for name in ("epoch", "loss", "norm", "lr")}}


def _speed(entry: Record, tokens: str) -> Record:
    count, took = _number(entry, tokens), _number(entry, "duration_ms")
    tps = 1000 * count / took if count is not None and took else None
    return {"time_ms": took, "tokens": count, "trained_tokens": count, "tps": tps}


def _gpu(entry: Record, about: _About) -> Record:
    """A GPU's state in our units: watts of milliwatts, kB/s and MiB of bytes."""
    total, free = _number(about.kinds.get("gpu-model", {}), "memory"), _number(entry, "dram_free")
    busy, memory = _number(entry, "gpu_util"), _number(entry, "mem_util")
    cap, watts = entry.get("throttle"), _number(entry, "power")
    return {
        "sm_mhz": _number(entry, "clock"),
        "watts": None if watts is None else watts / 1000,
        "celsius": _number(entry, "temperature"),
        "throttled": [cap] if isinstance(cap, str) and cap not in ("no cap", "not supported") else [],
        "used_mib": (total - free) / MIB if total and free is not None else None,
        "pcie_rx_kb_s": None if (received := _number(entry, "pcie_rx")) is None else received / 1000,
        "pcie_tx_kb_s": None if (sent := _number(entry, "pcie_tx")) is None else sent / 1000,
        "gpu_percent": busy if busy is not None and busy >= 0 else None,
        "memory_percent": memory if memory is not None and memory >= 0 else None,
    }


def _breakdown(entry: Record) -> dict[str, float]:
    """Milliseconds of a step on the first GPU: the head's are measured within those of backward."""
    parts = entry.get("breakdown")
    rows = [one for one in parts if isinstance(one, dict)] if isinstance(parts, list) else []
    forward, head, backward, update = (
        sum(_number(row, n) or 0.0 for row in rows) for n in ("fwd", "head", "bwd", "opt")
    )
    return {"forward_ms": forward, "head_ms": head, "backward_ms": backward - head, "update_ms": update}


def _message(text: str, step: int, when: Record) -> Iterator[Record]:
    if text.startswith(SAVING):
        yield {"type": "checkpoint", "step": step, **when, "path": text.removeprefix(SAVING).rstrip("`")}
        return
    yield {"type": "notice", "step": step, **when, "text": text}
    if text.startswith("Done. "):
        yield {"type": "end", "step": step, **when, "reason": "finished"}


def _number(entry: Mapping[str, Any], name: str) -> float | None:
    """A number of an object, if it is a finite one."""
    value = entry.get(name)
    is_one = isinstance(value, float) or (type(value) is int and abs(value) < 2**63)
    return float(value) if is_one and math.isfinite(value) else None  # type: ignore[arg-type]


def _time(entry: Mapping[str, Any]) -> float | None:
    """`2025-09-10 12:34:56.123456789`, in seconds since 1970."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?\d*", str(entry.get("time")))
    if not found:
        return None
    try:
        whole = datetime.fromisoformat(found[1]).replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None
    return whole + float(f"0.{found[2] or 0}")
