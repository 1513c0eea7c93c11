"""The engine against transformers and torch, live: fresh random models of every family, folders both ways.

The golden files fix one small model per family; here shapes, rotary constants, windows and tying are drawn too.
"""

import numpy as np
import pytest

from llmq.data.batches.batch import Batch

pytest.importorskip("torch", reason="the judges are torch and transformers")
pytest.importorskip("transformers", reason="the judges are torch and transformers")

import torch
import transformers
from golden import families, transformers_judge
from golden.engines import BF16, FP32, FP64, cosine, engine_of, gradients, parameters, relative_errors, values_of
from ops.build import output, tensor
from tiny_engines import next_logits

from llmq.backends.host import HostBackend
from llmq.blocks.cached import Sampling
from llmq.engine.engine import Engine
from llmq.engine.generate import generate, open_generator
from llmq.files.huggingface import Export, checked_tensors, read_rows
from llmq.model.config import from_folder, read_config
from llmq.model.optimizer import Hyperparameters
from llmq.ops.reference import OPS
from llmq.ops.reference.generation import threshold
from llmq.optimizers.adamw import AdamW
from llmq.plan.decoding import Decoding
from llmq.plan.memory import Memory
from llmq.plan.plan import make_plan
from llmq.plan.spec import Spec

pytestmark = pytest.mark.judge

SEEDS = (1, 2)
LENGTH = 24


def drawn_config(family, seed):
    """A config of the family with every size drawn."""
    draw = np.random.RandomState([*family.encode(), seed])
    config = dict(families.FAMILIES[family])  # nested dicts are replaced below, not changed
    kv_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
    head_dim = draw.choice([4, 6, 8, 16])
    config.update(
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        hidden_size=kv_heads * group * head_dim,
        intermediate_size=draw.randint(5, 90),
        num_hidden_layers=draw.randint(1, 4),
        vocab_size=draw.randint(50, 400),
        rms_norm_eps=draw.choice([1e-6, 1e-5, 1e-2]),
        tie_word_embeddings=draw.rand() < 0.5,
    )
    if "head_dim" in config:
        config.update(head_dim=head_dim, hidden_size=kv_heads * group * draw.randint(2, 9))
    if config.get("sliding_window"):
        config.update(sliding_window=draw.randint(1, LENGTH + 4))
    if "max_window_layers" in config:
        config.update(max_window_layers=draw.randint(0, config["num_hidden_layers"] + 1))
    if "rope_theta" in config:
        config.update(rope_theta=10.0 ** draw.uniform(1, 6))
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaling = {**scaling, **({"factor": draw.uniform(1.5, 16)} if "factor" in scaling else {})}
    if scaling.get("rope_type") == "llama3":
        scaling.update(
            original_max_position_embeddings=draw.randint(8, 64),
            low_freq_factor=draw.uniform(0.5, 1.5),
            high_freq_factor=draw.uniform(2, 6),
        )
        if seed == SEEDS[-1]:  # the config's own comes before that of `rope_scaling`
            config.update(original_max_position_embeddings=draw.randint(64, 256))
    if "rope_scaling" in config:
        config["rope_scaling"] = scaling
    elif scaling:
        config["rope_parameters"] = {**scaling, "rope_theta": 10.0 ** draw.uniform(1, 6)}
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in config.items()}


MODELS = pytest.mark.parametrize(
    ("config", "seed"),
    [pytest.param(drawn_config(f, seed), seed, id=f"{f}-{seed}") for f in families.FAMILIES for seed in SEEDS],
)


def drawn_batch(config, index):
    """A batch for one of the drawn models."""
    return families.batch(config["vocab_size"], index, length=LENGTH)


def worst(errors):
    """The largest error with the tensor's name."""
    return max((error, name) for name, error in errors.items())


def exact_gradients(config, weights, *batches):
    """transformers' f64 gradients of each batch."""
    found = []
    with transformers_judge.doubled():
        model = transformers_judge.model_of(config, weights, "float64")
        for batch in batches:
            transformers_judge.backward(model, *batch)
            found.append(transformers_judge.gradients(model))
    return found


@MODELS
def test_gradients_and_logits(config, seed):
    weights, (tokens, targets) = families.weights(config, seed), drawn_batch(config, seed)
    (right,) = exact_gradients(config, weights, (tokens, targets))
    with transformers_judge.doubled():
        logits = transformers_judge.logits_of(transformers_judge.model_of(config, weights, "float64"), tokens)
    for precision, bound in ((FP64, 1e-9), (FP32, 1e-5)):
        run = engine_of(config, weights, precision, families.BATCH, LENGTH)
        assert worst(relative_errors(gradients(run, tokens, targets), right)) < (bound, "")
        for row, count in ((0, 1), (1, LENGTH // 2), (1, LENGTH)):
            found, wanted = next_logits(run, tokens[row, :count]), logits[row, count - 1]
            assert found.shape == wanted.shape
            assert np.linalg.norm(found - wanted) < bound * np.linalg.norm(wanted)


def assert_same_adamw_run(config, weights):
    """In f64, so that nothing but the formula decides where the 20 steps lead; and losses in f32."""
    clip = families.grad_clip(config)
    with transformers_judge.doubled():
        model = transformers_judge.model_of(config, weights, "float64")
        losses, norms = transformers_judge.adamw_run(model, config, LENGTH)
        right = {name: array - weights[name] for name, array in transformers_judge.parameters(model).items()}
    hyper = Hyperparameters(AdamW(**families.ADAMW), clip)
    run, single = (engine_of(config, weights, one, families.BATCH, LENGTH, hyper) for one in (FP64, FP32))
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1):
        for engine in (run, single):
            engine.micro_step(Batch(*drawn_batch(config, step)))
        result, rounded = (engine.update(step, families.learning_rate(step)) for engine in (run, single))
        assert (result.loss, result.norm) == pytest.approx((loss, norm), rel=1e-7)
        assert rounded.loss == pytest.approx(loss, rel=1e-4)
    change = {name: array - weights[name] for name, array in parameters(run).items()}
    assert worst(relative_errors(change, right)) < (1e-6, "")


@MODELS
def test_adamw_run(config, seed):
    assert_same_adamw_run(config, families.weights(config, seed))


@MODELS
def test_bf16_gradients(config, seed):
    assert_bf16_gradients(config, families.weights(config, seed))


def assert_bf16_gradients(config, weights):
    """Against transformers in bf16 on the same batches, each tensor's error over all of them."""
    batches = [drawn_batch(config, index) for index in range(8)]
    exact = exact_gradients(config, weights, *batches)
    theirs = transformers_judge.model_of(config, weights, "bfloat16")
    ours = engine_of(config, weights, BF16, families.BATCH, LENGTH)
    squares = {name: np.zeros(2) for name in weights}
    for batch, right in zip(batches, exact, strict=True):
        transformers_judge.backward(theirs, *batch)
        both = gradients(ours, *batch), transformers_judge.gradients(theirs)
        found, other = (cosine(one, right) for one in both)
        assert 1 - found <= max(1e-3, 1.5 * (1 - other))
        for side, errors in enumerate(relative_errors(named, right) for named in both):
            for name, error in errors.items():
                squares[name][side] += error**2
    ratios = {name: np.sqrt(mine / other) for name, (mine, other) in squares.items()}
    keys = {name: ratios.pop(name) for name in [*ratios] if name.endswith("k_proj.bias")}  # sums that nearly cancel
    assert worst(ratios) <= (1.5, "") and max(keys.values(), default=0) < 3


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [32001, 262144])
def test_vocabularies_of_any_size(vocab_size, tied):
    """One beyond a multiple of every alignment, and the largest in use: padding takes no part in anything."""
    config = dict(families.FAMILIES["llama3"], vocab_size=vocab_size, tie_word_embeddings=tied, num_hidden_layers=1)
    config.update(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=8)
    weights, (tokens, targets) = families.weights(config), drawn_batch(config, 1)
    tokens[0, :2], targets[0, :2] = vocab_size - 1, vocab_size - 1
    (right,) = exact_gradients(config, weights, (tokens, targets))
    with transformers_judge.doubled():
        logits = transformers_judge.logits_of(transformers_judge.model_of(config, weights, "float64"), tokens[:1])
    run = engine_of(config, weights, FP64, families.BATCH, LENGTH)
    assert worst(relative_errors(gradients(run, tokens, targets), right)) < (1e-9, "")
    found = next_logits(run, tokens[0])
    assert found.shape == (vocab_size,)
    assert np.linalg.norm(found - logits[0, -1]) < 1e-9 * np.linalg.norm(logits[0, -1])
    assert run.update(1, 1e-3).applied
    parameters(run)  # asserts that padding is still zero


FOLDERS = pytest.mark.parametrize("family", families.FAMILIES)


def reloaded(folder):
    """A folder's model as transformers loads it, in f32, with nothing missing and nothing left over."""
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(said.values()), said
    return model


def assert_same_logits(run, model, tokens):
    """Ours in f32 are those of a transformers model in f32."""
    wanted = transformers_judge.logits_of(model, tokens)
    for row, count in ((0, 3), (1, tokens.shape[1])):
        found, right = next_logits(run, tokens[row, :count]), wanted[row, count - 1]
        assert found.shape == right.shape
        assert np.linalg.norm(found - right) < 1e-5 * np.linalg.norm(right)


def engine_from(folder):
    """An f32 engine with the model of a Hugging Face folder."""
    config = from_folder(folder)
    plan = make_plan(Spec(config, FP32, Memory(), Hyperparameters(), families.BATCH, LENGTH))
    run = Engine(plan, HostBackend())
    run.load(read_rows(checked_tensors(folder, plan.rows), plan.rows))
    return run


def export(run, folder, dtype):
    """Writes an engine's model as a Hugging Face folder."""
    plan, by_row = run.plan, lambda row: run.parameter(row.name)
    Export(folder, plan.spec.config, plan.rows, dtype).write(by_row)


@FOLDERS
def test_exported_folders_load_in_transformers(family, tmp_path):
    """After some training, so that the weights are no longer those of anything else."""
    config = families.FAMILIES[family]
    run = engine_of(config, families.weights(config), FP32, families.BATCH, LENGTH)
    for step in (1, 2):
        run.micro_step(Batch(*drawn_batch(config, step)))
        run.update(step, 1e-2)
    export(run, tmp_path / "model", "fp32")
    model = reloaded(tmp_path / "model")
    named = parameters(run)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: a.shape for n, a in named.items()}
    assert all(np.array_equal(array, named[name]) for name, array in transformers_judge.parameters(model).items())
    assert_same_logits(run, model, drawn_batch(config, 3)[0])


@FOLDERS
def test_transformers_folders_load_here(family, tmp_path):
    """As save_pretrained writes them, in one file or many, in f32 or bf16; they train on here and go back."""
    config = families.FAMILIES[family]
    model = transformers_judge.empty_model(config)
    bf16 = sorted(families.FAMILIES).index(family) % 2 == 0
    if bf16:
        model.to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="30KB" if bf16 else "5GB")
    run = engine_from(tmp_path / "theirs")
    batch = drawn_batch(config, 1)
    assert_same_logits(run, reloaded(tmp_path / "theirs"), batch[0])
    losses = []
    for step in range(1, 11):
        run.micro_step(Batch(*batch))
        losses.append(run.update(step, 1e-2).loss)
    assert losses[-1] < losses[0] - 0.5
    export(run, tmp_path / "ours", "fp32")
    assert_same_logits(run, reloaded(tmp_path / "ours"), batch[0])


@pytest.mark.parametrize(("dtype", "theirs"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_exported_dtype_is_what_transformers_loads(dtype, theirs, tmp_path):
    config = families.FAMILIES["qwen3_tied"]
    export(engine_of(config, families.weights(config), FP32, families.BATCH, LENGTH), tmp_path / "model", dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert model.dtype == getattr(torch, theirs)
    assert all(
        np.array_equal(array, families.weights(config)[name])  # exact in every one of these types
        for name, array in transformers_judge.parameters(model).items()
    )


@pytest.mark.parametrize("vocab_size", [32001, 262144])
def test_exported_vocabularies_are_not_padded(vocab_size, tmp_path):
    config = dict(families.FAMILIES["llama3"], vocab_size=vocab_size, num_hidden_layers=1)
    config.update(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=8)
    run = engine_of(config, families.weights(config), FP32, families.BATCH, LENGTH)
    export(run, tmp_path / "model", "fp32")
    model = reloaded(tmp_path / "model")
    assert model.get_input_embeddings().weight.shape == model.lm_head.weight.shape == (vocab_size, 8)
    assert_same_logits(run, model, drawn_batch(config, 1)[0])


@MODELS
def test_greedy_tokens_are_those_of_generate(config, seed):
    """Prompts of several lengths in one batch here, each alone in transformers; some end at a token."""
    weights, tokens = families.weights(config, seed), drawn_batch(config, seed)[0]
    prompts = [tokens[0, :1].tolist(), tokens[1, :9].tolist(), tokens[0, :17].tolist()]
    with transformers_judge.doubled():
        judge = transformers_judge.model_of(config, weights, "float64")
        judge.generation_config.eos_token_id = judge.generation_config.pad_token_id = None
        kept = {"do_sample": False, "max_new_tokens": 16}
        right = [judge.generate(torch.tensor([p]), **kept)[0, len(p) :].tolist() for p in prompts]
    spec = Spec(read_config(config), FP64, Memory(), Hyperparameters(), 3, 17 + 16)
    decoding = Decoding(spec, Sampling(), (32,))
    generator = open_generator(decoding, HostBackend(), lambda plan: values_of(plan, weights))
    for stop in ((), (right[1][5], right[2][3])):
        found = [[], [], []]
        for index, token, _ in generate(generator, prompts, max_tokens=16, stop=stop):
            found[index] += [] if token is None else [token]
        ends = [next((i for i, token in enumerate(text) if token in stop), 16) for text in right]
        assert found == [text[:end] for text, end in zip(right, ends, strict=True)]


@pytest.mark.parametrize(
    "cuts", [{"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8, "min_p": 0.05}]
)
def test_the_cuts_leave_what_transformers_leaves(cuts):
    """After its temperature, in its order."""
    kinds = {
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }
    rng = np.random.default_rng(0)
    for _ in range(20):
        z = rng.standard_normal(300) * 2
        scores = torch.tensor(z)[None]
        for name, value in cuts.items():
            scores = kinds[name](value)(None, scores)
        least = threshold(z, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **cuts})
        assert np.array_equal(z >= least, np.isfinite(scores[0].numpy()))


def test_the_repetition_penalty_is_that_of_transformers():
    rng = np.random.default_rng(0)
    logits, history = rng.standard_normal((2, 1, 50)), rng.integers(0, 50, (2, 9))
    right = transformers.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor(history), torch.tensor(logits[:, 0]))
    seen = np.zeros((2, 50), np.int32)
    np.put_along_axis(seen, history[:, :-1], 1, axis=1)
    found = output((2, 1, 50), "fp64")
    given = (tensor(logits), tensor(seen), tensor(history[:, -1:]))
    OPS["penalize"](found, output((2, 50), "int32"), *given, penalty=1.7)
    np.testing.assert_allclose(found.tensors[0].array[:, 0], right.numpy(), rtol=1e-15)
