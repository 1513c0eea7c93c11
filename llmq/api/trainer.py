"""`Trainer`: a run of llmq-train from Python, on data that the caller holds, with callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from llmq.api.config import Config
from llmq.api.ranks import started
from llmq.data.rows.given import placed
from llmq.errors import INTERRUPTED, UsageError
from llmq.hardware import device
from llmq.options.parse import Options
from llmq.training.callbacks import Callback, RunFunction
from llmq.training.ranks import joined
from llmq.training.records import TrainResult
from llmq.training.train import run

if TYPE_CHECKING:
    from llmq.plan.plan import Plan


class Trainer:
    """Runs of one configuration: that of llmq-train with the same options, bit for bit.

    `Trainer(presets.lora(model="Qwen/Qwen2.5-0.5B"), steps=200).train(train=rows)`; `options` go before those of
    `config`. The option `loss` may also be a function of a chunk's logits, which llmq/plan/loss.py describes.
    """

    def __init__(self, config: Config | None = None, **options: Any) -> None:
        """UsageError for names that are no options."""
        if config is not None and not isinstance(config, Config):
            raise UsageError(f"config is {config!r}: give a Config, such as llmq.presets.lora(model=...)")
        self.config = (config or Config()).replace(**options)

    def train(
        self,
        train: Any = None,
        val: Any = None,
        callbacks: Sequence[Callback | RunFunction] = (),
        *,
        console: TextIO | None = None,
        handle_signals: bool = True,
    ) -> TrainResult:
        """Trains, and returns metrics and paths.

        `train` and `val` are rows or tokens (see llmq/data/rows/given.py) in place of the options `data`, `train_file`
        and `eval_file`. Functions among the `callbacks` are called with the run and the record of each step and
        evaluation.
        `console` takes the lines that the command prints (None: stdout).

        Ctrl-C ends the step, saves a checkpoint and raises KeyboardInterrupt; SIGTERM, SIGHUP and SIGUSR1 end and save
        the same way and return, with exit code 75. Without `handle_signals` they do what they did before the call.

        With the option `gpus` this process is the first rank, whose callbacks and data are those of all; the others are
        started beside it, and end with it. One that is lost ends this process, too, having said so.

        Raises LlmqError for what the caller can fix, and what a callback raises, once finished steps are saved.
        """
        with named_data(self.config, train, val) as data:
            return _run(self.config.replace(**data).parse(), callbacks, console, handle_signals=handle_signals)

    def plan(self, train: Any = None, val: Any = None, *, console: TextIO | None = None) -> Plan:
        """The plan of the run, as --dry-run makes it: `total_bytes`, and `table()` with the bytes of each part. Without
        data it plans without."""
        with named_data(self.config, train, val) as data:
            plan = run(self.config.replace(**data, dry_run=True).parse(), console=console).plan
        assert plan is not None
        return plan


@contextmanager
def named_data(config: Config, train: Any, val: Any) -> Iterator[Mapping[str, Any]]:
    """Within, these options name the data that is given, if any. UsageError where those of `config` name data, too."""
    given = [name for name, value in {"train": train, "val": val}.items() if value is not None]
    keys = ("data", "train_file", "eval_file", *(["eval_fraction"] if val is not None else []))
    named = [key for key in keys if key in config.options]
    if given and named:
        raise UsageError(f"{' and '.join(given)}, and the options {', '.join(named)}, both name data: give one of them")
    if val is not None and train is None:
        raise UsageError("val is given without train: give rows to train on, too")
    if not given:
        yield {}
        return
    found = placed(train, val)
    if found.streams and (config.options.get("gpus", 1) or len(device.gpu_addresses(0))) != 1:
        raise UsageError("a stream is read by this process alone: give a list or files, or train on one GPU")
    with found.held():
        yield found.options


def train(
    *,
    callbacks: Sequence[Callback | RunFunction] = (),
    console: TextIO | None = None,
    handle_signals: bool = True,
    **options: Any,
) -> TrainResult:
    """Trains a model with the options of llmq-train as keyword arguments, `config` a YAML file of more; see
    `Trainer.train`."""
    return _run(Options.parse(options), callbacks, console, handle_signals=handle_signals)


def _run(
    options: Options, callbacks: Sequence[Callback | RunFunction], console: TextIO | None, *, handle_signals: bool
) -> TrainResult:
    if console is not None and not hasattr(console, "write"):
        raise UsageError(f"console is {console!r}: give an open text file, such as sys.stderr or io.StringIO()")
    with ExitStack() as stack:
        place = stack.enter_context(started(options))
        ranks = None if place is None else stack.enter_context(joined(options, place))
        result = run(options, callbacks=callbacks, console=console, ranks=ranks, handle_signals=handle_signals)
    if result.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    return result
