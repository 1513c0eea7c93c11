"""tokenize-data: text into token files for training."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import click

from llmq.cli import shell
from llmq.errors import TERMINATED


@click.command("tokenize-data", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--dataset", metavar="NAME", help="A data set by name: tiny-shakespeare (1.1 MB, downloaded once).")
@click.option("--input", "inputs", multiple=True, metavar="FILE-OR-GLOB", help="Text files in UTF-8; repeatable.")
@click.option(
    "--model",
    "--tokenizer",
    "tokenizer",
    required=True,
    metavar="NAME-OR-FOLDER",
    help="Whose tokenizer: qwen (Qwen2.5), llama (Llama 2), any hub name, or a folder with a tokenizer.json.",
)
@click.option("--revision", help="Branch, tag or commit of a hub name.")
@click.option(
    "--eval-fraction",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.1,
    show_default=True,
    help="Part of the text that goes to eval.bin; 0 writes no eval.bin.",
)
@click.option("--eos-token", help="The token that ends a document, if the tokenizer does not say.")
@click.option("--out-dir", metavar="FOLDER", help="Where to write.  [default: data/TEXT-TOKENIZER]")
def command(
    dataset: str | None,
    inputs: tuple[str, ...],
    tokenizer: str,
    revision: str | None,
    eval_fraction: float,
    eos_token: str | None,
    out_dir: str | None,
) -> None:
    """Tokenizes text into train.bin and eval.bin.

    \b
    tokenize-data --dataset tiny-shakespeare --model qwen
    tokenize-data --input 'books/*.txt' --tokenizer ./my-tokenizer

    One file is one document and ends with the tokenizer's EOS; text that spells a special token is ordinary text. Whole
    files, spread evenly, become eval.bin; of a single file, its end does, from a line break on. Beside each token file
    lies a .json that says where it comes from, and the tokenizer's files lie in tokenizer/.

    Memory: about 300 MB, whatever the size, with the tokenizers of GPT-2, Llama 3 and Qwen and others built like them.
    With any other (such as Llama 2), each document is tokenized as a whole, which takes some 120 times its size.

    Environment: LLMQ_TINY_SHAKESPEARE is a file or URL to take instead of the download, LLMQ_CACHE the folder for
    downloads (~/.cache/llmq), HF_HUB_OFFLINE=1 forbids the network, TOKENIZERS_PARALLELISM=false is one thread.
    """
    # Imported here, so that --help does not wait for them.
    from rich.console import Console
    from rich.progress import Progress

    from llmq.data.tokenize import tokenize_data

    console = Console(stderr=True)
    with _terminable(), Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("tokenizing", total=None)
        written = tokenize_data(
            tokenizer=tokenizer,
            dataset=dataset,
            inputs=inputs,
            revision=revision,
            eval_fraction=eval_fraction,
            eos_token=eos_token,
            out_dir=out_dir,
            on_progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    for file in written:
        documents = f"{file.num_documents} document{'s' if file.num_documents != 1 else ''}"
        click.echo(f"{file.path}: {file.num_tokens} tokens in {documents}")


command.params.append(shell.version_option())


@contextmanager
def _terminable() -> Iterator[None]:
    """Lets SIGTERM end the command by way of the writers, which remove what is not complete."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(TERMINATED)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    sys.exit(shell.run(command, arguments))


if __name__ == "__main__":
    main()
