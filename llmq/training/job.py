"""A run made ready: options to model, data, device and plan, with everything refused that can be before allocation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from llmq.adapters import resolve as adapters
from llmq.backends import Backend, open_backend
from llmq.data.batches.loader import Data
from llmq.data.tokens.tokenizer import num_ids
from llmq.disk import shown
from llmq.errors import UsageError
from llmq.files.checkpoint import Checkpoints, check_same
from llmq.files.huggingface import Export, exports_anyway
from llmq.files.source import ModelSource, Values, fingerprint, initial_parameters, open_parameters, open_source
from llmq.files.tensor_files import Piece
from llmq.files.writers import TensorSlice
from llmq.generation.prompts import Question, read_questions
from llmq.hardware import device, gemm_speed
from llmq.hardware.device import Device
from llmq.hardware.gemm_speed import GemmSpeed
from llmq.model.config import ModelConfig
from llmq.options.commands import continue_command
from llmq.options.parse import Options, minimal
from llmq.options.run import RunOptions
from llmq.options.sweep import MemberOptions, read_members
from llmq.plan import memory, precision, sharding
from llmq.plan.plan import Plan, make_plan
from llmq.plan.precision import Precision
from llmq.plan.remedies import with_fitting_chunks
from llmq.plan.spec import Spec
from llmq.row import Row
from llmq.tensor import DTYPES
from llmq.training import auto
from llmq.training.describe import describe
from llmq.training.exported import OpenedExports, open_model
from llmq.training.fit import NUMBERS, Fit, chosen
from llmq.training.gpu_log import GpuWatch
from llmq.training.health import rate_warnings
from llmq.training.log import RunLog
from llmq.training.past import Past, open_past, remove_earlier
from llmq.training.ranks import Ranks
from llmq.training.room import check_disk, check_memory
from llmq.training.samples import SamplePrompts, open_samples
from llmq.training.schedule import Schedule
from llmq.training.several import MemberRun, open_exports
from llmq.training.specs import Facts, facts_of
from llmq.training.survey import Surveyed, found_before, look
from llmq.training.trained_on import Trained, TrainedOn
from llmq.training.without_effect import without_effect

HOST_RESERVE = 0.05  # of the host's memory stays free when checkpoints are copied into it


# A plan with other dtypes, where so many more bytes are free than now.
Replan = Callable[[Precision, int], Plan]


@dataclass(frozen=True)
class Job:
    """A run, checked and planned, before memory is allocated."""

    device: Device
    backend: Backend
    seed: int
    source: ModelSource
    parameters: Values  # of rows as they are before the first step
    found: Surveyed  # before adapters were planned
    data: Data
    samples: SamplePrompts | None
    schedule: Schedule
    members: tuple[MemberRun, ...]  # several adapters that are trained at once
    plan: Plan
    checkpoints: Checkpoints
    resume: Path | None
    exports: tuple[Export, ...]  # the model, or the adapter, and that merged; of several adapters each
    exports_anyway: bool
    options: dict[str, Any]
    fitted: Mapping[str, Any]  # options that --fit chose
    continue_command: str
    watching: precision.Watching
    replan: Replan
    plans_only: bool
    gpu: GpuWatch
    can_restart: bool  # processes that are lost
    speed: GemmSpeed | None
    notices: tuple[str, ...]  # what the user should know before training starts
    warnings: tuple[str, ...]  # what may spoil the run

    @property
    def names(self) -> list[str]:
        """Of several adapters that are trained at once."""
        return [member.name for member in self.members]

    def rates(self, step: int) -> float | list[float]:
        """The learning rate of a step, or that of each of several adapters."""
        if not self.members:
            return self.schedule.learning_rate(step)
        return [member.schedule.learning_rate(step) for member in self.members]

    @property
    def tokens_per_step(self) -> int:
        """All tokens of an optimizer step, but virtual ones. Packed rows have fewer, if they have these."""
        return self.data.samples_per_step * self.data.tokens_per_row

    @property
    def light_s(self) -> float:
        """Seconds for a token at the speed of light, by the dtypes of the plan's sites."""
        return self.plan.spec.light_s(device.peaks(self.device))

    def frozen(self) -> Iterable[tuple[Row, np.ndarray]]:
        """Rows that no checkpoint holds, with their values."""
        rows = self.plan.loaded_anew
        return self.parameters(rows) if rows else ()

    @property
    def checkpoint_slices(self) -> list[TensorSlice]:
        """What this rank writes of a checkpoint, which may be all."""
        return [
            TensorSlice(Piece(name, one.whole, DTYPES[one.dtype]), one.start, one.shape)
            for name, one in self.plan.saved().items()
        ]

    @property
    def checkpoint_pieces(self) -> list[Piece]:
        """The tensors of a checkpoint, whole, as far as this rank writes any of them."""
        return [each.tensor for each in self.checkpoint_slices]

    def memory_aside(self, say: Callable[[str], None]) -> Callable[[int], np.ndarray] | None:
        """What gives host memory for a copy of a checkpoint, which is written while training continues.

        None, having said so, where the host has too little for it.
        """
        needed, (total, free) = self.checkpoint_copy_bytes, device.memory_bytes()
        needed += sum(sum(self.plan.table(home).values()) for home in self._host_homes)
        if needed + HOST_RESERVE * total <= free:
            return self.backend.host_bytes
        say(
            f"Training waits while a checkpoint is written: to save beside it, the run needs {shown(needed)} of host "
            f"memory beyond {shown(int(HOST_RESERVE * total))} that stay free, and {shown(free)} are free"
        )
        return None

    @property
    def _host_homes(self) -> tuple[str, ...]:
        """The homes of the plan that are in host memory."""
        return ("host", "device") if self.device.kind == "cpu" else ("host",)

    @property
    def checkpoint_copy_bytes(self) -> int:
        """Host memory that a copy of a checkpoint takes."""
        return sum(each.piece.num_bytes for each in self.checkpoint_slices)

    @cached_property
    def base(self) -> str | None:
        """The fingerprint of the model that frozen rows are loaded from."""
        return fingerprint(self.source)

    @property
    def must_match(self) -> dict[str, Any]:
        """What a checkpoint has in common with the run that continues it: else it would be another run."""
        return {
            "seed": self.seed,
            **self.data.identity(),
            "model": self.plan.spec.config.identity(),
            "parameters": {row.name: list(row.shape) for row in self.plan.rows},
            **({"frozen model": self.base} if self.plan.loaded_anew else {}),
            **({"trained": self.options["train_only"]} if self.plan.spec.frozen else {}),
            **self.plan.spec.adapters.must_match(),
            **self.plan.spec.hyper.rule.identity(),
            **self.plan.spec.precision.identity(),
        }

    def check_same(self, saved: Mapping[str, Any]) -> None:
        """UsageError naming what must match the checkpoint and does not; the data need not where it begins anew."""
        now = self.must_match
        if "data" in self.checkpoints.resets:
            now = {name: value for name, value in now.items() if name not in self.data.identity()}
            saved = {name: value for name, value in saved.items() if name in now}
        check_same(saved, now)


def is_dry(options: RunOptions) -> bool:
    """Whether the run is a dry one, which writes nothing."""
    return options.dry_run


def prepare(options: Options, log: RunLog, ranks: Ranks) -> Job:
    """Everything that can be refused before the first allocation, and the sections of the log."""
    questions, early = _check_files(log), [ranks.said] if ranks.said else []
    members, plans_only = read_members(options), is_dry(options.run)
    where, seed = _device(options, ranks), device.seed_of(options.system)
    past = open_past(options, log, ranks, plans_only=plans_only)
    source = open_source(options.model, early.append, num_ids, plan_only=plans_only)
    model = _open_parameters(source, seed, past)
    named = TrainedOn(options, members, source, log, past, plans_only=plans_only)
    dtypes, is_timed = _resolve_precision(options, source.config, where, past, ranks)
    rows = named.open(device.packing_problem(where, dtypes.model), ranks.size, early)
    samples = open_samples(questions, log.sample_tokens, source, *rows.writes)
    facts = facts_of(rows, dtypes, where, seed, samples, ranks, members)
    speed, backend = _open_backend(_checked(options, facts, dtypes, past), where, past, ranks)
    fit, options, data = _fit(options, facts, rows.data, backend, past, ranks, log)
    dtypes, is_timed = _resolve_precision(options, source.config, where, past, ranks)
    spec, found = _look(options, facts.spec(options, dtypes), where, backend, data, model, past, ranks, log)
    replan, plan, matmuls = _plan(options, spec, where, backend, data, log, fit.plan, is_timed=is_timed)
    opened = _open_results(options, source, rows, plan, model, past)
    job = Job(
        device=where,
        backend=backend,
        seed=seed,
        source=source,
        parameters=_first_values(options, members, plan.spec, source, model, seed, found),
        found=found,
        data=data,
        samples=samples,
        schedule=rows.schedule,
        members=rows.members,
        plan=plan,
        checkpoints=past.checkpoints,
        resume=past.path,
        exports=opened.exports,
        options=options.to_flat(),
        fitted=fit.changes,
        exports_anyway=exports_anyway(options.export),
        continue_command="" if plans_only else continue_command(options, ranks.start),
        watching=precision.watching(options.precision),
        replan=replan,
        plans_only=plans_only,
        gpu=GpuWatch(where, log.gpu_every),
        can_restart=ranks.can_restart,
        speed=speed,
        notices=(*options.notices, *early, *found.lines, *opened.notices),
        warnings=tuple(text for text in (opened.warning, speed and speed.warning) if text),
    )
    return _begun(job, options, matmuls, past, ranks, log)


def _begun(job: Job, options: Options, matmuls: Mapping[str, str], past: Past, ranks: Ranks, log: RunLog) -> Job:
    """The job with what its options and data give to think about, once it is known to fit, and described in the log."""
    given, rates = minimal(options), {one.name: one.schedule.peak for one in job.members}
    found = (text for who, peak in (rates or {"": job.schedule.peak}).items() for text in rate_warnings(peak, who))
    job = replace(
        job, notices=(*job.notices, *without_effect(job, given)), warnings=(*job.warnings, *job.data.warnings(), *found)
    )
    check_memory(job, options, log)
    describe(job, log, given, matmuls, check_disk(job, past.step))
    remove_earlier(past, log, ranks, plans_only=job.plans_only)
    return job


def _open_results(
    options: Options, source: ModelSource, rows: Trained, plan: Plan, model: Values, past: Past
) -> OpenedExports:
    """Where the model goes, or the adapter, or each of several, and what is to be known of the base of --adapter."""
    replaces = past.replaces_model
    several = open_exports(rows.members, options, source, plan, replaces=replaces)
    opened = several or open_model(options, source, *rows.tokens, plan, model, replaces=replaces)
    every = [options.adapters, *(member.options.adapters for member in rows.members)]
    of_base = [text for one in every for text in adapters.base_notes(one, source, plan.held_base, plan.spec.seed)]
    return replace(opened, notices=(*opened.notices, *of_base))


def _device(options: Options, ranks: Ranks) -> Device:
    """Where the run computes. UsageError if ranks cannot copy there as they are asked to."""
    where = ranks.device or device.pick_device(options.system)
    sharding.refuse_copies(options.sharding, where.kind)
    return where


def _check_files(log: RunLog) -> list[Question]:
    """Refuses what the log cannot be written to; the prompts of --sample-prompts."""
    log.check()
    return read_questions(log.sample_prompts, "--sample-prompts") if log.sample_prompts else []


def _checked(options: Options, facts: Facts, dtypes: Precision, past: Past) -> Options:
    """The options, unless they cannot be planned, or the run would mix with what an earlier one left."""
    if not memory.is_to_fit(options.memory):
        facts.spec(options, dtypes)
    past.refuse_earlier(options)
    return options


def _open_parameters(source: ModelSource, seed: int, past: Past) -> Values:
    """The first values of rows; a resumed run needs no files but for frozen rows."""
    return partial(initial_parameters, source, seed=seed) if past.path else open_parameters(source, seed)


def _resolve_precision(
    options: Options, config: ModelConfig, where: Device, past: Past, ranks: Ranks
) -> tuple[Precision, bool]:
    """Dtypes and sites by options, device and checkpoint; and whether timing has yet to choose among the fp8 sites."""
    dtypes, is_auto = precision.resolve(options.precision, config), precision.is_auto(options.precision)
    if is_auto and not device.has_fp8(where):
        dtypes, is_auto = dtypes.without_fp8(), False
    device.refuse_dtypes(where, dtypes.matmul, dtypes.head, scaling=dtypes.scaling)
    dtypes = dtypes.without(past.state.get("fp8", {}).get("fell_back", ()))
    if is_auto and (chosen := ranks.told.get("sites") or past.state.get("sites")):
        return replace(dtypes, matmul=chosen["matmul"], wide=tuple(chosen["wide"])), False
    if is_auto and where.planned:
        raise UsageError(
            "--matmul-dtype auto times a GPU, and --gpu names one that this machine does not have: use bf16 or e4m3"
        )
    return dtypes, is_auto


def _first_values(
    options: Options,
    members: Sequence[MemberOptions],
    spec: Spec,
    source: ModelSource,
    model: Values,
    seed: int,
    found: Surveyed,
) -> Values:
    """What gives rows as they are before the first step."""
    return adapters.first_values(options.adapters, spec.adapters, source, model, seed, found.first, members)


def _fit(
    options: Options, facts: Facts, data: Data, backend: Backend, past: Past, ranks: Ranks, log: RunLog
) -> tuple[Fit, Options, Data]:
    """With --fit the fastest settings that fit: as the first rank chose them, with the numbers of the checkpoint."""
    if not memory.is_to_fit(options.memory):
        return Fit(options), options, data

    def spec_of(tried: Options) -> Spec:
        return facts.spec(tried, _resolve_precision(tried, facts.config, facts.where, past, ranks)[0])

    saved = past.state.get("options", {})
    kept = {key: saved[key] for key in NUMBERS if key in saved} if past.path else None
    fit = chosen(options, spec_of, facts.where, data, backend, kept, ranks.told.get("fit"), log)
    return fit, fit.options, fit.resized(data)


def _open_backend(options: Options, where: Device, past: Past, ranks: Ranks) -> tuple[GemmSpeed | None, Backend]:
    """The speed of matrix products, and the device's backend, with the GEMM algorithms of the checkpoint."""
    speed = None if is_dry(options.run) else gemm_speed.measure(where)
    kind = "planned" if where.planned else where.kind
    settings = device.backend_settings(options.system, where)
    return speed, open_backend(kind, world=ranks.world, algorithms=past.state.get("algorithms") or None, **settings)


def _look(
    options: Options,
    spec: Spec,
    where: Device,
    backend: Backend,
    data: Data,
    model: Values,
    past: Past,
    ranks: Ranks,
    log: RunLog,
) -> tuple[Spec, Surveyed]:
    """The spec with what the first batches say of its adapters, which a resumed run and other ranks know already; a
    dry run, which has no weights, plans for what is asked."""
    found = found_before(spec.adapters, past.state, ranks.told)
    if found is None and not is_dry(options.run):
        found = look(spec, data, model, backend, lambda: device.memory_bytes(where)[1], log.task)
    found = found or Surveyed()
    return found.fit(spec), found


def _plan(
    options: Options,
    spec: Spec,
    where: Device,
    backend: Backend,
    data: Data,
    log: RunLog,
    known: Plan | None,
    *,
    is_timed: bool,
) -> tuple[Replan, Plan, Mapping[str, str]]:
    """What plans the run, its plan, and a line for each site if timing chose among the fp8 sites."""
    replan = _planner(options, spec, where, backend, known)
    if not is_timed:
        return replan, replan(spec.precision, 0), {}
    dtypes, matmuls = _time_sites(replan(spec.precision, 0).spec, backend, data, log)
    return replan, replan(dtypes, 0), matmuls


def _planner(options: Options, spec: Spec, where: Device, backend: Backend, known: Plan | None) -> Replan:
    """A function that plans `spec` with other dtypes, which may be what is `known`."""

    def planned(dtypes: Precision, given_back: int) -> Plan:
        wanted = replace(spec, precision=dtypes)
        plan = known if known and known.spec == wanted else make_plan(wanted, backend.scratch_bytes)
        if not memory.chooses_attention_chunks(options.memory):
            return plan
        # What is free is asked here, as planning loads cuDNN's kernels.
        return with_fitting_chunks(plan, device.memory_bytes(where)[1] + given_back, backend.scratch_bytes)

    return planned


def _time_sites(spec: Spec, backend: Backend, data: Data, log: RunLog) -> tuple[Precision, Mapping[str, str]]:
    """The dtypes of `spec`, with only those sites in fp8 that are faster for it on this device, and a line for each."""
    sizes = {"batch_size": spec.batch_size, "seq_len": spec.seq_len, "grad_accumulation": data.grad_accumulation}
    with log.task("Timing matmuls") as report:
        dtypes, timing = auto.choose(spec.config, spec.precision, spec.memory, backend, report, **sizes)
    return dtypes, timing.rows(spec.precision.model)
