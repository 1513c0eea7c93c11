"""The training loop: a job to an engine, batches to steps, steps to log, checkpoints and a model.

`train(**options)` is what the command calls. It installs its signal handlers and threads for the time of the run only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from llmq.data.batches.batch import Batch
from llmq.data.batches.loader import Loader
from llmq.data.stream import Stopped
from llmq.disk import MIB, shown
from llmq.engine.engine import Engine, StepResult
from llmq.errors import INTERRUPTED, NonFiniteError, StorageError
from llmq.files.background import Saver, Snapshot
from llmq.files.checkpoint import EVAL_LOSS, load
from llmq.files.writers import Keep
from llmq.options.parse import Options
from llmq.plan.plan import Plan
from llmq.training.allocation import allocation_of
from llmq.training.begin import hold, load_weights, restore, share_algorithms, told
from llmq.training.describe import summary
from llmq.training.evaluation import held_out
from llmq.training.finish import export_all
from llmq.training.fp8_watch import Fp8Watch, carried
from llmq.training.hooks import Watch, check_hooks
from llmq.training.interrupt import Interrupt
from llmq.training.job import Job, prepare
from llmq.training.log import SUMMARY, RunLog
from llmq.training.past import changes, settings
from llmq.training.progress import Progress
from llmq.training.ranks import Ranks, joined
from llmq.training.records import EvalRecord, TrainRecord
from llmq.training.result import AdapterResult, TrainResult
from llmq.training.several import evaluated, progress_after, step_records

NON_FINITE_LIMIT = 10  # consecutive steps without an update after which training gives up


def train(
    *, watch: Watch | None = None, console: TextIO | None = None, handle_signals: bool = True, **options: Any
) -> TrainResult:
    """Trains a model with the options of `llmq-train` as keyword arguments, and returns metrics and paths.

    `watch` is called with every train and eval record; `console` takes the lines that the command prints (default
    stdout). Ctrl-C ends the step, saves a checkpoint and raises KeyboardInterrupt; SIGTERM, SIGHUP and SIGUSR1 end and
    save the same way and return, with exit code 75. Without `handle_signals` they do what they did before the call.
    Raises LlmqError for what the caller can fix.
    """
    check_hooks(watch, console)
    result = run(Options.parse(options), watch=watch, console=console, handle_signals=handle_signals)
    if result.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    return result


def run(
    options: Options,
    *,
    watch: Watch | None = None,
    console: TextIO | None = None,
    ranks: Ranks | None = None,
    handle_signals: bool = True,
) -> TrainResult:
    """As `train`, for parsed options; on `ranks`, or on those that this process was started as one of.

    A run that Ctrl-C ended has a result, too, with exit code 130.
    """
    began = time.perf_counter()
    with ExitStack() as stack:
        ranks = ranks or stack.enter_context(joined(options))
        log = stack.enter_context(RunLog(options.log, console, is_silent=not ranks.is_first, again=ranks.again))
        ranks.on_lost = lambda lost: log.end("failed", error="; ".join(map(str, lost)))
        stack.enter_context(hold(options, log, ranks))
        job = ranks.in_turn(lambda: prepare(options, log, ranks), told)
        if job.plans_only:
            return TrainResult(plan=job.plan)
        share_algorithms(job, log, ranks)
        task = partial(log.task, words=shown)
        saver = Saver(job.checkpoints.folder, log.say, job.memory_aside(log.say), task, ranks.world)
        interrupt = Interrupt()
        with interrupt if handle_signals else nullcontext(), saver:
            try:
                return _Run(job, log, ranks, interrupt, saver, watch or (lambda record: None), began).finish()
            except Exception as error:
                with suppress(StorageError):  # a log that cannot be written must not hide what ended the run
                    log.end("failed", error=str(error) or type(error).__name__)
                raise


class _Run:
    """One training run from its first allocation to its exported model."""

    def __init__(
        self, job: Job, log: RunLog, ranks: Ranks, interrupt: Interrupt, saver: Saver, watch: Watch, began: float
    ) -> None:
        self.job, self.log, self.ranks, self.watch, self.began = job, log, ranks, watch, began
        self.interrupt, self.agreed_code = interrupt, 0  # and the exit code that all ranks have agreed to end with
        self.saver, self.saving = saver, 0  # and the step of the newest save that was begun
        self.engine, self.light_s = Engine(job.plan, job.backend), job.light_s
        if job.backend.allocated:
            log.say(job.backend.allocated)
        self.progress = Progress()
        self.last: Batch | None = None  # that was trained on
        self.fp8 = Fp8Watch(self)
        self.allocation = allocation_of(self.engine, log.say)
        self.is_cold = job.resume is None  # whether delayed scales have seen nothing yet
        self.saved = self.began_at = 0  # step of the newest checkpoint, and that of the one that the run continues
        self.speeds: list[float] = []
        self.exported: Mapping[str, Path] = {}  # of several adapters
        self.result, self.updating = TrainResult(log_path=log.path), False  # in an update the state is of no step

    def finish(self) -> TrainResult:
        """Trains to the end or to an interrupt; saves; exports a finished model."""
        job, log = self.job, self.log
        try:
            with self.ranks.long("loading"):
                self._begin()
            self._warn()
        except Stopped:
            return self._stopped()
        with job.data.loader(self.ranks.rank) as loader, log.task("Training", after_s=0.0, only_bar=True) as report:
            loader.start(self.progress.position, self.progress.stream)
            try:
                self._evaluate_if_due()  # where an interrupt kept the continued run from it
                report(self.progress.step, job.schedule.steps)
                while self.progress.step < job.schedule.steps and not self._ends():
                    with nullcontext() if self.speeds else self.ranks.long("its first step"):  # compiles kernels
                        self._step(loader)
                    report(self.progress.step, job.schedule.steps)
                batch = self.last or loader.next(self._ends)  # a resumed run may have no step left
            except Stopped:
                pass  # the step that waits for data is not begun
            except Exception as error:
                if not isinstance(error, NonFiniteError):  # its weights are not worth resuming from
                    self._rescue()
                else:
                    with suppress(StorageError):
                        self._settle()
                raise
            self._save()  # first of all: who sent SIGTERM does not wait for long
            self._settle()
        if self._ends():
            return self._stopped()
        left = export_all(job, self.engine, self.allocation, self.progress, batch, self.ranks, log)
        self.result = replace(self.result, model_path=left.model_path, merged_path=left.merged_path)
        self.exported = left.adapters
        result = self._result(exit_code=0 if left.is_whole else NonFiniteError.exit_code)
        for line in summary(result, time.perf_counter() - self.began):
            log.say(line, least=SUMMARY)
        losses = {"train_loss": result.train_loss, "eval_loss": result.eval_loss}
        log.end("failed" if result.exit_code else "finished", left.warnings, **losses)
        return replace(result, warnings=tuple(log.warnings))

    def _ends(self) -> bool:
        """Whether the run is to end after this step: many ranks agree on that with the update."""
        return bool(self.interrupt if self.ranks.size == 1 else self.agreed_code)

    def _stopped(self) -> TrainResult:
        """The end of a run that was asked to end, which has saved what there was to save."""
        code = self.agreed_code or self.interrupt.exit_code
        way_on = f"Resume with:\n  {self.job.continue_command}" if self.saved else "Nothing is saved: start again."
        self.log.say(f"Stopped after step {self.progress.step}. {way_on}", least=SUMMARY)
        self.log.end("interrupted" if code == INTERRUPTED else "terminated")
        return self._result(exit_code=code)

    def _begin(self) -> None:
        """Weights from the source or state from the checkpoint, and the log's file."""
        job, engine = self.job, self.engine
        if job.resume is None:
            job.found.share(job.plan, self.ranks)
            load_weights(engine, job, self.log, self.interrupt)
            self.log.begin(num_steps=job.schedule.steps)
            return
        state, reader = load(job.resume, verified=False)  # it was, when it was chosen
        job.check_same(state["must_match"])
        self.progress = Progress.read(state).anew(job.checkpoints.resets)
        self.saved = self.saving = self.began_at = self.progress.step
        self.result = replace(self.result, checkpoint_path=job.resume)
        restore(engine, job, self.log, self.interrupt, reader)
        self.log.begin(resume_step=self.saved, num_steps=job.schedule.steps)
        self.log.notice(f"Continued from {job.resume}")
        if differs := changes(state, job.options, job.data):
            self.log.notice(f"Changed since then: {', '.join(differs)}")

    def _warn(self) -> None:
        """What the user should know of the model, the data and the tokenizer, and what is wrong with the GPU."""
        for text in self.job.notices:
            self.log.notice(text)
        for text in self.job.warnings:
            self.log.warn(text)

    def _step(self, loader: Loader) -> None:
        """One optimizer step, and what is due after it."""
        self._settle(wait=False)  # what made the last save fail ends the run here
        job, step, start = self.job, self.progress.step + 1, time.perf_counter()
        self.ranks.step, wait_ms, real, tokens, rates = step, 0.0, 0, 0, job.rates(step)
        for micro_step in range(job.data.grad_accumulation):
            batch = loader.next(self._ends)
            wait_ms, real, tokens = wait_ms + batch.wait_ms, real + batch.num_real, tokens + batch.num_tokens
            if self.is_cold and self.engine.needs_warm_up:
                self.engine.warm_up(batch)
            self.is_cold = False
            if micro_step == 0:
                start += self.fp8.before_step(batch)
                self.engine.start_step(step - self.progress.moments_from, rates)
                self.allocation.before(self.engine, step)
                self.updating = job.plan.spec.memory.fused
            self.engine.micro_step(batch, first=micro_step == 0, last=micro_step == job.data.grad_accumulation - 1)
            if micro_step == 0 and self.log.gpu_due(step):
                job.gpu.begin()  # the GPU works on the step from here on
        self.updating = True
        saves_now = self.ranks.size > 1 and self.ranks.is_first and job.checkpoints.asked()
        request = self.interrupt.exit_code or int(saves_now)  # exit codes are above 1
        done = self.engine.update(step - self.progress.moments_from, rates, request)
        self.allocation.after(self.engine, step)
        self.agreed_code = done.request if done.request > 1 else 0
        seconds = time.perf_counter() - start
        self._advance(batch, done)
        self.last, self.updating = batch, False
        self._after(
            TrainRecord(
                step=step,
                epoch=batch.epoch,
                loss=done.loss,
                norm=done.norm,
                lr=job.schedule.learning_rate(step),
                time_ms=1e3 * seconds,
                tokens=tokens * self.ranks.size,
                trained_tokens=done.num_tokens,
                wait_ms=wait_ms,
                sol=self.light_s * tokens / seconds,
                applied=done.applied,
                memory_mib=job.backend.peak_bytes() / MIB,
                real_tokens=real * self.ranks.size if job.data.has_padding else None,
                sent_error=done.sent_error,
                adapters=step_records(job.members, done.each, step) if job.members else None,
            ),
            done.request,
        )

    def _after(self, record: TrainRecord, request: int) -> None:
        """What is due after a step: its lines, and an evaluation and a checkpoint, for which there may be a request."""
        job, step, last = self.job, record.step, record.step == self.job.schedule.steps
        self._note(record, last)
        if (reading := job.gpu.record(step)) is not None:
            self.log.gpu(reading)
        for text in job.backend.notices if len(self.speeds) == 1 else ():
            self.log.notice(text)
        if len(self.speeds) == 1 and job.backend.algorithms:
            self.log.record("algorithms", **job.backend.algorithms)
        if last and not job.checkpoints.saves_best:
            self._save()  # before an evaluation that may take long
        self._evaluate_if_due()
        asked = request or (self.ranks.size == 1 and job.checkpoints.asked())
        if any((job.checkpoints.due(step, last=last), self._is_best(), asked)):
            self._save()

    def _advance(self, batch: Batch, done: StepResult) -> None:
        """The run's progress after the update that ends with `batch`."""
        now = self.progress
        self.progress = replace(
            now,
            step=now.step + 1,
            position=batch.position,
            stream=batch.stream,
            rejected=0 if done.applied else now.rejected + 1,
            course=now.course.after(done.loss, done.norm),
            losses=(now.losses[0] + done.loss, now.losses[1] + 1),
            train_loss=done.loss,
            each=progress_after(now.each, self.job.names, done.each) if self.job.members else {},
        )

    def switch(self, plan: Plan) -> None:
        """Goes on under another plan, with fewer fp8 scales, as a resume from a checkpoint of this step would."""
        self._save()
        self._settle()
        old, path = self.job.plan, self.result.checkpoint_path
        assert path is not None
        self.reopen(plan)
        _, read = load(path, verified=False)
        self.engine.restore(carried(read.in_one_memory(), old, plan), self.job.frozen())

    def reopen(self, plan: Plan) -> None:
        """Puts an engine under another plan, which has no values yet, in the place of the run's."""
        self.job = replace(self.job, plan=plan)
        del self.engine  # its memory is what the other one gets, once no rank has it open
        self.ranks.all_of(None)
        self.engine, self.light_s = Engine(plan, self.job.backend), self.job.light_s

    def _note(self, record: TrainRecord, last: bool) -> None:
        """A step's record to log and watcher; NonFiniteError when steps keep being refused."""
        if self.log.due(record.step, last=last) or not record.applied:
            self.log.train(record)
        self.watch(record)
        self.speeds.append(record.tps)
        if math.isnan(self.result.first_step_s):
            self.result = replace(self.result, first_step_s=time.perf_counter() - self.began)
        for name, one in self.progress.each.items():
            if one.rejected == NON_FINITE_LIMIT:
                self.log.warn(
                    f"adapter {name} has not changed in the last {NON_FINITE_LIMIT} steps up to step {record.step}, as "
                    "its loss or gradient was not finite; the others train on: lower its learning_rate"
                )
        if self.progress.rejected == NON_FINITE_LIMIT:
            raise NonFiniteError(
                f"loss or gradient was not finite in the last {NON_FINITE_LIMIT} steps up to step {record.step}, none "
                "of which changed the weights: lower --learning-rate, set --grad-clip, or use a wider --matmul-dtype"
            )

    def _evaluate_if_due(self) -> None:
        """Evaluates after this step if that is due and not done, and shows samples then."""
        has_data, step = self.job.data.eval is not None, self.progress.step
        last = step == self.job.schedule.steps
        if not self.log.eval_due(step, last=last) or self.progress.evaluated >= step:
            return
        is_new = step > self.began_at
        if has_data:
            self._evaluate(whole=last and self.log.final_eval_is_whole)
            is_new = self.progress.evaluated == step
        if self.job.samples is not None and is_new:
            with self.log.task("Completing prompts") as report:
                self.log.samples(step, list(self.job.samples.write(self.engine, self._ends, report)))

    def _evaluate(self, *, whole: bool) -> None:
        """Held-out loss now: of the first batches, or of all."""
        start, now = time.perf_counter(), self.progress
        steps = None if whole else self.log.eval_num_steps or None
        found = held_out(self.engine, self.job.data, steps, self.log.task, self._ends, self.ranks.world)
        if found is None:
            return
        each, adapters = evaluated(now.each, self.job.names, found.each) if self.job.members else ({}, None)
        record = EvalRecord(
            step=now.step,
            epoch=self.job.data.epoch(now.position, now.stream),
            loss=found.loss / max(found.trained, 1),
            train_loss=now.losses[0] / now.losses[1] if now.losses[1] else None,
            time_ms=1e3 * (time.perf_counter() - start),
            tokens=found.tokens,
            trained_tokens=found.trained,
            adapters=adapters,
        )
        self.progress = replace(now, evaluated=now.step, losses=(0.0, 0), eval_loss=record.loss, each=each)
        self.log.evaluation(record)
        self.watch(record)

    def _rescue(self) -> None:
        """Saves the finished steps before an error ends the run; no older checkpoint goes for that."""
        try:
            self._settle()
            if self.updating or self.ranks.size > 1:
                why = "within an update" if self.updating else "on one rank, and all save together"
                raise RuntimeError(f"the error came {why}")
            self._save(beside=True)
            self._settle()
        except Exception as error:  # the one that ends the run is raised; this one is told
            if (lost := self.progress.step - self.saved) > 0:
                self.log.say(f"The {lost} steps since the last checkpoint are lost: {error}")

    def _save(self, *, beside: bool = False) -> None:
        """Begins a checkpoint of this step, unless it is there or under way.

        With `beside`, or if the step was refused, all older ones stay.
        """
        job, now = self.job, self.progress
        if now.step in (self.saved, self.saving):
            return
        self._settle()
        state = {
            **self.progress.stored,
            **settings(job.options, job.data, self.ranks.start),
            "must_match": job.must_match,
            "row_layout": job.data.layout.kind,
            "algorithms": job.backend.algorithms,
            "ranks": dict(job.found.ranks),
            "sites": {"matmul": job.plan.spec.precision.matmul, "wide": list(job.plan.spec.precision.wide)},
        }
        is_known = now.evaluated == now.step and math.isfinite(now.eval_loss)
        metrics = {EVAL_LOSS: now.eval_loss} if is_known else {}
        beside = beside or now.rejected > 0  # theirs may be the last sound weights
        snapshot = Snapshot(now.step, job.checkpoint_slices, self.engine.state, state, metrics)
        self.saver.save(snapshot, Keep() if beside else job.checkpoints.keep)
        self.saving = now.step
        self._settle(wait=False)

    def _settle(self, *, wait: bool = True) -> None:
        """Notes a save that is complete, having waited for it or not; StorageError if it failed."""
        saving, self.saving = self.saving, self.saved  # one that failed is begun again if it is due
        with self.ranks.long("saving") if wait else nullcontext():
            path = self.saver.finished(wait=wait)
        if path is not None:
            self.saved = saving
            self.result = replace(self.result, checkpoint_path=path)
            self.log.checkpoint(path, saving)
        self.saving = saving

    def _is_best(self) -> bool:
        """Whether this step has just been evaluated, and is the best of the run."""
        now = self.progress
        return now.evaluated == now.step and self.job.checkpoints.improves(now.eval_loss)

    def _result(self, exit_code: int = 0) -> TrainResult:
        """The run's metrics; the first step is left out of the speed where there are others."""
        steady = self.speeds[1:] or self.speeds
        speed = float(np.median(steady)) if steady else math.nan
        share = self.light_s * speed if steady else None
        adapters = {
            name: AdapterResult(one.train_loss, one.eval_loss, self.exported.get(name))
            for name, one in self.progress.each.items()
        }
        return replace(
            self.result,
            exit_code=exit_code,
            steps=self.progress.step,
            train_loss=self.progress.train_loss,
            eval_loss=self.progress.eval_loss,
            tokens_per_second=speed,
            sol=share,
            adapters=adapters,
            warnings=tuple(self.log.warnings),
        )
