"""Whole runs with `--fit`: all ranks train what was chosen, and a run that resumes keeps the checkpoint's numbers.

The CPU has no rates, so it is taken to be a card here.
"""

import pytest
from in_process import train_on_ranks
from tiny_runs import weights_of

import llmq
from llmq.engine import search
from llmq.engine.predict import sustained
from llmq.files.checkpoint import load
from llmq.hardware import cards
from llmq.plan import remedies
from llmq.training import fit


@pytest.fixture
def given(given, few_remedies, monkeypatch):
    """Steps of four samples, on a device with the rates of an H200, with two ways to save memory."""
    monkeypatch.setattr(fit, "rates_of", lambda where: sustained(cards.named("H200")))
    sizes = {"global_batch_size": 4, "steps": 4, "ckpt_interval": 2, "ckpt_keep_n": 0}
    given = {key: value for key, value in given.items() if key not in fit.SIZES}
    return {
        **given,
        **sizes,
        "lmhead_chunks": 1,
        "attn_bwd_chunks": 1,
        "seq_tiles": 1,
        "offload_residual": True,
        "fit": True,
    }


def train(given, size, **more):
    return train_on_ranks(size, {**given, **more})


def options_of(result):
    """The options that a checkpoint was made with."""
    return load(result.checkpoint_path)[0]["options"]


def test_a_run_trains_as_one_with_the_settings_that_were_chosen(given):
    result = llmq.train(**{**given, "name": "fit"})
    saved = options_of(result)
    assert saved["batch_size"] * saved["grad_accumulation"] == 4 and saved["batch_size"] > 1 and not saved["fit"]
    chosen = {key: saved[key] for key in ("batch_size", "grad_accumulation", "recompute_block", "offload_optimizer")}
    again = llmq.train(**{**given, "fit": False, **chosen, "name": "by hand"})
    assert weights_of(again.checkpoint_path) == weights_of(result.checkpoint_path)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_it_is_resumed_on_another_number_of_ranks(given, sizes):
    """With the dtypes of the checkpoint, whatever --fit may change, and as many samples a step."""
    first, then = sizes
    given |= {"model_dtype": "bf16", "opt_m_dtype": "bf16"}
    (one, *_), console = train(given, first, name="run", steps=2)
    assert one.exit_code == 0 and console.count("1 is taken:") == 1
    before = options_of(one)
    more = {"continue": 2, "steps": 4, "overwrite": True, "fit_may": "states,matmul", "opt_m_dtype": None}
    (result, *_), console = train(given, then, name="run", **more)
    after = options_of(result)
    assert result.exit_code == 0 and console.count("1 is taken:") == 1 and load(result.checkpoint_path)[0]["step"] == 4
    assert {key: after[key] for key in fit.NUMBERS} == {key: before[key] for key in fit.NUMBERS}
    assert after["opt_m_dtype"] == "bf16" and after["global_batch_size"] == 4


@pytest.mark.slow
def test_all_ranks_share_what_the_level_that_was_chosen_shares(given, monkeypatch):
    """Where nothing else fits: the bits are those of a run that is given the level."""
    real = remedies.levels
    monkeypatch.setattr(search, "levels", lambda spec: real(spec)[-1:])
    (one, _), console = train(given, 2, name="fit", model_dtype="bf16")
    chosen = options_of(one)
    assert chosen["zero_level"] == 3 and "--zero-level 3" in console
    same = {key: chosen[key] for key in ("batch_size", "grad_accumulation", "recompute_block", "offload_optimizer")}
    (again, _), _ = train(given, 2, name="by hand", model_dtype="bf16", fit=None, zero_level=3, **same)
    assert weights_of(one.checkpoint_path) == weights_of(again.checkpoint_path)
