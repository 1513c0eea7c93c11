"""`llmq-eval --tasks` against the harness's own `hf` backend: each answer to each request, and the scores of tasks."""

import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="the judge is lm-evaluation-harness")
pytest.importorskip("peft", reason="the judges are torch, transformers and PEFT")

import peft
import torch
from golden import families, transformers_judge
from golden.peft_judge import changed
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from small_tokenizers import EOS, byte_level, save
from tokenizers import processors

import llmq
from llmq.cli import shell
from llmq.cli.eval import command
from llmq.evaluation.harness import HarnessModel

pytestmark = pytest.mark.judge
MOST = 40  # positions: less than some requests have
TEMPLATE = "<bos>{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"
WORDS = [
    "king",
    "ships",
    "isn't",
    "ROMEO",
    "What",
    "thou",
    "Aye",
    "\u00e9clat\u00e9s",
    "10",
    "say'st",
    "of",
    "--",
    "it?",
]
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}} ",  # whose space goes to the choice
        "doc_to_target": "{{label}}",
        "doc_to_choice": "{{choices}}",
        "target_delimiter": "",
        "metric_list": [{"metric": name, "aggregation": "mean"} for name in ("acc", "acc_norm")],
    },
    "letters": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{label}}",
        "doc_to_choice": ["a", "b", "c", "?"],
        "num_fewshot": 2,
        "metric_list": [{"metric": "acc", "aggregation": "mean"}],
    },
    "unasked": {  # without a context
        "output_type": "multiple_choice",
        "doc_to_text": "",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "{{choices}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean"}],
    },
    "whole": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["\n", "s "], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def words(rng, count):
    return " ".join(rng.choice(WORDS, count))


@pytest.fixture(autouse=True)
def no_list_of_packages(monkeypatch):
    """What the harness adds of the environment takes it seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """YAML files of tasks on local rows, by name; some questions have more tokens than the model has positions."""
    folder, rng, rows = tmp_path_factory.mktemp("tasks"), np.random.default_rng(0), []
    for number in range(10):
        choices = [words(rng, count) for count in (1, 2, 3)]
        about = {"question": words(rng, 2 + 3 * number), "choices": choices, "label": number % 3}
        rows.append({**about, "text": words(rng, 1 + 9 * number)})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"train": str(folder / "rows.jsonl"), "test": str(folder / "rows.jsonl")}
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")}}
    splits = {"training_split": "train", "test_split": "test", "fewshot_split": "train"}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **splits, **task}))
    return {name: str(folder / f"{name}.yaml") for name in TASKS}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model whose tokenizer has no BOS, one whose tokenizer puts it before a text, and an adapter of that."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("plain", "begun"):
        tokenizer = byte_level()
        tokenizer.add_special_tokens(["<bos>"])
        bos = ("<bos>", tokenizer.token_to_id("<bos>"))
        begun = processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
        tokenizer.post_processor = begun if name == "begun" else processors.ByteLevel(trim_offsets=False)
        config = {**families.FAMILIES["llama3"], "vocab_size": tokenizer.get_vocab_size()}
        config |= {"max_position_embeddings": MOST, "eos_token_id": tokenizer.token_to_id(EOS), "bos_token_id": None}
        base = transformers_judge.model_of(config, families.weights(config), "float32")
        with torch.no_grad():
            for parameter in base.parameters():  # what it writes depends on what it reads
                parameter.mul_(1.0 if parameter.ndim == 1 else 3.0)
        base.save_pretrained(folder / name)
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "chat_template": TEMPLATE}
        save(tokenizer, folder / name, about | ({"bos_token": "<bos>"} if name == "begun" else {}))
        generation = json.loads((folder / name / "generation_config.json").read_text())
        (folder / name / "generation_config.json").write_text(json.dumps({**generation, "repetition_penalty": 1.2}))
    lora = peft.LoraConfig(r=4, lora_alpha=10, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, lora)
    changed(adapted, {"lora_": lambda p: p.add_(torch.randn_like(p) * 0.1)})
    adapted.save_pretrained(folder / "adapter")
    return folder


def run(model, tasks, **about):
    """Scores, and the answers to all requests in order."""
    manager = TaskManager(include_defaults=False)
    found = simple_evaluate(model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **about)
    each = {name: [one["resps"] for one in rows] for name, rows in found["samples"].items()}
    return found["results"], each


def ours(folder, adapter=None, **about):
    def load(seq_len):
        return llmq.load(folder, adapter, device="cpu", dtype="fp32", batch_size=3, seq_len=seq_len)

    return HarnessModel(load, folder, max_length=MOST, batch_size=3, **about)


def flat(value):
    return [one for part in value for one in flat(part)] if isinstance(value, list) else [value]


def assert_equal(found, right):
    """Log p within 1e-4, all else exactly."""
    for name, answers in right[1].items():
        mine, theirs = flat(found[1][name]), flat(answers)
        assert len(mine) == len(theirs) > 0
        if isinstance(theirs[0], str):
            assert mine == theirs, name
        else:
            pairs = [np.array([one if isinstance(one, tuple) else (one, 0) for one in side]) for side in (mine, theirs)]
            assert np.abs(pairs[0] - pairs[1]).max() < 1e-4, name
    for name, scores in right[0].items():
        numbers = {key: value for key, value in scores.items() if isinstance(value, float)}
        assert numbers and {key: found[0][name][key] for key in numbers} == pytest.approx(numbers, rel=1e-4), name


@pytest.mark.parametrize("case", ["plain", "begun", "adapter", "chats"])
def test_answers_are_those_of_the_hf_backend(case, tasks, models):
    folder = models / ("plain" if case == "plain" else "begun")
    adapter = models / "adapter" if case == "adapter" else None
    about = {"apply_chat_template": case == "chats"}
    with_peft = {} if adapter is None else {"peft": str(adapter)}
    judge = HFLM(str(folder), device="cpu", dtype="float32", batch_size=4, **with_peft)
    right = run(judge, tasks.values(), **about)
    found = run(ours(folder, adapter), tasks.values(), **about)
    assert_equal(found, right)
    assert any(text for text in flat(right[1]["written"]))


def test_a_message_that_the_model_continues(models):
    chat = [{"role": "user", "content": "Aye?"}, {"role": "assistant", "content": " It's "}]
    judge = HFLM(str(models / "begun"), device="cpu", dtype="float32")
    for turns, is_asked in ((chat[:1], True), (chat, False)):
        text = ours(models / "begun").apply_chat_template(turns, is_asked)
        assert text == judge.apply_chat_template(turns, is_asked)


WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("torch", "transformers", "peft", "accelerate")
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path = [Finder if one is PathFinder else one for one in sys.meta_path]
from llmq.cli import shell
from llmq.cli.eval import command
sys.exit(shell.run(command))
"""


def test_the_command_prints_scores(tasks, models, capsys):
    arguments = [f"--model={models / 'plain'}", "--device=cpu", "--limit=3"]
    assert shell.run(command, [*arguments, f"--tasks={tasks['whole']}"]) == 0
    assert "|whole|" in capsys.readouterr().out.replace(" ", "")
    assert shell.run(command, [*arguments, "--tasks=absent.yaml"]) == 2
    assert "--tasks absent.yaml: no such file" in capsys.readouterr().err


def test_the_command_needs_no_pytorch(tasks, models):
    given = ",".join(tasks[name] for name in ("choices", "letters", "written"))
    arguments = [
        f"--model={models / 'begun'}",
        f"--adapter={models / 'adapter'}",
        "--device=cpu",
        "--limit=3",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments, f"--tasks={given}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert 0 <= results["choices"]["acc,none"] <= 1 and "exact_match,none" in results["written"]
