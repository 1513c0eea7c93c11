"""What `llmq-bench` is asked to measure: its options checked as a whole, and what is measured where none were given.

A configuration is planned as `llmq-train` would plan it: its options go through the same description and the same
resolvers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmq.adapters import resolve as adapters
from llmq.bench.results import adapters_in_words, load, require_common
from llmq.disk import takes_files
from llmq.errors import LlmqError, StorageError, UsageError
from llmq.hardware import device as devices
from llmq.hardware.device import Device
from llmq.model.config import ModelConfig, from_folder
from llmq.model.presets import preset
from llmq.options.parse import Options
from llmq.plan import precision
from llmq.plan.memory import ROLES
from llmq.plan.precision import Precision

MOMENTS = ("opt_m_dtype", "opt_v_dtype")  # of adapters those of llmq-train
NARROW = {"model_dtype": "bf16", "opt_m_dtype": "bf16", "opt_v_dtype": "bf16"}
MATMULS = {  # options of llmq-train by name of --dtypes
    "fp32": {"model_dtype": "fp32"},
    "bf16": NARROW,
    "e4m3": {**NARROW, "matmul_dtype": "e4m3"},
}
OF_FP8 = ("gradient_dtype", "fp8_scaling", "head_dtype", "bf16_layers", "fp8_layers")
DEFAULT_LEVEL = 1  # of several GPUs


@dataclass(frozen=True)
class Defaults:
    """Defaults for a kind of device; it is sure to reach `share` of the speed of light."""

    models: tuple[str, ...]
    tokens: int  # of a step
    seq_len: int
    batch_size: int  # at most
    share: float


DEFAULTS = {
    "cuda": Defaults(("Qwen2.5-0.5B", "Qwen2.5-1.5B"), tokens=524_288, seq_len=1024, batch_size=32, share=0.25),
    "cpu": Defaults(("tiny_llama3_50m",), tokens=1024, seq_len=128, batch_size=1, share=0.06),
}


@dataclass(frozen=True)
class BenchRequest:
    """The options of the command; None and () take the defaults. `recipe` are options of llmq-train."""

    models: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    device: str = "auto"
    memory_limit: str | None = None
    host_memory_limit: str | None = None
    batch_size: int | None = None
    batch_sizes: tuple[int, ...] = ()  # each of them, in one table
    seq_len: int | None = None
    adapters_at_once: tuple[int, ...] = ()  # one after the other; 1 is an adapter alone
    tokens_per_step: int | None = None
    steps: int = 10
    warmup: int = 3
    recompute: tuple[str, ...] = ()
    deterministic: bool = True
    recipe: Mapping[str, Any] = field(default_factory=dict)
    save: Path | None = None
    compare: Path | None = None
    tolerance: float | None = None
    markdown: bool = False
    single_ops: bool = True
    gpus: int = 1
    zero_levels: tuple[int, ...] = ()
    memcpy_all_gather: bool | None = None
    command: str = "llmq-bench"


@dataclass(frozen=True)
class Wanted:
    """One configuration: a model's shape and the options of llmq-train that it is planned with."""

    model: str
    dtype: str
    config: ModelConfig
    precision: Precision
    flat: Mapping[str, Any]
    batch_size: int | None = None  # None: as many as fit
    at_once: int = 1  # equal adapters, which share the rows

    @property
    def name(self) -> str:
        """`Qwen2.5-0.5B bf16 32x1024, 8 adapters of rank 16 on nf4`."""
        size = f" {self.batch_size}x{self.flat['seq_len']}" if self.batch_size else ""
        return f"{self.model} {self.dtype}{size}{adapters_in_words({**self.flat, 'adapters_at_once': self.at_once})}"


def check(request: BenchRequest, where: Device, num_ranks: int = 1) -> tuple[list[Wanted], dict[str, Any] | None]:
    """What is measured, and what it is compared with; all is refused that can be before the first measurement."""
    wanted = configurations(request, where, num_ranks)
    old = load(request.compare) if request.compare else None
    if old is not None:
        require_common(old, [(one.model, one.dtype, one.flat["seq_len"]) for one in wanted])
    if request.save:
        _check_place(request.save)
    return wanted, old


def configurations(request: BenchRequest, where: Device, num_ranks: int = 1) -> list[Wanted]:
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
    if unknown := [name for name in request.recompute if f"recompute_{name}" not in ROLES]:
        known = ", ".join(flag.removeprefix("recompute_") for flag in ROLES)
        problems.append(f"--recompute {','.join(unknown)}: known are {known}")
    if request.tolerance is not None and request.compare is None:
        problems.append(f"--tolerance {request.tolerance:g} is for --compare: add it, or leave --tolerance out")
    if request.recipe.get("fit"):
        problems += _beside_fit(request, num_ranks)
    if request.batch_size and request.batch_sizes:
        problems.append("--batch-size and --batch-sizes are both given: give one of them")
    if request.zero_levels and num_ranks == 1:
        problems.append("--zero-levels is for several GPUs: add --gpus N, or leave it out")
    if request.memcpy_all_gather is not None and (num_ranks == 1 or where.kind == "cpu"):
        problems.append("--memcpy-all-gather is for several GPUs: add --gpus N, or leave it out")
    problems += [*_odd_tokens(request, where, num_ranks), *_odd_adapters(request)]
    sizes, counts = request.batch_sizes or (request.batch_size,), request.adapters_at_once or (1,)
    found = []
    for name, config in configs.items():
        for dtype in dtypes if not unknown_dtypes else ():
            try:
                one = _wanted(request, name, config, dtype, where, with_fp8="e4m3" in dtypes)
                found += [replace(one, batch_size=size, at_once=count) for size in sizes for count in counts]
            except LlmqError as error:
                problems.append(str(error))
    problems = list(dict.fromkeys(problems))  # a problem of every model is shown once
    if problems:
        raise UsageError("\n  ".join(["options that need a change:", *problems]) if problems[1:] else problems[0])
    return found


def _beside_fit(request: BenchRequest, num_ranks: int) -> Iterator[str]:
    """A message for each option that --fit decides, and for many ranks, which would each search for themselves."""
    if request.batch_size or request.batch_sizes:
        yield "--fit chooses the size of a micro-batch: leave out --batch-size and --batch-sizes"
    if "matmul" in (request.recipe.get("fit_may") or ""):
        yield "--fit-may matmul: --dtypes says what is multiplied, each for itself: allow states, or leave it out"
    if num_ranks > 1:
        yield "--fit is for one GPU: leave out --gpus"


def _default_dtypes(request: BenchRequest, where: Device) -> tuple[str, ...]:
    if where.kind == "cpu":
        return ("bf16",) if request.models else ("fp32",)
    return ("bf16", "e4m3") if devices.has_fp8(where) and not request.models else ("bf16",)


def _odd_tokens(request: BenchRequest, where: Device, num_ranks: int) -> Iterator[str]:
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


def _odd_adapters(request: BenchRequest) -> Iterator[str]:
    """Messages on --adapters-at-once."""
    for count in (count for count in request.adapters_at_once if count > 1):
        said = f"--adapters-at-once {count}"
        if not str(request.recipe.get("lora_rank")).isdecimal():
            yield f"{said} is for adapters of one rank: add --lora-rank N"
        if request.recipe.get("dora"):
            yield f"{said} trains A and B alone: leave --dora out"
        if request.recipe.get("fit"):
            yield f"{said} shares out the rows of a micro-batch, whose size --fit chooses: leave one of them out"
        for size in (size for size in request.batch_sizes or (request.batch_size,) if size and size % count):
            near = max(1, size // count) * count
            yield f"{said} shares out the rows of a micro-batch, and --batch-size {size} is no multiple: use {near}"


def seq_len_of(request: BenchRequest, where: Device) -> int:
    """Tokens of a sequence."""
    return request.seq_len or DEFAULTS[where.kind].seq_len


def _wanted(
    request: BenchRequest, model: str, config: ModelConfig, dtype: str, where: Device, *, with_fp8: bool
) -> Wanted:
    """A configuration. Options of fp8 apply to e4m3 only, if that is among the dtypes."""
    left_out = OF_FP8 if with_fp8 and dtype != "e4m3" else ()
    own = MATMULS[dtype]
    if "lora_rank" in request.recipe:
        own = {key: value for key, value in own.items() if key not in MOMENTS}
    flat = {
        "model": model,
        "from_scratch": True,
        "train_file": "generated",
        "seq_len": seq_len_of(request, where),
        **{f"recompute_{name}": True for name in request.recompute},
        **({} if request.host_memory_limit is None else {"host_memory_limit": request.host_memory_limit}),
        **own,
        **{key: value for key, value in request.recipe.items() if key not in left_out},
    }
    options = Options.parse(flat)
    resolved = precision.resolve(options.precision, config)
    adapters.resolve(options.adapters, config)  # for its errors, before anything is measured
    devices.refuse_dtypes(where, resolved.matmul, resolved.head, scaling=resolved.scaling, option="--dtypes")
    return Wanted(model, dtype, config, resolved, flat)


def multiplied(dtypes: Precision) -> tuple[str, ...]:
    """Dtypes of the matrix products of a run; attention's are the model's."""
    return dtypes.matmul, dtypes.head, dtypes.model


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
