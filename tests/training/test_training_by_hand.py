"""The training loop against its parts put together by hand: what is trained on, at which rate, with which constants."""

import numpy as np
import pytest
from sample_files import write_tokens
from tiny_engines import tiny

import llmq
from llmq.backends.host import HostBackend
from llmq.data.batches.batch import Batch
from llmq.data.batches.rows import sample_order
from llmq.engine.engine import Engine
from llmq.files.checkpoint import load
from llmq.files.source import ModelSource, open_parameters
from llmq.model.optimizer import Hyperparameters
from llmq.optimizers.adamw import AdamW
from llmq.plan.memory import Memory
from llmq.plan.plan import make_plan
from llmq.plan.precision import Precision
from llmq.plan.spec import Regularization, Spec
from llmq.training.records import EvalRecord, TrainRecord

B, T, ACCUMULATION, STEPS, SEED = 2, 16, 3, 5, 3
RATES = (5e-3, 1e-2, 1e-2, 7e-3, 4e-3)  # two steps of warmup, then a line from 1e-2 to 1e-3 at the end of step 5
FP8 = {"bf16": {}, "e4m3": {"gradient_dtype": "e5m2", "fp8_scaling": "delayed"}}
HYPER = Hyperparameters(AdamW(beta_1=0.7, beta_2=0.8, epsilon=1e-5, weight_decay=0.3), grad_clip=0.4)
ADDED = Regularization(z_loss=1e-2)


def token_files(folder):
    """Training tokens for a bit more than two steps; held-out tokens of which most are masked in some batches."""
    draw = np.random.default_rng(0)
    mask = draw.random(5 * T + 1) < np.repeat([1, 1, 0.1, 0.1, 0.5, 1], [T] * 5 + [1])
    write_tokens(folder / "train.bin", draw.integers(0, 97, 14 * T + 3).astype(np.int32), vocab_size=97)
    write_tokens(folder / "eval.bin", draw.integers(0, 97, 5 * T + 1).astype(np.int32), vocab_size=97, mask=mask)
    return mask


def windows_of(path):
    """Tokens and shifted targets (windows, T), without the loader."""
    tokens = np.fromfile(path, "<u2", offset=1024).astype(np.int32)
    count = (14 * T + 2) // T if path.name == "train.bin" else 5
    return tokens[: count * T].reshape(count, T), tokens[1 : count * T + 1].reshape(count, T)


@pytest.mark.parametrize("matmul", FP8)
def test_a_run_is_its_parts_put_together(given, tmp_path, matmul):
    mask, config, records = token_files(tmp_path), tiny(num_layers=1), []
    own = dict(
        model_dtype="bf16",
        matmul_dtype=matmul,
        **FP8[matmul],
        opt_m_dtype="bf16",
        opt_v_dtype="fp32",
        master_dtype="fp32",
        grad_accum_dtype="fp32",
        batch_size=B,
        seq_len=T,
        grad_accumulation=ACCUMULATION,
        steps=STEPS,
        learning_rate=1e-2,
        lr_schedule="linear",
        warmup=2,
        final_lr_fraction=0.1,
        beta_1=HYPER.rule.beta_1,
        beta_2=HYPER.rule.beta_2,
        adam_epsilon=HYPER.rule.epsilon,
        weight_decay=HYPER.rule.weight_decay,
        grad_clip=HYPER.grad_clip,
        z_loss=ADDED.z_loss,
        seed=SEED,
        eval_every_n_steps=STEPS,
    )
    result = llmq.train(**{**given, **own}, callbacks=[lambda run, record: records.append(record)])

    dtypes = Precision("bf16", matmul, "e5m2", "delayed", m="bf16", v="fp32", master="fp32", grad="fp32")
    plan = make_plan(Spec(config, dtypes, Memory(), HYPER, B, T, SEED, regularization=ADDED))
    engine = Engine(plan, HostBackend())
    source = ModelSource("", config, None, None, from_scratch=True, init_proj_to_zero=False)
    engine.load(open_parameters(source, SEED)(plan.rows))
    tokens, targets = windows_of(tmp_path / "train.bin")
    order = sample_order(np.arange(STEPS * ACCUMULATION * B), len(tokens), SEED).reshape(STEPS, ACCUMULATION, B)
    seen = [record for record in records if isinstance(record, TrainRecord)]
    for step, (record, rate) in enumerate(zip(seen, RATES, strict=True), 1):
        if step == 1:
            engine.warm_up(Batch(tokens[order[0, 0]], targets[order[0, 0]]))
        for micro_step, rows in enumerate(order[step - 1]):
            engine.micro_step(Batch(tokens[rows], targets[rows]), first=micro_step == 0)
        done = engine.update(step, rate)
        assert record.lr == pytest.approx(rate, rel=1e-12)
        assert (record.step, record.loss, record.norm) == (step, done.loss, done.norm)
        assert record.accuracy == done.accuracy
        assert record.trained_tokens == ACCUMULATION * B * T

    _, read = load(result.checkpoint_path)
    for name, array in engine.state():
        np.testing.assert_array_equal(read(name), array, err_msg=name)

    tokens, targets = windows_of(tmp_path / "eval.bin")
    targets = np.where(mask[1:].reshape(targets.shape), targets, -100)
    each = [engine.evaluate(Batch(np.stack([t] * B), np.stack([u] * B))) for t, u in zip(tokens, targets, strict=True)]
    assert len({count for _, count, _ in each}) > 2, "rows of equal weight would hide a mean of means"
    (evaluated,) = (record for record in records if isinstance(record, EvalRecord))
    total, count, hits = np.sum(each, axis=0)
    assert evaluated.loss == result.eval_loss == pytest.approx(total / count, rel=1e-5)
    assert evaluated.trained_tokens == count / B == np.count_nonzero(mask[1:])
    assert evaluated.accuracy == hits / count
