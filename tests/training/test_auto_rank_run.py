"""`--lora-rank auto`: a run chooses the ranks of its maps by their first gradients, once, within a budget."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from in_process import run_ranks
from safetensors.numpy import load_file
from tiny_runs import on_weights, weights_of

import llmq
from llmq.adapters.method import NO_ADAPTERS
from llmq.adapters.rank_choice import ranks_within
from llmq.backends.host import HostBackend
from llmq.engine.engine import Engine
from llmq.errors import MemoryLimitError, UsageError
from llmq.files.checkpoint import load
from llmq.options.parse import Options
from llmq.plan.plan import make_plan
from llmq.training import prepare, survey, train
from llmq.training.ranks import Ranks

BUDGET = 1500
SITES = {"q_proj": 96, "k_proj": 72, "v_proj": 72, "o_proj": 96, "gate_proj": 112, "up_proj": 112, "down_proj": 112}


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Options of a run that chooses its ranks."""
    monkeypatch.chdir(tmp_path)
    return {**on_weights(tmp_path, times=5), "lora_rank": "auto", "lora_budget": BUDGET, "steps": 6, "warmup": 0}


def ranks_of(path):
    found = load_file(path / "adapter_model.safetensors")
    return {name.split(".")[-3]: len(value) for name, value in found.items() if "lora_A" in name}


def by_hand(given, spec, data, values):
    """The ranks by full training's gradients of the first step."""
    plan = make_plan(spec)
    engine = Engine(plan, HostBackend())
    engine.load(values(plan.rows))
    with data.loader() as loader:
        for index in range(2):
            engine.micro_step(loader.next(), first=index == 0, last=index == 1)
    spectra = {}
    for row in plan.rows:
        for part in row.parts if row.site and len(row.shape) == 2 else ():
            gradient = engine.gradient(row.name)[part.start : part.stop].astype(np.float64)
            spectra[part.name.split(".")[-2]] = np.linalg.svd(gradient, compute_uv=False) ** 2
    return ranks_within(BUDGET, SITES, spectra)


def test_ranks_are_those_of_the_first_steps_gradients_whatever_fits_at_a_time(given, monkeypatch):
    whole = llmq.train(**given)
    ranks = ranks_of(whole.model_path)
    used = sum(SITES[name] * rank for name, rank in ranks.items())
    said = given["console"].getvalue()
    assert f"--lora-rank auto uses {used:,} of 1,500 parameters, by 2 micro-batches" in said
    assert f"Ranks of q_proj: {ranks.get('q_proj', 0)}" in said and "Ranks of down_proj" in whole.log_path.read_text()
    assert BUDGET - min(SITES.values()) < used <= BUDGET and len(set(ranks.values())) > 1
    plans, kept = [], []
    original = survey.make_plan

    def planned(*about, **more):
        plans.append(original(*about, **more))
        return plans[-1]

    def looked(spec, data, model, backend, free, start_task):
        kept.append((spec, data, model))
        return survey.look(spec, data, model, backend, lambda: least, start_task)

    monkeypatch.setattr(survey, "make_plan", planned)
    monkeypatch.setattr(prepare, "look", looked)
    least = 2**40
    llmq.train(**{**given, "name": "roomy", "steps": 1})
    (roomy,) = plans
    least = roomy.total_bytes - 1
    tight = llmq.train(**{**given, "name": "tight", "steps": 1})
    assert len(plans) > 2 and ranks_of(tight.model_path) == ranks
    spec, data, model = kept[0]
    full = survey._as_it_is(spec, list(spec.adapters.by_site))
    wanted = by_hand(given, survey.replace(full, adapters=NO_ADAPTERS), data, model)
    assert {name: rank for name, rank in wanted.items() if rank} == ranks
    least = 1000
    with pytest.raises(MemoryLimitError):
        llmq.train(**{**given, "name": "none"})


def test_what_was_chosen_is_exported_and_kept_by_a_run_that_resumes(given, monkeypatch):
    whole = llmq.train(**given)
    ranks = ranks_of(whole.model_path)
    config = json.loads((whole.model_path / "adapter_config.json").read_text())
    assert config["r"] in ranks.values() and config["lora_alpha"] == 2 * config["r"]
    pattern = {name.split(".")[-1]: rank for name, rank in config["rank_pattern"].items()}
    assert {name: pattern.get(name, config["r"]) for name in ranks} == ranks
    alphas = {name.split(".")[-1]: alpha for name, alpha in config["alpha_pattern"].items()}
    assert alphas == {name: 2 * rank for name, rank in pattern.items()}
    folders = {"out_dir": "cut", "checkpoint_dir": "parts"}
    llmq.train(**{**given, **folders, "steps": 3})
    monkeypatch.setattr(prepare, "look", lambda *about: pytest.fail("looks again"))
    parts = llmq.train(**{**given, **folders, "out_dir": "parts-model", "continue": 3})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)
    assert load(parts.checkpoint_path)[0]["ranks"]["model.layers.0.mlp.down_proj"][0] == ranks.get("down_proj", 0)
    for change, says in (
        ({"lora_budget": 1400}, r"adapters budget: 1500 in the checkpoint, 1400 now"),
        ({"lora_rank": 4, "lora_budget": None}, r"lora_a: \[\d+, 48\] in the checkpoint, \[12, 48\] now"),
    ):
        with pytest.raises(UsageError, match=says):
            llmq.train(**{**given, **folders, "continue": 3, "overwrite": True, **change})


def test_what_the_run_recomputes_is_recomputed_where_that_frees_memory(given, monkeypatch):
    whole, plans, original = llmq.train(**{**given, "steps": 1}), [], survey._with_gradients
    monkeypatch.setattr(survey, "_with_gradients", lambda plan, *about: plans.append(plan) or original(plan, *about))
    monkeypatch.setattr(prepare, "look", lambda *about: survey.look(*about[:4], lambda: least, about[5]))
    least = 2**40
    again = llmq.train(**{**given, "steps": 1, "name": "again", "recompute_block": True})
    assert plans[0].spec.memory.flags == ("recompute_block",) and ranks_of(again.model_path) == ranks_of(
        whole.model_path
    )
    least = plans[0].total_bytes - 1
    parts = llmq.train(**{**given, "steps": 1, "name": "parts", "recompute_block": True})
    assert len(plans) > 2 and ranks_of(parts.model_path) == ranks_of(whole.model_path)


@pytest.mark.parametrize("more", [{"dora": True, "lora_alpha": 3}, {"lora_init": "pissa"}, {"base_dtype": "int8"}])
def test_it_goes_with_the_other_options(given, more):
    done = llmq.train(**{**given, **more, "merge": True})
    rest = {name: value for name, value in given.items() if not name.startswith("lora")}
    found = llmq.train(**{**rest, "name": "merged", "model": str(done.merged_path), "learning_rate": 0.0, "steps": 1})
    assert found.eval_loss == pytest.approx(done.eval_loss, rel=1e-5)
    if "lora_alpha" in more:
        assert json.loads((done.model_path / "adapter_config.json").read_text())["lora_alpha"] == 3


def test_many_ranks_take_over_what_the_first_one_chose(given, monkeypatch):
    options = {name: value for name, value in given.items() if name not in ("console", "grad_accumulation")}
    options |= {"batch_size": 1, "global_batch_size": 4, "deterministic": True, "steps": 2, "name": "two"}
    looked = []
    monkeypatch.setattr(prepare, "look", lambda *about: looked.append(1) or survey.look(*about))
    two = run_ranks(2, lambda world: train.run(Options.parse(options), console=io.StringIO(), ranks=Ranks(world)))
    assert len(looked) == 1 and len(set(ranks_of(two[0].model_path).values())) > 1


def test_what_cannot_be_chosen_is_refused(given):
    for change, says in (
        ({"lora_budget": None}, "chooses ranks within a number of parameters: add --lora-budget N"),
        ({"lora_rank": 4}, "--lora-budget 1500 is for --lora-rank auto, and this run has 4"),
        ({"lora_rank": None}, "--lora-budget 1500 is for adapters: add --lora-rank"),
        ({"lora_rank_pattern": "mlp=4"}, "--lora-rank-pattern mlp=4 chooses ranks, as --lora-rank auto does"),
        ({"lora_init": "eva"}, "--lora-init eva chooses ranks, as --lora-rank auto does"),
        ({"lora_budget": 71}, "--lora-budget 71 is less than the 72 parameters of the smallest adapter of rank 1"),
        ({"lora_targets": "all,lm_head"}, "that of lm_head is the embedding's too"),
        ({"dry_run": True}, "here nothing but a plan is made: give a number"),
    ):
        with pytest.raises(UsageError) as error:
            llmq.train(**{**given, **change})
        assert says in str(error.value)
    assert not Path("runs").exists()
