"""llmq-plot: training curves of one or several runs as an image."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from llmq.cli import shell


@click.command("llmq-plot", epilog="Example: llmq-plot runs/first runs/second -o out.png")
@click.argument("runs", nargs=-1, required=True, metavar="RUN_OR_LOG [MORE ...]")
@click.option("-o", "--output", default="out.png", show_default=True, metavar="FILE", help="A .png, .svg or .pdf file.")
def command(runs: tuple[str, ...], output: str) -> None:
    """Draws training and evaluation loss, gradient norm, learning rate and tokens/s of runs over each other."""
    # Imported here, so that --help does not wait for them.
    from llmq.report.plot import plot_runs

    click.echo(plot_runs([Path(run) for run in runs], Path(output)))


command.params.append(shell.version_option())


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    sys.exit(shell.run(command, arguments))


if __name__ == "__main__":
    main()
