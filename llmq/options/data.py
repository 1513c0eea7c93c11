"""What to train on: the model, token files, and text, chats or rows."""

# No `from __future__ import annotations`: pydantic would compile every annotation from text, a tenth of --help's time.

import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from llmq.options.field import (
    Count,
    Floats,
    Path,
    Paths,
    Positive,
    Section,
    Share,
    Text,
    Texts,
    describe,
    flag,
    option,
    truth,
    written,
)


def _file_at_home(value: Any) -> Any:
    path = os.path.expanduser(value) if isinstance(value, str) else value
    return path if isinstance(path, str) and os.path.isfile(path) else value


def _how_to_pack(value: Any) -> Any:
    found = value if value == "windows" else truth(value)
    if found is None and value is not None:
        raise ValueError("give windows, true (the same as --packing) or false (--no-packing)")
    return found


Packing = Annotated[Literal["windows"] | bool | None, BeforeValidator(_how_to_pack)]
Template = Annotated[Text, Field(min_length=1), BeforeValidator(_file_at_home)]
VocabSize = Literal["tokenizer"] | Positive


class ModelOptions(Section):
    title = "Model"
    model: Path = option(
        ..., "Model to train: a folder, a hub name, or a preset such as Qwen2.5-0.5B.", "model_name_or_path"
    )
    revision: Text | None = option(None, "Branch, tag or commit of a hub model.", "model_revision")
    family: Path | None = option(
        None,
        "YAML file that describes the model's family, of a folder whose architecture llmq does not know.",
        metavar="FILE",
    )
    from_scratch: bool = option(False, "Start from random weights, N(0, 0.02), residual projections over sqrt(2L).")
    init_proj_to_zero: bool = option(False, "Start the output projections of --from-scratch at zero.")

    tokenizer: Path | None = option(
        None, "Tokenizer of a --from-scratch run.", "tokenizer_name", "tokenizer_name_or_path", shown="that of --model"
    )

    vocab_size: VocabSize | None = option(
        None,
        "Vocabulary of a --from-scratch model: its tokenizer's, or a number.",
        shown="that of --model",
        metavar="tokenizer|INT",
    )

    add_tokens: Path | None = option(
        None,
        "File of tokens to add to the tokenizer and the model: one in each line, or a .json list of texts and objects "
        'such as {"content": "<tool>", "special": true}. Their rows start as the mean of the others.',
        metavar="FILE",
    )

    def contradictions(self) -> Iterator[str]:
        if not self.from_scratch:
            for key in self.given(("vocab_size", "tokenizer", "init_proj_to_zero")):
                yield f"{self.written(key)} is for weights that are not loaded: add --from-scratch, or leave it out"


class DataOptions(Section):
    title = "Data"
    train_file: Paths | None = option(None, "Token files: a path or glob; repeatable.", shown="needed, or --data")
    weight: Floats | None = option(
        None, "Share of the tokens from each --train-file or --data, in order; repeatable.", metavar="WEIGHT"
    )
    eval_file: Paths | None = option(None, "Held-out token files: a path or glob; repeatable.")
    batch_size: Positive = option(4, "Sequences per micro-batch and GPU.", "per_device_train_batch_size", "batch")
    global_batch_size: Positive | None = option(None, "Sequences per optimizer step; replaces --grad-accumulation.")
    grad_accumulation: Positive = option(
        lambda data: max(total // data.get("batch_size", 1), 1) if (total := data.get("global_batch_size")) else 4,
        "Micro-batches per optimizer step.",
        "gradient_accumulation_steps",
        shown="4, or from --global-batch-size",
    )
    seq_len: Positive = option(
        1024, "Tokens per sequence.", "seq_length", "max_seq_length", "block_size", "sequence_len", "cutoff_len"
    )
    packing: Packing = option(
        None,
        "Pack whole documents into rows, each with its own positions and attention. --no-packing puts one document in "
        "a padded row; --packing=windows cuts the text every --seq-len tokens.",
        shown="packed for rows (padded on a GPU that cannot pack), windows for text and tokens",
        metavar="[windows]",
        kind="switch",
    )
    max_docs: Positive | None = option(None, "Most documents in a packed row.", shown="as few as fill the rows")

    def contradictions(self) -> Iterator[str]:
        if self.max_docs is not None and self.packing in (False, "windows"):
            yield f"--max-docs {self.max_docs} is for packed rows: add --packing, or leave it out"
        elif self.max_docs is not None and self.max_docs > self.seq_len:
            yield f"--max-docs {self.max_docs} is more than the --seq-len {self.seq_len} tokens of a row: use fewer"
        total, micro = self.global_batch_size, self.batch_size
        if total is None:
            return
        if total % micro:
            below = total // micro * micro
            fix = f"{below} or {below + micro}" if below else str(micro)
            yield f"--global-batch-size {total} is not a multiple of --batch-size {micro}: use {fix}"
        elif total != micro * self.grad_accumulation:
            steps, said = self.grad_accumulation, f"the first asks for {total // micro} micro-batches"
            yield f"--global-batch-size {total} and --grad-accumulation {steps} disagree: {said}; give one of the two"


class SourceOptions(Section):
    title = "Text, chats and rows"
    data: Paths | None = option(
        None,
        "Text, chats or rows to train on, tokenized once: a file, folder or glob, a data set as "
        "NAME[@REVISION][:CONFIG[:SPLIT[SLICE]]]; repeatable. Replaces --train-file.",
        metavar="NAME-OR-PATH",
    )
    eval_fraction: Share | None = option(
        None, "Fraction of the data held out for evaluation; 0: none.", shown="its own validation split, else 0.1"
    )
    data_format: Text | None = option(
        None,
        "Format of the rows: text, messages, sharegpt, prompt-completion, question-answer, alpaca or tokens.",
        shown="from their columns",
    )
    map_: Texts | None = option(None, "Name of a column, such as text=body; repeatable.", metavar="OURS=THEIRS")
    prompt_template: Path | None = option(
        None, "Jinja file that writes the prompt from a row's columns, such as {{ title }}; the answer stays a column."
    )
    preamble: bool = option(True, "Begin alpaca prompts with the usual preamble; a row's system prompt replaces it.")
    chat_template: Template | None = option(
        None, "Chat template in Jinja: a file or the text itself.", shown="the tokenizer's own"
    )
    train_on: Text | None = option(
        None, "Tokens of a row to train on: assistant, all, last, or roles with commas.", shown="answers"
    )
    overlong: Literal["turns", "truncate", "split", "drop"] = option(
        "turns",
        "Treatment of rows longer than --seq-len: turns keeps the whole turns of a chat that fit, drops a row without "
        "one, and leaves text whole; truncate cuts off the end, split cuts into pieces, drop leaves the row out.",
    )
    skip_bad_rows: Count = option(0, "Skip up to N broken rows; 0 stops at the first.")
    streaming: bool = option(False, "Tokenize while training and keep no token files, for data larger than the disk.")

    def contradictions(self) -> Iterator[str]:
        if self.data is None:
            for d in describe("source", type(self)):
                if d.key != "data" and (value := getattr(self, d.field)) not in (None, d.default):
                    yield f"{written(d.key, value)} is for --data: give that, or leave it out"
        elif self.streaming and len(self.data) > 1:
            yield f"--streaming reads one data set, but --data is given {len(self.data)} times: give one"
        if self.data is not None and self.streaming and self.eval_fraction:
            part = f"--eval-fraction {self.eval_fraction:g} of a stream"
            yield f"{part} is not known ahead: leave it out, for the validation split, or set it to 0"

    def beside(self, files: DataOptions, *, plans_only: bool) -> Iterator[str]:
        """Contradictions with the options that name token files, and their weights. A plan needs no data."""
        if files.train_file is None and self.data is None and not plans_only:
            yield "--train-file is needed: token files; or --data: text or rows; --dry-run plans without data"
        for key in files.given(("train_file", "eval_file")) if self.data is not None else ():
            given, named = ", ".join(getattr(files, key)), ", ".join(self.data or ())
            yield f"{flag(key)} {given} and --data {named} both say what the data is: give one of them"
        key, names = ("data", self.data) if self.data is not None else ("train_file", files.train_file)
        weight = files.weight
        if weight is not None and names is not None and len(weight) != len(names):
            yield f"--weight is given {len(weight)} times and {flag(key)} {len(names)} times: give one weight for each"
        if weight is not None and self.streaming:
            yield "--weight is for several sources, but --streaming reads one: leave one of them out"
