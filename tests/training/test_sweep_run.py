"""A run of --adapters: each adapter is trained, evaluated, saved and exported as a run of it alone would do it."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from in_process import run_ranks
from safetensors.numpy import load_file, save_file
from tiny_runs import T, number_stream, on_weights, weights_of, write_documents

import llmq
from llmq.data.tokens.token_file import TokenWriter
from llmq.engine.engine import Engine
from llmq.errors import DataError, MemoryLimitError, NonFiniteError, UsageError
from llmq.files.checkpoint import load
from llmq.options.parse import Options
from llmq.options.sweep import OWN, read_members
from llmq.report.plot import plot_runs
from llmq.report.read import read_log
from llmq.report.summary import summarize
from llmq.training import run_data, train
from llmq.training.ranks import Ranks

ENTRIES = {
    "low": {"lora_rank": 4, "seed": 3, "eval_file": "other-eval.bin"},
    "high": {"lora_rank": 8, "lora_alpha": 3, "learning_rate": 2e-2, "lora_dropout": 0.2, "batch_size": 2, "warmup": 2},
    "other-1": {
        "train_file": "other.bin",
        "lora_targets": "q_proj,v_proj,lm_head",
        "lora_rank": 2,
        "seed": 5,
        "lr_schedule": "cosine",
        "weight_decay": 0.0,
        "grad_clip": 0.1,
        "lora_plus_ratio": 4,
        "beta_2": 0.99,
    },
}


def write_sweep(entries, path="sweep.yaml"):
    """A file of --adapters, as YAML reads JSON."""
    listed = [{"name": name, **given} for name, given in entries.items()]
    Path(path).write_text(json.dumps(listed), "utf-8")
    return path


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Options of a run of three adapters on a model with weights."""
    monkeypatch.chdir(tmp_path)
    options = on_weights(tmp_path, times=5)
    rng = np.random.default_rng(1)
    for name, count in (("other", 23 * T + 1), ("other-eval", 3 * T + 1)):
        with TokenWriter(f"{name}.bin", vocab_size=97) as file:
            file.append((rng.zipf(1.3, count) % 97).astype(np.int32))
    changes = {"batch_size": 4, "steps": 6, "warmup": 0, "learning_rate": 5e-3, "adapters": write_sweep(ENTRIES)}
    return {**options, **changes}


def alone(given, name, **more):
    """The run of one of the adapters without the others."""
    rest = {key: value for key, value in given.items() if key != "adapters"}
    own = {"batch_size": 1, **ENTRIES[name]}
    return llmq.train(**{**rest, **own, "name": f"alone-{name}", "console": io.StringIO(), **more})


def adapter_of(path):
    return load_file(path / "adapter_model.safetensors")


def near(one, other):
    """Whether exported adapters are the same but for rounding; AdamW's first steps divide by small roots."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=1e-3, atol=2e-5, err_msg=name)


def test_each_is_what_a_run_of_it_alone_leaves(given):
    done = llmq.train(**given)
    assert done.exit_code == 0 and done.model_path == Path("runs/run/model") and done.warnings == ()
    log = read_log(done.log_path)
    assert [one.adapter for one in log.adapters] == list(ENTRIES) == list(done.adapters)
    for one in log.adapters:
        apart, result = alone(given, one.adapter), done.adapters[one.adapter]
        own = read_log(apart.log_path)
        for column in ("step", "loss", "norm", "lr", "trained_tokens"):
            np.testing.assert_allclose(one.train[column], own.train[column], rtol=2e-5, err_msg=column)
        for column in ("step", "loss", "train_loss", "trained_tokens"):
            np.testing.assert_allclose(one.eval[column], own.eval[column], rtol=2e-5, err_msg=column)
        near(adapter_of(result.path), adapter_of(apart.model_path))
        configs = [(path / "adapter_config.json").read_text() for path in (result.path, apart.model_path)]
        assert configs[0] == configs[1]
        assert result.train_loss == pytest.approx(apart.train_loss, rel=2e-5)
        assert result.eval_loss == pytest.approx(apart.eval_loss, rel=2e-5)
    finals = [one.train["loss"][-1] for one in log.adapters]
    assert len({round(loss, 4) for loss in finals}) == 3


def test_adapters_train_by_sgd_as_each_would_alone(given):
    """Each with its own rate and decay."""
    sgd = {"optimizer": "sgd", "momentum": 0.9, "nesterov": True, "learning_rate": 0.05}
    own = {"low": {**ENTRIES["low"], "weight_decay": 0.1}, "high": {**ENTRIES["high"], "learning_rate": 0.1}}
    write_sweep(own)
    done = llmq.train(**{**given, **sgd, "batch_size": 3})
    for name, entry in own.items():
        near(adapter_of(done.adapters[name].path), adapter_of(alone(given, name, **{**sgd, **entry}).model_path))
    assert done.adapters["low"].train_loss < read_log(done.log_path).adapters[0].train["loss"][0]


def test_a_file_of_one_is_that_adapter(given):
    write_sweep({"low": ENTRIES["low"]})
    done = llmq.train(**{**given, "batch_size": 2, "recompute_block": True})
    apart = alone(given, "low", batch_size=2)
    assert done.eval_loss == pytest.approx(apart.eval_loss, rel=2e-5) == done.adapters["low"].eval_loss
    near(adapter_of(done.adapters["low"].path), adapter_of(apart.model_path))


@pytest.mark.slow
def test_a_stream_of_one_adapter_resumes_where_it_was(given, monkeypatch):
    real = run_data.open_data

    def opened(options, vocab_size, seed, **about):
        found = real(options, vocab_size, seed, **about)
        return replace(found, train=number_stream(T, vocab_size)) if seed == 5 else found

    monkeypatch.setattr(run_data, "open_data", opened)
    whole = llmq.train(**{**given, "ckpt_interval": 3, "ckpt_keep_n": 0})
    state, _ = load(Path("runs/run/checkpoints/step-00000003"))
    assert state["stream"].keys() == {"other-1"} and state["stream"]["other-1"]["overall"] > 0
    weights = weights_of(whole.checkpoint_path)
    parts = llmq.train(**{**given, "continue": 3, "overwrite": True, "out_dir": "parts"})
    assert weights_of(parts.checkpoint_path) == weights and parts.steps == 6


@pytest.mark.slow
def test_a_plan_that_does_not_fit_names_the_smallest_batch_of_all(given):
    write_sweep({"a": {"lora_rank": 4}, "b": {"lora_rank": 2}})
    rest = {key: value for key, value in given.items() if key not in ("train_file", "eval_file", "model")}
    plan = {"model": "Qwen2.5-0.5B", "from_scratch": True, "dry_run": True, "device": "cuda", "gpu": "4GiB"}
    with pytest.raises(MemoryLimitError, match=r"\n1 .* --batch-size 2 --recompute-"):
        llmq.train(**{**rest, **plan, "model_dtype": "bf16", "batch_size": 64, "seq_len": 1024})


def test_the_run_says_what_it_trains(given):
    done = llmq.train(**given)
    said = given["console"].getvalue()
    assert "3 adapters at once: " in said
    table = said.split("[Adapters]\n")[1].splitlines()[:4]
    assert table[0].split() == ["name", "rank", "alpha", "maps", "parameters", "rows", "rate", "seed", "epochs", "data"]
    assert table[2].split()[:3] == ["high", "8", "3"] and table[2].split()[5:8] == ["2", "0.02", "0"]
    assert table[3].split() == ["other-1", "2", "4", "3", "626", "1", "0.005", "5", "0.52", "other.bin"]
    assert "[A] step     6 | loss | low " in said and "[A] step     6 | eval | low " in said
    assert "Exported: runs/run/model/other-1" in said
    other = done.adapters["other-1"]
    last = f"  other-1: training loss {other.train_loss:.4f}, evaluation loss {other.eval_loss:.4f}"
    assert said.splitlines()[-1] == last
    header = json.loads(done.log_path.read_text().splitlines()[0])
    assert header["adapters"]["high"]["lora_rank"] == "8"
    steps = [json.loads(line) for line in done.log_path.read_text().splitlines()]
    train = [line for line in steps if line["type"] == "train"]
    tokens = sum(one["trained_tokens"] for one in train[0]["adapters"].values())
    assert train[0]["trained_tokens"] == tokens
    lines = summarize([read_log(done.log_path)], 3)
    assert [line.label for line in lines] == ["run/low", "run/high", "run/other-1"]
    assert plot_runs([read_log(done.log_path)], Path("plot.svg")).is_file()
    drawn = Path("plot.svg").read_text()
    assert "run: 3 adapters" in drawn and all(f"run/{name}" in drawn for name in ENTRIES)


def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(given):
    whole = llmq.train(**given)
    folders = {"out_dir": "cut", "checkpoint_dir": "parts"}
    llmq.train(**{**given, **folders, "ckpt_interval": 3, "ckpt_keep_n": 0})
    parts = llmq.train(**{**given, **folders, "out_dir": "parts-model", "continue": 3, "overwrite": True})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)
    assert parts.adapters == {
        name: type(one)(one.train_loss, one.eval_loss, Path("parts-model") / name)
        for name, one in whole.adapters.items()
    }
    for name, one in whole.adapters.items():
        left, right = adapter_of(one.path), adapter_of(parts.adapters[name].path)
        assert all(np.array_equal(left[key], right[key]) for key in left)
    _, read = load(whole.checkpoint_path)
    held = {name.partition(":")[2] for name in read.tensors}
    assert "layers.0.attention.qkv.adapters.low.lora_a" in held and not [n for n in held if n.endswith(".weight")]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"low": {"lora_rank": 3}}, r"adapters\.low\.lora_a: \[12, 48\] in the checkpoint, \[9, 48\] now"),
        pytest.param(
            {"low": {"lora_rank": 4, "seed": 4}},
            r"adapters low seed: 3 in the checkpoint, 4 now",
            marks=pytest.mark.slow,
        ),
        ({"high": {**ENTRIES["high"], "train_file": "other.bin"}}, r"data high training samples: 40 in the checkpoint"),
    ],
)
def test_another_sweep_is_not_continued(given, change, says):
    llmq.train(**{**given, "steps": 2})
    write_sweep({**ENTRIES, **change})
    with pytest.raises(UsageError, match=says):
        llmq.train(**{**given, "continue": True, "overwrite": True})


def test_rates_may_change_when_a_run_resumes(given):
    llmq.train(**{**given, "steps": 2})
    write_sweep({**ENTRIES, "low": {**ENTRIES["low"], "learning_rate": 0.0}})
    done = llmq.train(**{**given, "continue": True, "overwrite": True, "steps": 3})
    assert read_log(done.log_path).adapters[0].train["lr"].tolist() == [5e-3, 5e-3, 0]


@pytest.fixture
def documents(given):
    """Documents of 2 to 30 tokens, of which some are not trained."""
    rng = np.random.default_rng(0)
    for name, count in (("docs", 60), ("docs-eval", 12)):
        write_documents(name, count, rng)
    return {**given, "adapters": "documents.yaml", "packing": True, "eval_file": None}


@pytest.mark.slow
def test_packed_and_padded_rows_and_windows_beside_each_other(documents):
    entries = {
        "packed": {"train_file": "docs.bin", "eval_file": "docs-eval.bin", "lora_rank": 4},
        "padded": {"train_file": "docs.bin", "packing": "false", "lora_rank": 2, "batch_size": 2},
        "windows": {"train_file": "other.bin", "packing": "windows", "lora_rank": 2, "eval_file": "eval.bin"},
    }
    write_sweep(entries, "documents.yaml")
    done = llmq.train(**documents)
    text = documents["console"].getvalue()
    assert "packed: layout" in text and "windows: layout" in text
    rest = {key: value for key, value in documents.items() if key != "adapters"}
    for log in read_log(done.log_path).adapters:
        own = {"batch_size": 1, **entries[log.adapter], "name": log.adapter}
        apart = llmq.train(**{**rest, **own})
        found = read_log(apart.log_path)
        np.testing.assert_allclose(log.train["loss"], found.train["loss"], rtol=2e-5)
        assert np.array_equal(log.train["trained_tokens"], found.train["trained_tokens"])
        np.testing.assert_allclose(log.eval["loss"], found.eval["loss"], rtol=2e-5)
        near(adapter_of(done.adapters[log.adapter].path), adapter_of(apart.model_path))
    assert done.adapters["padded"].eval_loss is None and not math.isnan(done.eval_loss)
    assert len({tuple(log.train["trained_tokens"]) for log in read_log(done.log_path).adapters}) == 3


@pytest.mark.slow
def test_epochs_are_those_of_the_adapter_that_has_most_to_see(given):
    done = llmq.train(**{**given, "steps": None, "epochs": 1})
    assert done.steps == 20  # 40 windows of one adapter, 2 in a step; 23 of another
    assert " 1.00  train.bin" in given["console"].getvalue() and "1.74  other.bin" in given["console"].getvalue()


def test_an_adapter_is_trained_on(given):
    first = llmq.train(**given)
    folder = str(first.adapters["high"].path)
    write_sweep({"again": {"adapter": folder, "batch_size": 2}, "new": {"lora_rank": 4, "batch_size": 2}})
    again = llmq.train(**{**given, "name": "again", "learning_rate": 0.0, "steps": 1, "eval_num_steps": 0})
    assert again.adapters["again"].eval_loss == pytest.approx(first.adapters["high"].eval_loss, rel=1e-6)
    left, right = adapter_of(again.adapters["again"].path), adapter_of(Path(folder))
    assert all(np.array_equal(left[name], right[name]) for name in right)
    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    (Path(folder) / "adapter_config.json").write_text(json.dumps({**config, "r": 5}))
    with pytest.raises(DataError, match="does not fit the model"):
        llmq.train(**{**given, "name": "bad"})


def test_an_adapter_that_shares_no_base_is_refused(given):
    rest = {key: value for key, value in given.items() if key != "adapters"}
    first = llmq.train(**{**rest, "lora_rank": 4, "dora": True, "name": "dora", "steps": 1})
    write_sweep({"again": {"adapter": str(first.model_path)}, "new": {"lora_rank": 4}})
    with pytest.raises(UsageError, match=r"again: the adapter in .* has magnitudes, which does not go with --adapters"):
        llmq.train(**given)


def test_one_that_is_ruined_is_not_exported_and_the_others_are(given, monkeypatch):
    real = Engine.update

    def broken(self, *about):
        done = real(self, *about)
        each = [
            one._replace(applied=n != 1, loss=math.nan if n == 1 else one.loss) for n, one in enumerate(done.groups)
        ]
        return type(done).of(each)

    monkeypatch.setattr(Engine, "update", broken)
    done = llmq.train(**{**given, "steps": 11})
    assert done.exit_code == NonFiniteError.exit_code
    assert done.adapters["high"].path is None and not Path("runs/run/model/high").exists()
    assert done.adapters["low"].path.is_dir() and done.adapters["other-1"].path.is_dir()
    assert "adapter high has not changed in the last 10 steps up to step 10" in done.warnings[0]
    assert "Adapter high is not exported: the last step, 11, changed nothing" in done.warnings[-1]
    assert "Step 3 changed nothing of high: " in given["console"].getvalue()
    anyway = llmq.train(**{**given, "steps": 11, "continue": True, "export_anyway": True})
    assert anyway.exit_code == 0 and anyway.adapters["high"].path.is_dir()


def test_one_that_its_last_update_ruins_is_found_without_an_evaluation(given):
    del given["eval_file"], given["eval_every_n_steps"]
    write_sweep({"low": {"lora_rank": 4}, "high": {"lora_rank": 4, "learning_rate": 1e30}})
    done = llmq.train(**{**given, "steps": 1})
    assert done.exit_code == NonFiniteError.exit_code
    assert done.adapters["high"].path is None and done.adapters["low"].path.is_dir()
    assert done.warnings[0].startswith("adapter high: --learning-rate 1e+30 moves weights by up to that much")
    assert "Adapter high is not exported: after the last step the loss of a batch is " in done.warnings[-1]


def test_all_that_are_refused_end_the_run(given, monkeypatch):
    real = Engine.update

    def broken(self, *about):
        done = real(self, *about)
        return type(done).of([one._replace(applied=False) for one in done.groups])

    monkeypatch.setattr(Engine, "update", broken)
    with pytest.raises(NonFiniteError, match="not finite in the last 10 steps"):
        llmq.train(**{**given, "steps": 20})


@pytest.mark.slow
def test_ranks_train_as_one_does(given):
    """A batch of twice the rows on one rank is what two ranks see, row for row of each adapter."""
    write_sweep({"a": {"lora_rank": 4}, "b": {"lora_rank": 2, "train_file": "other.bin", "seed": 3}})
    options = {key: value for key, value in given.items() if key != "console"} | {"eval_every_n_steps": 3}

    def trained_on(size, **more):
        values = {**options, "name": f"on{size}", "batch_size": 4 // size, "global_batch_size": 8, **more}
        values.pop("grad_accumulation")

        def work(world):
            return train.run(Options.parse(values), console=io.StringIO(), ranks=Ranks(world))

        return run_ranks(size, work)[0]

    one, two = trained_on(1), trained_on(2, zero_level=2)
    for name, found in two.adapters.items():
        near(adapter_of(found.path), adapter_of(one.adapters[name].path))
        assert found.eval_loss == pytest.approx(one.adapters[name].eval_loss, rel=1e-5)
    for left, right in zip(read_log(one.log_path).adapters, read_log(two.log_path).adapters, strict=True):
        np.testing.assert_allclose(left.train["loss"], right.train["loss"], rtol=1e-5)


@pytest.mark.slow
def test_a_quantized_base_and_fp8(given):
    changes = {"base_dtype": "nf4", "matmul_dtype": "e4m3", "model_dtype": "bf16"}
    done = llmq.train(**{**given, **changes, "log_fp8_every": 2})
    assert done.exit_code == 0
    finals = [one.train["loss"] for one in read_log(done.log_path).adapters]
    assert all(np.isfinite(losses).all() for losses in finals)
    folders = {"out_dir": "cut", "checkpoint_dir": "parts"}
    llmq.train(**{**given, **changes, **folders, "ckpt_interval": 3, "ckpt_keep_n": 0})
    more = {**folders, "out_dir": "parts-model", "continue": 3, "overwrite": True}
    parts = llmq.train(**{**given, **changes, **more})
    whole = llmq.train(**{**given, **changes, "name": "whole"})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ("- {name: a, lora_rank: 4}\n- {name: A, lora_rank: 4}", r":2: the name A is taken by sweep\.yaml:1: use ano"),
        ("- {name: a, lora_rnk: 4}", r"sweep\.yaml:1: unknown option --lora-rnk: did you mean --lora-rank\?"),
        ("- {lora_rank: 4}", r":1: an adapter has no name: use letters"),
        (
            "- {name: ../a, lora_rank: 4}",
            r":1: name '\.\./a' is no folder's: use letters, digits, - and _, 100 at most",
        ),
        ("a: 3", r"--adapters sweep\.yaml must be a list with entries such as `- {name: low"),
        ("- 3", r":1: an entry has keys: write it as `- {name"),
        ("", r"must be a list"),
        ("- {name: a, lora_rank: [1, {b: 2}]}", r":1: keys are flat"),
        ("- {name: a, seed: 1, seed: 2}", r":1: seed is given a second time"),
        ("- {name: a, lora_rank: 4, steps: 4}", r":1: --steps is of the whole run: give it on the command line"),
        ("- {name: a, lora_rank: 4, dora: true}", r":1: --dora does not go with --adapters: leave it out"),
        ("- {name: a, lora_rank: 4, learning_rate: -1}", r":1: a: --learning-rate -1 is below the least value: use 0"),
        ("- {name: a, lora_rank: auto}", r":1: --lora-rank auto does not go with --adapters: use another value"),
        ("- {name: a, lora_init: pissa, lora_rank: 2}", r":1: --lora-init pissa does not go with --adapters"),
        ("- {name: a}", r":1: a has no rank: add lora_rank, there or to the command"),
        ("- {name: a, lora_rank: 4, train_file: no.bin}", r"no\.bin"),
        ("- {name: a, lora_rank: 99999}", r"99999 is larger than model\.layers\.0\.self_attn\.q_proj"),
        ("- {name: a, lora_rank: 4, adapter: x}", r"a: --lora-rank 4 is of a new adapter, and --adapter continues one"),
        (
            "\n".join(f"- {{name: a{n}, lora_rank: 4}}" for n in range(5)),
            r"--batch-size 4 has no .* 5 adapters: use 5$",
        ),
        ("- {name: a, lora_rank: 4, batch_size: 3}", r"--batch-size 4, of which entries ask for 3, .*: use 3$"),
        ("- {name: a, lora_rank: 4, batch_size: x}", r":1: --batch-size x is no number of rows: use 1 or more"),
        ("- {name: a, lora_rank: 4", r"sweep\.yaml is not YAML"),
    ],
)
def test_a_bad_file_is_one_clear_message(given, entries, says):
    Path("sweep.yaml").write_text(entries, "utf-8")
    with pytest.raises((UsageError, DataError), match=says):
        llmq.train(**given)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dora": True}, r"--dora does not go with --adapters, which trains A and B .*: leave it out"),
        ({"adalora": True}, "--adalora does not go with --adapters"),
        ({"lora_rank": "auto", "lora_budget": 100}, "--lora-budget 100 does not go with --adapters"),
        ({"train_also": "norm"}, "--train-also norm does not go with --adapters"),
        ({"lora_bias": "all"}, "--lora-bias all does not go with --adapters"),
        ({"lora_init": "eva"}, "--lora-init eva does not go with --adapters"),
        ({"ia3": "k_proj"}, "--ia3 k_proj does not go with --adapters"),
        ({"prompt_tuning": 4}, "--prompt-tuning 4 does not go with --adapters"),
        ({"train_only": "norm"}, "--train-only norm does not go with --adapters"),
        ({"merge": True}, "--merge does not go with --adapters, .*: merge the one that you choose with llmq-merge"),
        ({"adapter": "x"}, "--adapter x does not go with --adapters, .*: name the folder in its entry of the file"),
        ({"fit": True}, "--fit chooses the size of a micro-batch, whose rows --adapters shares out"),
        ({"sample_prompts": "x"}, "--sample-prompts x completes by one adapter"),
        ({"seq_tiles": 2}, "--seq-tiles 2: --adapters gives each row"),
        ({"neftune_alpha": 5.0}, r"--neftune-alpha 5 adds one noise to all rows of --adapters"),
        ({"fused_update": True, "grad_accumulation": 1, "grad_clip": 0}, "--fused-update: --adapters updates each"),
        ({"adapters": "none.yaml"}, r"--adapters none\.yaml cannot be read: No such file"),
    ],
)
def test_what_cannot_be_combined_is_refused(given, options, says):
    with pytest.raises(UsageError, match=says):
        llmq.train(**{**given, **options})


def test_an_adapter_does_not_take_the_folder_of_checkpoints(given):
    write_sweep({"checkpoints": {"lora_rank": 4}, "b": {"lora_rank": 2}})
    says = (
        r"sweep\.yaml:1: checkpoints is exported to runs/run/checkpoints, which is --checkpoint-dir: use another name"
    )
    with pytest.raises(UsageError, match=says):
        llmq.train(**given, out_dir="runs/run")


def test_options_of_the_command_hold_where_an_entry_does_not_say_otherwise(given):
    write_sweep({"a": {}, "b": {"lora_rank": 2}, "c": {"warmup_ratio": 0.5}, "d": {"lora_targets": "mlp"}})
    done = llmq.train(**{**given, "lora_rank": 4, "warmup": 2, "lora_targets": "attention", "steps": 4})
    configs = {name: json.loads((one.path / "adapter_config.json").read_text()) for name, one in done.adapters.items()}
    assert {name: (config["r"], config["lora_alpha"]) for name, config in configs.items()} == {
        **dict.fromkeys(("a", "c", "d"), (4, 8)),
        "b": (2, 4),
    }
    assert sorted(configs["d"]["target_modules"]) == ["down_proj", "gate_proj", "up_proj"]
    assert sorted(configs["a"]["target_modules"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_the_example_of_the_manual_is_a_file_that_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manual = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text("utf-8")
    section = manual.split("## Many adapters at once\n")[1].split("\n## ")[0]
    Path("sweep.yaml").write_text(section.split("```yaml\n")[1].split("```")[0], "utf-8")
    options = {"model": "Qwen/Qwen2.5-7B", "data": "gsm8k", "lora_rank": 16, "adapters": "sweep.yaml", "batch_size": 6}
    members = {one.name: one.options.to_flat() for one in read_members(Options.parse({**options, "steps": 500}))}
    assert [(name, one["lora_rank"], one["batch_size"]) for name, one in members.items()] == [
        ("low", 8, 2),
        ("high", 32, 2),
        ("math", 16, 2),
    ]
    assert members["math"]["data"] == ["math.jsonl"] and members["low"]["data"] == ["gsm8k"]
    listed = {name for row in section.split("| of an adapter")[1].splitlines()[2:8] for name in row.split("`")[1::2]}
    assert listed - {"--batch-size"} == set(OWN)


def test_a_dry_run_plans_without_data(given):
    write_sweep({"a": {"lora_rank": 4}, "b": {"lora_rank": 2}})
    rest = {key: value for key, value in given.items() if key not in ("train_file", "eval_file")}
    done = llmq.train(**{**rest, "dry_run": True, "device": "cuda", "gpu": "H200", "model_dtype": "bf16"})
    assert done.plan.spec.batch_size == 4 and not Path("runs").exists()
    said = given["console"].getvalue()
    assert "2 adapters at once" in said and "adapter a " in said.split("On disk: ")[1]


def test_an_adapter_of_a_sweep_is_one_like_any_other(given):
    done = llmq.train(**given)
    folder = done.adapters["high"].path
    rest = {key: value for key, value in given.items() if key != "adapters"}
    one = llmq.train(**{**rest, "name": "one", "adapter": str(folder), "learning_rate": 0.0, "steps": 1})
    assert one.eval_loss == pytest.approx(done.adapters["high"].eval_loss, rel=1e-5)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert not [name for name in tensors if "high" in name]
    save_file(tensors, folder / "copy.safetensors")
