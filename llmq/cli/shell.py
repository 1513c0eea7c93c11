"""What all commands share: a user's error is one message and its exit code, never a traceback."""

import errno
import logging
import math
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from llmq.errors import INTERRUPTED, LlmqError, MemoryLimitError, StorageError, UsageError
from llmq.redact import note_secrets, print_redacted, redacted

BROKEN_PIPE = 1  # the reader of our output went away (`llmq-train --help | head -1`): an error message has no reader
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of writing to a full disk
SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "token_normalize_func": lambda name: name.replace("_", "-"),  # --batch_size is --batch-size
}
BASE_DTYPE = click.Choice(["fp32", "bf16", "e4m3", "int8", "nf4", "mxfp4"])  # of --base-dtype
# Versions as installed, without importing them; what a run has loaded is in its [System] section.
LIBRARIES = """
    numpy ml_dtypes tokenizers safetensors huggingface_hub pyarrow pydantic click rich filelock PyYAML matplotlib wandb
    cupy-cuda13x cupy-cuda12x nvmath-python nvidia-cudnn-frontend cuda-bindings nvidia-cublas nvidia-cublas-cu12
    nvidia-cuda-nvrtc nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime nvidia-cuda-runtime-cu12 nvidia-cudnn-cu13
    nvidia-cudnn-cu12 nvidia-nccl-cu13 nvidia-nccl-cu12 nvidia-ml-py
"""


def run(command: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; what it returns, if it is a number. Other errors than a user's fly."""
    if sys.platform == "win32":
        _say("native Windows is not supported: install WSL2 (`wsl --install`) and run llmq inside it")
        return UsageError.exit_code
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed (`>&-`): its number must not become that of a file that we open
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # paths that the terminal's encoding cannot say are escaped, not fatal
            stream.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:] if arguments is None else arguments
    note_secrets("\n".join(arguments))
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # of the time of the imports: see start.py
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _refuse_single_dashes(command, arguments)
        result = command.main(list(arguments), prog_name=command.name, standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except LlmqError as error:
        _say(str(error))
        return error.exit_code
    except click.ClickException as error:
        _say(error.format_message())
        return UsageError.exit_code
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted")
        return INTERRUPTED
    except MemoryError as error:
        _say(
            f"out of memory ({error}): a smaller --batch-size or --seq-len needs less"
            if str(error)
            else "out of memory"
        )
        return MemoryLimitError.exit_code
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in FULL:
            raise
        _drop_output()
        _say(f"cannot write: {error.strerror}: free some space, or send the output elsewhere")
        return StorageError.exit_code


def _drop_output() -> None:
    # Python flushes stdout once more at exit, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(message: str) -> None:
    with suppress(OSError):
        sys.stdout.flush()
    with suppress(OSError):
        print(f"error: {redacted(message)}", file=sys.stderr, flush=True)


def _refuse_single_dashes(command: click.Command, arguments: Sequence[str]) -> None:
    """UsageError for `-steps 3`, which click would read as -s -t -e -p -s, and -h among them as help."""
    commands = [command, *getattr(command, "commands", {}).values()]
    options = [p for one in commands for p in one.params if isinstance(p, click.Option)]
    names = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    with_value = {name for option in options if not option.is_flag for name in option.opts if len(name) == 2}
    problems = []
    for text in arguments[: arguments.index("--") if "--" in arguments else None]:
        name = text.partition("=")[0].replace("_", "-")
        if len(name) < 3 or name[0] != "-" or not name[1].isalpha():
            continue
        if f"-{name}" in names:
            problems.append(f"{name}: options have two dashes: use -{name}")
        elif name[:2] not in with_value:
            problems.append(
                f"{text}: options have two dashes, and values that begin with one an equals sign: --name=-x"
            )
    if problems:
        raise UsageError("\n  ".join(problems))


class Number(click.FloatRange):
    """A number in a range, if there is one, which is finite."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Home(click.ParamType):
    """A path, in which `~` is the home folder also where the shell leaves it: --out-dir=~/x."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path as text."""
        if value == "":
            self.fail("it is empty: give a path.", param, ctx)
        return os.path.expanduser(value)


def _show_versions(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Prints the versions of llmq, Python, and the libraries that are installed, one per line."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import llmq

    if not value or context.resilient_parsing:
        return
    click.echo(f"llmq {llmq.__version__}\npython {platform.python_version()}")
    for name in LIBRARIES.split():
        with suppress(PackageNotFoundError):
            click.echo(f"{name} {version(name)}")
    context.exit()


version_option = click.option(  # of every command
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_versions,
    help="Show the versions of llmq, Python and libraries, and exit.",
)


def main(command: click.Command, arguments: Sequence[str] | None = None) -> None:
    """Runs a command with `arguments`, by default those of the process, and exits with its code."""
    sys.excepthook = print_redacted
    logging.setLogRecordFactory(_redacted_record)  # of libraries that log what they ask a server for
    sys.exit(run(command, arguments))


def _redacted_record(*about: Any, **more: Any) -> logging.LogRecord:
    record = logging.LogRecord(*about, **more)
    record.msg, record.args = redacted(record.getMessage()), ()
    return record
