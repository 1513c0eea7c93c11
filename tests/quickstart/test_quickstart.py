"""The quickstart, tiny: everything is made, found again, continued after an interrupt, and shown as it is."""

import dataclasses
import io
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from llmq.data.batches.batch import Batch
from llmq.data.tokens.token_file import TokenFile
from llmq.engine.generate import complete, open_engine
from llmq.errors import DataError, LlmqError, NonFiniteError
from llmq.hardware import device
from llmq.quickstart import corpus, installed, resume, show
from llmq.quickstart import run as stages
from llmq.quickstart.__main__ import NOT_PROVEN, run
from llmq.quickstart.run import Places, Settings
from llmq.training.loop import TrainResult
from llmq.training.records import EvalRecord, TrainRecord

ROOT = Path(__file__).parents[2]
TINY = Settings(
    text_bytes=120_000,
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    seq_len=32,
    batch_size=4,
    steps=12,
    learning_rate=1e-2,
    new_tokens=6,
    least_gain=-9.0,
)


@contextmanager
def unwatched(steps):
    yield lambda record: None


def quiet(places, settings=TINY, follow=unwatched):
    """One call, without output."""
    return stages.quickstart(places, settings, tell=lambda line: None, follow=follow)


def times(folder):
    """When each file below `folder` was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished tiny quickstart (tests leave it as it is) and its outcome."""
    places = Places(tmp_path_factory.mktemp("quickstart"))
    outcome, cached = quiet(places)
    assert not cached
    return places, outcome


# what is made


def test_the_outcome_tells_what_is_in_the_folder(made):
    places, outcome = made
    assert outcome.train_tokens == TokenFile.open(places.train_file, vocab_size=TINY.vocab_size).num_tokens
    assert outcome.eval_tokens == TokenFile.open(places.eval_file, vocab_size=TINY.vocab_size).num_tokens
    c, f, kv = TINY.hidden_size, TINY.intermediate_size, TINY.hidden_size // 2
    block = 2 * c * c + 2 * kv * c + 3 * c * f + 2 * c
    assert outcome.num_parameters == 2 * TINY.vocab_size * c + TINY.num_layers * block + c
    assert outcome.tokens_per_second > 0 and outcome.first_step_s > 0
    assert 0 < outcome.machine_sol <= outcome.sol < 1
    assert places.plot.read_bytes().startswith(b"\x89PNG")


def test_the_held_out_loss_is_that_of_the_exported_model(made):
    """The last line of the screen is about what the user gets: the folder, on files that were never trained on."""
    places, outcome = made
    engine = open_engine(places.model, seq_len=TINY.seq_len)
    tokens = TokenFile.open(places.eval_file).tokens
    sums = []
    for start in range(0, len(tokens) - 1, TINY.seq_len):
        inputs, targets = np.zeros((1, TINY.seq_len), np.int32), np.full((1, TINY.seq_len), -100, np.int32)
        stop = min(start + TINY.seq_len, len(tokens) - 1)
        inputs[0, : stop - start], targets[0, : stop - start] = tokens[start:stop], tokens[start + 1 : stop + 1]
        sums.append(engine.evaluate(Batch(inputs, targets)))
    assert sum(count for _, count in sums) == len(tokens) - 1
    loss = math.fsum(loss for loss, _ in sums) / sum(count for _, count in sums)
    assert loss == pytest.approx(outcome.eval_loss, rel=1e-5)


def test_held_out_files_are_not_trained_on(made):
    places, _ = made
    tokenizer = Tokenizer.from_file(str(places.model / "tokenizer.json"))
    train, held_out = (
        {tokenizer.decode(part) for part in documents(path)} for path in (places.train_file, places.eval_file)
    )
    texts = {path.read_text("utf-8") for path in (places.out / "text").glob("*.py")}
    assert held_out and not train & held_out
    assert train | held_out == texts


def documents(path):
    """The ids of each document: what stands before an EOS (id 0)."""
    tokens = TokenFile.open(path).tokens
    return [part[part != 0].tolist() for part in np.split(tokens, np.flatnonzero(tokens == 0)) if (part != 0).any()]


def test_the_samples_are_of_the_drawn_and_of_the_trained_weights(made):
    places, outcome = made
    tokenizer = Tokenizer.from_file(str(places.model / "tokenizer.json"))
    prompt = tokenizer.encode(TINY.prompt).ids
    for folder, from_scratch, text in ((places.shape, True, outcome.before), (places.model, False, outcome.after)):
        engine = open_engine(folder, seq_len=TINY.seq_len, from_scratch=from_scratch, seed=stages.SEED)
        tokens = complete(engine, prompt, TINY.new_tokens, temperature=0.7, seed=stages.SEED, stop=0)
        assert tokenizer.decode(tokens) == text
    assert outcome.before != outcome.after


# called again


def test_a_second_call_finds_everything_made(made, monkeypatch):
    places, outcome = made
    before = times(places.out)
    monkeypatch.setattr(stages, "train", None)
    assert quiet(places) == (outcome, True)
    assert times(places.out) == before


def test_a_lost_model_is_exported_again(made, tmp_path):
    """What is there is used: the data, and the checkpoint of the last step."""
    places, outcome = Places(shutil.copytree(made[0].out, tmp_path / "copy")), made[1]
    (places.model / "model.safetensors").unlink()
    again, cached = quiet(places)
    assert not cached and again.first_step_s is None
    assert (again.eval_loss, again.after) == (outcome.eval_loss, outcome.after)


def test_other_settings_are_made_anew(made, tmp_path):
    places = Places(shutil.copytree(made[0].out, tmp_path / "copy"))
    outcome, cached = quiet(places, dataclasses.replace(TINY, vocab_size=280, steps=3))
    assert not cached and outcome.first_step_s is not None
    assert TokenFile.open(places.train_file).vocab_size == 280


def test_an_interrupted_training_goes_on_where_it_was(made, tmp_path):
    places = Places(shutil.copytree(made[0].out, tmp_path / "copy"))
    for folder in (places.run, places.model):
        shutil.rmtree(folder)

    @contextmanager
    def interrupting(steps):
        yield lambda record: os.kill(os.getpid(), signal.SIGINT) if record.step == 5 else None

    with pytest.raises(stages.Interrupted) as interrupted:
        quiet(places, follow=interrupting)
    assert (interrupted.value.result.steps, interrupted.value.result.exit_code) == (5, 130)
    steps = []

    @contextmanager
    def counting(_):
        yield lambda record: steps.append(record.step) if isinstance(record, TrainRecord) else None

    outcome, cached = quiet(places, follow=counting)
    assert not cached and steps == list(range(6, 13))
    whole, untouched = made
    assert resume.weights_hash(places.model) == resume.weights_hash(whole.model)
    assert outcome.eval_loss == untouched.eval_loss


def test_a_ruined_model_is_an_error_and_no_interrupt(tmp_path, monkeypatch):
    ruined = TrainResult(exit_code=NonFiniteError.exit_code, warnings=("no model",))
    monkeypatch.setattr(stages, "train", lambda **given: ruined)
    where = device.pick("cpu")
    with pytest.raises(NonFiniteError, match="no model"):
        stages.trained(TINY, Places(tmp_path), where, lambda line: None, unwatched)


# killed


HELD = """
import signal, sys
from llmq.cli.train import main
from llmq.engine.engine import Engine
real = Engine.update
def update(self, step, rate):
    if step == STEP:
        signal.pause()
    return real(self, step, rate)
Engine.update = update
main(sys.argv[1:])
"""


def hold(monkeypatch, step):
    """The process that is to be killed stays in a step until it is: so few steps may be over before."""

    def held(command, **more):
        assert command[:3] == [sys.executable, "-m", "llmq.cli.train"]
        return subprocess.Popen([sys.executable, "-c", HELD.replace("STEP", str(step)), *command[3:]], **more)

    processes = SimpleNamespace(Popen=held, run=subprocess.run, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(resume, "subprocess", processes)


def test_a_killed_run_ends_with_the_same_weights(made, monkeypatch, capsys):
    places, _ = made
    hold(monkeypatch, 8)  # a checkpoint is of each third one
    assert run(places.out, TINY, show_resume=True) == 0
    shown = capsys.readouterr().out
    digest = resume.weights_hash(places.model)
    assert shown.count(digest) == 2 and "the same bits" in shown
    log = [json.loads(line) for line in (places.out / "resume" / "log.jsonl").read_text().splitlines()]
    resumed_at = [record["step"] for record in log if record["type"] == "resume"]
    assert len(resumed_at) == 1 and 0 < resumed_at[0] < TINY.steps
    assert [record["reason"] for record in log if record["type"] == "end"] == ["finished"]


def test_other_weights_are_not_called_the_same(made, monkeypatch, capsys):
    places, _ = made
    monkeypatch.setattr(resume, "_wait_for_checkpoint", lambda process, folder: (1, 2))
    monkeypatch.setattr(resume, "subprocess", FakeProcesses)
    monkeypatch.setattr(resume, "weights_hash", lambda folder: str(folder))
    assert run(places.out, TINY, show_resume=True) == NOT_PROVEN
    assert "NOT the same" in capsys.readouterr().out


class FakeProcesses:
    """A subprocess module whose processes do nothing, and succeed."""

    STDOUT = subprocess.STDOUT

    class Popen:
        """A process that can be killed."""

        def __init__(self, *_, **__):
            pass

        def send_signal(self, number):
            assert number == signal.SIGKILL

        def wait(self):
            pass

    @staticmethod
    def run(command, **_):
        return subprocess.CompletedProcess(command, 0)


def test_a_training_that_fails_by_itself_is_not_a_resume(made, tmp_path):
    """Nothing to train on: the message of the process is passed on."""
    with pytest.raises(LlmqError, match=r"ended by itself(.|\n)*error: there is no folder"):
        resume.show_resume(TINY, Places(tmp_path), tell=lambda line: None)


# text, tokenizer, entropy, size


@pytest.fixture
def library(tmp_path):
    """A standard library of four files that count and four that do not."""
    texts = {
        "b.py": b"# b\n" * 20_000,
        "a/c.py": b"# c\n" * 20_000,
        "a/big.py": b"#" * 500_000,
        "z.py": b"# z\n",
        "test/d.py": b"# d\n",
        "site-packages/e.py": b"# e\n",
        "latin.py": b"# \xe9\n",
        "empty.py": b"",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    return tmp_path


def test_the_text_is_whole_files_up_to_a_size_in_a_fixed_order(library):
    found = corpus.standard_library(200_000, library)
    assert list(found.texts) == ["a.c.py", "b.py", "z.py"]
    assert found.num_bytes == 160_004
    (library / "z.py").write_bytes(b"# y\n")
    assert corpus.standard_library(200_000, library).sha256 != found.sha256


def test_a_python_without_sources_is_told(tmp_path):
    with pytest.raises(DataError, match="0 bytes of Python sources"):
        corpus.standard_library(200_000, tmp_path)


def test_the_tokenizer_is_lossless_on_any_text(tmp_path):
    corpus.train_tokenizer(["def f(x):\n    return x\n"] * 50, 270, tmp_path, 32)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.token_to_id(corpus.EOS) == 0
    for text in ("def f(y): ...", "\t\r\n  \u00e9\u4e2d\U0001f600\x00"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_unigram_entropy_is_that_of_the_frequencies(tmp_path):
    TokenFile.write(tmp_path / "t.bin", np.array([0, 0, 0, 5, 7, 7, 2, 2]), vocab_size=9)
    shares = (3 / 8, 1 / 8, 2 / 8, 2 / 8)
    assert corpus.unigram_entropy(tmp_path / "t.bin") == pytest.approx(-sum(p * math.log(p) for p in shares))


def test_installed_size_follows_requirements(monkeypatch, tmp_path):
    """llmq -> numpy -> nothing; an extra is not counted, and neither is what nobody needs."""

    class Fake:
        def __init__(self, name, requires):
            self.requires = requires
            (tmp_path / name).write_bytes(bytes(1000))
            (tmp_path / f"{name}.pyc").write_bytes(bytes(1000))
            self.files = [type("File", (), {"locate": lambda _, p=p: p})() for p in tmp_path.glob(f"{name}*")]

    there = {
        "llmq-train": Fake("llmq", ["numpy>=1", 'torch; extra == "test"', "absent>=2"]),
        "numpy": Fake("numpy", []),
        "torch": Fake("torch", []),
    }

    def find(name):
        if name not in there:
            raise installed.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(installed, "distribution", find)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "code.py").write_bytes(bytes(10))
    monkeypatch.setattr(installed.llmq, "__file__", str(tmp_path / "package" / "__init__.py"))
    assert installed.installed_bytes() == 2010
    del there["llmq-train"]
    assert installed.installed_bytes() is None


# what is shown


def train_record(step, loss=2.0):
    return TrainRecord(step, 0.1, loss, 1.0, 1e-3, 100.0, 1000, 1000, sol=0.25)


def test_plain_lines_are_few_and_end_with_the_last_step(capsys, monkeypatch):
    clock = iter(np.arange(0, 100, 1.0))
    monkeypatch.setattr(show.time, "perf_counter", lambda: next(clock))
    watch = show.Lines(20)
    for step in range(1, 21):
        watch(train_record(step))
    watch(EvalRecord(20, 0.1, 1.5, 2.0, 10.0, 1000, 1000))
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines] == [1, 6, 11, 16, 20, 20]
    assert lines[1].split() == ["step", "6/20", "loss", "2.000", "10000", "tokens/s", "sol", "25.0%", "14", "s", "left"]
    assert lines[-1].endswith("held-out loss 1.500")


def test_a_terminal_gets_a_live_line(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(show, "Console", lambda **k: Console(file=screen, force_terminal=True, width=120, **k))
    monkeypatch.setenv("TERM", "xterm")
    with show.training(20) as watch:
        assert isinstance(watch.progress, Progress)
        watch(train_record(7, loss=3.25))
        watch(EvalRecord(7, 0.1, 1.5, 2.0, 10.0, 1000, 1000))
    assert "loss 3.250" in screen.getvalue() and "held-out loss 1.500" in screen.getvalue()


def test_a_pipe_and_a_dumb_terminal_get_plain_lines(monkeypatch):
    for console in (Console(file=io.StringIO()), Console(file=io.StringIO(), force_terminal=True)):
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setattr(show, "Console", lambda console=console, **_: console)
        with show.training(20) as watch:
            assert isinstance(watch, show.Lines)


def test_the_last_screen_says_what_was_measured(made):
    places, outcome = made
    outcome = dataclasses.replace(
        outcome, installed_bytes=358_000_000, eval_loss=4.0, unigram_entropy=6.25, sol=0.5, used_cores=1, num_cores=2
    )
    text = "\n".join(show.last_screen(TINY, places, outcome, cached=False))
    for expected in ("358 MB, without torch", "4.000 nats", "6.250 nats", "2.250 below", "25.0% of the machine's"):
        assert expected in text
    assert all(str(path) in text for path in (places.model, places.plot, places.log))


@pytest.mark.slow
def test_what_to_try_next_works(made):
    """The three commands, as printed, in a shell."""
    places, outcome = made
    lines = show.last_screen(TINY, places, outcome, cached=True)
    commands = lines[lines.index("Try next:") + 1 :]
    assert [line.startswith("  # ") for line in commands] == [True, False] * 3
    if not Path(shlex.split(commands[1])[0]).exists():
        pytest.skip("llmq is not installed in this environment")
    for command in commands[1::2]:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (places.out / "again" / "model" / "model.safetensors").exists()
    assert (places.out / "curves.svg").exists()
    assert (places.out / "my-data" / "train.bin").exists()


def test_too_little_learnt_is_a_failure(made, monkeypatch):
    """With the loss barely below the entropy the quickstart has not shown that it trains."""
    places, _ = made
    monkeypatch.setattr(stages.Outcome, "gain", TINY.least_gain)
    assert run(places.out, TINY, show_resume=False) == 0
    monkeypatch.setattr(stages.Outcome, "gain", TINY.least_gain - 0.1)
    assert run(places.out, TINY, show_resume=False) == NOT_PROVEN


def test_a_bare_shell_is_enough(tmp_path):
    """No HOME, C locale, no colour, no terminal; nothing is written outside of the folder."""
    script = (
        "import sys; from pathlib import Path; from llmq.quickstart.__main__ import prepare_environment, run\n"
        "out = Path('out'); prepare_environment(out)\n"
        "from llmq.quickstart.run import Settings\n"
        f"sys.exit(run(out, Settings(**{dataclasses.asdict(TINY)!r}), show_resume=False))"
    )
    environ = {"LC_ALL": "C", "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environ, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not done.stderr and b"\x1b" not in done.stdout
    assert b"Try next:" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_real_one(tmp_path):
    """As a user calls it: at least one nat below the unigram entropy, and shown again offline."""
    command = [sys.executable, "-m", "llmq.quickstart", "--cpu"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    offline = {**environ, **dict.fromkeys(("http_proxy", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9")}
    before = times(tmp_path)
    done = subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, check=False)
    assert done.returncode == 0 and times(tmp_path) == before
    outcome = json.loads((tmp_path / "out" / "quickstart" / "outcome.json").read_text())
    assert outcome["unigram_entropy"] - outcome["eval_loss"] >= 1
