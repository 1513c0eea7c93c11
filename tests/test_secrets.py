"""No secret is in what a run prints or writes: canaries over whole runs, and over those that fail."""

import io
import json
import logging
import os
import sys
from pathlib import Path

import pytest
from tiny_runs import text_model

import llmq
from llmq.cli import plot, shell
from llmq.cli import train as command
from llmq.data.tokens.tokenizer import Sidecar
from llmq.errors import DataError
from llmq.files.huggingface import write_json
from llmq.files.run_lock import this_process
from llmq.redact import HIDDEN, note_secrets, print_redacted, redacted, redacted_in

CANARY = "c4n4ry"
URL = f"https://someone:{CANARY}-given%21@tracker.example/log?project=7&api_key={CANARY}-query"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a model and data, and an environment with a canary for each kind of secret."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")):
        monkeypatch.setenv(name, f"{CANARY}-{number}")
    home = tmp_path.parent / f"{tmp_path.name}-home"  # whose token stays where it is
    home.mkdir()
    (home / "token").write_text(f"hf_{CANARY}_file\n")
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{CANARY}-proxy@127.0.0.1:9")
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    factory = logging.getLogRecordFactory()
    text_model(tmp_path / "source")
    rows = [json.dumps({"text": f"{n} and {n + 1} are {2 * n + 1}. " * 4}) for n in range(40)]
    Path("rows.jsonl").write_text("\n".join(rows))
    yield tmp_path
    logging.setLogRecordFactory(factory)


class Leaky(llmq.Callback):
    """A tracker that is given a URL with a password, and says everything that it should not."""

    def __init__(self, url, fails=""):
        self.url, self.fails = url, fails

    def on_step(self, run, record):
        if record.step == 2 and self.fails:
            raise DataError(f"{self.url} refused {os.environ['HF_TOKEN']} of {list(run.options.values())}")

    def on_begin(self, run):
        run._ready.log.warn(f"{self.url} and {dict(os.environ)} and {Path(os.environ['HF_HOME'], 'token').read_text()}")

    def state(self):
        return {"url": self.url, "key": [os.environ["WANDB_API_KEY"]]}


llmq.register("callback", "leaky", Leaky)
FLAGS = ["--from-scratch", "--seq-len=16", "--batch-size=2", "--grad-accumulation=1", "--device=cpu", "--name=run"]
FLAGS += ["--model-dtype=fp32", "--eval-every-n-steps=2", "--ckpt-interval=2", "-v"]
RUN = ["--model=source", "--data=rows.jsonl", "--steps=4", *FLAGS]


def found(folder):
    """The files with a canary, and all others."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    leaks = [path for path in files if CANARY.encode() in path.read_bytes() or CANARY in str(path)]
    return leaks, set(files) - set(leaks)


def run(capfd, arguments, entry=command.command):
    """The exit code of a command, and what it prints, without a canary."""
    with pytest.raises(SystemExit) as end:
        shell.main(entry(), arguments)
    said = "".join(capfd.readouterr())
    assert CANARY not in said
    return end.value.code, said


def test_a_whole_run_leaves_none(place, capfd):
    code, said = run(capfd, [*RUN, f"--callback=leaky:url={URL}"])
    assert code == 0 and f"https://{HIDDEN}@tracker.example/log?project=7&api_key={HIDDEN}" in said
    code, said = run(capfd, [*RUN, f"--callback=leaky:url={URL}", "--steps=6", "--continue"])
    assert code == 0 and "Changed since then: --steps 4 to 6\n" in said  # and nothing else
    assert run(capfd, ["runs", "-o", "plot.svg"], lambda: plot.command)[0] == 0
    leaks, others = found(place)
    suffixes = {path.name.rsplit(".", 1)[-1] for path in others}
    assert not leaks and {"jsonl", "json", "safetensors", "bin", "svg"} <= suffixes


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        pytest.param([*RUN, f"--callback=leaky:url={URL},fails=yes"], 3, id="a callback"),
        pytest.param(["--model=source", f"--data={URL}", *FLAGS], 3, id="data"),
        pytest.param([*RUN, f"--model={URL}"], None, id="model"),
        pytest.param([*RUN, f"--matmul-dtype={URL}"], 2, id="option"),
        pytest.param([*RUN, "--model=someone/model", f"--tokenizer={URL}"], None, id="hub"),
        pytest.param([*RUN, f"--log-file={URL}/log.jsonl", "--dry-run"], 0, id="dry run"),
    ],
)
def test_a_run_that_fails_leaves_none(place, capfd, arguments, code):
    found_code, said = run(capfd, arguments)
    assert found_code == code or (code is None and found_code in (2, 3)), said
    assert not found(place)[0]


def test_python_s_errors_have_none(place):
    note_secrets(f"of {URL}")
    with pytest.raises(DataError) as why:
        raise DataError(f"{URL}: {os.environ['HF_TOKEN']}, {CANARY}-given!", 7)
    assert CANARY not in repr(why.value) and why.value.args[1] == 7


def test_a_traceback_and_a_library_s_log_have_none(place, capsys):
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    with pytest.raises(SystemExit):
        shell.main(command.command(), ["--version"])
    logging.getLogger("a library").addHandler(handler)
    logging.getLogger("a library").warning("asking %s with %s", URL, os.environ["HF_TOKEN"])
    assert CANARY not in out.getvalue() and "asking https://***@tracker" in out.getvalue()
    try:
        raise RuntimeError(os.environ["HTTPS_PROXY"])
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    said = capsys.readouterr().err
    assert sys.excepthook is print_redacted and CANARY not in said and said.startswith("Traceback (most recent")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("https://a:b@host/x", "https://***@host/x"),
        ("https://a:p@ss@host/x", "https://***@host/x"),
        ("https:/token@host/x", "https:/***@host/x"),  # as a path
        ("see https://host/x?a=1&X-Amz-Signature=ab/c%2F&b=2.", "see https://host/x?a=1&X-Amz-Signature=***&b=2."),
        ("https://host/x?tokens_seen=9", "https://host/x?tokens_seen=***"),
        ("mail me@host, or see https://host/@me and a:/b", "mail me@host, or see https://host/@me and a:/b"),
        ("--sample-tokens=9 --key-frames=2", "--sample-tokens=9 --key-frames=2"),
    ],
)
def test_what_is_hidden(text, left):
    assert redacted(text) == left
    assert redacted_in({text: [text, 1, None, (text, 2.5)]}) == {left: [left, 1, None, [left, 2.5]]}


def test_files_beside_a_model_and_tokens_have_none(place, monkeypatch):
    write_json(Path("adapter_config.json"), {"base_model_name_or_path": URL})
    Sidecar.model_construct(text=(URL,)).write(Path("x.bin"))
    monkeypatch.setattr(sys, "argv", ["llmq-train", f"--data={URL}"])
    assert CANARY not in this_process() and found(place)[0] == [] and HIDDEN in Path("adapter_config.json").read_text()


def test_short_values_are_no_secrets(monkeypatch):
    """They would be parts of other words."""
    monkeypatch.setenv("HF_TOKEN", "a")
    assert redacted("a b a") == "a b a"
