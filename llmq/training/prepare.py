"""Options made into a run that is ready, with everything refused that can be before memory is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from llmq.adapters import resolve as adapters
from llmq.backends import Backend
from llmq.backends.opening import open_backend
from llmq.data.batches.loader import Data
from llmq.data.tokens.rebuilt_tokenizer import rebuilt_warning
from llmq.data.tokens.tokenizer import num_ids
from llmq.errors import UsageError
from llmq.files.huggingface import exports_anyway
from llmq.files.source import ModelSource, Values, initial_parameters, open_parameters, open_source
from llmq.generation.prompts import Question, read_questions
from llmq.hardware import device
from llmq.hardware.device import Device
from llmq.model.config import ModelConfig
from llmq.options.parse import Options, continue_command, minimal
from llmq.options.run import RunOptions
from llmq.plan import memory, precision, sharding
from llmq.plan.plan import Plan, make_plan
from llmq.plan.precision import Precision
from llmq.plan.remedies import with_fitting_chunks
from llmq.plan.spec import Spec
from llmq.training import auto
from llmq.training.describe import describe, describe_dry
from llmq.training.earlier_run import EarlierRun
from llmq.training.exports import OpenedExports, open_model
from llmq.training.facts import Facts, facts_of
from llmq.training.fit import NUMBERS, Fit, chosen
from llmq.training.gpu_log import GpuWatch
from llmq.training.health import rate_warnings
from llmq.training.log import RunLog
from llmq.training.ranks import Ranks
from llmq.training.ready import Ready, Replan, Results
from llmq.training.room import check_disk, check_memory
from llmq.training.run_data import NamedRunData, RunData
from llmq.training.samples import open_samples
from llmq.training.without_effect import without_effect


@dataclass(frozen=True)
class Start:
    """What a run starts from, before its data is opened: who runs where, what an earlier run left, and the model.

    `values` are the model's first ones, and `early` notices on the way.
    """

    log: RunLog
    ranks: Ranks
    device: Device
    earlier: EarlierRun
    source: ModelSource
    values: Values
    seed: int
    is_dry: bool
    early: list[str]


@dataclass(frozen=True)
class Planned:
    """The plan of a run, what plans it with other dtypes, and what timing chose for each site."""

    plan: Plan
    replan: Replan
    matmuls: Mapping[str, str]


def is_dry(options: RunOptions) -> bool:
    """Whether the run is a dry one, which writes nothing."""
    return options.dry_run


def prepare(options: Options, log: RunLog, ranks: Ranks) -> Ready:
    """Everything that can be refused before the first allocation, and the sections of the log."""
    questions = _check_files(log)
    start = _start(options, log, ranks)
    named = NamedRunData(options, start.source, log, start.earlier, plans_only=start.is_dry)
    dtypes, _ = _resolve_precision(options, start.source.config, start)
    trains = named.open(device.packing_problem(start.device, dtypes.model), ranks.size, start.early)
    of_model = (trains.config, *trains.tokens, trains.data.train.num_virtual)
    samples = open_samples(questions, log.sample_tokens, start.source, *of_model)
    facts = facts_of(trains, dtypes, start.device, start.seed, samples, ranks)
    if not memory.is_to_fit(options.memory):
        facts.spec(options, dtypes)  # may be refused, which is better known before what an earlier run left
    start.earlier.refuse_to_mix(options)
    backend = _open_backend(options, start)
    fit = _fit(options, facts, trains.data, backend, start)
    if memory.is_to_fit(options.memory):
        trains = replace(trains, data=fit.resized(trains.data))
    planned = _plan(fit, facts, trains.data, backend, start)
    run = Ready(
        device=start.device,
        backend=backend,
        source=start.source,
        values=adapters.first_values(
            fit.options.adapters, planned.plan.spec.adapters, start.source, start.values, start.seed
        ),
        trains=trains,
        samples=samples,
        plan=planned.plan,
        replan=planned.replan,
        watching=precision.watching(fit.options.precision),
        gpu=GpuWatch(start.device, log.gpu_every, log.gpu),
        options=fit.options.to_flat(),
        fitted=fit.changes,
        can_restart=ranks.can_restart,
        results=_results(fit.options, trains, planned, start),
    )
    given = minimal(fit.options)
    run = replace(run, results=_with_advice(run, given))
    check_memory(run, fit.options, log)
    needs = check_disk(run, start.earlier.step)
    describe(run, log, given, planned.matmuls)
    if start.is_dry:
        describe_dry(run, log, needs)
    elif ranks.is_first:
        start.earlier.remove(log)
    return run


def _check_files(log: RunLog) -> list[Question]:
    """Refuses what the log cannot be written to; the prompts of --sample-prompts."""
    log.check()
    return read_questions(log.sample_prompts, "--sample-prompts") if log.sample_prompts else []


def _start(options: Options, log: RunLog, ranks: Ranks) -> Start:
    """What the run starts from. UsageError also if ranks cannot copy on the device as they are asked to."""
    early = [ranks.said] if ranks.said else []
    dry = is_dry(options.run)
    where = ranks.device or device.pick_device(options.system)
    sharding.refuse_copies(options.sharding, where.kind)
    seed = device.seed_of(options.system)
    earlier = EarlierRun.open(options, log, ranks, plans_only=dry)
    source = open_source(options.model, early.append, num_ids, plan_only=dry)
    # A resumed run needs no files but for frozen rows.
    values = partial(initial_parameters, source, seed=seed) if earlier.path else open_parameters(source, seed)
    return Start(log, ranks, where, earlier, source, values, seed, dry, early)


def _resolve_precision(options: Options, config: ModelConfig, start: Start) -> tuple[Precision, bool]:
    """Dtypes and sites by options, device and checkpoint; and whether timing has yet to choose among the fp8 sites."""
    where, state = start.device, start.earlier.state
    dtypes, is_auto = precision.resolve(options.precision, config), precision.is_auto(options.precision)
    if is_auto and not device.has_fp8(where):
        dtypes, is_auto = dtypes.without_fp8(), False
    device.refuse_dtypes(where, dtypes.matmul, dtypes.head, scaling=dtypes.scaling)
    dtypes = dtypes.without(state.get("fp8", {}).get("fell_back", ()))
    if is_auto and (sites := start.ranks.told.get("sites") or state.get("sites")):
        return replace(dtypes, matmul=sites["matmul"], wide=tuple(sites["wide"])), False
    if is_auto and where.planned:
        raise UsageError(
            "--matmul-dtype auto times a GPU, and --gpu names one that this machine does not have: use bf16 or e4m3"
        )
    return dtypes, is_auto


def _open_backend(options: Options, start: Start) -> Backend:
    """The device's backend, with the GEMM algorithms of the checkpoint."""
    where, algorithms = start.device, start.earlier.state.get("algorithms") or None
    kind = "planned" if where.planned else where.kind
    settings = device.backend_settings(options.system, where)
    return open_backend(kind, world=start.ranks.world, algorithms=algorithms, **settings)


def _fit(options: Options, facts: Facts, data: Data, backend: Backend, start: Start) -> Fit:
    """With --fit the fastest settings that fit: as the first rank chose them, with the numbers of the checkpoint."""
    if not memory.is_to_fit(options.memory):
        return Fit(options)

    def spec_of(tried: Options) -> Spec:
        return facts.spec(tried, _resolve_precision(tried, facts.config, start)[0])

    saved = start.earlier.state.get("options", {})
    kept = {key: saved[key] for key in NUMBERS if key in saved} if start.earlier.path else None
    return chosen(options, spec_of, facts.where, data, backend, kept, start.ranks.told.get("fit"), start.log)


def _plan(fit: Fit, facts: Facts, data: Data, backend: Backend, start: Start) -> Planned:
    """The plan of the options that were chosen, once it is known what timing chooses."""
    dtypes, is_timed = _resolve_precision(fit.options, facts.config, start)
    spec = facts.spec(fit.options, dtypes)
    replan = _planner(fit.options, spec, start.device, backend, fit.plan)
    matmuls: Mapping[str, str] = {}
    if is_timed:
        dtypes, matmuls = _time_sites(replan(dtypes, 0).spec, backend, data, start.log)
    return Planned(replan(dtypes, 0), replan, matmuls)


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


def _open_exports(options: Options, trains: RunData, plan: Plan, start: Start) -> OpenedExports:
    """Where the model goes, or the adapter, and what is to be known of the base of --adapter."""
    replaces, source = start.earlier.replaces_model, start.source
    opened = open_model(options, source, trains.tokens, plan, start.values, replaces=replaces)
    of_base = adapters.base_notes(options.adapters, source, plan.held_base, start.seed)
    return replace(opened, notices=(*opened.notices, *of_base))


def _results(options: Options, trains: RunData, planned: Planned, start: Start) -> Results:
    """Where what the run leaves goes, and what is known so far that the user should know."""
    opened = _open_exports(options, trains, planned.plan, start)
    rebuilt = rebuilt_warning(trains.tokens[0], trains.config.family.model_type)
    return Results(
        exports=opened.exports,
        exports_anyway=exports_anyway(options.export),
        checkpoints=start.earlier.checkpoints,
        resume=start.earlier.path,
        continue_command="" if start.is_dry else continue_command(options, start.ranks.start),
        notices=(*options.notices, *start.early, *opened.notices),
        warnings=(rebuilt,) if rebuilt else (),
    )


def _with_advice(run: Ready, given: Mapping[str, object]) -> Results:
    """The results with what the options that are `given` and the data give to think about."""
    found = rate_warnings(run.trains.schedule.peak)
    notices = (*run.results.notices, *without_effect(run, given))
    return replace(run.results, notices=notices, warnings=(*run.results.warnings, *run.data.warnings(), *found))
