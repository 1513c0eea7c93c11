"""`Config`: options as a value, in YAML, and what a run would refuse of them."""

import pytest
from tiny_runs import tiny_options

import llmq
from llmq import Config, presets
from llmq.errors import StorageError, UsageError


def test_names_are_options_in_any_spelling():
    config = Config(model="m", max_seq_length=64, save_steps=5)
    assert config.options == {"model": "m", "seq_len": 64, "ckpt_interval": 5}
    with pytest.raises(UsageError, match="unknown option --learning-rat: did you mean --learning-rate"):
        Config(learning_rat=1)
    with pytest.raises(AttributeError):
        config.options = {}


def test_what_is_replaced_takes_back_its_alternatives():
    config = Config(model="m", steps=5, lora_rank=4)
    assert config.replace(epochs=2).options == {"model": "m", "lora_rank": 4, "epochs": 2}
    assert config.replace(steps=None, max_seq_length=9).options == {"model": "m", "lora_rank": 4, "seq_len": 9}
    assert config.replace(adapter="folder").options == {"model": "m", "steps": 5, "adapter": "folder"}
    assert config.options == {"model": "m", "steps": 5, "lora_rank": 4}


def test_yaml_and_back(tmp_path):
    config = Config(model=tmp_path / "m", steps=5, data=("a", "b"), learning_rate=1e-5, dora=True, lora_rank=4)
    text = config.to_yaml(tmp_path / "run.yaml")
    assert (tmp_path / "run.yaml").read_text() == text
    assert Config.from_yaml(tmp_path / "run.yaml").parse() == config.parse()
    with pytest.raises(StorageError, match=r"run.yaml: cannot be written .*: choose another folder"):
        config.to_yaml(tmp_path / "absent" / "run.yaml")
    with pytest.raises(UsageError, match="cannot be read"):
        Config.from_yaml(tmp_path / "absent.yaml")
    (tmp_path / "run.yaml").write_text("model: m\nstepz: 4\n")
    with pytest.raises(UsageError, match=r"run.yaml:2: unknown option --stepz"):
        Config.from_yaml(tmp_path / "run.yaml")


def test_what_would_be_refused_is_listed():
    assert Config(model="m").check() == []
    bad = Config(model="m", steps=-1, batch_size=2, global_batch_size=3).check()
    assert len(bad) == 2 and bad[0].startswith("--global-batch-size 3") and "--steps -1" in bad[1]
    assert Config(model="m", data="d", eval_file="e").check() != []
    assert Config().check() == [
        "--model is needed: Model to train: a folder, a hub name, or a preset such as Qwen2.5-0.5B."
    ]


def test_it_explains_all_options_as_a_run_prints_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = tiny_options(tmp_path) | {"dry_run": True}
    console = given.pop("console")
    llmq.train(**given, console=console)
    text = Config(**given).explain()
    assert f"{text}\n[" in console.getvalue() and text.startswith("[Options]\n  model ")
    assert Config(model="m").explain() == Config(model="m", seq_len=None).explain() != text
    few = Config(model="m", lora_rank=4, steps=9).explain(only_changes=True)
    lines = dict(line.split(" : ") for line in few.splitlines())
    found = {name.strip(): value for name, value in lines.items()}
    assert found["lora_rank"] == "4" and found["steps"] == "9" and "seq_len" not in found


@pytest.mark.parametrize("name", ["full", "lora", "qlora", "fp8", "tiny"])
def test_a_preset_is_a_configuration(name):
    config = getattr(presets, name)(model="m", steps=7)
    assert config.check() == [] and config.options["steps"] == 7 and config.options["model"] == "m"


def test_presets_ask_for_what_they_are_called():
    assert presets.lora(model="m").options["lora_rank"] == 16
    assert presets.lora(model="m", lora_rank=4).options["lora_rank"] == 4
    assert presets.qlora(model="m").options["base_dtype"] == "nf4"
    assert presets.fp8(model="m").options["matmul_dtype"] == "e4m3"
    assert presets.tiny().options["from_scratch"] is True and presets.tiny(epochs=1).options.get("steps") is None
