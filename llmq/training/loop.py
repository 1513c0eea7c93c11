"""The training loop: batches to steps, and what is due after a step."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from llmq.data.batches.batch import Batch
from llmq.data.batches.loader import Loader
from llmq.data.stream import Stopped
from llmq.disk import MIB
from llmq.files.writers import Saver
from llmq.plan.plan import Plan
from llmq.training.engines import Engines
from llmq.training.evaluation import SampleHook, evaluate
from llmq.training.faults import fault_hooks
from llmq.training.finish import export_all
from llmq.training.fp8 import Fp8Watch
from llmq.training.hooks import Ask, Hook, LogHook, MethodHook, RunView
from llmq.training.interrupt import Interrupt
from llmq.training.profile import profile_hooks
from llmq.training.ready import Ready
from llmq.training.records import TrainRecord, TrainResult
from llmq.training.rollback import Rollbacks
from llmq.training.saving import RunCheckpoints, begin


class Loop:
    """One training run from its first allocation to its exported model."""

    def __init__(self, ready: Ready, interrupt: Interrupt, saver: Saver, hooks: Sequence[Hook], began: float) -> None:
        self.ready, self.log, self.ranks, self.interrupt = ready, ready.log, ready.ranks, interrupt
        self.engines = Engines(ready)
        self.progress, self.num_steps = ready.earlier.progress, ready.schedule.steps
        how_it_goes_on, is_saved = ready.continue_command, ready.earlier.path is not None
        self.report = LogHook(self.log, ready.backend, began, how_it_goes_on, is_saved=is_saved)
        self.hooks: tuple[Hook, ...] = (
            self.report,
            *fault_hooks(ready.asked.faults, self.log, self.ranks),
            *hooks,
            ready.gpu,
            Fp8Watch(ready, self._switch),
            MethodHook(self.log.say),
            SampleHook(ready.samples, self.log, self._ends),
            *profile_hooks(ready),
        )
        self.saving = RunCheckpoints(ready, saver, self.hooks)
        self.rollbacks = Rollbacks(ready, self.saving, self.hooks)
        self.exit_code = 0  # with which all ranks have agreed to end
        self.is_updating = False  # in an update the state is of no step

    def run(self) -> TrainResult:
        """Trains to the end or to an interrupt; saves; exports a finished model."""
        try:
            with self.ranks.long("loading"):
                begin(self.ready, self.engines.now, self.hooks, self.interrupt)
            self._tell("on_begin")
            batch = self._train()
        except Stopped:
            batch = None
        if batch is None or self._ends():
            left = {"exit_code": self.exit_code or self.interrupt.exit_code}
        else:
            left = export_all(self.ready, self.engines.now, self.progress, batch)
        plan, backend = self.ready.plan, self.ready.backend
        memory = {"planned": plan.total_bytes, "peak": backend.peak_bytes()}
        about = {**left, "checkpoint_path": self.saving.path, "memory": memory}
        result = self.report.result(self.progress, self.engines.light_s, **about)
        self._tell("on_end", result)
        return replace(result, warnings=tuple(self.log.warnings))

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
                    is_first = not self.report.has_stepped  # which compiles kernels
                    with self.ranks.long("its first step") if is_first else nullcontext():
                        batch = self._step(loader)
                    report(self.progress.step, self.num_steps)
                batch = batch or loader.next(self._ends)  # a resumed run may have no step left
            except Stopped:
                pass  # the step that waits for data is not begun
            except Exception as error:
                self.saving.rescue(self._view(), error, is_updating=self.is_updating)
                raise
            self.saving.save(self._view())  # first of all: what sent SIGTERM does not wait for long
            self.saving.settle(self._view())
        return batch

    def _step(self, loader: Loader) -> Batch:
        """One optimizer step, and what is due after it; its last batch."""
        self.saving.settle(self._view(), wait=False)  # what made the last save fail ends the run here
        ready, step, start = self.ready, self.progress.step + 1, time.perf_counter()
        number, rate = step - self.progress.moments_from, ready.schedule.learning_rate(step)
        self.ranks.step, wait_ms, real, tokens = step, 0.0, 0, 0
        for micro_step in range(ready.data.grad_accumulation):
            batch = loader.next(self._ends)
            wait_ms, real, tokens = wait_ms + batch.wait_ms, real + batch.num_real, tokens + batch.num_tokens
            first, last = micro_step == 0, micro_step == ready.data.grad_accumulation - 1
            self.engines.now.warm_up(batch)
            if first:
                looked = time.perf_counter()
                self._tell("before_step", batch)
                start += time.perf_counter() - looked  # what hooks do here is no part of the step's time
                self.engines.now.start_step(number, rate)
                self.is_updating = ready.plan.spec.memory.fused
            self.engines.now.micro_step(batch, first=first, last=last)
            if first:
                self._tell("during_step")
        self.is_updating = True
        saves_now = self.ranks.size > 1 and self.saving.is_asked()
        done = self.engines.now.update(number, rate, self.interrupt.exit_code or int(saves_now))  # codes are above 1
        self.is_updating = done.applied or ready.plan.spec.memory.fused
        self._tell("after_update", done)
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
            sol=self.engines.light_s * tokens / seconds,  # of another plan where fp8 has just fallen back
            applied=done.applied,
            memory_mib=ready.backend.peak_bytes() / MIB,
            real_tokens=real * self.ranks.size if ready.data.has_padding else None,
            sent_error=done.sent_error,
            accuracy=done.accuracy,
            allocated_mib=self.engines.now.plan.total_bytes / MIB,
        )
        self._after(record, is_asked=bool(done.request))
        return batch

    def _after(self, record: TrainRecord, *, is_asked: bool) -> None:
        """What hooks do after a step, and an evaluation and a checkpoint if they are due or asked for."""
        asked = self._tell("after_step", record)
        if Ask.ROLLBACK in asked and Ask.STOP not in asked:
            self._roll_back()
            return
        if self._view().is_last and not self.ready.earlier.checkpoints.saves_best:
            self.saving.save(self._view())  # the evaluation may take long, and decides nothing here
        asked |= self._evaluate_if_due(asked)
        is_due = self.saving.is_due(self.progress, last=self._view().is_last)
        is_asked |= self.ranks.size == 1 and self.saving.is_asked()
        if is_due or is_asked or Ask.SAVE in asked:
            self.saving.save(self._view())

    def _evaluate_if_due(self, asked: Ask = Ask.NOTHING) -> Ask:
        """Evaluates after this step if that is due or asked for, and not done; what hooks ask for then."""
        run, now = self._view(), self.progress
        if now.evaluated >= now.step or not (self.log.eval_due(now.step, last=run.is_last) or Ask.EVALUATE in asked):
            return Ask.NOTHING
        if self.ready.data.eval is None:  # no evaluation, but a moment for hooks; a resumed run does not repeat it
            return self._tell("on_evaluate", None) if self.report.has_stepped else Ask.NOTHING
        if (found := evaluate(self.ready, self.engines.now, now, self._ends, is_last=run.is_last)) is None:
            return Ask.NOTHING
        self.progress, record = found
        return self._tell("on_evaluate", record)

    def _view(self) -> RunView:
        return RunView(self.progress, self.num_steps, lambda: self.engines.now, self.report.history)

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
        self.saving.save(self._view())
        self.saving.settle(self._view())
        self.engines.switch(plan, self.saving.path)

    def _roll_back(self) -> None:
        """Continues from the last checkpoint, or from the beginning, with the data that follows."""
        plan, self.is_updating = self.rollbacks.begin(self._view()), True  # until the state is of a step again
        self.engines.reopen(plan)
        self.progress, self.is_updating = self.rollbacks.restore(self.engines.now, self.progress), False
        self._tell("on_rollback")
