"""A new tokenizer, trained on text: byte-level BPE, as GPT-2 has it, so that every text has tokens and comes back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from llmq.data.rows.find_sources import Found
from llmq.data.tokens.text import Document, Texts, pieces
from llmq.data.tokens.tokenizer import CONFIG, TextTokenizer
from llmq.disk import temporary_name, write_whole
from llmq.errors import DataError, UsageError

EOS = "<|endoftext|>"


def train_tokenizer(documents: Sequence[Document], vocab_size: int, folder: Path) -> None:
    """Writes a tokenizer of `vocab_size` tokens to `folder`, in Hugging Face's format; token 0 is EOS.

    Raises DataError if the text has too few different words for that many tokens, or is not UTF-8.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for document in documents for piece in pieces(document, True)), trainer)
    if (found := tokenizer.get_vocab_size()) < vocab_size:
        raise DataError(
            f"--train-tokenizer {vocab_size}: the text is enough for {found} tokens only: give more text, or use "
            f"--train-tokenizer {found}"
        )
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "bos_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    write_whole(folder / CONFIG, json.dumps(about, indent=1).encode())
    write_whole(folder / "tokenizer.json", tokenizer.to_str().encode())


@contextmanager
def trained_tokenizer(found: Found, vocab_size: int, folder: Path) -> Iterator[TextTokenizer]:
    """A tokenizer trained on the text to train on, open, whose files are for `folder`; UsageError for rows.

    Until they are copied they lie beside it, so that an interrupted call leaves the tokenizer of an earlier one alone.
    """
    if not isinstance(found.train, Texts):
        raise UsageError(f"--train-tokenizer is for text, but {found.name} is rows: give --model")
    fresh = temporary_name(folder)
    try:
        train_tokenizer(found.train.documents, vocab_size, fresh)
        yield replace(TextTokenizer.open(str(fresh)), source=str(folder.resolve()))
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
