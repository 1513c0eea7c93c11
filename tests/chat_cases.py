"""Conversations, templates and a tokenizer on which the chat templates are compared with transformers.

The templates follow the conventions of well-known models, and are written for these tests. The tokenizer is byte-level
BPE with a few merges, which is the same everywhere: nothing in it is trained.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from llmq.data.chat.template import ChatTemplate

TEMPLATES = Path(__file__).parent / "golden/chat_templates"
GOLDEN = Path(__file__).parent / "golden/chats.json"
BOS, EOS = "<s>", "</s>"
SPECIAL = (
    *("<|endoftext|>", BOS, EOS, "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "[INST]", "[/INST]", "<|user|>", "<|system|>", "<|assistant|>"),
)
ORDINARY = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added, but no special tokens: as Qwen3 has it
# Merges over the borders between headers, content and line breaks among them.
MERGES = [(".", "\u010a"), ("\u010a", "\u010a"), ("h", "e"), ("\u0120", "t"), ("\u0120t", "he"), ("i", "n"), ("e", "r")]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather <now> & later",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def _turn(role: str, content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": role, **({} if content is None else {"content": content}), **more}


def _call(**arguments: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]


ONE = [_turn("user", "What is in the box?"), _turn("assistant", "Nothing.")]
SYSTEM = [_turn("system", "Answer in verse."), *ONE]
LONG = [*SYSTEM, _turn("user", "And\n\nnow?"), _turn("assistant", "\n  A r\u00e9sum\u00e9 \u2014 \U0001f600.\n")]
OPEN = [*LONG, _turn("user", "Then stop.")]
REASONED = [
    _turn("user", "2 + 2?"),
    _turn("assistant", "4.", reasoning_content="Two and two."),
    _turn("user", "And 3 + 3?"),
    _turn("assistant", "<think>\nThree and three.\n</think>\n\n6."),
]
TOOLS = [
    _turn("system", "Use the functions."),
    _turn("user", "The weather in K\u00f6ln?"),
    _turn("assistant", tool_calls=_call(city="K\u00f6ln")),
    _turn("tool", '{"degrees": 21}'),
    _turn("assistant", "It has 21 degrees.", reasoning_content="The tool says it."),
    _turn("user", "Thanks."),
    _turn("assistant", "Not at all."),
]
SPELLED = [_turn("user", "What does <|im_end|> do?"), _turn("assistant", "It ends <|im_start|> turns.")]
# Name -> messages, tools.
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one": (ONE, None),
    "system": (SYSTEM, None),
    "long": (LONG, None),
    "open": (OPEN, None),
    "reasoned": (REASONED, None),
    "tools": (TOOLS, [WEATHER]),
    "spelled": (SPELLED, None),
}
# The templates, and the chats that they can render.
PLAIN = ("one", "system", "long", "open", "spelled")
CASES = {
    "chatml": (*PLAIN, "reasoned"),
    "chatml_generation": PLAIN,
    "llama3": (*PLAIN, "tools"),
    "mistral": (*PLAIN, "reasoned"),
    "zephyr": PLAIN,
    "qwen3": (*PLAIN, "reasoned", "tools"),
}
PAIRS = [(template, chat) for template, chats in CASES.items() for chat in chats]
VARIABLES = {"bos_token": BOS, "eos_token": EOS}
CHATML = (  # in short
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def source(name: str) -> str:
    """A template's text."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def template(name: str) -> ChatTemplate:
    return ChatTemplate(source(name), name, VARIABLES)


def chat_tokenizer(without: tuple[str, ...] = ()) -> Tokenizer:
    """The tokenizer, without some of its special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*letters, *(a + b for a, b in MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL if token not in without])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ORDINARY])
    return tokenizer
