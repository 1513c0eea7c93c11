"""The quickstart at a tiny size: real commands, found done by a second call, resumed, and killed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from llmq.cli import shell, train
from llmq.data.tokens.token_file import TokenFile
from llmq.report.read import read_log

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import quickstart  # noqa: E402

if not (Path(sys.executable).parent / "llmq-train").exists():
    pytest.skip("llmq is not installed in this environment", allow_module_level=True)


def tiny(folder: Path, **options) -> quickstart.Setup:
    """A setup whose training takes some seconds, most of them after the first checkpoint."""
    for name in ("config.json", "train.yaml"):
        (folder / "sizes").mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tools" / "quickstart" / "cpu" / name, folder / "sizes")
    path = folder / "sizes" / "config.json"
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 1, "vocab_size": 300, "max_position_embeddings": 128}
    path.write_text(json.dumps(json.loads(path.read_text()) | small))
    path = folder / "sizes" / "train.yaml"
    small = {"seq_len": 32, "batch_size": 4, "steps": 200, "learning_rate": 0.01} | options
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | small))
    inputs = (f"{quickstart.LIBRARY}/a*.py",)
    return quickstart.Setup(folder / "sizes", inputs, out=folder / "out" / "quickstart")


@pytest.fixture(scope="module", autouse=True)
def environ():
    """The commands run this tree's llmq, on one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        patch.setattr(quickstart, "LEAST_GAIN", -9.0)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished quickstart (tests leave it unchanged)."""
    setup = tiny(tmp_path_factory.mktemp("made"))
    assert quickstart.quickstart(setup) == 0
    return setup


@pytest.fixture
def copy(made, tmp_path):
    """What `made` made, in the same place in its folder, to be changed: its own stamp says so."""
    out = shutil.copytree(made.out, tmp_path / "quickstart")
    return replace(made, out=out)


def times(folder):
    """When each file below `folder` was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_last_screen_is_about_what_was_made(made):
    screen, out = (made.out / "screen.txt").read_text(), made.out
    train_file, held_out = (TokenFile.open(out / "data" / name) for name in ("train.bin", "eval.bin"))
    log = read_log(out / "run")
    shares = np.bincount(held_out.tokens) / held_out.num_tokens
    entropy = -sum(share * np.log(share) for share in shares if share)
    for expected in (
        f"{train_file.num_tokens:,} to train on, {held_out.num_tokens:,} held out",
        f"{out}/run/model",
        f"held-out loss                {log.eval['loss'][-1]:.3f} nats",
        f"unigram entropy              {entropy:.3f} nats",
        f"tokens/s                     {np.median(log.train['tps']):.0f}\n",
        "of the machine's" if os.cpu_count() != 1 else "share",
        "MB, without torch",
    ):
        assert expected in screen
    assert float(re.search(r"seconds to the first step +([\d.]+)\n", screen).group(1)) > 0
    before, after = re.findall(r"Completed by the .*trained model:\n((?:  \| .*\n)+)", screen)
    assert before.startswith("  | class Reader:\n  |     def __init__(self, ") and before != after
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_second_call_shows_the_same_and_writes_nothing(made, capsys):
    before = times(made.out)
    assert quickstart.quickstart(made) == 0
    assert capsys.readouterr().out == (made.out / "screen.txt").read_text() and times(made.out) == before


@pytest.mark.slow
def test_a_lost_model_is_exported_again(copy, capsys):
    """What is there is used: the data, and the checkpoint of the last step."""
    model = copy.out / "run" / "model" / "model.safetensors"
    weights = model.read_bytes()
    model.unlink()
    assert quickstart.quickstart(copy) == 0
    said = capsys.readouterr().out
    assert model.read_bytes() == weights
    assert "tokenize-data --input" not in said.partition("Made:")[0] and "[T] step" not in said
    assert "taken by an earlier call" in said


@pytest.mark.slow
def test_other_sizes_are_made_again(made, copy, tmp_path):
    other = replace(tiny(tmp_path, steps=20), out=copy.out, inputs=made.inputs)
    config = other.sizes / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 300', '"vocab_size": 280'))
    quickstart.quickstart(other)
    assert TokenFile.open(copy.out / "data" / "train.bin").header.vocab_size == 280
    assert read_log(copy.out / "run").train["step"][-1] == 20


@pytest.mark.sweep
def test_too_little_learnt_is_a_failure_each_time(copy, monkeypatch):
    (copy.out / "screen.txt").unlink()
    monkeypatch.setattr(quickstart, "LEAST_GAIN", 9.0)
    assert quickstart.quickstart(copy) == quickstart.quickstart(copy) == 1


@pytest.mark.slow
def test_a_command_that_fails_ends_the_quickstart_with_its_code(tmp_path, capfd):
    setup = replace(tiny(tmp_path), inputs=(f"{tmp_path}/*.none",))
    with pytest.raises(SystemExit) as ended:
        quickstart.quickstart(setup)
    assert ended.value.code == 3
    said = capfd.readouterr()
    assert "no file matches" in said.err and "exit code 3" in said.out


@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_weights(copy, capsys):
    assert quickstart.quickstart(copy, show_resume=True) == 0
    said = capsys.readouterr().out
    assert re.search(r"\$ kill -KILL \d+\n", said) and said.endswith("  the same bits\n")
    assert len(set(re.findall(r"sha256 (\w{64})", said))) == 1
    log = [json.loads(line) for line in (copy.out / "resume" / "log.jsonl").read_text().splitlines()]
    assert [record["reason"] for record in log if record["type"] == "end"] == ["finished"]
    assert {record["step"] for record in log if record["type"] == "resume"} == {100}


@pytest.mark.sweep
def test_other_weights_are_not_called_the_same(copy, capsys):
    path = copy.out / "run" / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert quickstart.quickstart(copy, show_resume=True) == 1
    assert capsys.readouterr().out.endswith("  NOT the same\n")


@pytest.mark.slow
def test_ctrl_c_saves_and_the_next_call_resumes(tmp_path):
    """The signal goes to the quickstart and to its command, as from a terminal."""
    setup = tiny(tmp_path, log_every=1)
    script = "import quickstart, sys; from pathlib import Path; quickstart.LEAST_GAIN = -9.0\n"
    script += f"sys.exit(quickstart.quickstart(quickstart.Setup(Path({str(setup.sizes)!r}), {setup.inputs!r}, "
    script += f"out=Path({str(setup.out)!r}))))"
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'tools'}{os.pathsep}{os.environ['PYTHONPATH']}"}
    command = [sys.executable, "-c", script]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True)
    said = ""
    for line in first.stdout:
        said += line
        if line.startswith("[T] step    20 "):
            os.killpg(first.pid, signal.SIGINT)
    assert first.wait() == 130 and "the same call of the quickstart resumes there" in said
    stopped = read_log(setup.out / "run").train["step"][-1]
    assert 20 <= stopped < 200
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=True)
    assert f"[T] step {stopped + 1:5d} " in done.stdout and "[T] step     1 " not in done.stdout
    assert "Try next:" in done.stdout


@pytest.mark.slow
def test_what_to_try_next_works(made):
    """The three commands, as printed, in a shell."""
    commands = (made.out / "screen.txt").read_text().partition("Try next:\n")[2].splitlines()
    assert [line.startswith("  # ") for line in commands] == [True, False] * 3
    for command in commands[1::2]:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    for name in ("again/model/model.safetensors", "curves.svg", "my-data/train.bin"):
        assert (made.out.parent / name).exists()


# on a GPU


def bench_result(rate, batch_size):
    """What `llmq-bench --save` writes, as far as it is read."""
    found = {"tokens_per_second": {"median": rate}, "batch_size": batch_size, "sol": 0.5, "first_step_s": 3.0}
    return json.dumps({"results": [found]})


def test_batch_and_steps_follow_from_the_bench(tmp_path):
    """At 32768 tokens a step: a minute's worth, between 200 steps and those of train.yaml; what it says is settled."""
    setup = quickstart.Setup(ROOT / "tools" / "quickstart" / "gpu", (), device="cuda", out=tmp_path)
    for rate, batch, fit in ((1e3, 4, "--steps=200 --batch-size=4 --grad-accumulation=16"), (1e7, 32, "--steps=1500 ")):
        (tmp_path / "bench.json").write_text(bench_result(rate, batch))
        assert fit in quickstart.fitted(setup).fit


def test_the_commands_of_the_gpu_are_ones_that_llmq_takes(tmp_path, monkeypatch, capsys):
    """Every option is parsed by the command itself; nothing runs but what needs no GPU."""
    import llmq.bench.run
    import llmq.training.train

    setup = quickstart.Setup(ROOT / "tools" / "quickstart" / "gpu", (), device="cuda", out=tmp_path)
    asked, fits = [], []
    monkeypatch.setattr(llmq.bench.run, "run", lambda request, *_: asked.append(request) or 0)
    monkeypatch.setattr(llmq.training.train, "run", lambda options: asked.append(options) or 1 / 0)

    def in_process(command, **_):
        from llmq.cli import bench

        name, *arguments = quickstart.shlex.split(command)
        if name.endswith("llmq-bench"):
            assert shell.run(bench.command, arguments) == 0
            (tmp_path / "bench.json").write_text(bench_result(4e5, 16))
        else:
            with pytest.raises(ZeroDivisionError):
                shell.run(train.command(), arguments)
        return (fits.pop() if fits else 0), 1.0

    monkeypatch.setattr(quickstart, "run", in_process)
    fitting = quickstart.fitted(setup)
    quickstart.run(fitting.train(tmp_path / "run"))
    bench, options = asked[0], asked[1].to_flat()
    assert (bench.seq_len, bench.tokens_per_step, bench.dtypes) == (512, 32768, ("bf16",))
    assert (options["steps"], options["batch_size"], options["grad_accumulation"]) == (732, 16, 4)
    assert (options["model_dtype"], options["master_dtype"], options["device"]) == ("bf16", "fp32", "cuda")
    for code, verdict in ((0, "Llama-3-8B fits"), (4, "Llama-3-8B does not fit")):
        fits.append(code)
        text = quickstart.gpu_results(tmp_path)
        assert verdict in text and "400,000 tokens/s" in text and "3.0 s, with kernels compiled" in text
    assert asked[-1].to_flat()["dry_run"] and asked[-1].to_flat()["model"] == "llama3_8b"


# the script


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with the quickstart's script and a Python that notes how it is called."""
    python, tools = tmp_path / "python", tmp_path / "checkout" / "tools"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "$@" >> "$CALLED"\n')
    python.chmod(0o755)
    tools.mkdir(parents=True)
    for name in ("quickstart.sh", "python.sh"):
        shutil.copy(ROOT / "tools" / name, tools)
    (tmp_path / "checkout" / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "checkout" / ".venv" / "bin" / "python").symlink_to(python)
    monkeypatch.setenv("PYTHON", str(python))
    monkeypatch.setenv("CALLED", str(tmp_path / "called"))
    return tmp_path / "checkout"


@pytest.mark.parametrize("arguments", [(), ("--show-resume",), ("--cpu",), ("--show-resume", "--cpu")])
def test_the_script_asks_for_the_libraries_of_the_gpu_by_default(checkout, arguments):
    assert subprocess.run(["bash", str(checkout / "tools" / "quickstart.sh"), *arguments], check=False).returncode == 0
    made, started = [line.split() for line in (checkout.parent / "called").read_text().splitlines()]
    gpu = [] if "--cpu" in arguments else ["--cuda"]
    assert made == ["tools/environment.py", ".venv", "--extra", "plot", *gpu]
    assert started == ["tools/quickstart.py", *arguments]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--help"], 0, "usage: bash tools/quickstart.sh"),
        (["--cpu", "-h"], 0, "--show-resume"),
        (["--cpu", "--hlep"], 2, "error: --hlep is no option"),
    ],
)
def test_the_script_reads_its_options_before_it_installs(checkout, arguments, code, says):
    script = str(checkout / "tools" / "quickstart.sh")
    done = subprocess.run(["bash", script, *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == code and says in done.stdout + done.stderr
    assert not (checkout.parent / "called").exists(), "nothing was installed or started"


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_the_real_one(tmp_path):
    """In a bare shell, as a user calls it: a nat below the unigram entropy, shown again offline, all in one folder."""
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    environ = {"LC_ALL": "C", "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    environ["MPLCONFIGDIR"] = str(tmp_path / "out" / "cache")
    command = [sys.executable, "tools/quickstart.py", "--cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout and "Try next:" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"tools", "out"}
    environ |= dict.fromkeys(("http_proxy", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    before, began = times(tmp_path / "out"), time.monotonic()
    again = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert again.returncode == 0 and again.stdout == done.stdout[done.stdout.index("\nMade:") :]
    assert times(tmp_path / "out") == before and time.monotonic() - began < 60
