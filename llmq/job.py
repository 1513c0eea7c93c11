"""A run made ready: options to model, data, device and plan, with everything refused that can be before allocation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmq import auto, device, gemm_speed, optimizer
from llmq.backends import Backend, open_backend
from llmq.blocks.attention import Packing
from llmq.checkpoint import Checkpoints, checkpoint_bytes, load_state
from llmq.commands import continue_command
from llmq.config import FAMILIES, ModelConfig
from llmq.data.loader import Data, open_data
from llmq.data.prepare import open_named, sample_text
from llmq.data.rebuilt_tokenizer import rebuilt_warning
from llmq.data.trained_template import exported_templates
from llmq.device import Device
from llmq.disk import check_free_space, shown
from llmq.errors import UsageError
from llmq.gemm_speed import GemmSpeed
from llmq.gpu_log import GpuWatch
from llmq.hf import Export, export_folder, exports_anyway, finish_export, open_export, refuse_taken
from llmq.log import RunLog
from llmq.options import Options
from llmq.plan import memory, precision
from llmq.plan.advice import refuse_if_too_large, with_fitting_chunks
from llmq.plan.plan import Plan, make_plan
from llmq.plan.precision import Precision
from llmq.plan.spec import Spec
from llmq.rows import Row, num_parameters, padded_vocab, parameter_rows
from llmq.run_lock import held, kept_folder, replaced_whole
from llmq.schedule import Schedule, make_schedule
from llmq.sections import RunOptions
from llmq.source import ModelSource, initial_parameters, open_source
from llmq.tensor import DTYPES

MIB = 2**20


@dataclass(frozen=True)
class Job:
    """A run, checked and planned, before memory is allocated."""

    device: Device
    backend: Backend
    seed: int
    source: ModelSource
    parameters: Iterator[tuple[Row, np.ndarray]] | None
    data: Data
    schedule: Schedule
    plan: Plan
    checkpoints: Checkpoints
    resume: Path | None
    export: Export
    exports_anyway: bool
    options: dict[str, Any]
    continue_command: str
    watching: precision.Watching
    replan: Callable[[Precision, int], Plan]  # where so many more bytes are free than now
    plans_only: bool
    gpu: GpuWatch
    speed: GemmSpeed | None
    notices: tuple[str, ...]  # what the user should know before training starts

    @property
    def tokens_per_step(self) -> int:
        """All tokens of an optimizer step."""
        return self.data.samples_per_step * self.data.seq_len

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint's tensors."""
        return checkpoint_bytes((name, r.shape, DTYPES[r.dtype]) for name, r in self.plan.state().items())

    @property
    def must_match(self) -> dict[str, Any]:
        """What a checkpoint has in common with the run that continues it: else it would be another run."""
        return {
            "seed": self.seed,
            **self.data.identity(),
            "model": self.plan.spec.config.identity(),
            "parameters": {row.name: list(row.shape) for row in self.plan.rows},
            **self.plan.spec.precision.identity(),
        }


@contextmanager
def hold(options: Options, log: RunLog) -> Iterator[None]:
    """Holds the lock on all that the run writes; a dry run writes nothing. StorageError if another run has it."""
    with ExitStack() as stack:
        if not _plans_only(options.run):
            stack.enter_context(held(replaced_whole("--out-dir", export_folder(options.export)), log.say))
            finish_export(options.export)  # may bring back the checkpoints, which can be below the model
            saved = Checkpoints(options.checkpoint).folder
            stack.enter_context(held(kept_folder("--checkpoint-dir", saved), log.say))
            stack.enter_context(held(replaced_whole("--log-file", log.path), log.say))
        yield


def _plans_only(options: RunOptions) -> bool:
    return options.dry_run


def prepare(options: Options, log: RunLog) -> Job:
    """Everything that can be refused before the first allocation, and the sections of the log."""
    log.options(options.to_flat())
    log.check()
    where, seed = device.pick_device(options.system), device.seed_of(options.system)
    checkpoints = Checkpoints(options.checkpoint)
    resume = checkpoints.start(writes=not _plans_only(options.run))
    refuse_taken(options.export)
    if checkpoints.starts_anew:
        log.warn(f"--continue auto found no checkpoint in {checkpoints.folder}: this run begins at step 0")
    source = open_source(options.model)
    parameters = None if resume else initial_parameters(source, parameter_rows(source.config), seed)
    given = None if source.from_scratch else source.tokenizer_folder  # from scratch, the data's tokenizer is exported
    named = open_named(options.source, source, plan_only=_plans_only(options.run), say=log.say)
    dtypes = precision.resolve(options.precision, source.config)
    cannot_pack = device.packing_problem(where, dtypes.model)
    data = open_data(
        options.data, source.config.vocab_size, seed, tokenizer=given, named=named, cannot_pack=cannot_pack
    )
    before = load_state(resume) if resume else {}
    if before:
        data.layout.refuse_other(before)
    config = _with_end_tokens(source, data.end_token_ids())
    if data.seq_len > config.max_position:
        log.say(
            f"--seq-len {data.seq_len} is beyond the max_position_embeddings {config.max_position} of {source.name}: "
            f"the exported model says {data.seq_len}"
        )
        config = replace(config, max_position=data.seq_len)
    schedule = make_schedule(options.schedule, data.train.num_windows, data.samples_per_step)
    if before and before["step"] > schedule.steps:
        raise UsageError(
            f"{resume} is of step {before['step']}, and this run ends after {schedule.steps}: raise --steps or "
            "--epochs, or continue from an earlier checkpoint"
        )
    b, t = data.batch_size, data.seq_len
    logit_bytes = padded_vocab(config) * DTYPES[dtypes.model].itemsize
    gpu_bytes = device.memory_bytes(where)[0] if where.kind == "cuda" else 0
    limits = memory.resolve(options.memory, batch_size=b, seq_len=t, logit_bytes=logit_bytes, gpu_bytes=gpu_bytes)
    is_auto = precision.is_auto(options.precision)
    if is_auto and not device.has_fp8(where):
        is_auto, dtypes = False, dtypes.without_fp8()
    device.refuse_dtypes(where, dtypes.matmul, dtypes.head, scaling=dtypes.scaling)
    gpu = GpuWatch(where, log.gpu_every)
    speed = None if _plans_only(options.run) else gemm_speed.measure(where)
    hyper = optimizer.resolve(options.optimizer)
    watching = precision.watching(options.precision)
    dtypes = dtypes.without(before.get("fp8", {}).get("fell_back", ()))
    algorithms = before.get("algorithms")
    kind = "planned" if where.planned else where.kind
    settings = device.backend_settings(options.system, where)
    backend = open_backend(kind, algorithms=algorithms or None, **settings)
    scratch = backend.scratch_bytes

    packing = Packing(*data.limits) if data.limits else None
    spec = Spec(config, dtypes, limits, hyper, b, t, seed, packing, observe=watching.every > 0)

    def planned(dtypes: Precision, given_back: int = 0) -> Plan:
        plan = make_plan(replace(spec, precision=dtypes), scratch)
        if not memory.chooses_attention_chunks(options.memory):
            return plan
        # What is free is asked here, as planning loads cuDNN's kernels.
        return with_fitting_chunks(plan, device.memory_bytes(where)[1] + given_back, scratch)

    if is_auto and "sites" in before:
        dtypes = replace(dtypes, matmul=before["sites"]["matmul"], wide=tuple(before["sites"]["wide"]))
    elif is_auto:
        if where.planned:
            raise UsageError("--matmul-dtype auto times a GPU, and --gpu names one that is not here: use bf16 or e4m3")
        sizes = {"batch_size": b, "seq_len": t, "grad_accumulation": data.grad_accumulation}
        dtypes, timing = auto.choose(config, dtypes, planned(dtypes).spec.memory, backend, **sizes)
        log.matmuls(timing.rows(dtypes.model))
    plan = planned(dtypes)
    tokenizer = (data.tokenizer_folder() if source.from_scratch else None) or source.tokenizer_folder
    templates = exported_templates(data.train, tokenizer)
    warning = rebuilt_warning(tokenizer, FAMILIES[config.architecture].model_type)
    job = Job(
        device=where,
        backend=backend,
        seed=seed,
        source=source,
        parameters=parameters,
        data=data,
        schedule=schedule,
        plan=plan,
        checkpoints=checkpoints,
        resume=resume,
        export=open_export(options.export, config, plan.rows, tokenizer, templates.sources),
        options=options.to_flat(),
        exports_anyway=exports_anyway(options.export),
        continue_command=continue_command(options),
        watching=watching,
        replan=planned,
        plans_only=_plans_only(options.run),
        gpu=gpu,
        speed=speed,
        notices=(*templates.notices, *([warning] if warning else [])),
    )
    _describe(job, log)
    for text in job.notices if job.plans_only else ():  # else they go to the log, too, which is not open yet
        log.say(text)
    strict = where.kind == "cuda" and settings["deterministic"]
    relaxed = open_backend("planned", deterministic=False).scratch_bytes if strict else None
    free = device.memory_bytes(where)[1]
    refuse_if_too_large(plan, free, scratch, relaxed)
    first, last = before.get("step", 0) + 1, schedule.steps
    saved = (checkpoints.folder, checkpoints.peak_bytes(job.checkpoint_bytes, first, max(first, last)))
    needs = {"the checkpoints": saved, "the model": (job.export.folder, job.export.check(room=not where.planned))}
    if _plans_only(options.run):
        log.say(f"On {where.kind}: {shown(plan.total_bytes)} of {shown(free)} that are free")
        log.say("On disk: " + ", ".join(f"{what} {shown(size)}" for what, (_, size) in needs.items()))
    if not where.planned:
        check_free_space(needs)
    return job


def _with_end_tokens(source: ModelSource, ends: tuple[int, ...]) -> ModelConfig:
    """The config of the exported model: it ends texts as its data does, and one trained before as then, too."""
    config = source.config
    if set(ends) <= set(config.eos_token_ids):
        return config
    if source.from_scratch:
        return replace(config, eos_token_ids=ends, bos_token_id=None, pad_token_id=None)
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ends))))


def _describe(job: Job, log: RunLog) -> None:
    """The sections of the log that say what will be run."""
    plan, data, config = job.plan, job.data, job.plan.spec.config
    measured = {"measured": f"matrix products at {job.speed.line}"} if job.speed else {}
    log.system({**device.system_facts(job.device), **measured})
    log.model(job.source.name, parameters=num_parameters(plan.rows), architecture=config.architecture)
    windows = data.train.num_windows
    per_epoch = None if windows is None else -(-windows // data.samples_per_step)
    steps = {"tokens per step": job.tokens_per_step, "steps per epoch": per_epoch, "steps": job.schedule.steps}
    shares = [asdict(share) for share in data.shares(job.schedule.steps * data.samples_per_step)]
    log.dataset(data.train.files, data.eval.files if data.eval else (), mixture=shares, **steps, **data.facts())
    if sample := sample_text(data.train.token_files, data.tokenizer_folder):
        log.say(sample)
    table = {name: size / MIB for name, size in plan.table().items()}
    other = table.pop("Other")
    total, free = device.memory_bytes(job.device)
    left = max(free - plan.total_bytes, 0) / MIB
    hint = "a larger --batch-size"
    hint += (", or fewer --recompute flags," if plan.spec.memory.flags else "") + " would use them"
    if (chunks := plan.spec.memory.attention_chunks) > 1 and job.options["attn_bwd_chunks"] == memory.AUTO:
        log.say(f"Attention's backward runs in {chunks} chunks of the batch, so that it needs less memory")
    log.allocator({**table, "Free": left, "Reserved": max(total - free, 0) / MIB, "Other": other}, hint=hint)
