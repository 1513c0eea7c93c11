"""llmq-plot: training curves of one or several runs as an image, and their last losses side by side."""

from pathlib import Path

import click

from llmq.cli import shell


@shell.version_option
@click.command(
    "llmq-plot",
    context_settings=shell.SETTINGS,
    epilog="Example: llmq-plot runs/first runs/second -o out.png; llmq-plot runs/ draws all that are in it",
)
@click.argument("runs", nargs=-1, required=True, type=shell.Home(), metavar="RUN_OR_LOG [MORE ...]")
@click.option("-o", "--output", type=shell.Home(), default="out.png", show_default=True, help="A .png, .svg or .pdf.")
@click.option(
    "--last",
    "last_steps",
    type=click.IntRange(1),
    default=30,
    show_default=True,
    help="Steps at the end over which the printed losses are means.",
)
def command(runs: tuple[str, ...], output: str, last_steps: int) -> None:
    """Draws training and evaluation loss, gradient norm, learning rate and tokens/s of runs over each other.

    Prints their last losses, and how far they are from those of the first run.
    """
    # Imported here, so that --help does not wait for them.
    from rich.console import Console

    from llmq.report.plot import plot_runs, summarize, table
    from llmq.report.read import read_runs

    logs = read_runs(Path(run) for run in runs)
    path = plot_runs(logs, Path(output))
    Console().print(table(summarize(logs, last_steps), last_steps))
    click.echo(path)


if __name__ == "__main__":
    shell.main(command)
