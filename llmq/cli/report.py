"""llmq-report: a page of one or several runs, as a file or served while they train."""

from pathlib import Path

import click

from llmq.cli import shell


@shell.version_option
@click.command(
    "llmq-report",
    context_settings=shell.SETTINGS,
    epilog="Example: llmq-report runs/first runs/second; llmq-report runs/first --watch while it trains",
)
@click.argument("runs", nargs=-1, required=True, type=shell.Home(), metavar="RUN_OR_LOG [MORE ...]")
@click.option("-o", "--out", type=shell.Home(), help="The HTML file.  [default: report.html]")
@click.option("--bench", type=shell.Home(), metavar="FILE", help="A file of llmq-bench --save: its ladder is shown.")
@click.option("--watch", is_flag=True, help="Serve the report on this machine until Ctrl-C, renewed as runs go on.")
@click.option("--port", type=click.IntRange(0, 65535), help="The port of --watch.  [default: a free one]")
def command(runs: tuple[str, ...], out: str | None, bench: str | None, watch: bool, port: int | None) -> None:
    """Writes one HTML file about runs: curves, speed, memory, the GPU, fp8 errors, events, samples, and their options.

    The file needs no network and nothing beside itself.
    """
    # Imported here, so that --help does not wait for them.
    from llmq.errors import UsageError
    from llmq.report.page import read_ladders, write_report
    from llmq.report.read import read_runs
    from llmq.report.serve import serve

    paths = [Path(run) for run in runs]
    if not watch:
        if port is not None:
            raise UsageError(f"--port {port} is for --watch: add it, or leave --port out")
        logs = read_runs(paths, begun=False)
        click.echo(write_report(logs, Path(out or "report.html"), bench=Path(bench) if bench else None))
        return
    if out:
        raise UsageError(f"--out {out} is for a file, and --watch serves the report: leave one of them out")
    serve(paths, port or 0, read_ladders(Path(bench) if bench else None), click.echo)


if __name__ == "__main__":
    shell.main(command)
