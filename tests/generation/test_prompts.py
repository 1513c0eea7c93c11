"""Prompts to tokens and tokens to text: characters of several tokens appear whole, special tokens are read as such."""

import pytest
from small_tokenizers import EOS, byte_level, save
from tokenizers import decoders

from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.errors import DataError, UsageError
from llmq.generation.prompts import PromptReader, Question, TextStream


@pytest.fixture
def reader(tmp_path):
    """Of a byte-level tokenizer that would put EOS behind texts."""
    made = byte_level()
    made.decoder = decoders.ByteLevel()
    tokenizer = TextTokenizer.open(str(save(made, tmp_path, {"eos_token": EOS})))
    return PromptReader(tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize(
    "text", ["It's the king's 10 ships", "\u00e9clat\u00e9 \U0001f600\U0001f680 \u4e2d\u6587!", " a\n\n b"]
)
def test_a_stream_shows_whole_characters_and_all_of_the_text(reader, text):
    stream, shown = TextStream(reader), []
    tokens = reader.tokens(Question({}, text=text))
    for token in tokens:
        shown.append(stream.add(token))
        assert "\ufffd" not in shown[-1]
    assert "".join(shown) == reader.text(tokens) == text and stream.rest() == ""
    cut = TextStream(reader)
    assert cut.add(reader.tokens(Question({}, text="\U0001f600"))[0]) == "" and cut.rest() == "\ufffd"


def test_a_prompt_ends_without_an_end_and_spells_special_tokens(reader):
    end = byte_level().token_to_id(EOS)
    tokens = reader.tokens(Question({}, text=f"Aye{EOS}Aye"))
    assert tokens.count(end) == 1 and tokens[-1] != end


def test_tokens_that_the_model_lacks_are_refused(reader):
    with pytest.raises(UsageError, match="token 9999 of a prompt is not in the vocabulary of"):
        reader.tokens(Question({}, tokens=(1, 9999)))
    small = PromptReader(reader._tokenizer, 5)
    with pytest.raises(DataError, match="the model only 5: use the model's own"):
        small.tokens(Question({}, text="Aye"))
