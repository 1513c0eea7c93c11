"""`python -m llmq.quickstart`: the command line of the quickstart."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmq.cli import shell

if TYPE_CHECKING:
    from llmq.quickstart.settings import Settings

OUT = Path("out") / "quickstart"
NOT_PROVEN = 1  # exit code: it ran, and what it should show is not so


def prepare_environment(out: Path) -> None:
    """Settings of libraries that they read when they are imported; what the user has set stays.

    One BLAS thread: two are 16% faster on two idle cores (5494 tokens/s, against 4757), but wait for each other in
    every small product, and beside other work were 10 times slower and more (69 to 377, against 1047 to 1517).
    """
    for name in ("OPENBLAS", "OMP", "MKL"):
        os.environ.setdefault(f"{name}_NUM_THREADS", "1")
    os.environ.setdefault("VECLIB_MAXIMUM_THREADS", "1")
    # matplotlib keeps a list of fonts: it goes where everything else goes.
    os.environ.setdefault("MPLCONFIGDIR", str(out.absolute() / "cache" / "matplotlib"))
    # So do kernels and matmul algorithms, and what CuPy and the NVIDIA driver would keep in the home folder.
    for name, folder in (("LLMQ_CACHE_DIR", "llmq"), ("CUPY_CACHE_DIR", "cupy"), ("CUDA_CACHE_PATH", "driver")):
        os.environ.setdefault(name, str(out.absolute() / "cache" / folder))


def run(out: Path, settings: Settings, *, show_resume: bool) -> int:
    """Makes everything below `out`, shows it, and returns the exit code."""
    from llmq.quickstart.gpu import fitted
    from llmq.quickstart.resume import show_resume as repeat_killed
    from llmq.quickstart.run import Interrupted, Places, quickstart
    from llmq.quickstart.show import last_screen, resumed_lines, say, tell, training

    places = Places(out)
    try:
        outcome, cached = quickstart(places, settings, tell=tell, follow=training)
    except Interrupted as interrupted:
        say(f"Interrupted after step {interrupted.result.steps}: the same command resumes from there.")
        return interrupted.result.exit_code
    resumed = repeat_killed(fitted(settings, places), places, tell) if show_resume else None
    for line in last_screen(settings, places, outcome, cached=cached):
        say(line)
    if resumed is not None:
        for line in resumed_lines(resumed):
            say(line)
    proven = outcome.gain >= settings.least_gain and (resumed is None or resumed.same)
    return 0 if proven else NOT_PROVEN


def settings_for(device: str) -> Settings:
    """The settings for `cpu`, or for what `auto` finds; says why a GPU that is there is left alone."""
    from llmq.hardware.device import pick
    from llmq.quickstart.settings import GPU, Settings
    from llmq.quickstart.show import say

    where = pick(device)
    if where.note:
        say(where.note)
    return GPU if where.kind == "cuda" else Settings()


def command() -> click.Command:
    """The click command."""

    def callback(cpu: bool, show_resume: bool) -> int:
        prepare_environment(OUT)
        return run(OUT, settings_for("cpu" if cpu else "auto"), show_resume=show_resume)

    on_cpu = click.Option(["--cpu"], is_flag=True, help="Train on the CPU, also where a GPU could be used.")
    resume = click.Option(
        ["--show-resume"],
        is_flag=True,
        help="Then train again in another process, kill it midway, go on, and compare the weights bit by bit.",
    )
    return click.Command(
        "llmq.quickstart",
        context_settings=shell.SETTINGS,
        params=[on_cpu, resume, shell.version_option()],
        callback=callback,
        help=f"Trains a small model on this machine's Python sources, offline, in a few minutes, on a GPU if there is "
        f"one that can be used. Writes to {OUT} only.",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and ends the process with its exit code."""
    sys.exit(shell.run(command(), arguments))


if __name__ == "__main__":
    main()
