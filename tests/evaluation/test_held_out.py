"""`llmq-eval --data`: metrics against hand computations, and what it refuses."""

import json
import math

import numpy as np
import pytest
from golden import families
from safetensors.numpy import save_file
from small_tokenizers import EOS, byte_level, save

import llmq
from llmq.cli import shell
from llmq.cli.eval import command
from llmq.evaluation import held_out
from llmq.generation import answers

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"
ROWS = [
    {"prompt": "It's the king's 10 ships", "completion": " \u00e9clat\u00e9s! Nothing."},
    {"prompt": "Aye", "completion": " -- 3 of \u4e2d\U0001f600"},
    {"prompt": "ROMEO:\n", "completion": "What say'st thou? " * 3},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny model in f32, its tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_level()
    tokenizer.post_processor = None
    save(tokenizer, folder, {"eos_token": EOS, "chat_template": TEMPLATE})
    config = {**families.FAMILIES["llama3"], "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 256}
    config |= {"hidden_size": 64, "intermediate_size": 96}  # what a GPU takes
    config |= {"eos_token_id": tokenizer.token_to_id(EOS), "bos_token_id": None, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(families.weights(config), folder / "model.safetensors")
    return folder


@pytest.fixture
def measured(model, tmp_path, monkeypatch, capsys):
    """What the command measures on rows, as JSON, or its exit code and message."""
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "cache"))

    def call(rows, *arguments):
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        code = shell.run(
            command, [f"--model={model}", f"--data={data}", "--device=cpu", "--batch-size=2", "--json", *arguments]
        )
        out, err = capsys.readouterr()
        return json.loads(out) if code == 0 else (code, err)

    return call


def by_hand(model, documents):
    """Nats, number and hits of the trained tokens of documents, each ids with where its trained ones begin."""
    reader, nats, count, hits = llmq.load(model, device="cpu", seq_len=256), 0.0, 0, 0
    for ids, start in documents:
        logits = reader.logits(ids[:-1]).astype(np.float64)
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        for at in range(max(start, 1), len(ids)):
            nats -= log_p[at - 1, ids[at]]
            hits += log_p[at - 1].argmax() == ids[at]
            count += 1
    return nats, count, hits


def encoded(*texts):
    """The ids of texts that are tokenized one by one, and EOS."""
    tokenizer = byte_level()
    ids = [one for text in texts for one in tokenizer.encode(text, add_special_tokens=False).ids]
    return [*ids, tokenizer.token_to_id(EOS)]


def test_metrics_of_answers_are_those_of_a_hand_computation(measured, model):
    documents = [(encoded(row["prompt"], row["completion"]), len(encoded(row["prompt"])) - 1) for row in ROWS]
    nats, count, hits = by_hand(model, documents)
    size = sum(len(row["completion"].encode()) for row in ROWS)
    found = measured(ROWS)
    assert (found["rows"], found["trained_tokens"], found["bytes"]) == (3, count, size)
    assert found["loss"] == pytest.approx(nats / count, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-6)
    assert found["accuracy"] == hits / count
    assert {"loss", "accuracy"} & measured(ROWS, "--metrics=loss", "--limit=2").keys() == {"loss"}


def test_text_is_all_but_its_first_token(measured, model):
    """Also in pieces, whose first tokens are predicted from the one before alone."""
    ids = encoded(text := "What say'st thou?\n  \u00e9clat\u00e9s")
    first = byte_level().decode(ids[:1])
    nats, count, _ = by_hand(model, [(ids, 0)])
    found = measured([{"text": text}])
    assert found["bytes"] == len(text.encode()) - len(first.encode()) and found["trained_tokens"] == count
    assert found["loss"] == pytest.approx(nats / count, rel=1e-6)
    nats, _, _ = by_hand(model, [(ids[at : at + 6], 0) for at in range(0, len(ids) - 1, 5)])
    pieces = measured([{"text": text}], "--seq-len=5")
    assert pieces["loss"] == pytest.approx(nats / count, rel=1e-6) and pieces["bytes"] == found["bytes"]


def test_a_character_counts_where_it_ends():
    ids, decode = np.array(encoded("a\u4e2db")), byte_level().decode
    size = len(ids)
    assert size > 5  # the character is three tokens
    halves = [np.arange(size) < 3, np.arange(size) >= 3]
    assert [held_out.num_bytes(ids, mask, decode) for mask in halves] == [0, 4]
    assert held_out.num_bytes(ids, np.ones(size, bool), decode) == 4  # without the first


def test_answers_are_compared_with_those_there(measured, model, tmp_path):
    """One reference is the model's own answer; each question of a chat is what comes before its last answer."""
    own = llmq.generate(model, ROWS[0]["prompt"], max_tokens=12, device="cpu")[0].text
    rows = [{**ROWS[0], "completion": f" {own.strip()}\n"}, *ROWS[1:]]
    out = tmp_path / "answers.jsonl"
    found = measured(rows, "--metrics=exact_match", "--max-tokens=12", f"--answers={out}")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [row["prompt"] for row in rows]
    assert [line["reference"] for line in lines] == [row["completion"] for row in rows]
    assert lines[0]["answer"] == own and found["exact_match"] == 1 / 3 and found["answers"] == 3
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)]
    measured([{"messages": turns}], "--metrics=exact_match", "--max-tokens=2", f"--answers={out}")
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["reference"] == "d" and line["prompt"] == "<user>a\n<assistant>b\n<user>c\n<assistant>"


@pytest.mark.judge  # NLTK, which rouge-score imports, takes seconds
def test_scores_of_text():
    pytest.importorskip("sacrebleu", reason="the extra eval is not installed")
    pytest.importorskip("rouge_score", reason="the extra eval is not installed")
    same = ["the cat sat on the mat"]
    found = answers.answer_scores(answers.OF_ANSWERS, same, same)
    assert found == pytest.approx({"exact_match": 1, "bleu": 100, "rouge1": 1, "rouge2": 1, "rougeL": 1})
    half = answers.answer_scores(["rouge"], ["the cat"], same)  # precision 1, recall 2/6
    assert half["rouge1"] == pytest.approx(0.5)
    of_four = answers.answer_scores(["bleu"], ["the cat sat on a rug"], same)  # 4/6, 3/5, 2/4, 1/3
    assert of_four["bleu"] == pytest.approx(100 * (4 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)


@pytest.mark.parametrize(
    ("rows", "arguments", "match"),
    [
        (ROWS, ["--metrics=loss,lost"], "--metrics lost: known are loss, perplexity"),
        (ROWS, ["--answers=a.jsonl"], "no metric is of answers: add --metrics exact_match"),
        ([{"text": "a b c"}], ["--metrics=exact_match"], "no row has a prompt and an answer"),
        ([{"prompt": 1, "completion": "a"}], [], "prompt is a number, not text"),
        (ROWS, ["--metrics=bleu"], "bleu need packages that are not installed: pip install 'llmq-train"),
    ],
)
def test_what_cannot_be_measured_is_refused(measured, monkeypatch, rows, arguments, match):
    monkeypatch.setattr(answers, "find_spec", lambda name: None)
    code, said = measured(rows, *arguments)
    assert code in (2, 3) and match in said


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-4), ("bf16", 0.03)])
def test_a_gpu_measures_as_the_cpu(measured, dtype, bound):
    asked = ("--metrics=loss,bits_per_byte,accuracy,exact_match", "--max-tokens=6")
    right, found = measured(ROWS, *asked), measured(ROWS, *asked, "--device=cuda", f"--dtype={dtype}")
    assert found["loss"] == pytest.approx(right["loss"], rel=bound)
    assert found["bits_per_byte"] == pytest.approx(right["bits_per_byte"], rel=bound)
    assert abs(found["accuracy"] - right["accuracy"]) <= (0 if dtype == "fp32" else 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-4), ("bf16", 0.3)])
def test_a_gpu_answers_requests_as_the_cpu(model, dtype, bound):
    """Of choices that share what is read, of others, of whole texts, and written."""
    pytest.importorskip("lm_eval", reason="the extra harness is not installed")
    from lm_eval.api.instance import Instance

    from llmq.evaluation.harness import HarnessModel

    pairs = [(row["prompt"], choice) for row in ROWS for choice in ("a", "b", " ships", row["completion"])]
    asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    whole = [Instance("loglikelihood_rolling", {}, (row["completion"] * 20,), 0) for row in ROWS]
    until = [Instance("generate_until", {}, (row["prompt"], {"until": ["s"], "max_gen_toks": 6}), 0) for row in ROWS]
    found = {}
    for device, held in (("cpu", "fp32"), ("cuda", dtype)):

        def load(seq_len, device=device, held=held):
            return llmq.load(model, device=device, dtype=held, batch_size=2, seq_len=seq_len)

        answering = HarnessModel(load, model, max_length=128, batch_size=2)
        scores = [score for score, _ in answering.loglikelihood(asked)]
        texts = answering.generate_until(until)
        found[device] = [*scores, *answering.loglikelihood_rolling(whole)], texts
    np.testing.assert_allclose(found["cuda"][0], found["cpu"][0], rtol=bound / 10, atol=bound)
    assert dtype != "fp32" or found["cuda"][1] == found["cpu"][1]
