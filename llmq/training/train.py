"""Training from options to results: ranks, locks and signals around a run that is prepared and then looped.

`train(**options)` is what the command calls. It installs its signal handlers and threads for the time of the run only.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TextIO

from llmq.engine.bound_plan import make_ready
from llmq.errors import INTERRUPTED, StorageError, UsageError
from llmq.files.checkpoint import Checkpoints
from llmq.files.huggingface import finish_model
from llmq.files.run_lock import held, kept_folder, replaced_whole
from llmq.options.parse import Options
from llmq.training.hooks import Hook, Watch, Watcher
from llmq.training.interrupt import Interrupt
from llmq.training.log import RunLog
from llmq.training.loop import Loop
from llmq.training.prepare import is_dry, prepare
from llmq.training.ranks import Ranks, joined
from llmq.training.ready import Ready
from llmq.training.records import TrainResult
from llmq.training.saving import saver_of


def train(
    *, watch: Watch | None = None, console: TextIO | None = None, handle_signals: bool = True, **options: Any
) -> TrainResult:
    """Trains a model with the options of `llmq-train` as keyword arguments, and returns metrics and paths.

    `watch` is called with every train and eval record; `console` takes the lines that the command prints (default
    stdout). Ctrl-C ends the step, saves a checkpoint and raises KeyboardInterrupt; SIGTERM, SIGHUP and SIGUSR1 end and
    save the same way and return, with exit code 75. Without `handle_signals` they do what they did before the call.
    Raises LlmqError for what the caller can fix.
    """
    if watch is not None and not callable(watch):
        raise UsageError(f"watch is {watch!r}: give a function, which is called with each record")
    if console is not None and not hasattr(console, "write"):
        raise UsageError(f"console is {console!r}: give an open text file, such as sys.stderr or io.StringIO()")
    hooks = () if watch is None else (Watcher(watch),)
    result = run(Options.parse(options), hooks=hooks, console=console, handle_signals=handle_signals)
    if result.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    return result


def run(
    options: Options,
    *,
    hooks: Sequence[Hook] = (),
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
        ranks.on_lost = lambda lost: log.end("failed", error=lost)
        stack.enter_context(_hold(options, log, ranks))
        ready = ranks.in_turn(lambda: prepare(options, log, ranks), _choices)
        if ready.is_dry:
            return TrainResult(plan=ready.plan)
        _share_algorithms(ready)
        interrupt, saver = Interrupt(), saver_of(ready)
        with interrupt if handle_signals else nullcontext(), saver:
            try:
                return Loop(ready, interrupt, saver, hooks, began).run()
            except Exception as error:
                with suppress(StorageError):  # a log that cannot be written must not hide what ended the run
                    log.end("failed", error=str(error) or type(error).__name__)
                raise


def _choices(run: Ready) -> dict[str, Any]:
    """What the other ranks take over from the first one's run."""
    dtypes, resume = run.plan.spec.precision, run.earlier.path
    sites = {"matmul": dtypes.matmul, "wide": list(dtypes.wide)}
    fit = {"fit": dict(run.fitted)} if run.fitted else {}
    return {"resume": resume and str(resume), "sites": sites, **fit}


def _share_algorithms(run: Ready) -> None:
    """Times the matrix products of the plan on the first rank; the others compute as it does, and so with its bits."""
    ranks, backend = run.ranks, run.backend
    with ranks.long("timing matrix products"), run.log.task("Timing matrix products") as report:
        if ranks.is_first:
            make_ready(run.plan, backend, report)
        chosen = ranks.agreed(dict(backend.algorithms))
        if not ranks.is_first:
            backend.take(chosen)


@contextmanager
def _hold(options: Options, log: RunLog, ranks: Ranks) -> Iterator[None]:
    """Holds the lock on all that the run writes; a dry run writes nothing, and of many ranks the first holds it.

    StorageError if another run has it.
    """
    dry = log.console_is_all = is_dry(options.run)
    with ExitStack() as stack:
        if ranks.is_first and not dry:
            model = Path(options.to_flat()["out_dir"])
            stack.enter_context(held(replaced_whole("--out-dir", model), log.say))
            finish_model(model)  # may bring back the checkpoints, which can be below the model
            saved = Checkpoints(options.checkpoint).folder
            stack.enter_context(held(kept_folder("--checkpoint-dir", saved), log.say))
            stack.enter_context(held(replaced_whole("--log-file", log.path), log.say))
        yield
