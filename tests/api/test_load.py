"""`llmq.load`: logits, log p, hidden states and weights of a model."""

import json
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from dlpack import Shared
from tiny_engines import tiny
from tiny_runs import folder, on_weights, write_weights

import llmq
from llmq.engine.reading import ModelReader
from llmq.errors import UsageError
from llmq.model.optimizer import Hyperparameters
from llmq.model.parameters import padded_vocab
from llmq.plan.memory import Memory
from llmq.plan.precision import Precision
from llmq.plan.reading import plan_reading
from llmq.plan.spec import Spec
from llmq.tensor import stored_bytes

T, V = 24, 97


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    write_weights(folder(place / "source", max_position=512), place / "base")
    return place / "base"


@pytest.fixture(scope="module")
def model(model_folder):
    return llmq.load(model_folder, device="cpu", batch_size=2, seq_len=T)


def tokens(*shape):
    return np.random.default_rng(sum(shape)).integers(0, V, shape)


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def test_scores_are_those_of_the_logits(model):
    ids = tokens(5, 20)
    logits, scores = model.logits(ids), model.score(ids)
    assert logits.shape == (5, 20, V) and logits.dtype == scores.dtype == np.float32 and scores.shape == (5, 20)
    wanted = np.take_along_axis(log_softmax(logits)[:, :-1], ids[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(scores[:, :-1], wanted, atol=2e-6)
    assert not scores[:, -1].any()


def test_a_row_is_the_same_alone_shorter_and_in_any_batch(model):
    ids = tokens(3, 20)
    whole = model.logits(ids), model.score(ids), model.hidden(ids)
    for index, row in enumerate(ids):
        alone = model.logits(row), model.score(row), model.hidden(row)
        assert all(np.array_equal(one, many[index]) for one, many in zip(alone, whole, strict=True))
    np.testing.assert_allclose(model.hidden(ids[:, :7]), whole[2][:, :7], atol=1e-6)


@pytest.mark.parametrize("short_of_memory", [False, True])
def test_short_rows_are_padded_to_few_tokens(model_folder, monkeypatch, short_of_memory):
    """By a plan of a quarter of the tokens, and one of a quarter of these, beside the weights that are there."""
    model = llmq.load(model_folder, device="cpu", batch_size=2, seq_len=510)
    plain = llmq.load(model_folder, device="cpu", batch_size=2, seq_len=40)
    read = []
    run = ModelReader.run
    monkeypatch.setattr(ModelReader, "run", lambda self, name: (read.append(self.plan.spec.seq_len), run(self, name)))
    monkeypatch.setattr("llmq.generation.weights.ModelWeights.values", None)
    if short_of_memory:
        monkeypatch.setattr("llmq.hardware.device.memory_bytes", lambda device: (2**30, 2**10))
    for name in ("logits", "score", "hidden"):
        for length in (3, 32, 33, 40):
            ids = tokens(3, length)
            np.testing.assert_allclose(getattr(model, name)(ids), getattr(plain, name)(ids), atol=2e-6)
    assert {*read} == ({510, 40} if short_of_memory else {32, 128, 40})
    model.score(tokens(1, 128)), model.score(tokens(1, 129))
    assert read[-2:] == [510, 510] if short_of_memory else [128, 510]


def test_targets_may_be_others_or_ignored(model):
    ids, goals = tokens(2, 9), tokens(2, 9)
    goals[0, 3:] = -100
    scores, every = model.score(ids, goals), log_softmax(model.logits(ids))
    wanted = np.take_along_axis(every, np.maximum(goals, 0)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(scores, np.where(goals == -100, 0, wanted), atol=2e-6)


def test_logits_are_the_head_of_hidden_states(model, model_folder):
    ids, weights = tokens(2, 6), dict(model.parameters())
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])[:V]
    np.testing.assert_allclose(model.hidden(ids) @ head.T, model.logits(ids), atol=1e-5)
    config = json.loads((model_folder / "config.json").read_text())
    assert weights["model.layers.0.mlp.up_proj.weight"].shape == (config["intermediate_size"], config["hidden_size"])


def test_a_view_is_read_only_and_is_overwritten(model):
    a, b = tokens(2, T), tokens(2, T) + 0
    b[:, 0] = (a[:, 0] + 1) % V
    for read in (model.hidden, model.score):
        view, copy = read(a, copy=False), read(a)
        assert np.array_equal(view, copy)
        read(b)
        assert not np.array_equal(view, copy)
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 0
    with pytest.raises(UsageError, match="copy=False is for one batch, and these are 3 rows in batches of 2"):
        model.hidden(tokens(3, 4), copy=False)


@pytest.mark.parametrize("kind", [list, Shared, lambda ids: ids.astype(np.uint8), lambda ids: ids[::-1][::-1]])
def test_tokens_may_be_what_has_them(model, kind):
    ids = tokens(7)
    assert np.array_equal(model.score(kind(ids)), model.score(ids))


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([[1, 2], [3]], r"tokens are no array .*: give rows of one length, or one at a time"),
        ((n for n in [1, 2]), "tokens are a generator: give whole numbers"),
        ([1.5], r"tokens are \(1,\) of float64"),
        ([True], r"tokens are \(1,\) of bool"),
        ("12", "tokens are"),
        ([], "tokens are"),
        (np.zeros((0, 3), int), r"tokens are \(0, 3\)"),
        ([[[1]]], r"tokens are \(1, 1, 1\)"),
        ([0] * (T + 1), "tokens have 25 in a row, and the model was loaded for 24: load it with seq_len=25"),
        ([1, V], "tokens: number 1 is 97, and the vocabulary has ids 0 to 96"),
        ([[1], [-100]], "tokens: number 0 of row 1 is -100"),
        (np.array([[1, 2], [3, 2**32 + 1]]), "tokens: number 1 of row 1 is 4294967297"),
    ],
)
def test_what_is_no_tokens_is_refused(model, ids, match):
    with pytest.raises(UsageError, match=match):
        model.score(ids)


def test_scores_hold_a_part_of_the_logits():
    """Of 16,384 tokens those of 2,048 at a time; those that `logits` leaves are of one row."""
    config, sizes = tiny(num_layers=1, vocab_size=32_000), (8, 2048)
    plan = plan_reading(Spec(config, Precision(), Memory(), Hyperparameters(), *sizes))
    a_part = 4 * 2048 * padded_vocab(config)
    arena = plan.programs["score"].arena_bytes["device"]
    assert a_part < arena < 1.1 * a_part
    assert max(stored_bytes(ref) for ref in plan.persistent.values()) == a_part


def test_it_is_loaded_and_read_in_a_thread(model_folder, model):
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(llmq.load, model_folder, device="cpu", batch_size=2, seq_len=T).result()
        assert np.array_equal(pool.submit(other.score, tokens(5, 9)).result(), model.score(tokens(5, 9)))


def test_other_settings_are_refused(model_folder):
    for wrong in ({"dtype": "fp8"}, {"base_dtype": "nf5"}, {"device": "tpu"}, {"batch_size": 0}, {"seq_len": 0}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            llmq.load(model_folder, **wrong)
    with pytest.raises(UsageError, match=r"targets are \(1, 2\), and tokens \(1, 3\)"):
        llmq.load(model_folder, device="cpu", seq_len=8).score([1, 2, 3], [1, 2])


def test_the_loss_of_rows_is_that_of_an_evaluation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = llmq.train(**on_weights(tmp_path))
    ids = np.fromfile("eval.bin", "<u2", offset=1024)[: 5 * 16 + 1].astype(int)
    rows = [ids[start : start + 17] for start in range(0, 80, 16)]
    model = llmq.load(result.model_path, device="cpu", seq_len=17)
    assert model.loss(rows) == pytest.approx(result.eval_loss, abs=1e-5)
    masked = {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, -100]}
    assert model.loss([masked]) == pytest.approx(-float(model.score([1, 2, 3, 4])[1]), abs=1e-6)
    assert np.isnan(model.loss([[5]]))
    apart = [[1, 2, 3], [4], [5, 6]]  # three trained tokens
    assert model.loss(apart) == pytest.approx(
        sum((len(row) - 1) * model.loss([row]) for row in (apart[0], apart[2])) / 3
    )


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([], "rows are empty: give at least one"),
        (([1, 2] for _ in range(2)), "rows are a generator: give a list"),
        ({"input_ids": [[1, 2]]}, "rows are a dict: give a list"),
        ([[1, 2], []], r"input_ids of row 1 are \(0,\)"),
        ([[1, 2], [[1, 2]]], r"input_ids of row 1 are \(1, 2\): give \(T,\)"),
        ([[1, 2], [1, 2], [1, V]], "input_ids of row 2: number 1 is 97"),
        ([[1] * (T + 1)], "input_ids of row 0 have 25 in a row"),
        ([{"text": "a"}], "row 0 has text: give input_ids"),
        ([{"input_ids": [1, 2], "labels": [1]}], "row 0 has 1 labels of 2 tokens"),
        ([{"input_ids": [1, 2], "labels": [1, -1]}], "labels of row 0: number 1 is -1"),
    ],
)
def test_rows_that_are_none_are_refused(model, rows, match):
    with pytest.raises(UsageError, match=match):
        model.loss(rows)


@pytest.mark.parametrize("how", [{"lora_rank": 4}, {"prompt_tuning": 4}, {"lora_rank": 4, "base_dtype": "nf4"}])
def test_an_adapter_goes_with_it(tmp_path, monkeypatch, how):
    """On the base that it was trained on, of which a quantized one has other values."""
    monkeypatch.chdir(tmp_path)
    result = llmq.train(**{**on_weights(tmp_path), **how, "packing": "windows"})
    with warnings.catch_warnings(record=True):
        plain = llmq.load("base", device="cpu", seq_len=16)
        model = llmq.load("base", adapter=result.model_path, device="cpu", seq_len=16)
    ids = tokens(2, 10)
    assert model.logits(ids).shape == plain.logits(ids).shape and not np.allclose(model.logits(ids), plain.logits(ids))
    wanted = np.take_along_axis(log_softmax(model.logits(ids))[:, :-1], ids[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(model.score(ids)[:, :-1], wanted, atol=2e-6)
    monkeypatch.setattr("llmq.api.load.SHORTEST", 2)
    with warnings.catch_warnings(record=True):
        long = llmq.load("base", adapter=result.model_path, device="cpu", seq_len=60)
    np.testing.assert_allclose(long.score(ids), model.score(ids), atol=2e-6)
    assert [*long._readers] == [60, 15]
    width = 16 - how.get("prompt_tuning", 0)  # of the windows of text beside virtual tokens
    file = np.fromfile("eval.bin", "<u2", offset=1024)[: 5 * 16 + 1].astype(int)
    windows = [file[start : start + width + 1] for start in range(0, 80, width)]
    assert long.loss(windows) == pytest.approx(result.eval_loss, abs=1e-5)
    about = {"max_tokens": 4, "ignore_end": True}
    with warnings.catch_warnings(record=True):
        other = llmq.generate("base", [1, 2], adapter=result.model_path, **about)
    mine = model.generate([1, 2], **about)
    assert mine[0].logprobs == other[0].logprobs


def test_it_writes_as_generate_does_with_the_weights_that_it_has(model, model_folder, monkeypatch):
    prompts, about = [[1, 2, 3], [4, 5]], {"max_tokens": 5, "ignore_end": True}
    wanted = llmq.generate(model_folder, prompts, device="cpu", **about)
    scores = model.score([1, 2, 3, 4])
    monkeypatch.setattr("llmq.generation.weights.ModelWeights.values", None)
    found = model.generate(prompts, **about)
    assert [(one.tokens, one.logprobs) for one in found] == [(one.tokens, one.logprobs) for one in wanted]
    pieces = model.generate(prompts[0], stream=True, **about)
    written = [next(pieces)]
    assert np.array_equal(model.score([1, 2, 3, 4]), scores)  # while it writes
    assert sum((piece.tokens for piece in [*written, *pieces]), ()) == wanted[0].tokens
    with pytest.raises(UsageError, match="generate was given device, dtype, which the model was loaded with"):
        model.generate(prompts, device="cpu", dtype="bf16")
    with pytest.raises(UsageError, match="no setting max_token "):
        model.generate(prompts, max_token=5)


def test_hits_are_the_targets_that_argmax_gives(model):
    ids, goals = tokens(2, 9), tokens(2, 9)
    best = model.logits(ids).argmax(axis=-1)
    goals[:, ::2] = best[:, ::2]
    goals[0, 4:] = -100
    score, hits = model.score_and_hits(ids, goals)
    assert np.array_equal(score, model.score(ids, goals)) and np.array_equal(hits, goals == best) and hits.sum() > 5
