"""llmq-merge: adapters merged into their model, as a model of Hugging Face's format."""

from pathlib import Path
from typing import Any

import click

from llmq.cli import shell
from llmq.errors import UsageError


@shell.version_option
@click.command(
    "llmq-merge",
    context_settings=shell.SETTINGS,
    epilog="Example: llmq-merge --model=Qwen/Qwen2.5-0.5B --adapter=runs/first/model --out-dir=merged",
)
@click.option("--model", required=True, type=shell.Home(), metavar="FOLDER-OR-NAME", help="The adapters' base model.")
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@click.option(
    "--adapter",
    "adapters",
    required=True,
    multiple=True,
    type=shell.Home(),
    metavar="DIR",
    help="An adapter in PEFT's format; repeat the flag for several, whose changes are added up.",
)
@click.option(
    "--weight",
    "weights",
    multiple=True,
    type=shell.Number(),
    help="How much of an adapter is added; once for each --adapter, in their order.  [default: 1]",
)
@click.option("--out-dir", required=True, type=shell.Home(), metavar="DIR", help="Folder for the merged model.")
@click.option("--export-dtype", "dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="[default: the model's]")
@click.option(
    "--base-dtype", type=shell.BASE_DTYPE, help="Dtype in which to hold the base.  [default: as they were trained]"
)
@click.option("--model-dtype", type=click.Choice(["bf16", "fp32"]), help="Dtype of the run of that --base-dtype.")
@click.option("--base-only", is_flag=True, help="Write what the adapters were trained on, without them.")
@click.option("--overwrite", is_flag=True, help="Replace a model that is there.")
def command(
    model: str, revision: str | None, adapters: tuple[str, ...], weights: tuple[float, ...], out_dir: str, **how: Any
) -> None:
    """Adds what adapters change to the weights of their model, in fp32 and one tensor at a time, and writes the result.

    Any program that reads Hugging Face folders then needs no adapter.
    """
    if weights and len(weights) != len(adapters):
        raise UsageError(f"{len(weights)} --weight for {len(adapters)} --adapter: give one for each, or none")
    if repeated := [one for one in adapters if adapters.count(one) > 1]:
        raise UsageError(f"--adapter {repeated[0]} is given twice: give it once, with a larger --weight")
    # Imported here, so that --help does not wait for them.
    from llmq.adapters.merge import merge
    from llmq.files.source import find_source

    source = find_source(model, revision=revision, say=lambda text: click.echo(text, err=True))
    given = dict(zip(map(Path, adapters), weights or [1.0] * len(adapters), strict=True))
    done = merge(source, given, Path(out_dir), **how)
    for note in done.notes:
        click.echo(note, err=True)
    if done.unties:
        click.echo("lm_head has an adapter, so it is no longer tied to the embedding", err=True)
    onto = f" on the base in {done.held}" if done.held.is_quantized else ""
    click.echo(f"{done.num_maps} linear maps changed{onto}: {done.folder}")


if __name__ == "__main__":
    shell.main(command)
