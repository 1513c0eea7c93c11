"""What all commands share: a user's error is one message and its exit code, never a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from llmq.errors import INTERRUPTED, LlmqError, MemoryLimitError, UsageError

BROKEN_PIPE = 1  # the reader of our output went away (`llmq-train --help | head -1`): nobody to tell
# Told as installed, without importing them; what a run has loaded stands in its [System] section.
LIBRARIES = (
    *("numpy", "ml_dtypes", "tokenizers", "safetensors", "huggingface_hub", "pyarrow", "pydantic", "click", "rich"),
    *("PyYAML", "matplotlib", "wandb", "cupy-cuda13x", "cupy-cuda12x", "nvmath-python", "nvidia-cudnn-frontend"),
    *("cuda-bindings", "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    *("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    *("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-ml-py"),
)


def run(command: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; what it returns, if it is a number. Other errors than a user's fly."""
    if sys.platform == "win32":
        _say("native Windows is not supported: install WSL2 (`wsl --install`) and run llmq inside it")
        return UsageError.exit_code
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # paths that the terminal's encoding cannot say are escaped, not fatal
            stream.reconfigure(errors="backslashreplace")
    try:
        result = command.main(arguments, prog_name=command.name, standalone_mode=False)
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
        # Python flushes stdout once more at exit, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _say(message: str) -> None:
    try:
        sys.stdout.flush()
        print(f"error: {message}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        pass


def show_and_exit(text: Callable[[], str]) -> Callable[[click.Context, click.Parameter, Any], None]:
    """The callback of a flag that prints something and ends the command."""

    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value and not context.resilient_parsing:
            click.echo(text())
            context.exit()

    return callback


def versions() -> str:
    """Versions of llmq, Python, and the libraries that are installed, one per line."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import llmq

    lines = [f"llmq {llmq.__version__}", f"python {platform.python_version()}"]
    for name in LIBRARIES:
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            pass
    return "\n".join(lines)


def version_option() -> click.Option:
    """`--version`, for every command."""
    return click.Option(
        ["--version"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show_and_exit(versions),
        help="Show versions of llmq, Python and libraries.",
    )
