"""tokenize-data: text and rows into token files for training."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import click

from llmq.cli import shell
from llmq.errors import StorageError, UsageError
from llmq.screen import Screen
from llmq.training.interrupt import terminable


@shell.version_option
@click.command("tokenize-data", context_settings=shell.SETTINGS)
@click.option(
    "--dataset",
    metavar="NAME",
    help="A data set by name: tiny-shakespeare, tiny-stories, gsm8k, limo, fineweb-1b, fineweb-10b, climb-1b, "
    "climb-10b, climb-20b, or one of the Hugging Face Hub as NAME[@REVISION][:CONFIG[:SPLIT[SLICE]]].",
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    type=shell.Home(),
    metavar="PATH",
    help="A file, folder or glob; repeatable. Rows in .jsonl, .json, .csv, .tsv (also .gz, .zst) and .parquet; "
    "any other file is text in UTF-8.",
)
@click.option(
    "--model",
    "--tokenizer",
    "tokenizer",
    type=shell.Home(),
    metavar="NAME-OR-FOLDER",
    help="Whose tokenizer: qwen (Qwen2.5), llama (Llama 2), any hub name, or a folder with a tokenizer.json.",
)
@click.option(
    "--train-tokenizer",
    type=click.IntRange(min=257),
    metavar="N",
    help="Train a byte-level BPE tokenizer of N tokens on the text, in place of --model; at least 257.",
)
@click.option("--revision", help="Branch, tag or commit of the tokenizer's hub name.")
@click.option(
    "--eval-fraction",
    type=shell.Number(0, 1, max_open=True),
    help="Part of the data that goes to eval.bin; 0 writes none.  [default: the data's validation split, else 0.1]",
)
@click.option("--eos-token", help="The token that ends a document, if the tokenizer does not say.")
@click.option(
    "--data-format",
    metavar="FORMAT",
    help="Format of the rows: text, messages, sharegpt, prompt-completion, question-answer, alpaca or tokens.  "
    "[default: from their columns]",
)
@click.option(
    "--map", "mapping", multiple=True, metavar="OURS=THEIRS", help="What a column is called in the data; repeatable."
)
@click.option(
    "--prompt-template",
    type=shell.Home(),
    metavar="FILE",
    help="Jinja file that writes the prompt from a row's columns, such as {{ title }}; the answer stays a column.",
)
@click.option("--no-preamble", "preamble", flag_value=False, default=True, help="Leave out Alpaca's usual preamble.")
@click.option(
    "--chat-template",
    type=shell.FileOrText(),
    metavar="FILE-OR-TEXT",
    help="Chat template in Jinja.  [default: the tokenizer's own]",
)
@click.option(
    "--train-on",
    metavar="WHAT",
    help="What is trained of a row: assistant, all, last, or roles with commas.  [default: answers]",
)
@click.option("--seq-len", type=click.IntRange(min=1), help="Tokens from which on a row is too long: see --overlong.")
@click.option(
    "--overlong",
    type=click.Choice(["turns", "truncate", "split", "drop"]),
    help="What happens to rows of more than --seq-len tokens: turns keeps the whole turns of a chat that fit and drops "
    "rows without one; the others cut off, split or drop.  [default: turns]",
)
@click.option(
    "--skip-bad-rows",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Leave out up to N rows that are broken.",
)
@click.option("--show", type=click.IntRange(min=0), default=0, metavar="N", help="Print N samples, colored by mask.")
@click.option("--out-dir", type=shell.Home(), metavar="FOLDER", help="Where to write.  [default: data/DATA-TOKENIZER]")
def command(
    inputs: tuple[str, ...],
    mapping: tuple[str, ...],
    show: int,
    seq_len: int | None,
    overlong: str | None,
    data_format: str | None,
    prompt_template: str | None,
    preamble: bool,
    chat_template: str | None,
    train_on: str | None,
    **given: Any,
) -> None:
    """Tokenizes text and rows into train.bin and eval.bin.

    \b
    tokenize-data --dataset tiny-shakespeare --model qwen
    tokenize-data --input 'books/*.txt' --tokenizer ./my-tokenizer
    tokenize-data --input 'books/*.txt' --train-tokenizer 8192
    tokenize-data --input chats.jsonl.gz --model qwen --show 3
    tokenize-data --dataset 'wikitext:wikitext-2-raw-v1:train[:10%]' --model qwen

    A text file is one document, and so is a row; each ends with the tokenizer's EOS, or as its chat template says. Data
    of more than 100 million tokens is written in parts: train-000.bin, train-001.bin, ... Beside each token file lies a
    .json that says where it comes from, and the tokenizer's files lie in tokenizer/.

    For evaluation, whole text files or rows are kept, spread evenly; of a single text file, its end from a line break
    on. An interrupted call that is made again resumes after its last finished part. No code of a data set is ever run.

    Memory: about 400 MB, whatever the size, with the tokenizers of GPT-2, Llama 3 and Qwen and others built like them.
    With any other (such as Llama 2), each document is tokenized as a whole, which takes some 120 times its size; and so
    is a stretch of text without spaces and single line breaks, and each prompt, answer and chat.

    Environment: LLMQ_TINY_SHAKESPEARE is a file or URL to take instead of the download, LLMQ_CACHE_DIR the folder
    for what is kept (~/.cache/llmq), HF_HUB_OFFLINE=1 forbids the network, TOKENIZERS_PARALLELISM=false is one thread.
    """
    if given["dataset"] and os.path.isfile(given["dataset"]):
        raise UsageError(f"--dataset {given['dataset']} is a file: give it as --input")
    if given["out_dir"] and os.path.isfile(given["out_dir"]):
        raise StorageError(f"--out-dir {given['out_dir']} is a file: name a folder")
    if overlong is not None and seq_len is None:
        raise UsageError(f"--overlong {overlong} is for rows of more than --seq-len tokens: give --seq-len too")
    # Imported here, so that --help does not wait for them.
    from rich.console import Console

    from llmq.data.chat.encode import EncodeOptions
    from llmq.data.chat.prompts import read_prompt_template
    from llmq.data.rows.request import parsed_mapping
    from llmq.data.tokens.tokenize import show_samples, tokenize_data

    encode = EncodeOptions(
        data_format=data_format,
        mapping=parsed_mapping(mapping),
        chat_template=chat_template,
        train_on=train_on,
        overlong=overlong or "turns",
        seq_len=seq_len,
        prompt_template=read_prompt_template(prompt_template) if prompt_template else None,
        preamble=preamble,
    )
    screen = Screen(sys.stderr)
    with terminable(), screen.task("Tokenizing") as on_progress:
        written = tokenize_data(
            inputs=inputs,
            encode=encode,
            on_progress=on_progress,
            say=screen.line,
            on_encoder=partial(show_samples, count=show, console=Console()) if show else None,
            **given,
        )
    for file in written:
        documents = f"{file.num_documents} document{'s' if file.num_documents != 1 else ''}"
        click.echo(f"{file.path}: {file.num_tokens} tokens in {documents}")


main = shell.console_script(command)

if __name__ == "__main__":
    main()
