"""What is trained in a chat: spans by template, samples of templates that rewrite earlier turns, tokens at borders."""

import json

import pytest
from chat_cases import CHATML, CHATS, GOLDEN, LONG, PAIRS, REASONED, SPECIAL, TOOLS, VARIABLES, chat_tokenizer, template
from tokenizers import normalizers, pre_tokenizers

from llmq.data.chat.formats import Chat
from llmq.data.chat.masks import Sample, TrainOn, samples, trained_tokens, unwritten
from llmq.data.chat.template import ChatTemplate, RenderError
from llmq.errors import UsageError

USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"
VERSE = "<|im_start|>system\nAnswer in verse.<|im_end|>\n"


def marked(sample: Sample) -> str:
    """A sample's text with its spans between guillemets."""
    text = sample.text
    for start, stop in reversed(sample.spans):
        text = f"{text[:start]}«{text[start:stop]}»{text[stop:]}"
    return text + "+EOS" * sample.ends


def masked(name: str | ChatTemplate, chat: str | list[dict], train_on: str | None = None) -> list[str]:
    messages, tools = CHATS[chat] if isinstance(chat, str) else (chat, None)
    used = template(name) if isinstance(name, str) else name
    return [marked(sample) for sample in samples(used, Chat(messages, tools), TrainOn.parse(train_on), SPECIAL)]


BEGINS = ChatTemplate(CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}"), "begins")  # with reasoning
LENIENT = ChatTemplate(CHATML, "lenient")
READS = ChatTemplate("{% for m in messages %}{{ raise_exception('no') if m.content == '0' }}"
                     "{{ m.role + ': ' + m.content }}\n{% endfor %}", "reads")  # fmt: skip
PLAIN = ChatTemplate("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
                     "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}", "plain")  # fmt: skip
# Phi-3 without blocks: EOS follows the last end token of a conversation, and no other.
PHI = ChatTemplate(CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}", "phi", VARIABLES)
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n".format
ASKED = [{"role": "user", "content": "Yes?"}, {"role": "assistant", "content": "No."}]
YES = f"{USER}Yes?{END}{ASSISTANT}"
BETWEEN_CALLS = [
    {"role": "user", "content": "Rome?"},
    {"role": "assistant", "reasoning_content": "Ask.", "tool_calls": TOOLS[2]["tool_calls"]},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "reasoning_content": "Wet.", "content": "It rains."},
]
# Each answer is trained with its end token, and nothing behind it; what earlier turns write otherwise is trained in a
# sample of its own.
MASKED = {
    "end tokens": ("chatml", "long", None, [
        f"{VERSE}{USER}What is in the box?{END}{ASSISTANT}«Nothing.<|im_end|>»\n"
        f"{USER}And\n\nnow?{END}{ASSISTANT}«\n  A r\u00e9sum\u00e9 \u2014 \U0001f600.\n<|im_end|>»\n"]),
    "nothing behind the end": ("llama3", "system", None, [
        f"<s>{HEADER('system')}Answer in verse.<|eot_id|>{HEADER('user')}What is in the box?<|eot_id|>"
        f"{HEADER('assistant')}«Nothing.<|eot_id|>»"]),
    "EOS as the end": ("zephyr", "one", None, ["<|user|>\nWhat is in the box?</s>\n<|assistant|>\n«Nothing.</s>»\n"]),
    "no generation prompt": ("mistral", "one", None, ["<s>[INST]What is in the box?[/INST]« Nothing.</s>»"]),
    "a system message that moves to the last question": ("mistral", "long", None, [
        "<s>[INST]Answer in verse.\n\nWhat is in the box?[/INST]« Nothing.</s>»",
        "<s>[INST]What is in the box?[/INST] Nothing.</s>[INST]Answer in verse.\n\nAnd\n\nnow?[/INST]"
        "« \n  A r\u00e9sum\u00e9 \u2014 \U0001f600.\n</s>»"]),
    "reasoning that earlier turns leave out": ("qwen3", "reasoned", None, [
        f"{USER}2 + 2?{END}{ASSISTANT}«<think>\nTwo and two.\n</think>\n\n4.<|im_end|>»\n",
        f"{USER}2 + 2?{END}{ASSISTANT}4.{END}{USER}And 3 + 3?{END}{ASSISTANT}"
        "«<think>\nThree and three.\n</think>\n\n6.<|im_end|>»\n"]),
    "reasoning that stays between tool calls": ("qwen3", BETWEEN_CALLS, None, [
        f"{USER}Rome?{END}{ASSISTANT}«<think>\nAsk.\n</think>\n\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "K\u00f6ln"}}\n</tool_call><|im_end|>»\n'
        f"{USER.strip()}\n<tool_response>\nrain\n</tool_response>{END}"
        f"{ASSISTANT}«<think>\nWet.\n</think>\n\nIt rains.<|im_end|>»\n"]),
    "a prompt that begins reasoning": (BEGINS, "one", None,
        [f"{USER}What is in the box?{END}{ASSISTANT}«Nothing.<|im_end|>»\n"]),
    **{f"a prompt that begins reasoning, and the answer {answer}": (
        BEGINS, [ASKED[0], {"role": "assistant", "content": answer}], None, [f"{YES}«{answer}<|im_end|>»\n"])
        for answer in ("<t", "<think", "<thin air>", "<th>ink</th>")},
    **{f"what others say, {content!r}": (LENIENT, [*ASKED, {"role": "user", "content": content}], "user",
        [f"{USER}«Yes?<|im_end|>»\n{ASSISTANT}No.{END}{USER}«{content}<|im_end|>»\n"])
        for content in ("i", "end", "user", "im_", "0", "<|im_start|>", "  a", "a\n", "|>")},
    "what others say where the template reads it": (
        READS, [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "user",
        ["«user: a\n»«user: b\n»+EOS"]),
    "no end token, once": (PLAIN, "one", None, ["user: What is in the box?\nassistant: «Nothing.\n»+EOS"]),
    "no end token, all": (PLAIN, "one", "all", ["«user: What is in the box?\nassistant: Nothing.\n»+EOS"]),
    "no end token, and a question at the end": (PLAIN, LONG[1:4], None,
        ["user: What is in the box?\nassistant: «Nothing.\n»user: And\n\nnow?\n"]),
    "a second end token of the last turn": (PHI, [*ASKED, *ASKED], None,
        [f"{YES}«No.<|im_end|>\n»{YES}«No.<|im_end|>\n</s>»"]),
    "the user alone": ("chatml", ASKED[:1], None, [f"<|im_start|>system\nBe brief.{END}{USER}Yes?{END}"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKED)
def test_what_is_trained(name):
    used, chat, train_on, expected = MASKED[name]
    assert masked(used, chat, train_on) == expected


def test_every_trained_turn_is_in_one_sample_as_at_inference():
    """For each template and chat: the span follows the generation prompt, in the rendering that ends with the turn."""
    seen = 0
    for name, chat in PAIRS:
        messages, tools = CHATS[chat]
        used, made = template(name), samples(template(name), Chat(*CHATS[chat]), TrainOn(), SPECIAL)
        spans = [(sample.text[:start], sample.text[:stop]) for sample in made for start, stop in sample.spans]
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        assert len(spans) == len(turns)
        for turn, (before, until) in zip(turns, spans, strict=True):
            assert before == used.render(messages[:turn], tools, add_generation_prompt=True).text
            assert until == used.render(messages[: turn + 1], tools).text.rstrip()
            seen += 1
    assert seen > 50


@pytest.mark.parametrize(
    ("train_on", "untrained", "trained"),
    [
        ("last", (), {4}), ("user", (), {1, 3, 5}), ("system, assistant", (), {0, 2, 4}), ("tool", (), ()),
        (None, {2}, {4}), (None, {0, 1, 3}, {2, 4}), (None, {2, 4}, ()), ("last", {4}, ()), ("last", {2}, {4}),
        ("user", {3}, {1, 5}), ("all", (), "all"), ("all", {2}, "all"), ("all", {1, 4}, "all"),
    ],
)  # fmt: skip
def test_other_turns_are_trained_and_those_whose_messages_say_so_are_context_only(train_on, untrained, trained):
    chat = [*LONG[:4], {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Stop."}]
    before, behind = ("»", "«") if trained == "all" else ("«", "»")  # what is marked
    text = ""
    for turn, message in enumerate(chat):
        said, is_marked = f"{message['content']}<|im_end|>", turn in (untrained if trained == "all" else trained)
        text += f"<|im_start|>{message['role']}\n" + (f"{before}{said}{behind}" if is_marked else said) + "\n"
    found = samples(template("chatml"), Chat(chat, None, frozenset(untrained)), TrainOn.parse(train_on), SPECIAL)
    assert [marked(sample) for sample in found] == [f"«{text}»" if trained == "all" else text]


def test_tools_are_trained_by_role():
    (text,) = masked("llama3", TOOLS, "tool")
    assert text.count("«") == 1 and '«{"degrees": 21}<|eot_id|>»' in text


@pytest.mark.parametrize("text", ["", "assistant,", "assitant", "all,user", "LAST"])
def test_what_is_no_role_is_refused(text):
    with pytest.raises(UsageError, match="is not a role: give all, last, or some of system, developer, user, assist"):
        TrainOn.parse(text)


STRICT = "{% if not messages %}{{ raise_exception('empty') }}{% endif %}" + CHATML


MADE = [ChatTemplate("<s>" + CHATML, "bos"), LENIENT, ChatTemplate(STRICT, "strict")]


@pytest.mark.parametrize("used", ["chatml", "llama3", "zephyr", "qwen3", *MADE])
@pytest.mark.parametrize("system", [False, True])
def test_a_chat_that_the_assistant_begins_trains_no_header_and_no_system_prompt(used, system):
    hello = "Hello, how can I help?"
    chat = [{"role": "assistant", "content": hello}, {"role": "user", "content": "a"}]
    (text,) = masked(used, [{"role": "system", "content": "s"}] * system + chat)
    spoken = text.split("«")[1].split("»")[0]
    assert spoken.removeprefix("<think>\n\n</think>\n\n") in [hello + end for end in SPECIAL]


def test_what_others_say_begins_in_their_message_where_another_content_changes_earlier_turns():
    chat = [*REASONED[:2], {"role": "user", "content": "<tool_response>5</tool_response>"}]
    (text,) = masked("qwen3", chat, "user")
    assert "Two and two" in text and text.split("4.<|im_end|>\n")[1].startswith("«<|im_start|>user\n<tool_resp")


# What is in the generation block of a turn and after it, by convention; then how the last turn is trained, and how
# one before, where that differs.
EOS_OF_LAST = "{%- if loop.last %}{{ eos_token }}{%- endif %}"
CONVENTIONS = {
    "end inside": ("{{ m.content + '<|im_end|>' }}", "{{ '\n' }}", "«No.<|im_end|>»\n", None),
    "end outside": ("{{ m.content }}", "{{ '<|im_end|>\n' }}", "«No.<|im_end|>»\n", None),
    "end and line break inside": ("{{ m.content + '<|im_end|>\n' }}", "", "«No.<|im_end|>\n»", None),
    "nothing behind": ("{{ m.content + '<|im_end|>' }}", "", "«No.<|im_end|>»", None),
    "white space trimmed": ("\n  {{- m.content | trim + '<|im_end|>' -}}\n  ", "", "«No.<|im_end|>»", None),
    "line breaks that Jinja takes": ("\n{{ m.content }}<|im_end|>\n", "", "«No.<|im_end|>»", None),
    "two blocks": ("{{ '<think>' }}{%- endgeneration %}{{ '|' }}{%- generation %}{{ m.content + '<|im_end|>\n' }}", "",
                   "«<think>»|«No.<|im_end|>\n»", None),
    "two blocks, the end between them": (
        "{{ m.content }}{%- endgeneration %}{{ '<|im_end|>' }}{%- generation %}", "{{ '\n' }}",
        "«No.»<|im_end|>\n", None),
    "two blocks without an end": (
        "{{ m.content }}{%- endgeneration %}{{ '|' }}{%- generation %}{{ m.role }}", "{{ '\n' }}",
        "«No.»|«assistant»\n", None),
    "two blocks that touch": ("{{ m.content }}{%- endgeneration %}{%- generation %}{{ '<|im_end|>\n' }}", "",
                              "«No.»«<|im_end|>\n»", None),
    "EOS behind the last": ("{{ m.content + '<|im_end|>\n' }}", EOS_OF_LAST, "«No.<|im_end|>\n»</s>",
                            "«No.<|im_end|>\n»"),
    "EOS in a block behind the last": (
        "{{ m.content + '<|im_end|>\n' }}", f"{{%- generation %}}{EOS_OF_LAST}{{%- endgeneration %}}",
        "«No.<|im_end|>\n»«</s>»", "«No.<|im_end|>\n»"),
    "no end at all": ("{{ m.content + '\n' }}", "", "«No.\n»+EOS", "«No.\n»"),
}  # fmt: skip


def convention(name: str) -> ChatTemplate:
    inside, behind, *_ = CONVENTIONS[name]
    text = (
        "{%- for m in messages %}{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
        f"{{%- generation %}}{inside}{{%- endgeneration %}}{behind}{{%- else %}}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
    )
    return ChatTemplate(text, name, VARIABLES)


@pytest.mark.parametrize("name", CONVENTIONS)
def test_a_turn_is_trained_through_its_end_token_and_gets_no_second_one(name):
    *_, last, first = CONVENTIONS[name]
    assert masked(convention(name), ASKED) == [YES + last]
    assert masked(convention(name), [*ASKED, *ASKED]) == [YES + (first or last) + YES + last]


@pytest.mark.parametrize("name", ["end inside", "end outside", "end and line break inside"])
def test_an_empty_answer_is_trained_by_its_end_token(name):
    chat = [ASKED[0], {"role": "assistant", "content": ""}, *ASKED]
    (text,) = masked(convention(name), chat)
    assert text.count("«<|im_end|>") == 1 and "+EOS" not in text


def test_a_prompt_that_is_rewritten_and_a_generation_block_that_some_turns_lack_are_refused():
    counts = ChatTemplate("{{ messages | length }}" + CHATML, "counts")
    with pytest.raises(RenderError, match="writes the conversation before message 2 differently once"):
        masked(counts, "one")
    blocks, chat = convention("end outside").source, [*ASKED, ASKED[0], {"role": "assistant", "content": "Nay."}]
    lacking = blocks.replace("m.role == 'assistant'", "m.role == 'assistant' and 'y' not in m.content")
    with pytest.raises(RenderError, match="message 4 has no generation block"):
        masked(ChatTemplate(lacking, "some", VARIABLES), chat)


def test_tokens_at_the_borders_are_trained_as_transformers_masks_them():
    """Byte for byte: a line break joined over the border of header and content, characters of several tokens."""
    tokenizer, golden = chat_tokenizer(), json.loads(GOLDEN.read_text("utf-8"))
    for chat in ("one", "system", "long", "open", "spelled"):
        (sample,) = samples(template("chatml_generation"), Chat(*CHATS[chat]), TrainOn(), SPECIAL)
        case = golden[f"chatml_generation/{chat}"]
        encoding = tokenizer.encode(sample.text, add_special_tokens=False)
        assert encoding.ids == case["ids"]
        ours, end = trained_tokens(encoding, sample.spans).tolist(), tokenizer.token_to_id("<|im_end|>")
        spoken = [bool(theirs) for theirs in case["generated"]]
        ends = [at for at in range(1, len(spoken)) if spoken[at - 1] and not spoken[at]]
        assert [encoding.ids[at] for at in ends] == [end] * len(ends) and len(ends) >= 1
        assert ours == [here or at in ends for at, here in enumerate(spoken)]


@pytest.mark.judge
@pytest.mark.parametrize("name", CONVENTIONS)
def test_blocks_of_every_convention_are_masked_as_transformers_does(name, tmp_path):
    """But for an end token outside the block, which is trained here."""
    from golden.make_chats import judge

    used, chat = convention(name), [*ASKED, *ASKED]
    wanted = {"chat_template": used.source, "return_dict": True, "return_assistant_tokens_mask": True}
    theirs = judge(tmp_path).apply_chat_template(chat, **wanted)
    (sample,) = samples(used, Chat(chat), TrainOn(), SPECIAL)
    encoding = chat_tokenizer().encode(sample.text, add_special_tokens=False)
    assert encoding.ids == list(theirs["input_ids"])
    trained = zip(trained_tokens(encoding, sample.spans), theirs["assistant_masks"], encoding.tokens, strict=True)
    differ = [(bool(ours), token) for ours, spoken, token in trained if ours != spoken]
    assert differ == [(True, "<|im_end|>")] * 2 * (name == "end outside")


@pytest.mark.parametrize("strip", [False, True])
def test_the_tokens_of_a_span_are_those_that_hold_its_characters(strip):
    """Against a search over all offsets, on every pair of borders; with and without white space in tokens."""
    tokenizer = chat_tokenizer()
    if strip:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), tokenizer.pre_tokenizer])
    text = "the\n\nrésumé \U0001f600.\n<|im_end|>in the"
    encoding = tokenizer.encode(text, add_special_tokens=False)
    for start in range(len(text)):
        for stop in range(start + 1, len(text) + 1):
            expected = [a < stop and b > start for a, b in encoding.offsets]
            assert trained_tokens(encoding, [(start, stop)]).tolist() == expected, (start, stop)


@pytest.mark.parametrize(
    ("name", "lost"), [("chatml", "tools and tool_calls"), ("llama3", ""), ("qwen3", ""), ("whole", "tools")]
)
def test_tools_and_calls_that_a_template_does_not_write_are_named(name, lost):
    whole = ChatTemplate("{% for m in messages %}{{ m | tojson }}{% endfor %}", "whole")
    used = whole if name == "whole" else template(name)
    called = [{**message, "content": message.get("content", "")} for message in CHATS["tools"][0]]
    assert unwritten(used, Chat(called, CHATS["tools"][1])) == lost
    assert unwritten(used, Chat(called, [])) == lost.removeprefix("tools").removeprefix(" and ")
    assert unwritten(used, Chat([{"role": "assistant", "content": "Nothing.", "tool_calls": []}])) == ""


def test_a_turn_that_is_left_out_of_all_and_differs_there_is_refused():
    chat = Chat(REASONED, None, frozenset({1}))
    with pytest.raises(RenderError, match="message 2, which is not to be trained, differently once others follow"):
        samples(template("qwen3"), chat, TrainOn.parse("all"), SPECIAL)
    assert len(samples(template("qwen3"), chat, TrainOn(), SPECIAL)) == 1


def test_a_long_chat_is_rendered_as_often_as_it_must(monkeypatch):
    messages = [{"role": role, "content": "word"} for role in ("user", "assistant") * 20]
    rendered, used = [], template("chatml")
    real = used.render
    monkeypatch.setattr(used, "render", lambda *args, **more: rendered.append(len(args[0])) or real(*args, **more))
    assert len(samples(used, Chat(messages), TrainOn(), ("<|im_end|>",))[0].spans) == 20
    assert len(rendered) == 40
