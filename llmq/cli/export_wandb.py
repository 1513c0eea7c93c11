"""llmq-export-wandb: a log to Weights & Biases, finished or as it grows."""

from pathlib import Path
from typing import Any

import click

from llmq.cli import shell


@shell.version_option
@click.command(
    "llmq-export-wandb", context_settings=shell.SETTINGS, epilog="Example: llmq-export-wandb --log-file runs/first"
)
@click.option(
    "--log-file", required=True, type=shell.Home(), metavar="LOG", help="The log, or the run folder that it is in."
)
@click.option("--project", default="llmq", show_default=True, help="W&B project.")
@click.option("--name", help="Name of the run in W&B.  [default: the run's own]")
@click.option("--entity", help="W&B user or team.  [default: yours]")
@click.option("--run-id", help="W&B id of the run.  [default: made from the log; the same for every export of it]")
@click.option("--offline", is_flag=True, help="Only into a local folder, for `wandb sync`; so does WANDB_MODE=offline.")
@click.option("--follow", is_flag=True, help="Go on as the log grows, until its run ends or Ctrl-C.")
def command(log_file: str, follow: bool, **where: Any) -> None:
    """Sends a run's options, losses and speeds to Weights & Biases, each at its step."""
    # Imported here, so that --help does not wait for them.
    from llmq.report.wandb import export_wandb, follow_wandb

    for done in follow_wandb(Path(log_file), **where) if follow else [export_wandb(Path(log_file), **where)]:
        steps = f"{done.num_steps} step{'' if done.num_steps == 1 else 's'}"
        if done.url:
            click.echo(f"{steps} sent to {done.url}")
        else:
            click.echo(f"{steps} written to {done.folder}\nUpload with: wandb sync {done.folder}")


if __name__ == "__main__":
    shell.main(command)
