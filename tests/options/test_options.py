"""Options: spellings, defaults, limits, contradictions, and that the effective options feed back."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from llmq.cli import train
from llmq.errors import UsageError
from llmq.options.field import INSTEAD, flag, plain, written
from llmq.options.parse import SECTIONS, Options, changed, continue_command, descriptions, spellings

NEEDED = {"model": "Qwen/Qwen2.5-0.5B", "train_file": "train.bin"}


def parse(**given):
    return Options.parse({**NEEDED, **given})


def problems(**given):
    """The lines of the error that these options are."""
    with pytest.raises(UsageError) as error:
        parse(**given)
    return [line.strip() for line in str(error.value).splitlines()]


def test_what_is_needed_is_said():
    with pytest.raises(UsageError, match=r"(?s)--model is needed.*--train-file is needed"):
        Options.parse({})


def test_adapters_have_defaults_of_their_own():
    flat = parse(lora_rank=16).to_flat()
    assert (flat["learning_rate"], flat["master_dtype"], flat["grad_accum_dtype"]) == (2e-4, "fp32", "fp32")
    assert (flat["lora_alpha"], flat["lora_targets"], flat["lora_bias"], flat["lora_init"]) == (
        32,
        "all",
        "none",
        "kaiming",
    )
    given = {"learning_rate": 1e-3, "master_dtype": "bf16", "lora_alpha": 5}
    flat = parse(adapter="a", **{**given, "lora_alpha": None}).to_flat()
    assert (flat["learning_rate"], flat["master_dtype"], flat["lora_targets"]) == (1e-3, "bf16", None)
    assert parse(lora_rank=16, **given).to_flat()["lora_alpha"] == 5
    flat = parse(lora_rank=12, adalora=True, adalora_interval=5).to_flat()
    said = [flat[f"adalora_{key}"] for key in ("target_rank", "warmup", "final", "interval", "beta1", "orth_reg")]
    assert said == [8, 0, 0, 5, 0.85, 0.5] and flat["lora_init"] is None
    flat = parse(ia3="k_proj").to_flat()
    assert (flat["learning_rate"], flat["master_dtype"], flat["lora_targets"]) == (3e-3, "fp32", None)
    for method in ("prompt_tuning", "prefix_tuning"):
        flat = parse(**{method: 20}).to_flat()
        assert (flat["learning_rate"], flat["master_dtype"]) == (2e-4, "fp32")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lora_dropout": 0.1}, "--lora-dropout 0.1 is for adapters: add --lora-rank"),
        ({"rslora": True}, "--rslora is for adapters: add --lora-rank"),
        ({"lora_rank": 4, "adapter": "a"}, "--lora-rank 4 is of a new adapter, and --adapter continues one"),
        ({"adapter": "a", "lora_targets": "mlp"}, "--lora-targets mlp is said by --adapter a: leave it out"),
        ({"lora_rank": 4, "train_only": "*.bias"}, "--train-only trains a part of the model, and adapters"),
        ({"ia3": "mlp", "lora_rank": 4}, "--ia3 mlp trains gains, and --lora-rank is of another method"),
        ({"ia3": "mlp", "dora": True}, "--ia3 mlp trains gains, and --dora is of another method"),
        ({"prefix_tuning": 9, "prompt_tuning": 9}, "--prompt-tuning 9 trains virtual tokens alone, and --prefix-"),
        ({"prefix_tuning": 9, "lora_rank": 4}, "--prefix-tuning 9 trains virtual tokens alone, and --lora-rank is"),
        ({"prompt_tuning": 9, "adapter": "a"}, "--prompt-tuning 9 trains virtual tokens alone, and --adapter is"),
        ({"prompt_tuning": 9, "ia3": "mlp"}, "--prompt-tuning 9 trains virtual tokens alone, and --ia3 is of another"),
        ({"prefix_tuning": 9, "train_also": "norm"}, "--prefix-tuning 9 trains virtual tokens alone, and --train-also"),
        ({"adapter": "a", "lora_rank_pattern": "mlp=4"}, "--lora-rank-pattern mlp=4 is said by --adapter a"),
        ({"adalora": True}, "--adalora is for adapters: add --lora-rank"),
        ({"lora_rank": 4, "adalora_warmup": 3}, "--adalora-warmup 3 is for --adalora: add that"),
        ({"lora_rank": 4, "adalora": True, "dora": True}, "--dora does not go with --adalora"),
    ],
)
def test_options_of_adapters_go_together(given, says):
    (problem,) = problems(**given)
    assert problem.startswith(says)


def test_an_option_is_quoted_as_typed():
    said = [written(name, value) for name, value in {"dora": True, "packing": False, "lora_alpha": 8.0}.items()]
    assert said == ["--dora", "--no-packing", "--lora-alpha 8"]
    assert [written("lr", value) for value in (2e-4, 1 / 3)] == ["--lr 0.0002", "--lr 0.3333333333333333"]
    before, now = parse().to_flat(), parse(lora_rank=8, dora=True).to_flat()
    assert "--dora off to on" in changed(before, now) and "--lora-rank not set to 8" in changed(before, now)


def test_sections_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        parse().data.batch_size = 8


@pytest.mark.parametrize("spelling", ["learning_rate", "learning-rate", "--learning-rate", "lr"])
@pytest.mark.parametrize("value", [3e-4, "3e-4"])
def test_spellings_and_text_are_read_alike(spelling, value):
    assert Options.parse({**NEEDED, spelling: value}) == parse(learning_rate=0.0003)


@pytest.mark.parametrize(
    ("alias", "key", "value"),
    [
        ("per_device_train_batch_size", "batch_size", 8),
        ("batch", "batch_size", 8),
        ("gradient_checkpointing", "recompute_block", True),
        ("activation_checkpointing", "recompute_block", True),
        ("resume_from_checkpoint", "continue", 7),
        ("model_revision", "revision", "main"),
    ],
)
def test_aliases_reach_their_option_and_cannot_be_given_beside_it(alias, key, value):
    flat = parse(**{alias: value}, eval_file="eval.bin").to_flat()
    assert flat[key] == value
    assert flat == parse(**{key: value}, eval_file="eval.bin").to_flat()
    (problem,) = problems(**{alias: value, key: value}, eval_file="eval.bin")
    assert flag(alias) in problem and flag(key) in problem


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("fsdp", "full_shard", "use --zero-level 3,"),
        ("nodes", 2, "llmq-launch --nnodes 2 on each machine"),
        ("use_lora", True, "--lora-rank 16"),
        ("qlora", "true", "--lora-rank 16 --base-dtype nf4"),
        ("load-in-4bit", True, "--lora-rank 16 --base-dtype nf4"),
        ("load_in_8bit", True, "--lora-rank 16 --base-dtype int8"),
        ("fp16", True, "--model-dtype bf16"),
        ("optim", "adamw_8bit", "--opt-m-dtype int8 --opt-v-dtype int8"),
        ("deepspeed_config", "ds.json", "--zero-level 3.* --offload-optimizer"),
        ("bf16", "off", "use --model-dtype fp32"),
        ("assistant-only-loss", True, "use --train-on assistant or all"),
    ],
)
def test_a_name_of_another_trainer_is_answered_by_ours(tmp_path, name, value, says):
    (problem,) = problems(**{name: value})
    assert problem.startswith(f"unknown option {flag(name)}: ") and re.search(says, problem)
    ours = re.findall(r"--[a-z][\w-]+", problem.partition(": ")[2])
    assert {plain(one) for one in ours} <= {*spellings(), "nnodes"}
    (tmp_path / "run.yaml").write_text(f"{name}: {value}\n")
    assert f"run.yaml:1: {problem}" in "".join(problems(config=tmp_path / "run.yaml"))
    for nothing in (None, "none", *((True, "true") if name == "bf16" else (False, "false"))):
        assert parse(**{name: nothing}) == parse()


def test_no_name_means_two_options_and_all_have_help():
    names = [name for d in descriptions().values() for name in (d.key, *d.aliases)] + list(INSTEAD)
    assert len(names) == len(set(names))
    assert [d.key for d in descriptions().values() if not d.help.endswith(".")] == []
    assert {d.section for d in descriptions().values()} == set(SECTIONS)


def test_everything_wrong_is_said_at_once():
    lines = problems(
        bacth_size=3,
        batch_size=0,
        seq_len=True,
        steps="1.5",
        learning_rate="nan",
        model_dtype="bp16",
        beta_1=1,
        out_dir="",
    )
    assert lines == [
        "options that need a change:",
        "unknown option --bacth-size: did you mean --batch-size?",
        "--batch-size 0 is below the least value: use 1 or more",
        "--seq-len True: a number is needed, not true or false",
        "--model-dtype bp16 is not one of bf16, fp32: did you mean bf16?",
        "--steps 1.5 is not a whole number: Optimizer steps.",
        "--learning-rate nan is not a finite number",
        "--beta-1 1 is too large: use less than 1",
        "--out-dir '' is empty: give a path, or leave the option out",
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"init_proj_to_zero": True}, "--from-scratch"),
        ({"tokenizer": "org/name"}, "add --from-scratch, or leave it out"),
        ({"vocab_size": "tokenizer"}, "--vocab-size tokenizer is for weights that are not loaded"),
        ({"vocab_size": "0", "from_scratch": True}, "--vocab-size 0 is "),
        ({"vocab_size": "large", "from_scratch": True}, "--vocab-size large is not "),
        ({"global_batch_size": 30}, "not a multiple of --batch-size 4: use 28 or 32"),
        ({"global_batch_size": 3}, "not a multiple of --batch-size 4: use 4"),
        ({"global_batch_size": 32, "grad_accumulation": 4}, "asks for 8 micro-batches"),
        ({"gradient_dtype": "e5m2"}, "and not for bf16"),
        ({"fp8_scaling": "current", "matmul_dtype": "fp32"}, "and not for fp32"),
        ({"fp8_fallback": True}, "--fp8-fallback is for e4m3 matmuls"),
        ({"fp8_fallback": True, "matmul_dtype": "e4m3", "log_fp8_every": 0}, "--log-fp8-every, which is 0"),
        ({"log_fp8_every": 10}, "--log-fp8-every 10 is for e4m3 matmuls"),
        ({"gradient_compression": "e4m3", "reduce_dtype": "bf16"}, "--reduce-dtype bf16 as well: use one of them"),
        ({"head_dtype": "e4m3"}, "--head-dtype e4m3 is for e4m3 matmuls"),
        ({"bf16_layers": "1,1"}, "--bf16-layers 1,1 is for e4m3 matmuls"),
        ({"bf16_layers": "1,1", "fp8_layers": "mlp", "matmul_dtype": "e4m3"}, "give one of them"),
        ({"steps": 10, "epochs": 1}, "give one of them"),
        ({"warmup": 6, "steps": 10, "cooldown": 5, "final_lr_fraction": 0}, "need 11 steps, but the run has 10"),
        ({"lr_schedule": "wsd"}, "set --cooldown"),
        ({"cooldown": 5, "final_lr_fraction": 1}, "--final-lr-fraction 1, which is the peak"),
        ({"min_lr": 1e-6}, "never reached by --lr-schedule constant"),
        ({"min_lr": 1e-3, "lr_schedule": "cosine"}, "--min-lr 0.001 is above the --learning-rate 1e-05"),
        ({"min_lr": 1e-5, "cooldown": 5}, "--min-lr 1e-05, which is the peak"),
        ({"min_lr": 1e-6, "final_lr_fraction": 0.2, "lr_schedule": "linear"}, "the second asks for 2e-06"),
        ({"min_lr": 1e-6, "learning_rate": 0, "lr_schedule": "linear"}, "is above the --learning-rate 0"),
        ({"warmup": 5, "warmup_ratio": 0.1, "steps": 100}, "--warmup-ratio 0.1 disagree: the second asks for 10"),
        ({"warmup_ratio": 0.6, "steps": 10, "cooldown": 5}, "--warmup-ratio 0.6 (6 steps) and --cooldown 5 need 11"),
        ({"model_dtype": "fp16"}, "--model-dtype fp16: fp16 needs its loss scaled"),
        ({"matmul_dtype": "float16"}, "--matmul-dtype float16: fp16 needs its loss scaled, which llmq does not do yet"),
        ({"memcpy_send_recv": True}, "exchanged: add --all-to-all-reduce, or leave it out"),
        ({"gpus": 2, "device": "cpu"}, "--device is cpu: llmq-launch --procs 2 starts processes for the CPU"),
        ({"ray_address": "auto"}, "--ray-address auto is for a Ray cluster: add --launcher ray, or leave it out"),
        ({"name": "a/b"}, "cannot be part of a path"),
        ({"name": ".."}, "cannot be part of a path"),
        ({"continue": ""}, "is empty"),
        ({"weight": ["much"]}, "--weight much is not a number"),
        ({"recompute_ffn": "maybe"}, "is not true or false"),
        ({"learning_rate": None}, "is not a number"),
        ({"revision": ["a"]}, "is not text"),
    ],
)
def test_what_cannot_be_is_one_clear_error(given, words):
    (problem,) = problems(**given)
    assert words in problem and flag(next(iter(given))) in problem


def test_dtypes_have_the_names_of_pytorch_too():
    options = parse(model_dtype="bfloat16", matmul_dtype="bfloat16", opt_m_dtype="float32", export_dtype="float16")
    assert options == parse(model_dtype="bf16", matmul_dtype="bf16", opt_m_dtype="fp32", export_dtype="fp16")
    assert parse(head_dtype="bfloat16", matmul_dtype="e4m3").precision.head_dtype == "bf16"


def test_defaults_follow_other_options():
    assert parse(global_batch_size=32).data.grad_accumulation == 8
    precision = parse(model_dtype="fp32").precision
    assert (precision.matmul_dtype, precision.master_dtype, precision.grad_accum_dtype) == ("fp32", "fp32", "fp32")
    precision = parse(matmul_dtype="e4m3").precision
    assert (precision.gradient_dtype, precision.fp8_scaling, precision.master_dtype) == ("e4m3", "delayed", "bf16")
    assert parse(steps=3).schedule.epochs is None


def test_a_search_is_free_to_choose_the_micro_batch_that_is_not_given():
    """Any global batch is a multiple of what replaces it."""
    open_ended = parse(global_batch_size=30, fit=True)
    assert open_ended.data.batch_size == 1 and "batch_size" not in open_ended.given
    with pytest.raises(UsageError, match="not a multiple of --batch-size 4"):
        parse(global_batch_size=30, batch_size=4, fit=True)
    assert "batch_size" in parse(global_batch_size=32, batch_size=4, fit=True).given


def test_names_in_paths():
    options = parse(name="night", out_dir="a/%n/b-%n", log_file="%n.jsonl")
    assert options.export.out_dir == "a/night/b-night"
    assert options.log.log_file == "night.jsonl"
    assert options.checkpoint.checkpoint_dir == "runs/night/checkpoints"
    assert parse(model="models/small/").log.name == "small"
    assert parse(model="/").log.name == "model"
    assert parse(model="50%nice").export.out_dir == "runs/50_nice/model"


def test_python_values_are_welcome(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    options = parse(out_dir=Path("a") / "b", train_file=[Path("x.bin"), "y.bin"], eval_file="~/e*.bin", steps=None)
    assert options.export.out_dir == "a/b"
    assert options.data.train_file == ("x.bin", "y.bin")
    assert options.data.eval_file == ("/home/ada/e*.bin",)


def test_a_printed_file_takes_another_name_and_batch(tmp_path):
    file = tmp_path / "effective.yaml"
    file.write_text(parse(global_batch_size=32).to_yaml())
    options = Options.parse({"config": file, "name": "night", "batch_size": 16})
    assert options.export.out_dir == "runs/night/model"
    assert options.data.grad_accumulation == 2


def test_the_command_line_overrides_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: a\ntrain-file: [x.bin, y.bin]\nlr: 1e-3\nwarmup: 5\nseed: 0123\nrevision:\n")
    options = Options.parse({"config": str(file), "learning_rate": "1e-4"})
    assert options.data.train_file == ("x.bin", "y.bin")
    assert (options.schedule.learning_rate, options.schedule.warmup) == (1e-4, 5)
    assert options.system.seed == 123  # YAML 1.1 alone would read 83
    assert options.model.revision is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: a\nmodel: b\n", r"run.yaml:2: model is given a second time"),
        ("model: a\nlr: 1\nlearning-rate: 2\n", r"(?s)--lr and --learning-rate are the same option"),
        ("optimizer:\n  beta_1: 0.5\n", r"run.yaml:2: keys are flat"),
        ("modle: a\n", r"(?s)unknown option --modle: did you mean --model\?"),
        ("model: a\nbatch_size: 0\nmodle: a\n", r"(?s)run.yaml:3: unknown option.*run.yaml:2: --batch-size 0 is below"),
        ("model: a\nconfig: other.yaml\n", r"run.yaml:2: config is for the command line"),
        ("steps: &a [*a]\n", r"run.yaml:1: keys are flat"),
        ("model: a\n? [a]\n: 3\n", r"run.yaml:2: keys are flat"),
        ("a: " + "[" * 600, r"is not YAML"),
        ("- a\n", r"must hold lines of the form"),
        ("a: [\n", r"is not YAML"),
        ("a: \xff\n", r"is not YAML"),
    ],
)
def test_bad_files_are_usage_errors(text, words, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=words):
        Options.parse({"config": file})


@pytest.mark.parametrize(
    ("given", "final"),
    [
        ({}, 1.0),
        ({"lr_schedule": "cosine"}, 0.0),
        ({"lr_schedule": "linear"}, 0.0),
        ({"lr_schedule": "wsd", "cooldown": 3}, 0.0),
        ({"cooldown": 3}, 0.0),
        ({"lr_schedule": "cosine", "min_lr": 1e-6}, 0.1),
        ({"lr_schedule": "cosine", "min_lr": 0, "learning_rate": 0}, 0.0),
        ({"lr_schedule": "cosine", "final_lr_fraction": 1}, 1.0),
        ({"lr_scheduler_type": "cosine_with_min_lr", "min_lr": 2e-6}, 0.2),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}, 1.0),
        ({"lr_scheduler_type": "warmup_stable_decay", "cooldown": 5}, 0.0),
    ],
)
def test_a_rate_that_falls_ends_at_zero_unless_given(given, final):
    assert parse(**given).schedule.final_lr_fraction == pytest.approx(final)


@pytest.mark.parametrize(
    ("in_file", "given", "expected"),
    [
        ("warmup: 5", {"warmup_ratio": "0.1"}, {"warmup": 0, "warmup_ratio": 0.1}),
        ("warmup_ratio: 0.1", {"warmup_steps": "5"}, {"warmup": 5, "warmup_ratio": None}),
        ("cooldown: 3\nfinal_lr_fraction: 0.5", {"min_lr": "1e-6"}, {"min_lr": 1e-6, "final_lr_fraction": 1e-6 / 1e-5}),
        ("cooldown: 3\nmin_lr: 1e-6", {"final_lr_fraction": "0.5"}, {"min_lr": None, "final_lr_fraction": 0.5}),
        ("steps: 3", {"epochs": "2"}, {"steps": None, "epochs": 2.0}),
        ("epochs: 3", {"max_steps": "2"}, {"steps": 2, "epochs": None}),
        ("train_file: a", {"data": "b"}, {"train_file": None, "data": ["b"]}),
        ("data: a", {"train_file": "b"}, {"train_file": ["b"], "data": None}),
        ("global_batch_size: 32", {"grad_accumulation": "3"}, {"global_batch_size": None, "grad_accumulation": 3}),
        ("grad_accumulation: 3", {"global_batch_size": "32"}, {"global_batch_size": 32, "grad_accumulation": 8}),
        ("matmul_dtype: e4m3\nfp8_layers: mlp", {"bf16_layers": "1,1"}, {"fp8_layers": None, "bf16_layers": "1,1"}),
    ],
)
def test_what_is_given_takes_back_the_alternatives_in_the_file(in_file, given, expected, tmp_path):
    file = tmp_path / "run.yaml"
    needed = "" if "train_file" in {**given, in_file.partition(":")[0]: 0} else "train_file: t\n"
    file.write_text(f"model: m\n{needed if 'data' not in in_file else ''}{in_file}\n")
    flat = Options.parse({"config": file, **given}).to_flat()
    assert {key: flat[key] for key in expected} == expected


def test_alternatives_within_a_file_or_a_command_line_stay_a_contradiction(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ntrain_file: t\nsteps: 3\nepochs: 2\n")
    for given in ({"config": file}, {"model": "m", "train_file": "t", "steps": 3, "epochs": 2}):
        with pytest.raises(UsageError, match="--steps 3 and --epochs 2 both say"):
            Options.parse(given)


def test_a_value_that_overrides_the_file_is_not_blamed_on_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ntrain_file: t\nsteps: 3\n")
    with pytest.raises(UsageError, match=r"^--steps 0 is below"):
        Options.parse({"config": file, "steps": 0})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("eval_every", "did you mean --eval-every-n-steps?"),
        ("--resume", "did you mean --continue?"),
        ("dataloader_num_workers", "llmq-train --help-all lists all options"),
        ("learning", "did you mean --learning-rate?"),
        ("outdir", "did you mean --out-dir?"),
        ("lr_sched", "did you mean --lr-schedule?"),
    ],
)
def test_an_unknown_option_is_answered_by_those_that_begin_like_it_or_look_like_it(name, advice):
    (problem,) = problems(**{name: 1})
    assert problem == f"unknown option {flag(name)}: {advice}"


@pytest.mark.parametrize("given", [{"name": "x" * 201}, {"out_dir": "a/" + "\u00e8" * 101 + "/b"}])
def test_names_too_long_for_a_file_are_refused(given):
    (problem,) = problems(**given)
    assert "the most are 200" in problem


def test_the_home_folder_is_found_where_the_shell_leaves_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.jinja").write_text("{{ messages }}")
    (tmp_path / "run.yaml").write_text("model: ~/m\ndata: [~/d.txt]\n")
    options = Options.parse({"config": "~/run.yaml", "chat_template": "~/a.jinja"})
    assert options.model.model == f"{tmp_path}/m" and options.source.data == (f"{tmp_path}/d.txt",)
    assert options.source.chat_template == f"{tmp_path}/a.jinja"
    assert Options.parse({"model": "m", "data": "d", "chat_template": "~ {{ x }}"}).source.chat_template == "~ {{ x }}"


def test_two_outputs_at_one_place_are_refused():
    for one, other in (("log_file", "checkpoint_dir"), ("checkpoint_dir", "out_dir")):
        with pytest.raises(UsageError, match=r"--\S+ and --\S+ are both x/y: name two places"):
            Options.parse({"model": "m", "train_file": "f", "name": "y", one: "x/%n", other: "x/y"})


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("seed", 2**64, "is above the largest value: use 18446744073709551615 or less"),
        ("epochs", 1e12, "is above the largest value: use 2147483647 or less"),
        ("weight", [], "is empty: give one value or more, or leave the option out"),
        ("train_file", [], "is empty: give one value or more, or leave the option out"),
        ("model", "", "is empty: give a path"),
        *((key, -0.5, "is below the least value: use 0 or more") for key in ("final_lr_fraction", "min_lr")),
        *((key, 1.5, "is above the largest value: use 1 or less") for key in ("final_lr_fraction", "warmup_ratio")),
        *((key, 0, "is below the least value: use 1 or more") for key in ("lora_rank", "prefix_tuning")),
        *((key, 0, "is too small: use more than 0") for key in ("adam_epsilon", "epochs", "lora_plus_ratio")),
        *((key, 1, "is too large: use less than 1") for key in ("lora_dropout", "adalora_beta2")),
    ],
)
def test_limits_are_said_in_full(key, value, says):
    adapters = {"lora_rank": 4, "adalora": True} if key.startswith(("lora", "adalora")) else {}
    assert problems(**{**adapters, key: value}) == [f"{flag(key)} {value or repr(value)} {says}"]


@pytest.mark.parametrize("key", ["continue", "continue_", "resume_from_checkpoint"])
@pytest.mark.parametrize(
    ("given", "which"),
    [("auto", "auto"), ("12", 12), ("runs/a", "runs/a"), ("newest", "newest"), ("true", "newest"), ("false", None)],
)
def test_which_checkpoint(key, given, which, tmp_path):
    (tmp_path / "run.yaml").write_text(f"{key}: {given}\n")
    value = {"true": True, "false": False, "12": 12}.get(given, given)
    for options in ({key: given}, {key: value}, {"config": tmp_path / "run.yaml"}):
        assert parse(**options).checkpoint.continue_ == which


FED_BACK = [
    {},
    {"global_batch_size": 32, "grad_accumulation": 8, "eval_file": ["a", "b*"], "eval_every_n_steps": 3},
    {"matmul_dtype": "e4m3", "gradient_dtype": "e5m2", "fp8_scaling": "current", "steps": 7, "warmup": 3},
    {"model_dtype": "fp32", "master_dtype": "bf16", "continue": 12, "seed": 2**64 - 1, "train_file": ["a b", "c*"]},
    {"name": "0123", "revision": "1e5", "learning_rate": 1e-7, "adam_epsilon": 1e-12, "out_dir": "x y: #%n"},
    {"model": "null", "train_file": "on", "name": "modèle", "continue": "step\t3", "from_scratch": True},
    {"lr_schedule": "wsd", "cooldown": 3, "final_lr_fraction": 0, "recompute_ffn": True, "export_dtype": "fp16"},
    {"lr_schedule": "cosine", "final_lr_fraction": 1.0, "name": "it's", "use_cuda_graphs": False, "packing": False},
    {"lr_schedule": "cosine", "learning_rate": 3e-4, "min_lr": 1e-5, "warmup_ratio": 0.03, "continue": True},
    {"packing": True, "max_docs": 4, "weight": [1.0], "fp8_fallback": True, "matmul_dtype": "e4m3"},
    {"model_dtype": "fp32", "matmul_dtype": "bf16", "grad_accum_dtype": "bf16", "master_dtype": "fp32"},
    {"packing": "windows", "attn_bwd_chunks": 2, "export_anyway": True, "eval_every_n_steps": 100},
    {"steps": 5, "epochs": None, "log_fp8_every": 0, "matmul_dtype": "e4m3", "deterministic": False},
]


@pytest.mark.parametrize("given", FED_BACK)
def test_effective_options_feed_back(given, tmp_path):
    """As a file, and as the command that goes on."""
    options = parse(**given)
    file = tmp_path / "effective.yaml"
    file.write_text(options.to_yaml(), "ascii")
    assert Options.parse({"config": file}) == options
    assert set(yaml.safe_load(file.read_text())) <= set(descriptions())
    start = ("llmq-launch", "--procs=2", "--")
    program, *arguments = shlex.split(continue_command(options, start))
    assert (program, arguments.pop(0), arguments.pop(0), arguments[-1]) == (*start, "--continue")
    read = train.command().make_context(program, arguments).params
    again = Options.parse({k: v for k, v in read.items() if k in descriptions() and v not in (None, ())}).to_flat()
    assert again == {**options.to_flat(), "continue": "newest"}


def test_a_printed_file_takes_another_schedule(tmp_path):
    file = tmp_path / "effective.yaml"
    for before, given, fraction in (
        ({}, "cosine", 0),
        ({"lr_schedule": "cosine", "final_lr_fraction": 0.5}, "linear", 0.5),
    ):
        file.write_text(parse(**before).to_yaml())
        assert Options.parse({"config": file, "lr_schedule": given}).schedule.final_lr_fraction == fraction
