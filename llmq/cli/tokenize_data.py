"""tokenize-data: text and rows into token files for training."""

import os
import sys
from typing import Any

import click

from llmq.cli import shell
from llmq.cli.train import own_option
from llmq.errors import StorageError, UsageError
from llmq.options.parse import Options, descriptions
from llmq.screen import Screen
from llmq.training.interrupt import terminable

SHARED = (  # options of llmq-train, with its help
    *("eval_fraction", "data_format", "map", "prompt_template", "preamble", "chat_template", "train_on", "seq_len"),
    *("overlong", "skip_bad_rows", "add_tokens"),
)


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
@click.option("--revision", help="Branch, tag or commit of the tokenizer's hub name.")
@click.option("--eos-token", help="The token that ends a document, if the tokenizer does not say.")
@click.option("--show", type=click.IntRange(min=0), default=0, metavar="N", help="Print N samples, colored by mask.")
@click.option("--out-dir", type=shell.Home(), metavar="FOLDER", help="Where to write.  [default: data/DATA-TOKENIZER]")
def command(inputs: tuple[str, ...], show: int, **given: Any) -> None:
    """Tokenizes text and rows into train.bin and eval.bin.

    \b
    tokenize-data --dataset tiny-shakespeare --model qwen
    tokenize-data --input 'books/*.txt' --tokenizer ./my-tokenizer
    tokenize-data --input chats.jsonl.gz --model qwen --show 3
    tokenize-data --dataset 'wikitext:wikitext-2-raw-v1:train[:10%]' --model qwen

    A text file is one document, and so is a row; each ends with the tokenizer's EOS, or as its chat template says. Data
    of more than 100 million tokens is written in parts: train-000.bin, train-001.bin, ... Beside each token file lies a
    .json that says where it comes from, and the tokenizer's files lie in tokenizer/.

    For evaluation, whole text files or rows are kept, spread evenly; of a single text file, its end from a line break
    on. An interrupted call that is made again resumes after its last finished part. No code of a data set is ever run.

    Memory: about 400 MB, whatever the size, with the tokenizers of GPT-2, Llama 3 and Qwen and others built like them,
    and for many rows, which are tokenized by a process for each core (16 at most), 250 MB for each.
    With any other (such as Llama 2), each document is tokenized as a whole, which takes some 120 times its size; and so
    is a stretch of text without spaces and single line breaks, and each prompt, answer and chat.

    Environment: LLMQ_CACHE_DIR is the folder for what is kept (~/.cache/llmq), HF_HUB_OFFLINE=1 forbids the network,
    TOKENIZERS_PARALLELISM=false is one process with one thread.
    """
    if given["dataset"] and os.path.isfile(given["dataset"]):
        raise UsageError(f"--dataset {given['dataset']} is a file: give it as --input")
    if given["out_dir"] and os.path.isfile(given["out_dir"]):
        raise StorageError(f"--out-dir {given['out_dir']} is a file: name a folder")
    typed = {key: value for key in SHARED if (value := given.pop(key)) not in (None, ())}
    if "overlong" in typed and "seq_len" not in typed:
        raise UsageError(
            f"--overlong {typed['overlong']} is for rows of more than --seq-len tokens: give --seq-len too"
        )
    options = Options.parse({"model": "any", "data": "any", **typed})
    # Imported here, so that --help does not wait for them.
    from llmq.data.batches.named_data import encode_options
    from llmq.data.tokens.tokenize import tokenize_data

    flat = options.to_flat()
    encode = encode_options(options.source, flat["seq_len"] if "seq_len" in typed else None)
    screen = Screen(sys.stderr)
    with terminable(), screen.task("Tokenizing") as on_progress:
        written = tokenize_data(
            inputs=inputs,
            encode=encode,
            on_progress=on_progress,
            say=screen.line,
            samples=show,
            eval_fraction=flat["eval_fraction"],
            skip_bad_rows=flat["skip_bad_rows"],
            add_tokens=flat["add_tokens"],
            **given,
        )
    for file in written:
        documents = f"{file.num_documents} document{'s' if file.num_documents != 1 else ''}"
        click.echo(f"{file.path}: {file.num_tokens} tokens in {documents}")


command.params += [own_option(descriptions()[key]) for key in SHARED]

if __name__ == "__main__":
    shell.main(command)
