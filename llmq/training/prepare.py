"""Options made into a run that is ready, with everything refused that can be before memory is allocated."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from llmq.adapters import resolve as adapters
from llmq.adapters.added_tokens import ADDED_ROW, grown_for
from llmq.backends import Backend
from llmq.backends.opening import begin_opening, open_backend
from llmq.blocks.packed import Packing
from llmq.data.batches.loader import Data, open_data
from llmq.data.batches.named_data import open_named
from llmq.data.tokens.added_tokens import grown, read_tokens
from llmq.data.tokens.tokenizer import num_ids, rebuilt_warning
from llmq.disk import check_free_space
from llmq.engine.advice import refuse_if_too_large
from llmq.errors import UsageError
from llmq.files.source import ModelSource, open_parameters, open_source
from llmq.files.writers import checkpoint_bytes
from llmq.generation.prompts import read_questions
from llmq.hardware import device
from llmq.model.config import ModelConfig
from llmq.model.family_file import KEY
from llmq.model.parameters import EMBED_ROW
from llmq.options.parse import Options, continue_command, minimal
from llmq.options.run import RunOptions
from llmq.plan import levels, loss, memory, precision
from llmq.plan.plan import Plan, make_plan
from llmq.plan.precision import Precision
from llmq.plan.remedies import with_fitting_chunks
from llmq.plan.slots import listed
from llmq.plan.spec import Spec
from llmq.screen import Report
from llmq.training.describe import describe, describe_dry, level_lines
from llmq.training.evaluation import SamplePrompts, open_samples
from llmq.training.finish import RunData, exported_config, exported_templates, exported_tokenizer, open_exports
from llmq.training.fit import NUMBERS, Fit, fitted, taken
from llmq.training.fp8 import timed_sites
from llmq.training.hooks import GpuWatch
from llmq.training.log import RunLog
from llmq.training.ranks import Ranks
from llmq.training.ready import EarlierRun, Facts, Ready, Replan, Start, checkpoint_slices
from llmq.training.schedule import Schedule, make_schedule
from llmq.training.without_effect import without_effect

UNKNOWN_STEPS = 1_000_000  # planned for where neither the data nor --steps says how long the run is


def is_dry(options: RunOptions) -> bool:
    """Whether the run is a dry one, which writes nothing."""
    return options.dry_run


def prepare(options: Options, log: RunLog, ranks: Ranks, *, stops_early: bool) -> Ready:
    """Everything that can be refused before the first allocation, and the sections of the log. The run `stops_early` by
    its evaluations, if a callback does."""
    log.check()
    questions = read_questions(log.sample_prompts, "--sample-prompts") if log.sample_prompts else []
    start = _start(options, log, ranks, stops_early)
    loss.resolve(options.loss).check(start.source.config.vocab_size)
    dtypes, _ = _resolve_precision(start, options, start.source.config)
    trains = _open_data(start, dtypes)
    samples = open_samples(questions, log, start.source, trains)
    where, packs = start.device, device.packing_problem(start.device, dtypes.model) is None
    completions = None if samples is None else samples.completions(packed=packs)
    packing, steps = Packing(*trains.data.limits) if trains.data.limits else None, trains.schedule.steps
    facts = Facts(
        trains.config, where, start.seed, packing, completions, ranks.rank, ranks.size, steps, start.source.new_rows
    )
    if not memory.is_to_fit(options.memory):
        facts.spec(options, dtypes)  # may be refused, which is better known before what an earlier run left
    start.earlier.refuse_to_mix(options)
    settings = device.backend_settings(options.system, where)
    algorithms = start.earlier.state.get("algorithms") or None  # of matrix products
    backend = open_backend(where.backend, world=ranks.world, algorithms=algorithms, **settings)
    fit = _fit(start, facts, trains.data, backend)
    trains = replace(trains, data=fit.resized(trains.data))
    plan, replan, matmuls = _plans(start, fit, facts, trains.data, backend)
    _refuse_unknown_metrics(fit.options, plan)
    _refuse_untrained_tokens(start.source, plan)
    run, given = _ready(start, fit, trains, samples, backend, plan, replan), minimal(fit.options)
    for notice in without_effect(run, given):
        log.notice(notice)
    rebuilt = rebuilt_warning(trains.tokenizer, trains.config.family.model_type)
    for warning in (*([rebuilt] if rebuilt else []), *run.data.warnings(), *run.schedule.warnings()):
        log.warn(warning)
    _check_memory(run, facts, fit.options)
    needs = _check_disk(run)
    describe(run, given, matmuls)
    if start.is_dry:
        describe_dry(run, needs)
    elif ranks.is_first:
        start.earlier.remove(log)
    return run


def _start(options: Options, log: RunLog, ranks: Ranks, stops_early: bool) -> Start:
    """What the run starts from. UsageError also if ranks cannot copy on the device as they are asked to."""
    for text in (*options.notices, *([ranks.said] if ranks.said else [])):
        log.notice(text)
    dry = is_dry(options.run)
    where = ranks.device or device.pick_device(options.system)
    begin_opening(where.backend, where.gpu.index if where.gpu else 0)
    levels.refuse_copies(options.sharding, where.kind)
    seed = options.to_flat()["seed"]
    earlier = EarlierRun.open(options, log, ranks, plans_only=dry)
    family = earlier.state.get("must_match", {}).get("model", {}).get(KEY)
    source = open_source(options.model, log.notice, num_ids, plan_only=dry, family=family)
    file = options.to_flat()["add_tokens"]
    tokens = read_tokens(Path(file)) if file is not None else earlier.state.get("added_tokens", ())
    source = grown(grown_for(source, options.to_flat()["adapter"]), tokens, log.notice)
    # A resumed run needs no files but for frozen rows.
    values = (lambda rows: open_parameters(source, seed)(rows)) if earlier.path else open_parameters(source, seed)
    return Start(options, log, ranks, where, earlier, source, values, seed, dry, stops_early)


def _resolve_precision(start: Start, options: Options, config: ModelConfig) -> tuple[Precision, bool]:
    """Dtypes and sites by options, device and checkpoint; and whether timing has yet to choose among the fp8 sites."""
    where, state = start.device, start.earlier.state
    dtypes, is_auto = precision.resolve(options.precision, config), precision.is_auto(options.precision)
    if is_auto and not device.has_fp8(where):
        dtypes, is_auto = dtypes.without_fp8(), False
    device.refuse_dtypes(where, dtypes.matmul, dtypes.head, scaling=dtypes.scaling)
    dtypes = dtypes.without(state.get("fp8", {}).get("fell_back", ()))
    if is_auto and (sites := start.ranks.shared.get("sites") or state.get("sites")):
        return replace(dtypes, matmul=sites["matmul"], wide=tuple(sites["wide"])), False
    if is_auto and where.planned:
        raise UsageError(
            "--matmul-dtype auto times a GPU, and --gpu names one that this machine does not have: use bf16 or e4m3"
        )
    return dtypes, is_auto


def _open_data(start: Start, dtypes: Precision) -> RunData:
    """What the run trains on, which is tokenized if it is not, with what follows from it."""
    options, log, source, earlier = start.asked, start.log, start.source, start.earlier

    def task(title: str) -> AbstractContextManager[Report]:
        earlier.refuse_to_mix(options)  # now, as tokenizing may take hours
        return log.task(title)

    # Lines on data go below the log's section on it, but those on work that takes place.
    named = open_named(options.source, source, plan_only=start.is_dry, say=log.say, note=log.about_data, task=task)
    data = open_data(
        options.data,
        source.config.vocab_size,
        start.seed,
        tokenizer=source.required_tokenizer,
        named=named,
        world=start.ranks.size,
        cannot_pack=device.packing_problem(start.device, dtypes.model),
        num_virtual=adapters.resolve(options.adapters, source.config).num_virtual,
        placeholders=source.config.placeholders,
    )
    if earlier.path and "data" not in earlier.checkpoints.resets:
        data.layout.refuse_other(earlier.state)
    config, schedule = exported_config(source, data, log.notice), _schedule(start, data)
    tokenizer = exported_tokenizer(source, named, data)
    return RunData(data, schedule, config, tokenizer, exported_templates(data.train, tokenizer, log.notice))


def _schedule(start: Start, data: Data) -> Schedule:
    """The schedule; UsageError if the checkpoint is beyond its end, or if it lacks evaluations that are asked for."""
    earlier, checkpoints = start.earlier, start.earlier.checkpoints
    evaluates = data.eval is not None and start.log.eval_due(0, last=True)
    asked = {"--save-best": checkpoints.saves_best, "early stopping": start.stops_early}
    for name, is_asked in {**asked, "--eval-metrics": bool(start.log.eval_metrics)}.items():
        if is_asked and data.is_there and not evaluates:
            raise UsageError(
                f"{name} goes by evaluations, and this run makes none: give evaluation data and --eval-every-n-steps "
                "above 0, or leave it out"
            )
    begun = earlier.step if "lr" in checkpoints.resets else earlier.state.get("rate_from", 0)
    per_step = data.samples_per_step
    windows = data.train.num_windows if data.is_there else UNKNOWN_STEPS * per_step  # long enough for any run
    schedule = make_schedule(start.asked.schedule, windows, per_step, begun)
    if earlier.step > schedule.steps:
        raise UsageError(
            f"{earlier.path} is of step {earlier.step}, and this run ends after {schedule.steps}: raise --steps or "
            "--epochs, or continue from an earlier checkpoint"
        )
    return schedule


def _refuse_unknown_metrics(options: Options, plan: Plan) -> None:
    """UsageError for what goes by the accuracy where the loss counts no hits."""
    flat = options.to_flat()
    for name in ("save_best", "early_stopping_metric"):
        if flat[name] == "eval_accuracy" and not hasattr(plan.cells.evaluated, "hits"):
            option = f"--{name.replace('_', '-')} eval_accuracy"
            raise UsageError(f"{option}: --loss {flat['loss']} has no accuracy: use eval_loss")


def _refuse_untrained_tokens(source: ModelSource, plan: Plan) -> None:
    """UsageError where the rows of added tokens would stay what they begin as."""
    trained = {row.name for row in plan.rows if row.trainable}
    if source.new_rows and not trained & {EMBED_ROW, ADDED_ROW}:
        names = "embed_tokens" if source.config.tie_embeddings else "embed_tokens,lm_head"
        raise UsageError(
            "--add-tokens: the embedding is frozen, and with it the rows of the new tokens: use LoRA, which trains "
            f"these, add --train-also {names} to IA3 or AdaLoRA, name it with --train-only, or train the whole model"
        )


def _fit(start: Start, facts: Facts, data: Data, backend: Backend) -> Fit:
    """With --fit the fastest settings that fit: as the first rank chose them, with the numbers of the checkpoint."""
    options, earlier = start.asked, start.earlier
    if not memory.is_to_fit(options.memory):
        return Fit(options)
    saved = earlier.state.get("options", {})
    kept = {key: saved[key] for key in NUMBERS if key in saved} if earlier.path else None
    if (shared := start.ranks.shared.get("fit")) is not None:
        return Fit(taken(options, {**(kept or {}), **shared}), shared)

    def spec_of(tried: Options) -> Spec:
        return facts.spec(tried, _resolve_precision(start, tried, facts.config)[0])

    samples = data.batch_size * data.grad_accumulation
    found = fitted(options, spec_of, facts.where, backend, samples, kept=kept, task=start.log.task)
    for line in found.lines:
        start.log.say(line)
    return found


def _plans(
    start: Start, fit: Fit, facts: Facts, data: Data, backend: Backend
) -> tuple[Plan, Replan, Mapping[str, str]]:
    """The plan of the options that were chosen, what plans them with other dtypes, and what timing chose by site."""
    dtypes, is_timed = _resolve_precision(start, fit.options, facts.config)
    spec = facts.spec(fit.options, dtypes)

    def replan(dtypes: Precision, given_back: int) -> Plan:
        wanted = replace(spec, precision=dtypes)
        plan = fit.plan if fit.plan and fit.plan.spec == wanted else make_plan(wanted, backend.scratch_bytes)
        if not memory.chooses_attention_chunks(fit.options.memory):
            return plan
        # What is free is asked here, as planning loads cuDNN's kernels.
        return with_fitting_chunks(plan, device.memory_bytes(start.device)[1] + given_back, backend.scratch_bytes)

    plan, matmuls = replan(dtypes, 0), {}
    if is_timed:
        with start.log.task("Timing matmuls") as report:
            dtypes, timing = timed_sites(plan.spec, data.grad_accumulation, backend, report)
        plan, matmuls = replan(dtypes, 0), timing.rows(dtypes.model)
    return plan, replan, matmuls


def _ready(
    start: Start, fit: Fit, trains: RunData, samples: SamplePrompts | None, backend: Backend, plan: Plan, replan: Replan
) -> Ready:
    """The run, with where its results go, and notices on the base of an adapter."""
    options, source, log = fit.options, start.source, start.log
    exports = open_exports(options, source, trains, plan, start.values, replaces=start.earlier.replaces_model)
    for notice in adapters.base_notes(options.adapters, source, plan.held_base, start.seed):
        log.notice(notice)
    values = adapters.first_values(options.adapters, plan.spec.adapters, source.config, start.values)
    return Ready(
        **{**vars(start), "values": values},
        backend=backend,
        data=trains.data,
        schedule=trains.schedule,
        samples=samples,
        plan=plan,
        replan=replan,
        watching=precision.watching(options.precision),
        gpu=GpuWatch(start.device, log.gpu_every, log.gpu),
        options=options.to_flat(),
        fitted=fit.changes,
        exports=exports,
        continue_command="" if start.is_dry else continue_command(options, start.ranks.start),
    )


def _check_memory(run: Ready, facts: Facts, options: Options) -> None:
    """MemoryLimitError if the plan does not fit on the device, or in the memory of this host; a dry run for many says
    first what every level takes."""
    room = facts.limits(options, run.backend, run.data.grad_accumulation)
    levels = level_lines(run, room.free_bytes) if run.is_dry else ()
    for line in (*listed(run.plan, run.options["debug_memory"]), *levels):
        run.log.say(line)
    refuse_if_too_large(run.plan, room)


def _check_disk(run: Ready) -> dict[str, tuple[Path, int]]:
    """Bytes of the checkpoints that are left and of the model; StorageError if they do not fit on the disk."""
    first, last, checkpoints = run.earlier.step + 1, run.schedule.steps, run.earlier.checkpoints
    one = checkpoint_bytes([each.tensor for each in checkpoint_slices(run.plan)])
    needs = {"the checkpoints": (checkpoints.folder, checkpoints.peak_bytes(one, first, max(first, last)))}
    for what, export in zip(("the model", "the merged model"), run.exports, strict=False):
        needs[what] = (export.folder, export.check(room=not run.device.planned))
    if not run.device.planned:
        check_free_space(needs)
    return needs
