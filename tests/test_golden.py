"""The engine against golden files: what transformers and torch.optim.AdamW made of the same tiny models.

tests/golden/make_golden.py makes the files, tests/golden/families.py the models. The bounds are the project's promises:
1e-9 of a tensor's norm in f64, 1e-5 in f32, 1e-4 for the change over 20 AdamW steps, 1.5 times transformers' own error
in bf16, and for fp8 a cosine of 0.96 of the whole gradient (asked here is 0.98, as 0.989 and more is measured).
Weights are exact in bf16, so every precision starts from the same model.
"""

import json
import re
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from golden import families
from golden.engines import BF16, FP32, FP64, SCALINGS, cosine, engine_of, fp8, gradients, parameters, relative_errors
from safetensors import safe_open
from tiny_engines import next_logits

from llmq.data.batches.batch import Batch
from llmq.model.optimizer import Hyperparameters
from llmq.optimizers.adamw import AdamW
from llmq.plan.spec import Regularization

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = sorted(families.FAMILIES)
FEW = ("llama3", "qwen3_tied")
OFTEN_FEW = pytest.mark.parametrize(
    "family", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)


@cache
def golden(family):
    """Arrays of a golden file; an AssertionError if it was made from other inputs."""
    with safe_open(GOLDEN / f"{family}.safetensors", "numpy") as file:
        made_of = json.loads(file.metadata()["made_of"])
        assert made_of["fingerprint"] == families.fingerprint(families.FAMILIES[family]), (
            f"{family}.safetensors was made from other inputs: run tests/golden/make_golden.py {family}"
        )
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


def under(prefix, arrays):
    """The entries below `prefix`, without it."""
    return {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}


def sketches(named):
    """Every tensor as the golden files hold it."""
    return {name: families.sketch(name, array) for name, array in named.items()}


def engine(family, precision, hyper=None, batch_size=families.BATCH):
    """An engine for a family, with the weights that the golden files were made from."""
    config = families.FAMILIES[family]
    return engine_of(config, families.weights(config), precision, batch_size, families.LENGTH, hyper)


@cache
def exact_gradients(family, index):
    """f64 gradients, whole, of a batch."""
    return gradients(engine(family, FP64), *families.batch(families.VOCAB, index))


def kind(name):
    """A tensor's name without its layer."""
    return re.sub(r"layers\.\d+\.", "", name)


def worst(errors):
    """The largest error with the tensor's name."""
    return max((error, name) for name, error in errors.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_f64_gradients(family):
    errors = relative_errors(sketches(exact_gradients(family, 1)), under("grad/", golden(family)))
    assert worst(errors) < (1e-9, "")


@pytest.mark.parametrize("family", FAMILIES)
def test_f32_gradients_and_loss(family):
    right, run = golden(family), engine(family, FP32)
    tokens, targets = families.batch(families.VOCAB, 1)
    errors = relative_errors(sketches(gradients(run, tokens, targets)), under("grad/", right))
    assert worst(errors) < (1e-5, "")
    loss, count, _ = run.evaluate(Batch(tokens, targets))
    assert count == np.count_nonzero(targets != -100)
    assert loss / count == pytest.approx(right["loss"][0], rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family):
    """Of prefixes of one token, of some, and of the whole sequence: what follows a token must not touch its logits."""
    right, run = golden(family)["logits"], engine(family, FP32)
    for row, tokens in enumerate(families.batch(families.VOCAB, 1)[0]):
        for count in (1, 9, families.LENGTH):
            found = next_logits(run, tokens[:count])
            assert found.shape == (families.VOCAB,)
            assert np.linalg.norm(found - right[row, count - 1]) < 1e-5 * np.linalg.norm(right[row, count - 1])


def adamw_run(family, precision):
    """20 steps on the batches of the golden run: the results of the steps, and how far each parameter went."""
    config = families.FAMILIES[family]
    run = engine(family, precision, Hyperparameters(AdamW(**families.ADAMW), families.grad_clip(config)))
    results = []
    for step in range(1, families.STEPS + 1):
        run.micro_step(Batch(*families.batch(families.VOCAB, step)))
        results.append(run.update(step, families.learning_rate(step)))
    start = families.weights(config)
    return results, {name: array - start[name] for name, array in parameters(run).items()}


@OFTEN_FEW
def test_adamw_run_in_f64(family):
    """Every parameter arrives where AdamW's does, to the f32 in which the files hold the change."""
    right = golden(family)
    results, change = adamw_run(family, FP64)
    assert all(result.applied for result in results)
    np.testing.assert_allclose([result.loss for result in results], right["losses"], rtol=1e-9)
    np.testing.assert_allclose([result.norm for result in results], right["norms"], rtol=1e-9)
    assert worst(relative_errors(sketches(change), under("change/", right))) < (1e-7, "")


@OFTEN_FEW
def test_adamw_run_in_f32(family):
    """Within 1e-4, whole and by tensor (k_proj: 5e-4), but where transformers' own f32 run is beyond a quarter of that.

    Softmax hardly feels what all keys share, where the rotary embedding turns slowly: that gradient is mostly rounding,
    and AdamW makes steps of full size of it. Biases of torch in f32 are 9e-4 from torch in f64 there; a weight of ours
    is 0.9e-4 or 2.4e-4 away with the kernels that OpenBLAS has for AVX2 or for AVX-512.
    """
    right = golden(family)
    results, change = adamw_run(family, FP32)
    np.testing.assert_allclose([result.loss for result in results], right["losses"], rtol=1e-5)
    np.testing.assert_allclose([result.norm for result in results], right["norms"], rtol=1e-5)
    found, wanted = sketches(change), under("change/", right)
    squares = sum(np.sum((found[name] - wanted[name]) ** 2) for name in wanted)
    assert squares < 1e-4**2 * sum(np.sum(array**2) for array in wanted.values())
    theirs = {}
    for name, error in under("f32_change_error/", right).items():
        theirs[kind(name)] = max(error[0], theirs.get(kind(name), 0.0))
    errors = relative_errors(found, wanted)
    room = {name: max(5e-4 if "k_proj" in name else 1e-4, 4 * theirs[kind(name)]) for name in errors}
    assert {name: error for name, error in errors.items() if error > room[name]} == {}


@OFTEN_FEW
def test_bf16_gradients(family):
    """Each tensor's error is a root mean square over a few batches, as that of a small tensor has much of chance."""
    run, squares = engine(family, BF16), {}
    for index in range(1, families.BATCHES_BF16 + 1):
        right = exact_gradients(family, index)
        found = gradients(run, *families.batch(families.VOCAB, index))
        assert cosine(found, right) >= 0.999
        for name, error in relative_errors(found, right).items():
            squares[name] = squares.get(name, 0.0) + error**2 / families.BATCHES_BF16
    theirs = under("bf16_error/", golden(family))
    ratios = {name: np.sqrt(square) / theirs[name][0] for name, square in squares.items()}
    assert worst(ratios) <= (1.5, "")


@pytest.mark.sample
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
@pytest.mark.parametrize(
    "family", [FEW[0], *(pytest.param(family, marks=pytest.mark.slow) for family in (*FEW[1:], "mistral", "qwen2"))]
)
def test_fp8_gradients(family, gradient, scaling):
    run = engine(family, fp8(gradient, scaling))
    tokens, targets = families.batch(families.VOCAB, 1)
    run.warm_up(Batch(tokens, targets))
    found, right = gradients(run, tokens, targets), exact_gradients(family, 1)
    assert cosine(found, right) >= 0.98
    assert worst(relative_errors(found, right)) < (0.5, "")  # 0.27 and less is measured: no tensor is left out


def initial_weights(config):
    """N(0, 0.02), residual projections less by sqrt(2L), norm weights 1, biases 0: a model before its first step."""
    draw, weights = np.random.default_rng(5), {}
    for name, shape in families.tensor_shapes(config).items():
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        width = 0.02 / np.sqrt(2 * config["num_hidden_layers"] if residual else 1)
        weights[name] = draw.normal(0, width, shape) if len(shape) > 1 else np.full(shape, float("norm" in name))
    return {name: array.astype(np.float32).astype(ml_dtypes.bfloat16) for name, array in weights.items()}


LOSSY = {"bf16": (BF16, 0.999)} | {
    f"{gradient}-{scaling}": (fp8(gradient, scaling), 0.98) for gradient in ("e4m3", "e5m2") for scaling in SCALINGS
}
OFTEN = ("bf16", "e5m2-delayed", "e4m3-rowwise")


@pytest.mark.parametrize(
    "precision", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in LOSSY]
)
def test_direction_of_the_gradient_at_initialisation(precision):
    """On a model of more usual widths, as drawn for training from scratch."""
    shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "vocab_size": 500}
    config = {**families.FAMILIES["llama3"], **shape}
    weights, batch = initial_weights(config), families.batch(500, 1)
    with_precision, least = LOSSY[precision]
    exact, run = (engine_of(config, weights, p, *batch[0].shape) for p in (FP64, with_precision))
    run.warm_up(Batch(*batch))
    assert cosine(gradients(run, *batch), gradients(exact, *batch)) >= least


def test_four_micro_steps_of_two_equal_one_of_eight():
    """Gradients, loss and count are sums over the step; in f64 the order of sums is all that can differ."""
    tokens, targets = families.batch(families.VOCAB, 1, batch_size=8)
    targets[2:4] = -100  # a micro-batch with nothing to train on weighs nothing
    targets[4:6, 1:] = -100  # and one with two tokens weighs two tokens
    whole, parts = engine("qwen3", FP64, batch_size=8), engine("qwen3", FP64, batch_size=2)
    whole.micro_step(Batch(tokens, targets))
    for start in range(0, 8, 2):
        parts.micro_step(Batch(tokens[start : start + 2], targets[start : start + 2]), first=start == 0)
    for row in whole.plan.rows:
        right = whole.gradient(row.name)
        assert np.linalg.norm(parts.gradient(row.name) - right) < 1e-13 * np.linalg.norm(right), row.name
    one, split = (run.update(1, 1e-3) for run in (whole, parts))
    assert (
        (split.num_tokens, split.applied) == (one.num_tokens, one.applied) == (np.count_nonzero(targets != -100), True)
    )
    assert (split.loss, split.norm) == pytest.approx((one.loss, one.norm), rel=1e-13)
    for name, array in parameters(whole).items():
        np.testing.assert_allclose(parameters(parts)[name], array, rtol=1e-9, atol=1e-12)


NO_TOKENS = {"fp32": FP32, "bf16": BF16, **{scaling: fp8("e5m2", scaling) for scaling in SCALINGS}}


@pytest.mark.parametrize("precision", NO_TOKENS)
def test_step_without_trained_tokens(precision):
    """Loss, norm and gradients are 0, weights only decay, and the next step is an ordinary one."""
    run = engine("qwen2", NO_TOKENS[precision])
    tokens, targets = families.batch(families.VOCAB, 1)
    nothing = np.full_like(targets, -100)
    run.warm_up(Batch(tokens, targets))
    start = parameters(run)
    assert run.evaluate(Batch(tokens, nothing)) == (0.0, 0, 0)
    run.micro_step(Batch(tokens, nothing))
    assert not any(run.gradient(row.name).astype(np.float32).any() for row in run.plan.rows)
    result = run.update(1, 0.25)
    assert (result.loss, result.norm, result.num_tokens, result.applied) == (0.0, 0.0, 0, True)
    spacing = 2.0**-7 if precision != "fp32" else 1e-7  # bf16 masters are rounded stochastically, up or down
    for name, array in parameters(run).items():
        decayed = start[name] * (1 - 0.25 * 0.1 * (array.ndim > 1))
        np.testing.assert_allclose(array, decayed, rtol=spacing, atol=0)
    run.micro_step(Batch(tokens, targets))
    result = run.update(2, 1e-3)
    assert result.applied and result.num_tokens == np.count_nonzero(targets != -100)
    assert np.isfinite([result.loss, result.norm]).all() and result.norm > 0


def test_z_loss():
    """It adds z times the mean square of log-sum-exp to the training loss, and the gradient is that of the whole."""
    config, z = families.FAMILIES["qwen3"], 0.02
    weights, (tokens, targets) = families.weights(config), families.batch(families.VOCAB, 1)

    def run_with(z_loss, moved):
        return engine_of(config, moved, FP64, *tokens.shape, regularization=Regularization(z_loss=z_loss))

    def mean_loss(engine):
        engine.micro_step(Batch(tokens, targets))
        return engine.update(1, 0.0).loss

    plain, run = run_with(0.0, weights), run_with(z, weights)
    extra, count = 0.0, np.count_nonzero(targets != -100)
    for row, place in zip(*np.nonzero(targets != -100), strict=True):
        logits = next_logits(plain, tokens[row, : place + 1])
        extra += z * np.log(np.sum(np.exp(logits))) ** 2
    assert mean_loss(run) - mean_loss(plain) == pytest.approx(extra / count, rel=1e-10)
    assert run.evaluate(Batch(tokens, targets)) == plain.evaluate(
        Batch(tokens, targets)
    )  # held-out loss is that of the data alone

    draw, step = np.random.default_rng(3), 1e-5
    way = {name: draw.standard_normal(array.shape) for name, array in weights.items()}
    ends = [mean_loss(run_with(z, {n: weights[n] + sign * step * way[n] for n in weights})) for sign in (1, -1)]
    slope = (ends[0] - ends[1]) / (2 * step)
    gradient = gradients(run, tokens, targets)
    assert sum(np.sum(gradient[name] * way[name]) for name in way) == pytest.approx(slope, rel=1e-6)
