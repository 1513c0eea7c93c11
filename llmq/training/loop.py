"""The training loop: batches to steps, and what is due after a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

from llmq.data.batches.batch import Batch
from llmq.data.batches.loader import Loader
from llmq.data.stream import Stopped
from llmq.disk import MIB
from llmq.engine.engine import Engine, StepResult
from llmq.errors import NonFiniteError, StorageError
from llmq.files.checkpoint import load
from llmq.plan.plan import Plan
from llmq.training.evaluation import evaluate
from llmq.training.finish import export_all
from llmq.training.fp8_watch import Fp8Watch, carried
from llmq.training.hooks import Ask, Hook, MethodHook, RunView
from llmq.training.identity import changes, check_continues
from llmq.training.interrupt import Interrupt
from llmq.training.loading import load_weights, restore
from llmq.training.log import RunLog
from llmq.training.log_hook import NON_FINITE_LIMIT, BackendHook, LogHook
from llmq.training.metrics import Metrics
from llmq.training.progress import Progress
from llmq.training.ranks import Ranks
from llmq.training.ready import Ready
from llmq.training.records import TrainRecord
from llmq.training.result import TrainResult
from llmq.training.samples import SampleHook
from llmq.training.saving import RunCheckpoints


class Loop:
    """One training run from its first allocation to its exported model."""

    def __init__(
        self,
        ready: Ready,
        log: RunLog,
        ranks: Ranks,
        interrupt: Interrupt,
        checkpoints: RunCheckpoints,
        hooks: Sequence[Hook],
        began: float,
    ) -> None:
        self.ready, self.log, self.ranks, self.interrupt, self.checkpoints = ready, log, ranks, interrupt, checkpoints
        self.engine = Engine(ready.plan, ready.backend)
        if ready.backend.allocated:
            log.say(ready.backend.allocated)
        self.progress, self.num_steps = Progress(), ready.trains.schedule.steps
        self.metrics = Metrics(began)
        self.hooks: tuple[Hook, ...] = (
            self.metrics,
            LogHook(ready, log, self.metrics),
            *hooks,
            ready.gpu,
            BackendHook(ready, log),
            Fp8Watch(ready, log, ranks, self._switch),
            MethodHook(log.say),
            SampleHook(ready.samples, log, self._ends),
        )
        self.exit_code = 0  # with which all ranks have agreed to end
        self.is_updating = False  # in an update the state is of no step

    def run(self) -> TrainResult:
        """Trains to the end or to an interrupt; saves; exports a finished model."""
        try:
            with self.ranks.long("loading"):
                self._begin()
            self._tell("on_begin")
            batch = self._train()
        except Stopped:
            batch = None
        if batch is None or self._ends():
            result = self._result(self.exit_code or self.interrupt.exit_code)
        else:
            left = export_all(self.ready, self.engine, self.progress, batch, self.ranks, self.log)
            result = left.added_to(self._result(0 if left.is_whole else NonFiniteError.exit_code))
        self._tell("on_end", result)
        return replace(result, warnings=tuple(self.log.warnings))

    def _begin(self) -> None:
        """Weights from the source or state from the checkpoint, and the log's file."""
        ready, engine, log = self.ready, self.engine, self.log
        if ready.results.resume is None:
            load_weights(engine, ready, log, self.interrupt)
            log.begin(num_steps=self.num_steps)
            return
        state, reader = load(ready.results.resume, verified=False)  # it was, when it was chosen
        check_continues(ready, state["must_match"])
        self.progress = Progress.read(state).reset(ready.results.checkpoints.resets)
        for hook in self.hooks:
            if hook.key in state:
                hook.resume(state[hook.key])
        self.checkpoints.resumed(self.progress.step)
        restore(engine, ready, log, self.interrupt, reader)
        log.begin(resume_step=self.progress.step, num_steps=self.num_steps)
        log.notice(f"Continued from {ready.results.resume}")
        if differs := changes(state, ready.options, ready.data):
            log.notice(f"Changed since then: {', '.join(differs)}")

    def _train(self) -> Batch | None:
        """All steps, and the last batch; None if the run ends before it has one."""
        batch = None
        with (
            self.ready.data.loader(self.ranks.rank, self.progress.position, self.progress.stream) as loader,
            self.log.task("Training", after_s=0.0, only_bar=True) as report,
        ):
            try:
                self._evaluate_if_due()  # where an interrupt kept the continued run from it
                report(self.progress.step, self.num_steps)
                while self.progress.step < self.num_steps and not self._ends():
                    is_first = not self.metrics.speeds  # which compiles kernels
                    with self.ranks.long("its first step") if is_first else nullcontext():
                        batch = self._step(loader)
                    report(self.progress.step, self.num_steps)
                batch = batch or loader.next(self._ends)  # a resumed run may have no step left
            except Stopped:
                pass  # the step that waits for data is not begun
            except Exception as error:
                self._rescue(error)
                raise
            self._save()  # first of all: what sent SIGTERM does not wait for long
            self._settle()
        return batch

    def _step(self, loader: Loader) -> Batch:
        """One optimizer step, and what is due after it; its last batch."""
        self._settle(wait=False)  # what made the last save fail ends the run here
        ready, step, start = self.ready, self.progress.step + 1, time.perf_counter()
        number = step - self.progress.moments_from
        rate = ready.trains.schedule.learning_rate(step)
        self.ranks.step, wait_ms, real, tokens = step, 0.0, 0, 0
        for micro_step in range(ready.data.grad_accumulation):
            batch = loader.next(self._ends)
            wait_ms, real, tokens = wait_ms + batch.wait_ms, real + batch.num_real, tokens + batch.num_tokens
            first, last = micro_step == 0, micro_step == ready.data.grad_accumulation - 1
            self.engine.warm_up(batch)
            if first:
                looked = time.perf_counter()
                self._tell("before_step", batch)
                start += time.perf_counter() - looked  # what hooks do here is no part of the step's time
                self.engine.start_step(number, rate)
                self.is_updating = ready.plan.spec.memory.fused
            self.engine.micro_step(batch, first=first, last=last)
            if first:
                self._tell("during_step")
        self.is_updating = True
        saves_now = self.ranks.size > 1 and self.checkpoints.is_asked()
        done = self.engine.update(number, rate, self.interrupt.exit_code or int(saves_now))  # codes are above 1
        self._tell("after_update")
        self.exit_code = done.request if done.request > 1 else 0
        seconds = time.perf_counter() - start
        self.progress, self.is_updating = self.progress.after(batch, done), False
        record = TrainRecord(
            step=step,
            epoch=batch.epoch,
            loss=done.loss,
            norm=done.norm,
            lr=rate,
            time_ms=1e3 * seconds,
            tokens=tokens * self.ranks.size,
            trained_tokens=done.num_tokens,
            wait_ms=wait_ms,
            sol=self.ready.light_s * tokens / seconds,  # of another plan where fp8 has just fallen back
            applied=done.applied,
            memory_mib=ready.backend.peak_bytes() / MIB,
            real_tokens=real * self.ranks.size if ready.data.has_padding else None,
            sent_error=done.sent_error,
        )
        self._after(record, done)
        return batch

    def _after(self, record: TrainRecord, done: StepResult) -> None:
        """What hooks do after a step, and an evaluation and a checkpoint if they are due or asked for."""
        asked = self._tell("after_step", record)
        if self.progress.rejected == NON_FINITE_LIMIT:
            raise NonFiniteError(
                f"loss or gradient was not finite in the last {NON_FINITE_LIMIT} steps up to step {record.step}, none "
                "of which changed the weights: lower --learning-rate, set --grad-clip, or use a wider --matmul-dtype"
            )
        if self._view().is_last and self.checkpoints.comes_before_evaluation:
            self._save()
        asked |= self._evaluate_if_due(asked)
        is_due = self.checkpoints.is_due(self.progress, last=self._view().is_last)
        is_asked = done.request or (self.ranks.size == 1 and self.checkpoints.is_asked())
        if is_due or is_asked or Ask.SAVE in asked:
            self._save()

    def _evaluate_if_due(self, asked: Ask = Ask.NOTHING) -> Ask:
        """Evaluates after this step if that is due or asked for, and not done; what hooks ask for then."""
        run, now = self._view(), self.progress
        if now.evaluated >= now.step or not (self.log.eval_due(now.step, last=run.is_last) or Ask.EVALUATE in asked):
            return Ask.NOTHING
        if self.ready.data.eval is None:  # no evaluation, but a moment for hooks; a resumed run does not repeat it
            return self._tell("on_evaluate", None) if self.metrics.speeds else Ask.NOTHING
        steps = None if run.is_last and self.log.final_eval_is_whole else self.log.eval_num_steps or None
        found = evaluate(self.engine, self.ready.data, now, steps, self.log.task, self._ends, self.ranks.world)
        if found is None:
            return Ask.NOTHING
        self.progress, record = found
        return self._tell("on_evaluate", record)

    def _view(self) -> RunView:
        return RunView(self.progress, self.num_steps, lambda: self.engine)

    def _tell(self, moment: str, *about: object) -> Ask:
        """Calls a method of all hooks, in order; what they ask for. One that asks to stop makes this step the last."""
        asked = Ask.NOTHING
        for hook in self.hooks:
            asked |= getattr(hook, moment)(self._view(), *about) or Ask.NOTHING
        if Ask.STOP in asked:
            self.num_steps = self.progress.step
        return asked

    def _ends(self) -> bool:
        """Whether the run is to end after this step: many ranks agree on that with the update."""
        return bool(self.interrupt if self.ranks.size == 1 else self.exit_code)

    def _switch(self, plan: Plan) -> None:
        """Continues under another plan, with fewer fp8 scales, as a resume from a checkpoint of this step would."""
        self._save()
        self._settle()
        old, path = self.ready.plan, self.checkpoints.path
        assert path is not None
        self.ready = replace(self.ready, plan=plan)
        del self.engine  # its memory is what the other one gets, once no rank has it open
        self.ranks.all_of(None)
        self.engine = Engine(plan, self.ready.backend)
        _, read = load(path, verified=False)
        self.engine.restore(carried(read.in_one_memory(), old, plan), self.ready.frozen())

    def _rescue(self, error: Exception) -> None:
        """Saves the finished steps before an error ends the run; no older checkpoint goes for that."""
        if isinstance(error, NonFiniteError):  # its weights are not worth resuming from
            with suppress(StorageError):
                self._settle()
            return
        try:
            self._settle()
            if self.is_updating or self.ranks.size > 1:
                why = "within an update" if self.is_updating else "on one rank, and all save together"
                raise RuntimeError(f"the error came {why}")
            self._save(beside=True)
            self._settle()
        except Exception as why:  # the one that ends the run is raised; this one is said
            if (lost := self.progress.step - self.checkpoints.step) > 0:
                self.log.say(f"The {lost} steps since the last checkpoint are lost: {why}")

    def _save(self, *, beside: bool = False) -> None:
        """Begins a checkpoint of this step, unless it is there or under way."""
        if self.checkpoints.is_begun(self.progress.step):
            return
        self._settle()
        hooks = {hook.key: hook.state() for hook in self.hooks if hook.key}
        self.checkpoints.save(self.ready, self.engine, self.progress, hooks, beside=beside)
        self._settle(wait=False)

    def _settle(self, *, wait: bool = True) -> None:
        """Notes a save that is complete, having waited for it or not."""
        if (path := self.checkpoints.settle(wait=wait)) is not None:
            self._tell("on_save", path, self.checkpoints.step)

    def _result(self, exit_code: int) -> TrainResult:
        paths = {"log_path": self.log.path, "checkpoint_path": self.checkpoints.path}
        return self.metrics.result(self.progress, self.ready.light_s, exit_code=exit_code, **paths)
