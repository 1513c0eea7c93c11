"""Real text that every machine has: the sources of Python's standard library, with a tokenizer trained on them.

Where more is wanted, those of the installed packages are text as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from llmq.data.tokens.token_file import TokenFile
from llmq.data.tokens.tokenize import tokenize_data
from llmq.disk import write_whole
from llmq.errors import DataError

# Tests, tables of character codes, packed wheels, and what is installed beside the library.
LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3", "_bundled", "__pycache__"}
    | {"site-packages", "dist-packages"}
)
COPIES = "_vendor"  # packages within packages
LONGEST_NAME = 200  # bytes; file systems take 255
LEAST_BYTES = 100_000
EVAL_FRACTION = 0.05
EOS = "<|endoftext|>"


@dataclass(frozen=True)
class Corpus:
    """Text of whole files, by a flat name: `asyncio.events.py`."""

    texts: dict[str, bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(map(len, self.texts.values()))

    @property
    def sha256(self) -> str:
        """Digest of names and contents."""
        digest = hashlib.sha256()
        for name, content in self.texts.items():
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()


def standard_library(most_bytes: int, root: Path | None = None) -> Corpus:
    """The library's own modules in UTF-8, at most `most_bytes` in all, in the order of their names.

    DataError if the sources are not there, as in a Python that keeps them in a zip file.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    texts, size = {}, 0
    for path in _modules(root):
        fits = 0 < path.stat().st_size <= most_bytes - size
        if fits and _is_utf8(content := path.read_bytes()):
            texts[".".join(path.relative_to(root).parts)] = content
            size += len(content)
    if size < LEAST_BYTES:
        raise DataError(
            f"{root} has {size} bytes of Python sources, but the quickstart needs {LEAST_BYTES} to train on: "
            "use a Python that has its standard library as files"
        )
    return Corpus(texts)


def with_packages(library: Corpus, most_bytes: int, root: Path | None = None) -> Corpus:
    """`library` and the modules of the installed packages after it, up to `most_bytes` in all, no content twice.

    A file held out of the training would otherwise be known from a copy of it.
    """
    root = root or Path(sysconfig.get_path("purelib"))
    texts, size, known = dict(library.texts), library.num_bytes, set(library.texts.values())
    for path in _modules(root):
        name = ".".join((root.name, *path.relative_to(root).parts))
        usable = 0 < path.stat().st_size <= most_bytes - size and len(os.fsencode(name)) <= LONGEST_NAME
        if usable and COPIES not in path.parts and _is_utf8(content := path.read_bytes()) and content not in known:
            texts[name] = content
            size += len(content)
            known.add(content)
    return Corpus(texts)


def _modules(root: Path) -> list[Path]:
    """Python files below `root` that are not LEFT_OUT, in the order of their names."""
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in LEFT_OUT]  # os.walk does not go into the others
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def write_texts(corpus: Corpus, folder: Path) -> None:
    """Writes the files of `corpus` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in corpus.texts.items():
        (folder / name).write_bytes(content)


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path, seq_len: int) -> None:
    """Writes a byte-level BPE of `vocab_size` ids with one special token, EOS (id 0), as a Hugging Face folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "bos_token": EOS,
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
    }
    write_whole(folder / "tokenizer.json", tokenizer.to_str().encode())
    write_whole(folder / "tokenizer_config.json", json.dumps(about, indent=1).encode())


def make_token_files(corpus: Corpus, out: Path, vocab_size: int, seq_len: int) -> None:
    """Writes text/, tokenizer/, and data/train.bin and data/eval.bin to `out`; whole files are held out."""
    write_texts(corpus, out / "text")
    train_tokenizer((content.decode() for content in corpus.texts.values()), vocab_size, out / "tokenizer", seq_len)
    tokenize_data(
        tokenizer=str(out / "tokenizer"),
        inputs=[str(out / "text" / "*.py")],
        eval_fraction=EVAL_FRACTION,
        out_dir=out / "data",
    )


def unigram_entropy(path: Path) -> float:
    """Nats per token of a token file for the best guess that does not look at what comes before.

    That is the entropy of the file's own token frequencies: no model without context can have a lower loss on it.
    """
    file = TokenFile.open(path)
    counts = np.bincount(file.tokens, minlength=1).astype(np.float64)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
