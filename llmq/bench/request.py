"""What `llmq-bench` is asked to measure: its options checked as a whole, and what is measured where none were given.

Options of `llmq-train` stay what they are: they go through the same description and the same resolvers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmq.adapters import resolve as adapters
from llmq.bench.configuration import DEFAULTS, Configuration
from llmq.bench.results import load, require_common
from llmq.disk import takes_files
from llmq.errors import LlmqError, StorageError
from llmq.hardware import device
from llmq.hardware.device import Device
from llmq.model.config import ModelConfig, from_folder
from llmq.model.presets import preset
from llmq.options.bench import BenchOptions
from llmq.options.field import refuse
from llmq.options.parse import Options
from llmq.plan.memory import ROLES
from llmq.training.facts import Facts

MOMENTS = ("opt_m_dtype", "opt_v_dtype")  # of adapters those of llmq-train
NARROW = {"model_dtype": "bf16", "opt_m_dtype": "bf16", "opt_v_dtype": "bf16"}
# Options of llmq-train by name of --dtypes; nothing is measured of the errors of fp8 copies.
MATMULS: dict[str, dict[str, Any]] = {
    "fp32": {"model_dtype": "fp32"},
    "bf16": NARROW,
    "e4m3": {**NARROW, "matmul_dtype": "e4m3", "log_fp8_every": 0},
}
OF_FP8 = ("gradient_dtype", "fp8_scaling", "head_dtype", "bf16_layers", "fp8_layers")
OF_DEVICE = ("device", "memory_limit", "host_memory_limit", "deterministic", "memcpy_all_gather")
GENERATED = {"from_scratch": True, "train_file": "generated"}  # in place of data and weights
DEFAULT_LEVEL = 1  # of several GPUs


def shared(training: Mapping[str, Any]) -> Options:
    """What all configurations have of llmq-train's options: those of the device."""
    return Options.parse({"model": "any", **GENERATED, **{k: v for k, v in training.items() if k in OF_DEVICE}})


def check(
    request: BenchOptions, training: Mapping[str, Any], where: Device, num_ranks: int = 1
) -> tuple[list[Configuration], dict[str, Any] | None]:
    """What is measured, and what it is compared with; all is refused that can be before the first measurement."""
    wanted = configurations(request, training, where, num_ranks)
    old = load(Path(request.compare)) if request.compare else None
    if old is not None:
        require_common(old, [(one.model, one.dtype, one.flat["seq_len"]) for one in wanted])
    if request.save:
        _check_place(Path(request.save))
    return wanted, old


def configurations(
    request: BenchOptions, training: Mapping[str, Any], where: Device, num_ranks: int = 1
) -> list[Configuration]:
    """Every model in every dtype, checked. UsageError with all problems at once."""
    problems, configs = [], {}
    for name in request.models or DEFAULTS[where.kind].models:
        try:
            configs[name] = from_folder(Path(name)) if Path(name).is_dir() else preset(name)
        except LlmqError as error:
            problems.append(f"--models {name}: {error}")
    dtypes = request.dtypes or _default_dtypes(request, where)
    if unknown_dtypes := [name for name in dtypes if name not in MATMULS]:
        problems.append(f"--dtypes {', '.join(unknown_dtypes)}: known are {', '.join(MATMULS)}")
    problems += [*_odd_options(request, training, where, num_ranks), *_odd_tokens(request, where, num_ranks)]
    problems += _odd_adapters(request, training)
    sizes, counts = request.batch_sizes or (request.batch_size,), request.adapters_at_once or (1,)
    found = []
    for name, config in configs.items():
        for dtype in dtypes if not unknown_dtypes else ():
            try:
                one = _wanted(request, training, name, config, dtype, where, with_fp8="e4m3" in dtypes)
                found += [replace(one, batch_size=size, at_once=count) for size in sizes for count in counts]
            except LlmqError as error:
                problems.append(str(error))
    refuse(list(dict.fromkeys(problems)))  # a problem of every model is shown once
    return found


def _odd_options(request: BenchOptions, training: Mapping[str, Any], where: Device, num_ranks: int) -> Iterator[str]:
    """Messages on options that do not go together, or not with `num_ranks`."""
    sized = bool(request.batch_size or request.batch_sizes)
    fits = training.get("fit")
    if unknown := [name for name in request.recompute if f"recompute_{name}" not in ROLES]:
        known = ", ".join(flag.removeprefix("recompute_") for flag in ROLES)
        yield f"--recompute {','.join(unknown)}: known are {known}"
    if fits and sized:
        yield "--fit chooses the size of a micro-batch: leave out --batch-size and --batch-sizes"
    if fits and "matmul" in (training.get("fit_may") or ""):
        yield "--fit-may matmul: --dtypes says what is multiplied, each for itself: allow states, or leave it out"
    if fits and num_ranks > 1:  # each would search for itself
        yield "--fit is for one GPU: leave out --gpus"
    if request.zero_levels and num_ranks == 1:
        yield "--zero-levels is for several GPUs: add --gpus N, or leave it out"
    if training.get("memcpy_all_gather") is not None and (num_ranks == 1 or where.kind == "cpu"):
        yield "--memcpy-all-gather is for several GPUs: add --gpus N, or leave it out"


def _default_dtypes(request: BenchOptions, where: Device) -> tuple[str, ...]:
    if where.kind == "cpu":
        return ("bf16",) if request.models else ("fp32",)
    return ("bf16", "e4m3") if device.has_fp8(where) and not request.models else ("bf16",)


def _odd_tokens(request: BenchOptions, where: Device, num_ranks: int) -> Iterator[str]:
    """A message if --tokens-per-step is not a whole number of micro-batches of all ranks."""
    tokens, sequence = request.tokens_per_step, seq_len_of(request, where)
    if tokens is None:
        return
    for size in request.batch_sizes or (request.batch_size,):
        micro = (size or 1) * sequence * num_ranks
        if not tokens % micro:
            continue
        near = max(1, tokens // micro) * micro
        what = f"micro-batches of {size} x {sequence}" if size else f"{sequence}, --seq-len"
        what += f", on {num_ranks} GPUs" if num_ranks > 1 else ""
        yield f"--tokens-per-step {tokens} is not a multiple of {what}: use {near}"


def _odd_adapters(request: BenchOptions, training: Mapping[str, Any]) -> Iterator[str]:
    """Messages on --adapters-at-once."""
    for count in (count for count in request.adapters_at_once if count > 1):
        flag = f"--adapters-at-once {count}"
        if not str(training.get("lora_rank")).isdecimal():
            yield f"{flag} is for adapters of one rank: add --lora-rank N"
        if training.get("dora"):
            yield f"{flag} trains A and B alone: leave --dora out"
        if training.get("fit"):
            yield f"{flag} shares out the rows of a micro-batch, whose size --fit chooses: leave one of them out"
        for size in (size for size in request.batch_sizes or (request.batch_size,) if size and size % count):
            near = max(1, size // count) * count
            yield f"{flag} shares out the rows of a micro-batch, and --batch-size {size} is no multiple: use {near}"


def seq_len_of(request: BenchOptions, where: Device) -> int:
    """Tokens of a sequence."""
    return request.seq_len or DEFAULTS[where.kind].seq_len


def _wanted(
    request: BenchOptions,
    training: Mapping[str, Any],
    model: str,
    config: ModelConfig,
    dtype: str,
    where: Device,
    *,
    with_fp8: bool,
) -> Configuration:
    """A configuration. Options of fp8 apply to e4m3 only, if that is among the dtypes."""
    left_out = OF_FP8 if with_fp8 and dtype != "e4m3" else ()
    own = MATMULS[dtype]
    if "lora_rank" in training:
        own = {key: value for key, value in own.items() if key not in MOMENTS}
    flat = {
        "model": model,
        **GENERATED,
        "seq_len": seq_len_of(request, where),
        **{f"recompute_{name}": True for name in request.recompute},
        **own,
        **{key: value for key, value in training.items() if key not in left_out},
    }
    one = Configuration(model, dtype, Facts(config, where), flat, frozenset(training))
    adapters.resolve(one.options().adapters, config)  # for its errors, before anything is measured
    dtypes = one.precision
    device.refuse_dtypes(where, dtypes.matmul, dtypes.head, scaling=dtypes.scaling, option="--dtypes")
    return one


def _check_place(path: Path) -> None:
    """StorageError before anything is measured, if the file cannot be written."""
    folder = path.absolute().parent
    place = path if path.exists() else folder
    if path.is_dir() or not folder.is_dir():
        why = "it is a folder" if path.is_dir() else f"there is no folder {folder}"
    elif not (os.access(path, os.W_OK) if path.exists() else takes_files(folder)):
        why = f"{place} is read-only for this user"
    else:
        return
    raise StorageError(f"--save {path} cannot be written: {why}: name a file in a folder that can be written to")
