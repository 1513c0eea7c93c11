"""Makes chats.json: what transformers makes of the conversations of chat_cases.py. Run it with transformers:

PYTHONPATH=.:tests python tests/golden/make_chats.py
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import transformers
from chat_cases import BOS, CHATS, EOS, GOLDEN, PAIRS, chat_tokenizer, source


def judge(folder: Path) -> Any:
    """The tokenizer of chat_cases.py as transformers opens it."""
    path = folder / "tokenizer.json"
    chat_tokenizer().save(str(path))
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token=BOS, eos_token=EOS)


def judged(tokenizer: Any, template: str, chat: str) -> dict[str, Any]:
    """A conversation's text, its ids, its prompt's text, and with generation blocks which tokens they cover."""
    messages, tools = CHATS[chat]
    given = {"tools": tools, "chat_template": source(template)}
    prompt = {"add_generation_prompt": True, "tokenize": False}
    whole = tokenizer.apply_chat_template(
        messages, **given, return_dict=True, return_assistant_tokens_mask="generation" in template
    )
    return {
        "text": tokenizer.apply_chat_template(messages, **given, tokenize=False),
        "prompt": tokenizer.apply_chat_template(messages[:-1], **given, **prompt),
        "ids": list(whole["input_ids"]),
        **({"generated": list(whole["assistant_masks"])} if "assistant_masks" in whole else {}),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = judge(Path(folder))
        golden = {f"{template}/{chat}": judged(tokenizer, template, chat) for template, chat in PAIRS}
    lines = [f" {json.dumps(name)}: {json.dumps(case, separators=(',', ':'))}" for name, case in golden.items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{GOLDEN}: {len(golden)} conversations, transformers {transformers.__version__}")
