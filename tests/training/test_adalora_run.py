"""A run of --adalora: what it keeps, saves, exports and continues from."""

import numpy as np
import pytest
from adapter_cases import adapter_of, config_of
from in_process import train_on_ranks
from tiny_runs import weights_of

import llmq
from llmq.errors import UsageError

SCHEDULE = {"adalora_target_rank": 2, "adalora_warmup": 1, "adalora_final": 2, "adalora_interval": 2}


@pytest.fixture
def given(based):
    """Options of a run whose ranks are chosen after steps 2, 4 and 6 of 8."""
    return {**based, "lora_rank": 4, "adalora": True, **SCHEDULE, "steps": 8, "learning_rate": 1e-2}


def test_a_run_keeps_the_budget_and_says_what(given):
    done = llmq.train(**given, lora_targets="q_proj,v_proj,mlp", lora_dropout=0.1)
    said = given["console"].getvalue()
    assert (
        "Adapters with singular values (AdaLoRA) of rank 4 at first and 2 on average at last on 5 linear maps" in said
    )
    assert "Step 6: 10 of 20 singular values are kept, " in said and "Step 8" not in said
    config, found = config_of(done.model_path), adapter_of(done.model_path)
    asked = {"target_r": 2, "tinit": 1, "tfinal": 2, "deltaT": 2, "beta1": 0.85, "beta2": 0.85, "orth_reg_weight": 0.5}
    assert {key: config[key] for key in asked} == asked
    assert (config["peft_type"], config["init_r"], config["total_step"], config["lora_alpha"]) == ("ADALORA", 4, 8, 8)
    kept = {name: sum(flags) for name, flags in config["rank_pattern"].items()}
    assert len(kept) == 5 and sum(kept.values()) == 2 * 5
    sizes = {"q_proj": (48, 48), "v_proj": (48, 24), "gate_proj": (48, 64), "up_proj": (48, 64), "down_proj": (64, 48)}
    for name, rank in kept.items():
        inputs, outputs = sizes[name.split(".")[-2]]
        module = f"base_model.model.{name.removesuffix('.lora_E')}"
        shapes = [found[f"{module}.lora_{key}"].shape for key in "ABE"]
        assert shapes == [(rank, inputs), (outputs, rank), (rank, 1)]
        assert all(np.all(found[f"{module}.lora_{key}"] != 0) for key in "ABE")
    assert len(found) == 15


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(given):
    """From within the choice, from its last step, and from the final ones."""
    given = {**given, "ckpt_interval": 1, "ckpt_keep_n": 0, "lora_dropout": 0.1}
    whole = llmq.train(**given)
    for step in (3, 5, 6, 7):
        parts = llmq.train(**given, **{"continue": step, "out_dir": f"parts{step}"})
        assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)
        one, other = adapter_of(whole.model_path), adapter_of(parts.model_path)
        assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
        assert config_of(parts.model_path) == config_of(whole.model_path)
    with pytest.raises(UsageError, match=r"adapters adalora"):
        llmq.train(**{**given, "continue": 3, "adalora_final": 1, "overwrite": True})


@pytest.mark.slow
def test_an_adapter_is_trained_on_with_what_it_kept(given):
    first = llmq.train(**given, lora_targets="all,lm_head")
    rest = {name: value for name, value in given.items() if not name.startswith(("lora", "adalora"))}
    rest = {**rest, "name": "again", "adapter": str(first.model_path), "overwrite": True}
    again = llmq.train(**{**rest, "learning_rate": 0.0, "steps": 1})
    assert again.eval_loss == pytest.approx(first.eval_loss, rel=1e-6)
    one, other = adapter_of(first.model_path), adapter_of(again.model_path)
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
    assert config_of(first.model_path) == config_of(again.model_path)
    more = llmq.train(**{**rest, "learning_rate": 1e-2, "steps": 3})
    moved = adapter_of(more.model_path)
    assert {name: value.shape for name, value in moved.items()} == {name: value.shape for name, value in one.items()}
    assert all(not np.array_equal(moved[name], value) for name, value in one.items() if value.size)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 0])
def test_ranks_keep_what_one_does(given, level):
    more = {"global_batch_size": 4, "batch_size": 1, "grad_accumulation": None, "deterministic": True}

    def trained_on(size):
        values = {**given, **more, "name": f"on{size}", "zero_level": level}
        return train_on_ranks(size, values)[0][0].model_path

    one, two = trained_on(1), trained_on(2)
    assert config_of(one)["rank_pattern"] == config_of(two)["rank_pattern"]
    found, right = adapter_of(two), adapter_of(one)
    for name, value in right.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-2, atol=1e-4)


def test_it_trains_on_quantized_weights_in_fp8(given):
    about = {"base_dtype": "nf4", "matmul_dtype": "e4m3", "model_dtype": "bf16"}
    done = llmq.train(**{**given, **about})
    assert done.exit_code == 0 and np.isfinite(done.eval_loss)
    assert sum(map(sum, config_of(done.model_path)["rank_pattern"].values())) == 2 * 7


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dora": True}, "--dora does not go with --adalora"),
        ({"rslora": True}, "--rslora does not go with --adalora"),
        ({"lora_init": "pissa"}, "--lora-init pissa does not go with --adalora"),
        ({"lora_init": "kaiming"}, "--lora-init kaiming does not go with --adalora"),
        ({"lora_rank_pattern": "mlp=2"}, "--lora-rank-pattern mlp=2 does not go with --adalora"),
        ({"lora_alpha_pattern": "mlp=2"}, "--lora-alpha-pattern mlp=2 does not go with --adalora"),
        ({"adalora": False}, "--adalora-target-rank 2 is for --adalora: add that"),
        ({"lora_rank": None}, "--adalora is for adapters: add --lora-rank"),
        ({"lora_rank": None, "adapter": "a"}, "--adalora is said by --adapter a"),
        ({"lora_rank": None, "ia3": "mlp"}, "--ia3 mlp trains gains, and --adalora is of another method"),
        ({"adalora_target_rank": 4}, "--adalora-target-rank 4 is not below --lora-rank 4"),
        ({"adalora_warmup": 6}, "--adalora-warmup 6 and --adalora-final 2 leave none of 8 steps"),
        ({"adalora_beta1": 1.0}, "--adalora-beta1 1.0 is too large"),
        ({"adalora_interval": 0}, "--adalora-interval 0"),
    ],
)
def test_what_does_not_go_together_is_refused(given, change, says):
    with pytest.raises(UsageError, match=says):
        llmq.train(**{key: value for key, value in {**given, **change}.items() if value is not None})
