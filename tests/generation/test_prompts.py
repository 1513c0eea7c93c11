"""Prompts to tokens and tokens to text: characters of several tokens appear whole, special tokens are read as such."""

import random

import pytest
from small_tokenizers import EOS, byte_level, save
from tokenizers import decoders

from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.errors import DataError, UsageError
from llmq.generation.prompts import Answer, Draft, PromptReader, Question, questions_of


@pytest.fixture
def reader(tmp_path):
    """Of a byte-level tokenizer that would put EOS after texts."""
    made = byte_level()
    made.decoder = decoders.ByteLevel()
    tokenizer = TextTokenizer.open(str(save(made, tmp_path, {"eos_token": EOS})))
    return PromptReader(tokenizer, tokenizer.vocab_size)


def said(draft, token):
    """What a token adds to the text."""
    draft.add(token)
    return draft.piece(None).text


@pytest.mark.parametrize(
    "text", ["It's the king's 10 ships", "\u00e9clat\u00e9 \U0001f600\U0001f680 \u4e2d\u6587!", " a\n\n b"]
)
def test_a_stream_shows_whole_characters_and_all_of_the_text(reader, text):
    stream, shown = Draft(reader), []
    tokens = reader.tokens(Question({}, text=text))
    for token in tokens:
        shown.append(said(stream, token))
        assert "\ufffd" not in shown[-1]
    assert "".join(shown) == reader.text(tokens) == text and stream.piece("length").text == ""
    cut = Draft(reader)
    assert said(cut, reader.tokens(Question({}, text="\U0001f600"))[0]) == "" and cut.piece("length").text == "\ufffd"


class Spelled:
    """A reader whose tokens are texts."""

    has_tokenizer = True

    def text(self, tokens):
        return "".join(tokens)


def until(text, stop):
    """A text to the first stop text to be complete, read sign by sign; and whether there is one."""
    for end in range(len(text) + 1):
        if starts := [end - len(one) for one in stop if text[:end].endswith(one)]:
            return text[: min(starts)], True
    return text, False


def test_a_stream_ends_before_a_stop_text_however_tokens_cut_it_and_shows_none_of_it():
    draw = random.Random(3)
    for _ in range(3000):
        text = "".join(draw.choices("abc", k=draw.randrange(12)))
        stop = ["".join(draw.choices("abc", k=draw.randrange(1, 5))) for _ in range(draw.randrange(1, 4))]
        expected, has_ended = until(text, stop)
        stream, shown, left = Draft(Spelled(), stop), "", text
        while left and not stream.is_stopped:
            size = draw.randrange(1, 4)
            shown, left = shown + said(stream, left[:size]), left[size:]
            assert expected.startswith(shown)
            assert shown == expected or len(text) - len(left) - len(shown) < max(map(len, stop))  # no more is held
        assert (shown + stream.piece("length").text, stream.is_stopped) == (expected, has_ended), (text, stop)


def test_a_stop_text_before_half_a_character_is_why_an_answer_ends():
    draft = Draft(Spelled(), ["end"], (1, 2))
    assert not any(draft.add(token, -0.5) for token in ("a ", "end\ufffd"))
    assert draft.piece("length") == Answer("a ", ("a ", "end\ufffd"), (-0.5, -0.5), "stop", 1, 2)


def test_a_stop_text_may_lie_within_the_bytes_of_characters(reader):
    text = "It's \U0001f600 the \u00e9nd of ships"
    stream = Draft(reader, ["\u00e9nd"])
    tokens = iter(reader.tokens(Question({}, text=text)))
    shown = "".join(said(stream, token) for token in tokens if not stream.is_stopped)
    assert (shown, stream.piece("length").text, stream.is_stopped) == ("It's \U0001f600 the ", "", True)


CHAT = [{"role": "user", "content": "Aye"}]


@pytest.mark.parametrize(
    ("prompts", "shown"),
    [
        ("Aye", [{"prompt": "Aye"}]),
        (["Aye", "No"], [{"prompt": "Aye"}, {"prompt": "No"}]),
        (CHAT, [{"messages": CHAT}]),
        ([CHAT, CHAT * 2, "Aye"], [{"messages": CHAT}, {"messages": CHAT * 2}, {"prompt": "Aye"}]),
        ([5, 6], [{"tokens": [5, 6]}]),
        ([[5, 6], [7]], [{"tokens": [5, 6]}, {"tokens": [7]}]),
        ((one for one in ("Aye", "No")), [{"prompt": "Aye"}, {"prompt": "No"}]),
        ([], []),
    ],
)
def test_python_asks_with_texts_chats_and_tokens(prompts, shown):
    assert [question.shown for question in questions_of(prompts)] == shown


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        (None, "prompt 1 is None: give a text, a chat"),
        (CHAT[0], "prompt 1 is {'content': 'Aye', 'role': 'user'}: give"),
        (["Aye", 5, CHAT[0], []], r"prompt 2 is 5; prompt 3 is \{.*\}; prompt 4 is \[\]: give .*, or a list of these"),
    ],
)
def test_a_prompt_that_is_none_of_these_is_named(prompts, says):
    with pytest.raises(UsageError, match=says):
        questions_of(prompts)


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
