"""`loss=f`: a Python function in the place of cross-entropy, checked before the first step."""

import io
from pathlib import Path

import numpy as np
import pytest
from in_process import train_on_ranks
from installed_plugins import tables_kept
from safetensors.numpy import load_file
from tiny_runs import folder, hash_of, on_weights, write_documents

import llmq
from llmq import EarlyStopping
from llmq.api.ranks import refuse_local
from llmq.cli.train import options_of
from llmq.errors import PluginError, UsageError
from llmq.options.parse import Options


def by_hand(xp, logits, targets):
    """Cross-entropy, written by hand."""
    rows, columns = xp.arange(len(targets)), xp.maximum(targets, 0)
    largest = logits.max(axis=1, keepdims=True)
    p = xp.exp(logits - largest)
    total = p.sum(axis=1, keepdims=True)
    losses = (xp.log(total) + largest)[:, 0] - logits[rows, columns]
    d_logits = p / total
    d_logits[rows, columns] -= 1
    return losses, d_logits


def squares(xp, logits, targets, half=0.5):
    """A loss whose gradient needs no other one."""
    return half * (logits * logits).sum(axis=1), 2 * half * logits


@pytest.fixture
def given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with tables_kept():
        yield {**on_weights(tmp_path), "steps": 6, "device": "cpu", "eval_every_n_steps": 3}


def weights(result):
    return load_file(result.model_path / "model.safetensors")


CASES = {
    "plain": {},
    "chunks": {"lmhead_chunks": 4},
    "tiles": {"seq_tiles": 2, "recompute_block": True},
    "packed": {"packing": True},
    "fused": {"fused_update": True, "grad_accumulation": 1, "grad_clip": 0},
    "lora": {"lora_rank": 2, "merge": True},
}
NARROW = {  # bounds of losses
    "bf16": ({"model_dtype": "bf16"}, 2e-2),
    "e4m3 head": ({"model_dtype": "bf16", "matmul_dtype": "e4m3", "head_dtype": "e4m3"}, 5e-2),
}


@pytest.mark.quick("plain", "chunks")
@pytest.mark.parametrize("case", CASES)
def test_cross_entropy_by_hand_is_that_of_llmq(given, case):
    given |= CASES[case]
    ours, own = llmq.train(**given), llmq.train(**{**given, "name": "own"}, loss=by_hand)
    assert np.ptp(ours.history["loss"]) > 0.1
    for name in ("loss", "eval_loss"):
        # Adam makes more of a difference in gradients that are nearly 0.
        bound = 1e-5 if case == "fused" else 1e-6
        np.testing.assert_allclose(own.history[name], ours.history[name], rtol=0, atol=bound)
    place = "merged" if "merge" in given else "."
    ends, other = (load_file(run.model_path / place / "model.safetensors") for run in (ours, own))
    for name, value in ends.items():
        np.testing.assert_allclose(other[name], value, rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("case", NARROW)
def test_a_narrow_model_reads_its_gradient(given, case):
    changes, bound = NARROW[case]
    given |= changes
    ours, own = llmq.train(**given), llmq.train(**{**given, "name": "own"}, loss=by_hand)
    np.testing.assert_allclose(own.history["loss"], ours.history["loss"], rtol=0, atol=bound)


@pytest.mark.slow
def test_ranks_have_the_bits_of_one(given):
    given |= {"batch_size": 1, "grad_accumulation": None, "global_batch_size": 4}
    alone = llmq.train(**{key: value for key, value in given.items() if value is not None}, loss=by_hand)
    (first, _), _ = train_on_ranks(2, {**given, "name": "ranks", "loss": by_hand})
    np.testing.assert_allclose(first.history["loss"], alone.history["loss"], rtol=0, atol=1e-6)


def test_a_trainer_takes_one_and_others_by_their_names(given):
    llmq.register("loss", "squares", squares)
    given = {key: value for key, value in given.items() if key != "console"}
    results = [
        llmq.Trainer(**{**given, "name": name, "loss": loss}).train(console=io.StringIO())
        for name, loss in (("f", squares), ("named", "squares"), ("twice", "squares:half=1"))
    ]
    assert hash_of(weights(results[0]).items()) == hash_of(weights(results[1]).items())
    assert results[2].history["loss"][0] == pytest.approx(2 * results[0].history["loss"][0], rel=1e-6)


def wrong(xp, logits, targets):
    losses, d_logits = by_hand(xp, logits, targets)
    d_logits[xp.arange(len(targets)), xp.maximum(targets, 0)] *= 1.5
    return losses, d_logits


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (wrong, r"another gradient than its losses: at token \d with target (\d+), d_logits of logit \1 is -1.4"),
        (
            lambda xp, x, t: (by_hand(xp, x, t)[0], 0 * x),
            "another gradient .* is -?0, and finite differences are -0.99",
        ),
        (lambda xp, x, t: (xp.cumsum(by_hand(xp, x, t)[0]), by_hand(xp, x, t)[1]), "its own token's logits"),
        (lambda xp, x, t: by_hand(xp, x, t)[0], r"returned \(6,\): return arrays"),
        (lambda xp, x, t: (x, x), r"returned \(6, 97\), \(6, 97\): return arrays .* of shapes \(6,\) and \(6, 97\)"),
        (lambda xp, x, t: (0 * x[:, 0] / 0, x), "is not finite at random logits"),
        (lambda xp, x: None, r"the plug-in loss <lambda>\(\) failed: TypeError: .* 2 positional arguments but 3"),
        (lambda xp, x, t: xp.no, r"the plug-in loss <lambda>\(\) failed in .*test_custom_loss.py, line \d+: Attribute"),
        (7, "--loss 7 is not one of cross_entropy"),
    ],
)
def test_what_is_no_loss_is_refused_before_the_first_step(given, loss, match):
    with np.errstate(all="ignore"), pytest.raises((UsageError, PluginError), match=match):
        llmq.train(**given, loss=loss)
    assert not Path("runs/run/checkpoints").exists()


def test_a_right_gradient_passes_the_check_whatever_its_size(given):
    for factor in (1e-4, 1, 1e4):
        llmq.train(**{**given, "dry_run": True}, loss=lambda *a, f=factor: tuple(f * one for one in by_hand(*a)))


def test_ignored_tokens_have_no_loss(given):
    """Whatever the function says of them."""

    def loss(xp, logits, targets):
        losses, d_logits = by_hand(xp, logits, targets)
        losses[targets < 0], d_logits[targets < 0] = xp.nan, xp.nan
        return losses, d_logits

    write_documents("train", 40, np.random.default_rng(0))
    runs = [llmq.train(**{**given, "name": name}, loss=f) for name, f in (("own", loss), ("ours", "cross_entropy"))]
    np.testing.assert_allclose(runs[0].history["loss"], runs[1].history["loss"], rtol=0, atol=1e-6)


def test_a_run_resumes_with_the_same_function(given):
    llmq.train(**given, loss=squares)
    with pytest.raises(UsageError, match=r"--loss: squares\(\) in the checkpoint, not set now"):
        llmq.train(**{**given, "continue": "newest"})
    with pytest.raises(UsageError, match=r"--loss: squares\(\) in the checkpoint, by_hand\(\) now"):
        llmq.train(**{**given, "continue": "newest"}, loss=by_hand)
    assert llmq.train(**{**given, "continue": "newest", "steps": 7}, loss=squares).steps == 7
    with tables_kept():
        from llmq.plan.loss import LOSSES

        del LOSSES["squares()"]
        with pytest.raises(UsageError, match=r"--loss squares\(\): this was a function of a Python program"):
            options_of(["--model=m", "--data=d", "--loss=squares()", "--continue"])


def test_what_does_not_go_with_a_function_is_said(given, tmp_path):
    with pytest.raises(UsageError, match=r"--z-loss 0.1 is a term of cross_entropy: .* add it to squares\(\)"):
        llmq.train(**given, z_loss=0.1, loss=squares)
    for name, more in {"save_best": {}, "early_stopping_metric": {"early_stopping_patience": 2}}.items():
        with pytest.raises(
            UsageError, match=rf"--{name.replace('_', '-')} eval_accuracy: --loss squares\(\) has no acc"
        ):
            llmq.train(**given, **more, **{name: "eval_accuracy"}, loss=squares)
    with pytest.raises(UsageError, match="early stopping watches eval_accuracy, which nothing has logged"):
        llmq.train(**given, loss=squares, callbacks=[EarlyStopping(1, "eval_accuracy")])
    config = llmq.Config(model="m", loss=squares)
    with pytest.raises(UsageError, match="is a function, which no file can name"):
        config.to_yaml()
    with pytest.raises(UsageError, match=r"loss squares\(\) is registered in this process alone, and gpus=2 starts"):
        refuse_local(Options.parse({**config.options, "data": "d", "gpus": 2}))


def test_logits_come_in_more_chunks_where_a_function_needs_room():
    shape = {"model": "Qwen2.5-0.5B", "from_scratch": True, "gpu": "H200", "seq_len": 1024, "batch_size": 8}
    with tables_kept():
        plans = [llmq.Trainer(**shape, loss=loss).plan(console=io.StringIO()) for loss in ("cross_entropy", by_hand)]
    assert [plan.spec.memory.head_chunks for plan in plans] == [1, 16]


@pytest.mark.gpu
def test_a_gpu_trains_as_the_cpu(given, tmp_path):
    """In graphs around the function, which may have a state that no graph would know of."""
    calls = []

    def loss(xp, logits, targets):
        calls.append(xp.__name__)
        return by_hand(xp, logits, targets)

    shape = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}  # what cuDNN and 16-byte accesses take
    given |= {"model": str(folder(tmp_path / "for the GPU", **shape)), "from_scratch": True, "steps": 4}
    found = {}
    for name, changes in {"cpu": {}, "cuda": {"device": "cuda", "lmhead_chunks": 2}}.items():
        found[name] = llmq.train(**{**given, **changes, "name": name}, loss=loss).history
    np.testing.assert_allclose(found["cuda"]["loss"], found["cpu"]["loss"], rtol=0, atol=1e-4)
    assert calls.count("cupy") >= 2 * 2 * 4, "in each chunk of each micro-step"
    ours = llmq.train(**{**given, "device": "cuda", "name": "ours", "model_dtype": "bf16"}).history
    own = llmq.train(**{**given, "device": "cuda", "name": "own", "model_dtype": "bf16"}, loss=loss).history
    np.testing.assert_allclose(own["loss"], ours["loss"], rtol=0, atol=2e-2)
