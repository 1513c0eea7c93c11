"""The quickstart on a GPU, with the host in its place: sizes for the card, the same screens, its speed, the verdict."""

import dataclasses
import json
import os
import shlex
import shutil
from contextlib import contextmanager
from pathlib import Path

import fake_gpu
import pytest
from fake_cuda import RTX_2080, RTX_4090, FakeDriver
from test_quickstart import TINY, hold, quiet, times

from llmq.hardware import device
from llmq.model.config import from_folder
from llmq.model.parameters import num_parameters, parameter_rows
from llmq.model.presets import preset
from llmq.options.parse import Options
from llmq.quickstart import corpus, gpu, resume, show
from llmq.quickstart import run as stages
from llmq.quickstart.__main__ import prepare_environment, run, settings_for
from llmq.quickstart.settings import GPU, Fit, Places, Settings, config, options
from llmq.report.read import read_log
from llmq.training.records import EvalRecord, TrainRecord

ROOT = Path(__file__).parents[2]
# 24 steps of 128 tokens: a trial that says one token/s or more asks for that many, the most
TINY_GPU = dataclasses.replace(
    TINY,
    device="cuda",
    model_dtype="bf16",
    tie_embeddings=True,
    steps=24,
    fit=Fit(train_seconds=3000.0, least_steps=6, trial_steps=1, bench_seconds=0.2),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished quickstart on the fake GPU (tests leave it as it is) and its outcome."""
    places = Places(tmp_path_factory.mktemp("quickstart"))
    with pytest.MonkeyPatch.context() as patch:
        fake_gpu.install(patch)
        outcome, cached = quiet(places, TINY_GPU)
    assert not cached
    return places, outcome


@pytest.fixture
def on_gpu(monkeypatch):
    fake_gpu.install(monkeypatch)


@pytest.fixture
def copy(made, tmp_path, on_gpu):
    """What `made` made, to be changed."""
    return Places(shutil.copytree(made[0].out, tmp_path / "copy"))


# the choice of the device


def test_a_usable_gpu_is_taken_and_cpu_leaves_it_alone(on_gpu, capsys):
    assert settings_for("auto") is GPU and settings_for("cpu") == Settings()
    assert not capsys.readouterr().out


def test_a_gpu_that_cannot_be_used_is_told(monkeypatch, capsys):
    fake_gpu.install(monkeypatch, FakeDriver(gpus=(RTX_2080,)))
    assert settings_for("auto") == Settings()
    assert "compute capability 7.5, below 8.0: training on the CPU" in capsys.readouterr().out


def test_caches_lie_below_the_folder_unless_the_user_has_a_place(tmp_path, monkeypatch):
    names = ("LLMQ_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH")
    for name in names:
        monkeypatch.setenv(name, "gone")  # so that the patch restores what prepare_environment sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("LLMQ_CACHE_DIR", "/mine")
    prepare_environment(tmp_path)
    assert os.environ["LLMQ_CACHE_DIR"] == "/mine"
    assert all(Path(os.environ[name]).is_relative_to(tmp_path) for name in names[1:])


# what is made


def test_the_model_of_the_gpu_is_one_that_it_is_made_for():
    """Between 50 and 150 million parameters, with the blocks of a preset, and trained as bf16 over fp32 masters."""
    places = Places(Path("out"))
    shape, like = config(GPU), preset("tiny_llama3_150m")
    same = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "tie_embeddings")
    assert all(getattr(GPU, name) == getattr(like, name) for name in same)
    c, f, kv = GPU.hidden_size, GPU.intermediate_size, GPU.num_kv_heads * like.head_dim
    weights = GPU.num_layers * (2 * c * c + 2 * kv * c + 3 * c * f) + GPU.vocab_size * c
    assert 50e6 < weights < 150e6 and shape["dtype"] == "bfloat16"
    flat = Options.parse(options(GPU, places)).to_flat()
    assert (flat["model_dtype"], flat["matmul_dtype"], flat["master_dtype"]) == ("bf16", "bf16", "fp32")


def test_a_bf16_model_is_trained_and_exported(made):
    places, outcome = made
    log = read_log(places.log)
    assert "cuda: NVIDIA H200" in places.log.read_text("utf-8")
    assert len(log.train["loss"]) == gpu.fitted(TINY_GPU, places).steps
    assert log.train["loss"][-1] < log.train["loss"][0]
    model = from_folder(places.model)
    assert model.dtype == "bf16" and num_parameters(parameter_rows(model)) == outcome.num_parameters
    assert outcome.before != outcome.after and places.plot.exists()


def test_the_speed_is_that_of_measured_steps(made):
    outcome = made[1]
    measured = outcome.on_gpu
    assert measured.name == "NVIDIA H200" and measured.peak_tflops == pytest.approx(989.4)
    assert measured.least_tokens_per_second <= measured.tokens_per_second <= measured.most_tokens_per_second
    assert measured.bench_seconds > 0 and 0 < measured.sol < 1e-3 and measured.cold_first_step_s > 0
    # the trainer and the bench agree on what a token/s is worth
    assert measured.sol / measured.tokens_per_second == pytest.approx(outcome.sol / outcome.tokens_per_second, rel=1e-3)


def test_the_measurement_takes_about_the_time_that_was_asked_for(copy, monkeypatch):
    asked = []
    monkeypatch.setattr(gpu, "measure", lambda *_, steps, **k: asked.append((steps, k["tokens_per_step"])) or 1 / 0)
    settings = dataclasses.replace(gpu.fitted(TINY_GPU, copy), fit=Fit(bench_seconds=20.0))
    with pytest.raises(ZeroDivisionError):
        gpu.measured_on(settings, copy, device.pick("cuda"), rate=64_000.0)
    assert asked == [(10_000, 128)]


# sizes for the card


def test_steps_follow_from_the_rate_between_their_limits(copy, monkeypatch):
    """3000 s at 0.001 token/s: the least steps; at 0.512: 12 steps of 128 tokens; at 1000: the most."""
    said = []
    for rate, steps in ((0.001, 6), (0.512, 12), (1e3, 24)):
        copy.fitted.unlink()
        speed = type("Speed", (), {"tokens_per_second": (rate, rate, rate), "first_step_s": 1.5})
        monkeypatch.setattr(gpu, "timed", lambda *_, speed=speed: speed)
        chosen = gpu.fit_to_card(TINY_GPU, copy, device.pick("cuda"), said.append)
        assert chosen == dataclasses.replace(TINY_GPU, steps=steps) == gpu.fitted(TINY_GPU, copy)
    assert len(said) == 3
    monkeypatch.setattr(gpu, "timed", None)  # from now on it is a setting
    assert gpu.fit_to_card(TINY_GPU, copy, device.pick("cuda"), said.append) == chosen and len(said) == 3


@pytest.mark.parametrize("content", ["", "{", '{"batch_size": 4}', "[1]"])
def test_a_broken_choice_is_made_again(copy, content):
    copy.fitted.write_text(content)
    assert gpu.fitted(TINY_GPU, copy) == TINY_GPU
    gpu.fit_to_card(TINY_GPU, copy, device.pick("cuda"), lambda line: None)
    assert gpu.fitted(TINY_GPU, copy).steps <= 24 and "free_bytes" in json.loads(copy.fitted.read_text())


def test_a_small_card_gets_a_smaller_batch_and_the_same_tokens(tmp_path):
    """Halved until the plan has room; what fits nowhere is left to the training, which says what is missing."""
    places = Places(tmp_path)
    places.shape.mkdir()
    (places.shape / "config.json").write_text(json.dumps(config(GPU)))
    batches = {}
    for free in (140e9, 6e9, 3e9, 1e6):
        roomy = gpu.with_room(GPU, places, free)
        assert roomy.tokens_per_step == GPU.tokens_per_step == 32768
        needed = gpu.plan_of(from_folder(places.shape), Options.parse(options(roomy, places))).total_bytes
        assert needed <= free or roomy.batch_size == 1
        batches[free] = roomy.batch_size
    assert batches[140e9] == 64 > batches[6e9] > batches[3e9] >= batches[1e6] == 1


def test_the_cpu_is_not_fitted(tmp_path):
    assert gpu.fitted(TINY, Places(tmp_path)) is TINY
    assert gpu.fit_to_card(TINY, Places(tmp_path), device.CPU, None) is TINY


# called again


def test_a_second_call_finds_everything_made(made, on_gpu, monkeypatch):
    places, outcome = made
    before = times(places.out)
    for name in ("train", "fit_to_card", "measured_on"):
        monkeypatch.setattr(stages, name, None)
    assert quiet(places, TINY_GPU) == (outcome, True)
    assert times(places.out) == before


@pytest.mark.slow
def test_another_card_is_measured_anew(copy, monkeypatch):
    fake_gpu.install(monkeypatch, FakeDriver(gpus=(RTX_4090,)))
    outcome, cached = quiet(copy, TINY_GPU)
    assert not cached and outcome.on_gpu.name == "NVIDIA GeForce RTX 4090"
    assert outcome.on_gpu.verdict.startswith("does not fit")


def test_a_lost_model_is_exported_again_with_the_same_sizes(copy, made, monkeypatch):
    """The choice was written down: a trial at another speed would ask for other steps."""
    (copy.model / "model.safetensors").unlink()
    chosen = json.loads(copy.fitted.read_text())
    again, cached = quiet(copy, TINY_GPU)
    assert not cached and again.first_step_s is None and json.loads(copy.fitted.read_text()) == chosen
    assert (again.eval_loss, again.after) == (made[1].eval_loss, made[1].after)
    assert again.on_gpu.cold_first_step_s == made[1].on_gpu.cold_first_step_s


# killed


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_weights(made, on_gpu, monkeypatch, capsys, tmp_path):
    """The processes that train again have the fake GPU from a sitecustomize of their own."""
    places, _ = made
    (tmp_path / "sitecustomize.py").write_text("import fake_gpu, pytest\nfake_gpu.install(pytest.MonkeyPatch())\n")
    paths = (tmp_path, ROOT / "tests", ROOT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    hold(monkeypatch, 20)  # a checkpoint is of each sixth one
    assert run(places.out, TINY_GPU, show_resume=True) == 0
    shown = capsys.readouterr().out
    assert shown.count(resume.weights_hash(places.model)) == 2 and "the same bits" in shown
    again = [json.loads(line) for line in (places.out / "resume" / "log.jsonl").read_text("utf-8").splitlines()]
    tables = [record["table"] for record in again if record["type"] == "algorithms"]
    assert len(tables) == 2 and tables[0] == tables[1]  # the second process was given the checkpoint's
    steps = [record["step"] for record in again if record["type"] == "train"]
    assert steps[-1] == gpu.fitted(TINY_GPU, places).steps


# text


def test_packages_are_text_after_the_library_and_no_content_comes_twice(tmp_path):
    texts = {
        "a/one.py": b"# one\n",
        "a/copy.py": b"# one\n",
        "a/library.py": b"# library\n",
        "a/_vendor/two.py": b"# two\n",
        "a/tests/three.py": b"# three\n",
        "b.py": b"# four\n",
        "c/latin.py": b"# \xe9\n",
        "c/large.py": b"#" * 200,
        f"c/{'n' * 199}.py": b"# long\n",
        "d.py": b"# five\n",
    }
    for name, text in texts.items():
        path = tmp_path / "site-packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    library = corpus.Corpus({"os.py": b"# library\n"})
    found = corpus.with_packages(library, library.num_bytes + 20, tmp_path / "site-packages")
    assert list(found.texts) == ["os.py", "site-packages.a.copy.py", "site-packages.b.py", "site-packages.d.py"]
    assert found.num_bytes == library.num_bytes + 20
    assert list(corpus.with_packages(found, 10, tmp_path / "site-packages").texts) == list(found.texts)


def test_the_packages_of_this_python_are_read_where_they_are_asked_for(tmp_path, on_gpu, monkeypatch):
    """`text_bytes` of the library and the packages together; nothing is read twice the same."""
    made = []
    monkeypatch.setattr(stages.corpus, "make_token_files", lambda text, *_: made.append(text) or 1 / 0)
    library = corpus.standard_library(TINY.text_bytes)
    settings = dataclasses.replace(TINY_GPU, packages=True)
    monkeypatch.setattr(stages.corpus, "standard_library", lambda most_bytes: library)
    for more in (0, 100_000):
        with pytest.raises(ZeroDivisionError):
            quiet(Places(tmp_path), dataclasses.replace(settings, text_bytes=library.num_bytes + more))
    without, more = made
    assert without == library
    assert library.num_bytes < more.num_bytes <= library.num_bytes + 100_000


# what is shown


def test_the_last_screen_tells_of_the_card(made):
    places, outcome = made
    speed = {"tokens_per_second": 9.1e5, "least_tokens_per_second": 8e5, "most_tokens_per_second": 9.5e5}
    told = dataclasses.replace(outcome.on_gpu, **speed, sol=0.345, bench_seconds=20.4, cold_first_step_s=17.5)
    outcome = dataclasses.replace(outcome, sol=0.3, first_step_s=2.0, on_gpu=told)
    text = "\n".join(show.last_screen(gpu.fitted(TINY_GPU, places), places, outcome, cached=False))
    assert "30.0% of 989.4 TFLOP/s bf16 (NVIDIA H200)" in text and "cores" not in text
    assert "2.0 (17.5 before, while kernels were compiled and algorithms chosen)" in text
    assert "910,000 tokens/s (800,000 to 950,000), 34.5% of the speed of light, in 20 s of" in text
    assert "--model-dtype=bf16" in text and "--model-dtype=fp32" not in text


def test_the_stages_are_told_with_the_card(copy):
    """As on the CPU, and the trial, the measurement and where the training runs."""
    shutil.rmtree(copy.run)
    copy.fitted.unlink()
    copy.outcome.unlink()
    said, records = [], []

    @contextmanager
    def follow(steps):
        yield records.append

    stages.quickstart(copy, TINY_GPU, tell=said.append, follow=follow)
    told = "\n".join(said)
    steps = gpu.fitted(TINY_GPU, copy).steps
    for expected in ("timing a few steps", f"{steps} steps of 128 tokens on the NVIDIA H200", "GPU's speed for 0 s"):
        assert expected in told
    assert {type(record) for record in records} == {TrainRecord, EvalRecord}


# the verdict


def test_the_verdict_is_that_of_a_dry_run(made, on_gpu, tmp_path):
    """An H200 has room for the options' defaults; the command that is shown plans the same number of bytes."""
    places, outcome = made
    assert outcome.on_gpu.verdict.startswith("fits with 4 x 1024 tokens a micro-batch: the run needs ")
    lines = show.on_gpu_lines(outcome.on_gpu, TINY_GPU, places)
    name, *arguments = shlex.split(lines[-1])
    assert Path(name).name == "llmq-train" and "--dry-run" in arguments
    parsed = Options.parse({a[2:].split("=")[0].replace("-", "_"): a.partition("=")[2] or True for a in arguments})
    needed = gpu.plan_of(preset("llama3_8b"), parsed).total_bytes
    assert f"needs {needed / 2**30:.1f} GiB" in outcome.on_gpu.verdict


@pytest.mark.slow
def test_a_verdict_names_what_is_missing_and_what_helps():
    fit, places = Fit(), Places(Path("out"))
    text = gpu.verdict(fit, places, 90 * 2**30)
    assert "does not fit" in text and "90.0 GiB are free" in text and "--opt-m-dtype bf16 --opt-v-dtype bf16" in text
    assert "no memory option makes it fit" in gpu.verdict(fit, places, 24 * 2**30)
