"""Small tokenizers, made in a moment, in the shapes that large ones have."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmq.data.tokens.tokenizer import Sidecar, TokenizerNote

SAMPLE = (
    "It's the king's 10 ships, isn't it?\nAye -- 3 of \u00e9clat\u00e9s!\n\nROMEO:\n  What say'st thou?\n\tNothing. "
)
EOS = "<|endoftext|>"


def byte_level(pattern: str | None = None, *, digits: bool = False, added: tuple[str, ...] = ()) -> Tokenizer:
    """A byte-level BPE with some merges, which puts EOS behind text if it may; `pattern` None is GPT-2's."""
    tokenizer = Tokenizer.from_str(_trained(pattern, digits))
    if added:
        tokenizer.add_tokens(list(added))
    return tokenizer


@cache
def _trained(pattern: str | None, digits: bool) -> str:
    """The JSON of one without added tokens: training takes longer than reading it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern is not None:
        parts.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    # Twice with the lines joined otherwise, so that merges over white space and punctuation exist.
    tokenizer.train_from_iterator([SAMPLE * 3, SAMPLE.replace("\n", " \n "), SAMPLE.replace(" ", "\n")] * 3, trainer)
    eos = (EOS, tokenizer.token_to_id(EOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[eos])
    return tokenizer.to_str()


def save(tokenizer: Tokenizer, folder: Path, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def sidecar(sha256: str = "0" * 64) -> Sidecar:
    """What lies beside a token file of one document of 7 tokens."""
    note = TokenizerNote(
        source="me/model",
        revision="abc",
        sha256=sha256,
        folder="tokenizer",
        vocab_size=9,
        eos_token="</s>",
        eos_token_id=2,
    )
    about = {"document_rule": "rule", "text": ("a.txt",), "end_token_ids": (2,), "tokenizer": note}
    return Sidecar(num_tokens=7, num_documents=1, **about)
