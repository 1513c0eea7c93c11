"""The command: what is chosen where nothing is asked, what is refused, what is printed and saved."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_cuda import RTX_4090, FakeDriver
from installed_plugins import tables_kept
from tiny_engines import tiny

import llmq
from llmq.backends.host import HostBackend
from llmq.bench import configuration
from llmq.bench import run as bench_run
from llmq.bench.configuration import Configuration, configurations, name_of
from llmq.bench.ladder import Ceilings, Machine
from llmq.bench.run import measured
from llmq.cli import bench, shell
from llmq.disk import size_bytes
from llmq.engine.measure import paced
from llmq.engine.predict import step_seconds, sustained
from llmq.errors import MemoryLimitError, UsageError
from llmq.hardware import cards as gpus
from llmq.hardware import cuda_driver, device, nvml
from llmq.hardware.device import CPU, Device
from llmq.model.config import from_folder, to_hf
from llmq.model.optimizer import Hyperparameters
from llmq.options.commands import BenchOptions
from llmq.plan.memory import Memory
from llmq.plan.plan import make_plan
from llmq.plan.spec import Spec

H200, A100, GPU_4090 = (Device("cuda", planned=gpus.named(name)) for name in ("H200", "A100 80GB", "RTX 4090"))


@pytest.fixture
def shape(tmp_path):
    """Options of a tiny run, its model a folder."""
    (tmp_path / "config.json").write_text(json.dumps(to_hf(tiny(num_layers=1), "fp32")))
    sizes = ["--batch-size=2", "--seq-len=16", "--tokens-per-step=64", "--steps=2", "--warmup=1", "--device=cpu"]
    return [f"--models={tmp_path}", *sizes]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The host's ceilings without half a second of products and copies."""
    monkeypatch.setattr(device, "measured_peak", lambda dtype: 1e11)
    monkeypatch.setattr("llmq.bench.ladder._host_copy", lambda: 1e10)


@pytest.fixture
def measure(shape, tmp_path, capsys):
    """Runs the command on the tiny model, with options in place of the shape's; what it printed, and what it saved."""

    def run_with(*arguments, without=()):
        given = [part for part in shape if not part.startswith(tuple(without))]
        assert run([*given, *arguments, f"--save={tmp_path}/out.json"]) == 0
        return capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())

    return run_with


def run(arguments):
    return shell.run(bench.command, arguments)


def test_the_command_prints_and_saves(measure, tmp_path):
    output, saved = measure("--dtypes=fp32,e4m3")
    for part in ("tokens/s (", "of the speed of light", "of the measured ceilings", " planned, ", "roofline ms"):
        assert part in output, part
    assert "gaps" in output or "overlap" in output
    assert saved["command"].startswith(f"llmq-bench --models={tmp_path} ") and saved["schema"] == 3
    assert saved["ceilings"] == {"flops": dict.fromkeys(("bf16", "e4m3", "fp32"), 1e11), "bytes_per_s": 1e10}
    first, second = saved["results"]
    assert (first["dtype"], second["dtype"]) == ("fp32", "e4m3") and first["precision"]["m"] == "fp32"
    assert first["tokens_per_second"]["median"] > 0 and first["sol"] > 0 and len(first["losses"]) == 3
    assert "quantize" in {rung["family"] for rung in second["ladder"]} and first["deterministic"] is True
    assert second["precision"]["m"] == second["precision"]["master"] == "bf16"


def test_adapters_are_measured(measure, shape):
    """On a frozen base, whose products are fewer; the file says what was trained."""
    adapted = ["--lora-rank=4", "--lora-targets=mlp", "--base-dtype=nf4", "--adapter-dtype=bf16", "--dora"]
    output, saved = measure("--dtypes=e4m3", *adapted)
    assert "e4m3 2x16, DoRA of rank 4 on nf4, 64 tokens a step" in output.replace("\n", " ")
    (one,) = saved["results"]
    assert (one["lora_rank"], one["base_dtype"]) == (4, "nf4") and one["sol"] > 0
    assert (one["precision"]["master"], one["precision"]["m"]) == ("bf16", "fp32")
    assert name_of({**one, "dora": False}) == f"{one['model']} e4m3 2x16, rank 4 on nf4"
    assert run([*shape, "--dtypes=bf16", "--base-dtype=nf4"]) == UsageError.exit_code


def test_what_saves_memory_is_measured_and_single_ops_need_not_be_timed(measure):
    saving = ["--recompute=block", "--offload-residual", "--offload-optimizer", "--seq-tiles=2", "--fused-update"]
    saving += ["--use-zero-copy", "--write-combined", "--no-persistent-quants", "--no-single-ops"]
    output, saved = measure("--tokens-per-step=32", "--dtypes=bf16", *saving, without=["--tokens"])
    (one,) = saved["results"]
    settings, (rung,) = one["settings"], one["ladder"]
    assert settings["offload"] == ["residual"] and settings["host"] == ["m", "v"] and settings["seq_tiles"] == 2
    assert settings["fused"] and settings["zero_copy"] and settings["write_combined"]
    assert not settings["persistent_quants"] and "all ops" in output
    assert rung["family"] == "all ops" and rung["ms"] == one["micro_batch_ms"] > rung["roofline_ms"] > 0
    assert one["ceiling_share"] == rung["roofline_ms"] / rung["ms"] and not one["gaps_ms"]


def test_the_backend_of_a_plugin_is_measured(measure):
    """By NumPy's operations, as it computes in the host's memory."""
    opened = []
    with tables_kept():
        llmq.register("backend", "own", lambda asked: opened.append(asked) or HostBackend(world=asked.world))
        _, saved = measure("--dtypes=fp32", "--device=own", "--no-single-ops", without=["--device"])
    assert opened and saved["results"][0]["tokens_per_second"]["median"] > 0


def test_several_batch_sizes_end_in_one_table_and_one_that_does_not_fit_is_named(measure, shape, monkeypatch):
    fitting = Configuration.fitting_plan

    def plan(one, backend):
        if one.batch_size == 2:
            raise MemoryLimitError("too large")
        return fitting(one, backend)

    monkeypatch.setattr(Configuration, "fitting_plan", plan)
    output, saved = measure("--dtypes=fp32", "--batch-size=1,2,4", "--no-single-ops", without=["--batch-size"])
    rows = [line.split() for line in output.splitlines() if "fp32" in line and "(" in line]
    assert [next(part for part in row if "x16" in part) for row in rows[-2:]] == ["1x16", "4x16"]
    assert [r["batch_size"] for r in saved["results"]] == [1, 4]
    assert f"Too large for the memory that is free: {shape[0].partition('=')[2]} fp32 2x16" in output
    assert run([*shape, "--dtypes=fp32"]) == MemoryLimitError.exit_code


def test_fp8_on_a_card_without_it_is_an_error_with_the_fix():
    with pytest.raises(UsageError, match=r"--dtypes e4m3 needs .* 8\.9 .*A100 80GB .*has 8\.0: use --dtypes bf16"):
        configurations(BenchOptions(models=("Qwen2.5-0.5B",), dtypes=("bf16", "e4m3")), {}, A100)


def test_the_default_is_what_the_device_can():
    def names(where, **asked):
        return [(one.model, one.dtype) for one in configurations(BenchOptions(**asked), {}, where)]

    both = [(model, dtype) for model in ("Qwen2.5-0.5B", "Qwen2.5-1.5B") for dtype in ("bf16", "e4m3")]
    assert names(H200) == both
    assert names(A100) == [both[0], both[2]]
    assert names(CPU) == [("tiny_llama3_50m", "fp32")]
    assert names(H200, models=("Qwen2.5-7B",)) == [("Qwen2.5-7B", "bf16")]
    assert names(H200, dtypes=("e4m3",)) == [both[1], both[3]]


def test_a_recipe_is_for_fp8_and_the_optimizers_for_all():
    training = {"fp8_scaling": "current", "opt_v_dtype": "fp32"}
    bf16, e4m3, *_ = configurations(BenchOptions(dtypes=("bf16", "e4m3")), training, H200)
    assert (bf16.precision.v, e4m3.precision.v, e4m3.precision.scaling) == ("fp32", "fp32", "current")
    assert e4m3.precision.m == "bf16" and bf16.precision.matmul == "bf16"


@pytest.fixture
def card(monkeypatch):
    """Measurements at a share of the speed of light, on a made-up clock; returns what is run, and the clock."""

    def pretend(share=0.5, batch_size=32):
        seen, now = [], [0.0]
        monkeypatch.setattr(device, "memory_bytes", lambda where: (2**37, 2**37))
        monkeypatch.setattr(configuration, "open_backend", lambda kind, **settings: None)
        monkeypatch.setattr(bench_run.time, "perf_counter", lambda: now[0])

        def plan(one, backend):
            batch, facts = one.batch_size or batch_size, one.facts
            sizes = {"batch_size": batch if facts.where.kind == "cuda" else 1, "seq_len": one.flat["seq_len"]}
            return SimpleNamespace(spec=Spec(facts.config, one.precision, Memory(), Hyperparameters(), **sizes))

        def measure(one, plan, machine, tokens, backend, limit_s):
            light = plan.spec.light_s(machine.peaks)
            end, least = now[0] + limit_s, one.request.warmup if machine.where.kind == "cuda" else 1
            now[0] += 6
            for _ in paced(one.request.warmup, one.request.steps, least=least, end=end):
                now[0] += tokens * light / share
            now[0] += 6
            seen.append((one.model, one.dtype, plan.spec.batch_size, tokens))
            return {"sol": share}

        monkeypatch.setattr(Configuration, "fitting_plan", plan)
        monkeypatch.setattr(bench_run, "measured_alone", measure)
        return seen, now

    return pretend


def choose(where, request=None, **training):
    """Measures all that a request wants, with options of llmq-train."""
    request = request or BenchOptions()
    peaks = where.card.peaks if where.card else dict.fromkeys(("fp32", "bf16"), 1e11)
    return list(
        measured(request, configurations(request, training, where), Machine(where, {}, peaks, Ceilings({}, 1.0)))
    )


FIRST = ("Qwen2.5-0.5B", "bf16")


@pytest.mark.parametrize(
    ("where", "share", "batch_size", "measured_first"),
    [
        (H200, 0.5, 32, [(model, dtype) for model in (FIRST[0], "Qwen2.5-1.5B") for dtype in ("bf16", "e4m3")]),
        (GPU_4090, 0.3, 4, [FIRST]),
        (Device("cuda", planned=gpus.named("GB10")), 0.6, 4, [FIRST]),
        (Device("cuda", planned=gpus.named("L4")), 0.1, 4, [FIRST]),
        (CPU, 0.06, 1, [("tiny_llama3_50m", "fp32")]),
        (CPU, 1.5, 1, [("tiny_llama3_50m", "fp32")]),
    ],
    ids=["H200", "RTX 4090", "GB10", "L4", "busy CPU", "CPU"],
)
def test_without_arguments_any_device_is_done_within_three_minutes(where, share, batch_size, measured_first, card):
    """A fast card measures all, and a slow one less."""
    seen, now = card(share, batch_size)
    choose(where)
    assert [one[:2] for one in seen][: len(measured_first)] == measured_first and now[0] < 180
    assert all(tokens == 65536 if where.kind == "cuda" else 128 <= tokens <= 1024 for *_, tokens in seen)


def test_named_models_are_all_measured_in_full(card):
    seen, _ = card(share=0.01)
    choose(H200, BenchOptions(models=("Qwen2.5-0.5B", "Qwen2.5-7B"), dtypes=("bf16",), batch_size=(8,)))
    assert seen == [("Qwen2.5-0.5B", "bf16", 8, 524288), ("Qwen2.5-7B", "bf16", 8, 524288)]


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """A card with this much memory whose choice is a small and a large model, planned for and not measured."""

    def pretend(free):
        names = []
        for name, hidden in (("small", 64), ("large", 512)):
            names.append(str(tmp_path / name))
            (tmp_path / name).mkdir(exist_ok=True)
            config = tiny(num_layers=1, hidden_size=hidden, head_dim=16)
            (tmp_path / name / "config.json").write_text(json.dumps(to_hf(config, "bf16")))
        monkeypatch.setitem(bench_run.DEFAULTS, "cuda", replace(bench_run.DEFAULTS["cuda"], models=tuple(names)))
        real, seen = configuration.open_backend, []

        def open_backend(kind, **settings):
            return real("planned" if kind == "cuda" else kind, **settings)

        monkeypatch.setattr(configuration, "open_backend", open_backend)
        monkeypatch.setattr(device, "memory_bytes", lambda where: (free, free))
        monkeypatch.setattr(
            bench_run, "measured_alone", lambda one, plan, *_: seen.append((one.model, plan)) or {"sol": 0.5}
        )
        return names, seen

    return pretend


def test_the_batch_is_the_largest_that_fits(memory):
    (small, large), seen = memory(2**40)
    choose(GPU_4090, BenchOptions(dtypes=("bf16",)))
    assert [(model, plan.spec.batch_size) for model, plan in seen] == [(small, 32), (large, 32)]
    whole = {model: plan.total_bytes for model, plan in seen}
    _, seen = memory(int(0.6 * whole[small]))
    choose(GPU_4090, BenchOptions(models=(small,)))
    assert [plan.spec.batch_size for _, plan in seen] == [16] and seen[0][1].total_bytes < 0.6 * whole[small]


@pytest.mark.slow
def test_what_does_not_fit_is_left_out_of_the_choice_and_refused_if_it_was_named(memory):
    (small, large), seen = memory(2**40)
    choose(GPU_4090, BenchOptions(dtypes=("bf16",), batch_size=(1,)))
    sizes = {model: plan.total_bytes for model, plan in seen}
    assert sizes[small] < sizes[large]
    (small, large), seen = memory(sizes[large] - 1)
    choose(GPU_4090, BenchOptions(dtypes=("bf16",)))
    assert {model for model, _ in seen} == {small}
    for request in (BenchOptions(models=(large,)), BenchOptions(models=(small,), batch_size=(32,))):
        with pytest.raises(MemoryLimitError, match="are missing"):
            choose(GPU_4090, request)
    memory(2**20)
    with pytest.raises(MemoryLimitError, match="are missing"):
        choose(GPU_4090)


def test_attention_runs_in_chunks_where_the_batch_was_asked_for(memory):
    """A batch that is chosen gets smaller instead, as it did when chunks had to be asked for."""
    (small, _), seen = memory(2**40)
    request = BenchOptions(models=(small,), dtypes=("bf16",), batch_size=(4,), seq_len=4096)
    choose(GPU_4090, request)
    choose(GPU_4090, request, attn_bwd_chunks="4")
    (_, whole), (_, chunked) = seen
    assert (whole.spec.memory.attention_chunks, chunked.spec.memory.attention_chunks) == (1, 4)
    _, again = memory(chunked.total_bytes)
    choose(GPU_4090, request)
    assert again[0][1].spec.memory == chunked.spec.memory and again[0][1].spec.batch_size == 4
    choose(GPU_4090, request.model_copy(update={"batch_size": ()}))
    assert again[1][1].spec.memory.attention_chunks == 1 and again[1][1].spec.batch_size < 4


def test_a_gpu_is_opened_measured_and_described(measure, monkeypatch):
    """The GPU's way through the command, with the host in the place of the GPU."""
    import fake_gpu

    fake_gpu.install(monkeypatch, FakeDriver(gpus=(RTX_4090,)))
    reading = nvml.Reading(sm_mhz=2520, watts=401.5, celsius=60, throttled=("power cap",), used_bytes=2**30)
    monkeypatch.setattr(nvml, "read", lambda uuid, traffic=False: reading)
    monkeypatch.setattr(nvml, "num_others", lambda uuid: 2)
    monkeypatch.setattr(configuration, "CudaClock", configuration.Clock)
    ceilings = Ceilings({"bf16": 1e14}, 9e11)
    monkeypatch.setattr("llmq.bench.ladder.measure_ceilings", lambda kind, dtypes: ceilings)
    monkeypatch.setattr(cuda_driver, "versions", lambda: {"cuBLASLt": "13.1.0", "cuDNN": "9.19.0", "cupy": "14.2"})
    output, saved = measure("--dtypes=bf16", "--no-deterministic", without=["--device"])
    assert "NVIDIA GeForce RTX 4090; driver unknown (CUDA 13.0), cuBLASLt 13.1.0, cuDNN 9.19.0, cupy 14.2" in output
    assert "bf16 100 TFLOP/s (61% of the peak), copy 900 GB/s" in output
    assert "SM clock 2,520 MHz, 402 W, up to 60 C, slowed by: power cap 100% of the time" in output
    assert "Warning: 2 other processes on the card" in output and "1.0 GiB in use on the card" in output
    (result,) = saved["results"]
    assert result["deterministic"] is False and result["gpu"]["other_processes"] == 2
    assert result["gpu"]["sm_mhz"] == 2520 and result["gpu"]["throttled"] == {"power cap": 1.0}


def test_the_host_is_planned_as_the_trainer_plans(monkeypatch):
    """The plan comes from the same options: chunks of the head, recomputation, dtypes."""
    shape = {"models": ("tiny_llama3_50m",), "batch_size": (2,), "seq_len": 64}
    request = BenchOptions(dtypes=("bf16",), recompute=("ffn",), **shape)
    (one,) = configurations(request, {"attn_bwd_chunks": 2}, CPU)
    plan = one.fitting_plan(HostBackend())
    assert plan.spec.memory == Memory(("recompute_ffn",), head_chunks=1, attention_chunks=2)
    spec = Spec(one.facts.config, one.precision, plan.spec.memory, plan.spec.hyper, 2, 64)
    same = make_plan(spec, HostBackend().scratch_bytes)
    assert same.table() == plan.table()


@pytest.mark.slow
def test_the_plan_that_fit_takes_is_measured(memory, capsys, few_remedies):
    """In a little less than what the fastest needs, and in no more of the host than there is."""
    (small, _), seen = memory(2**40)
    given = {"fit": True, "lmhead_chunks": 1, "attn_bwd_chunks": 1, "seq_tiles": 2, "offload_gradients": True}
    about = {"models": (small,), "dtypes": ("bf16",), "tokens_per_step": 8 * 256, "seq_len": 256}
    choose(GPU_4090, BenchOptions(**about), **given)
    most = seen[0][1]
    assert most.spec.batch_size == 8 and most.spec.memory.seq_tiles == 2
    less, limit = int(0.98 * most.total_bytes), f"{most.host_bytes / 2**20 + 0.001:.3f}MiB"
    _, seen = memory(less)
    choose(GPU_4090, BenchOptions(**about), **given, host_memory_limit=limit)
    plan = seen[0][1]
    assert plan.total_bytes <= less and plan.host_bytes <= size_bytes(limit) and plan.spec.memory.seq_tiles == 2
    assert "1 is taken:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "training", "num_ranks", "message"),
    [
        ({"batch_size": (4,)}, {}, 1, "--fit chooses the size of a micro-batch: leave out --batch-size"),
        ({}, {"fit_may": "states,matmul"}, 1, "--fit-may matmul: --dtypes says what is multiplied"),
        ({}, {}, 2, "--fit is for one GPU: leave out --gpus"),
    ],
)
def test_what_fit_decides_is_not_given(given, training, num_ranks, message):
    with pytest.raises(UsageError, match=message):
        configurations(BenchOptions(**given), {"fit": True, **training}, H200, num_ranks)


def test_predicted_speeds_stand_beside_measured_ones(measure, monkeypatch, tmp_path):
    """On a card whose rates are known; by hand, of the steps that were made."""
    monkeypatch.setattr(Device, "card", gpus.named("H200"))
    output, saved = measure("--dtypes=fp32", "--no-single-ops")
    request = BenchOptions(models=(str(tmp_path),), dtypes=("fp32",), batch_size=(2,), seq_len=16)
    (one,) = configurations(request, {}, CPU)
    spec = Spec(from_folder(tmp_path), one.precision, Memory(), Hyperparameters(), 2, 16)
    seconds, rate = step_seconds(make_plan(spec), sustained(gpus.named("H200")), 2), saved["results"][0]
    assert rate["predicted_tokens_per_second"] == pytest.approx(64 / seconds)
    assert f"predicted: {rate['predicted_tokens_per_second']:,.0f} (+" in output
