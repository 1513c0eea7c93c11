"""What runs export and what llmq-merge writes against PEFT, live: a run's loss, sums of adapters, folders of PEFT."""

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from adapter_cases import BASES, METHODS, VIRTUAL, merged, trained
from golden import families
from golden.peft_judge import (
    assert_same_logits,
    drawn,
    export_base,
    loaded_from,
    merged_with,
    model_in,
    moved,
    peft,
    tensors_of,
    torch,
)
from safetensors.numpy import load_file, save_file
from tiny_runs import T, on_weights

from llmq.adapters.merge import merge
from llmq.adapters.resolve import open_adapter
from llmq.data.tokens.token_file import TokenFile
from llmq.errors import DataError
from llmq.files.source import find_source
from llmq.model.config import from_folder

pytestmark = pytest.mark.judge


def loss_of(model, tokens, length):
    """The mean loss over the windows of a held-out file, each with this many tokens of text or the rest of them."""
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, length):
            ids = torch.tensor(tokens[start : start + length + 1], dtype=torch.int64)
            logits = model(input_ids=ids[None, :-1]).logits[0, 1 - len(ids) :]
            total += float(torch.nn.functional.cross_entropy(logits.double(), ids[1:], reduction="sum"))
    return total / (len(tokens) - 1)


@pytest.mark.sample("sweep")
@pytest.mark.parametrize("base", [base for base in BASES if base != "bf16"])
@pytest.mark.parametrize("method", METHODS)
def test_peft_has_the_loss_of_the_run_on_the_base_that_it_trained_on(method, base, tmp_path, monkeypatch):
    """On the model itself, and of a quantized one on what --base-only writes, from which pissa and olora are gone."""
    monkeypatch.chdir(tmp_path)
    done = trained({**on_weights(tmp_path, times=5), "steps": 5, "warmup": 0}, method, base)
    folder = Path("base") if base is None else merged(done.model_path, Path("held"), base_only=True).folder
    about = peft.PeftConfig.from_pretrained(done.model_path)
    if method in ("pissa", "olora") and base is not None:
        assert about.init_lora_weights == method
        about.init_lora_weights = True
    model = peft.PeftModel.from_pretrained(model_in(folder), done.model_path, config=about).eval()
    length = T - 3 * (method in VIRTUAL)
    tokens = TokenFile.open("eval.bin").tokens
    assert loss_of(model, tokens, length) == pytest.approx(done.eval_loss, abs=1e-5)


KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model, a folder of PEFT's for each kind of adapter, and what PEFT makes of the weights with each."""
    folder, config = tmp_path_factory.mktemp("kinds"), families.FAMILIES["qwen2"]
    export_base(config, folder / "base")
    changes = {}
    for number, (kind, about) in enumerate(KINDS.items()):
        made = peft.LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM", **about)
        model = peft.get_peft_model(model_in(folder / "base"), made)
        moved(model, 0.05, seed=number).save_pretrained(folder / kind)
        found = {name: p.detach().numpy().copy() for name, p in model.merge_and_unload().named_parameters()}
        base = load_file(folder / "base" / "model.safetensors")
        changes[kind] = {name: value - base[name] for name, value in found.items()}
    return folder, changes


@pytest.mark.parametrize("kinds", [*permutations(KINDS, 2), tuple(KINDS), tuple(reversed(KINDS))], ids="-".join)
def test_adapters_of_all_kinds_are_added_up_in_any_order(saved, kinds, tmp_path):
    folder, changes = saved
    weights = {folder / kind: 0.5 + number for number, kind in enumerate(kinds)}
    merge(find_source(str(folder / "base")), weights, tmp_path / "out", dtype=None, overwrite=False)
    base, found = (load_file(path / "model.safetensors") for path in (folder / "base", tmp_path / "out"))
    for name, value in base.items():
        wanted = value + sum(weights[folder / kind] * changes[kind][name] for kind in kinds)
        np.testing.assert_allclose(found[name], wanted, atol=3e-5, err_msg=name)


READ = {
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "one layer": {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["up_proj", "model.layers.0.self_attn.q_proj"]},
    "pattern": {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*layers\.1\..*"},
    "adalora": {"target_modules": ["q_proj"], "layers_to_transform": [0], "init_r": 3, "total_step": 9},
}


@pytest.mark.parametrize("family", ["qwen2", "qwen2.5_tied"])
@pytest.mark.parametrize("kind", READ)
def test_what_peft_saves_of_some_maps_is_read(kind, family, tmp_path):
    """lm_head comes with the matrix that it is added to, and tied models with the embedding."""
    config = families.FAMILIES[family]
    export_base(config, tmp_path / "base")
    made = peft.AdaLoraConfig if kind == "adalora" else peft.LoraConfig
    theirs = peft.get_peft_model(model_in(tmp_path / "base"), made(task_type="CAUSAL_LM", **READ[kind]))
    moved(theirs, 0.1, seed=0).save_pretrained(tmp_path / "theirs")
    source, parsed = find_source(str(tmp_path / "base")), from_folder(tmp_path / "base")
    read = open_adapter(tmp_path / "theirs", parsed)
    assert bool(read.copies) == (kind == "head") and read.check_base(source, 0) is None
    engine, (tokens, _) = loaded_from(tmp_path / "base", read.adapters, read.values), drawn(config, 0)
    assert_same_logits(engine, theirs.eval(), tokens)
    assert_same_logits(engine, model_in(merged_with(tmp_path, "theirs")), tokens)
    if kind == "head":
        (stored,) = tensors_of(tmp_path / "theirs")
        name = next(name for name in stored if name.endswith("lm_head.base_layer.weight"))
        stored[name] = stored[name] * 2
        save_file(stored, tmp_path / "theirs" / "adapter_model.safetensors")
        with pytest.raises(DataError, match=r"has another lm_head\.weight than .*base"):
            open_adapter(tmp_path / "theirs", parsed).check_base(source, 0)
