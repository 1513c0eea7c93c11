"""The log: console lines, the file's rules, and reading it back, damaged or not."""

import io
import json
import math
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmq.errors import DataError, LlmqError, StorageError
from llmq.options.run import LogOptions
from llmq.report.read import find_log, read_log
from llmq.training.log import RunLog
from llmq.training.records import EvalRecord, TrainRecord

TRAIN = TrainRecord(
    step=7,
    epoch=0.125,
    loss=3.1415926,
    norm=2.7182818,
    lr=1e-5,
    time_ms=412.2,
    tokens=8191,
    trained_tokens=8000,
    sol=0.314,
)
EVAL = EvalRecord(step=7, epoch=0.125, loss=3.1415926, train_loss=3.25, time_ms=99, tokens=990, trained_tokens=900)


def options(path: Path, **changes: object) -> LogOptions:
    return LogOptions.model_validate({"name": "try", "log_file": str(path), **changes})


def write(path: Path, steps: range, *, resume: int | None = None, loss: float = 1.0) -> None:
    with RunLog(options(path), io.StringIO()) as log:
        log.options({"name": "try", "learning_rate": 1e-5})
        log.begin(resume_step=resume)
        for step in steps:
            log.train(replace(TRAIN, step=step, loss=loss))
            if step % 4 == 0:
                log.evaluation(replace(EVAL, step=step, loss=loss))


class Terminal(io.StringIO):
    """A console that a user watches."""

    def isatty(self) -> bool:
        return True


LINE = "[T] step     7 [ 25.0%] | time:   412 ms | norm   2.718282 | loss   3.141593 | tps 19871 | sol 31.4%"
EVALUATED = "[V] step     7 [ 25.0%] | time:    99 ms | eval   3.141593 | train   3.250000 | tps 10000"
PADDED = replace(TRAIN, tokens=8000, real_tokens=6000, time_ms=400)


def test_lines_have_the_documented_form() -> None:
    assert TRAIN.line(28) == LINE and EVAL.line(28) == EVALUATED
    assert TRAIN.line(28, details=True) == f"{LINE} | lr 1.000e-05"
    known = replace(TRAIN, memory_mib=36100.2).line(28, details=True)
    assert known == f"{LINE} | lr 1.000e-05 | memory 36100 MiB"
    for num_steps, share in ((1400, "[  0.5%]"), (7, "[100.0%]"), (0, "[   n/a]")):
        assert share in replace(TRAIN, epoch=1.25).line(num_steps)
    assert "| tps 20000 (15000 without padding) | sol" in PADDED.line(7)
    assert "| tps 20000 | sol" in replace(PADDED, real_tokens=8000).line(7)


def test_a_line_says_when_an_epoch_begins(tmp_path: Path) -> None:
    console = io.StringIO()
    with RunLog(options(tmp_path / "log.jsonl"), console) as log:
        log.begin(num_steps=8)
        for step, epoch in enumerate((0.5, 1.0000000000001, 1.5, 2.0, 2.5), 1):
            log.train(replace(TRAIN, step=step, epoch=epoch))
    with RunLog(options(tmp_path / "log.jsonl"), console) as log:  # a resumed run is in an epoch that is known
        log.begin(resume_step=5, num_steps=8)
        log.train(replace(TRAIN, step=6, epoch=3.0))
    lines = [line[: len("[T] step     7")] for line in console.getvalue().splitlines()]
    assert lines == [
        *("[T] step     1", "[T] step     2", "Epoch 2", "[T] step     3", "[T] step     4", "Epoch 3"),
        *("[T] step     5", "[T] step     6"),
    ]


@pytest.mark.parametrize(
    ("verbosity", "shown"),
    [
        (1, ["[Options]", "[T]", "note", "[V]", "Warning: hot", "[Warnings]", "- hot", "- worse"]),
        (0, ["[Options]", "[T]", "note", "[V]", "Warning: hot", "[Warnings]", "- hot", "- worse"]),
        (-1, ["[V]", "Warning: hot", "[Warnings]", "- hot", "- worse"]),
        (-2, []),
    ],
)
def test_verbosity_takes_lines_away_and_none_from_the_file(tmp_path: Path, verbosity: int, shown: list[str]) -> None:
    console = io.StringIO()
    with RunLog(options(tmp_path / "log.jsonl", verbosity=verbosity), console) as log:
        log.options({})
        log.begin(num_steps=8)
        log.train(TRAIN)
        log.notice("note")
        log.evaluation(EVAL)
        log.warn("hot")
        log.end("finished", ["hot", "worse"])
        assert log.warnings == ["hot", "worse"]
    lines = console.getvalue().splitlines()
    assert [line.strip()[: len(text)] for line, text in zip(lines, shown, strict=True)] == shown
    assert ("lr 1.000e-05" in console.getvalue()) == (verbosity == 1)
    kinds = [json.loads(line)["type"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert kinds == ["header", "train", "notice", "eval", "notice", "end"]


def test_a_terminal_has_the_options_that_differ_and_all_others_all_of_them(tmp_path: Path) -> None:
    values = {"model": "m", "seed": 0, "batch_size": 4}
    for console, verbosity, names in (
        (Terminal(), 0, ["model", "batch_size"]),
        (Terminal(), 1, [*values]),
        (io.StringIO(), 0, [*values]),
    ):
        log = RunLog(options(tmp_path / "log.jsonl", verbosity=verbosity), console)
        log.options(values, {"model", "batch_size"})
        head, *rest = console.getvalue().splitlines()
        assert [line.split()[0] for line in rest] == names and ("-v shows all" in head) == (len(names) == 2)


def test_a_terminal_that_goes_away_ends_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setenv("TERM", "xterm")
    log = RunLog(options(tmp_path / "log.jsonl"), Gone())
    with log.task("Training", after_s=0.0) as report:
        report(1, 2)
        report(2, 2)
    log.begin()
    log.say("unheard")


def test_sections_on_the_console_are_plain_and_in_order(tmp_path: Path) -> None:
    console = io.StringIO()
    with RunLog(options(tmp_path / "log.jsonl"), console) as log:
        log.options({"model": "Qwen/Qwen2.5-0.5B", "train_file": ("a.bin", "b.bin"), "eval_file": None})
        log.section("system", {"device": "cpu"}, "System 0")
        log.section("model", {"path": "/models/qwen"})
        log.begin()
    assert console.getvalue().splitlines() == [
        *("[Options]", "  model      : Qwen/Qwen2.5-0.5B", "  train_file : a.bin, b.bin", "  eval_file  : -"),
        *("[System 0]", "  device : cpu"),
    ]
    header = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert (header["type"], header["schema"], header["allocator"]) == ("header", 1, None)
    assert (header["system"], header["model"]) == ({"device": "cpu"}, {"path": "/models/qwen"})


@pytest.mark.parametrize("verbosity", [-1, 0, 1])
def test_a_run_that_starts_again_repeats_no_section(tmp_path: Path, verbosity: int) -> None:
    """But with -v; the file has all of them again."""
    shown, path = io.StringIO(), tmp_path / "log.jsonl"
    with RunLog(options(path, verbosity=verbosity), shown, again=True) as log:
        log.options({"name": "try"})
        log.warn("slow")
        log.begin(resume_step=3)
        log.notice("Continued from a checkpoint")
    after = ["Warning: slow", *(["Continued from a checkpoint"] if verbosity >= 0 else [])]
    before = ["[Options]", "  name : try"] if verbosity == 1 else []
    assert shown.getvalue().splitlines() == before + after
    assert json.loads(path.read_text().splitlines()[0])["options"] == {"name": "try"}


def test_colour_only_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = Terminal()
    log = RunLog(options(tmp_path / "log.jsonl"), console)
    log.section("system", {}, "System 0")
    assert "\x1b[1m[System 0]\x1b[0m" in console.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    log.section("system", {}, "System 0")
    assert console.getvalue().endswith("\n[System 0]\n")


def test_lines_arrive_when_piped_in_the_c_locale(tmp_path: Path) -> None:
    code = (
        "import sys; from llmq.training.log import RunLog; from llmq.options.run import LogOptions\n"
        "o = LogOptions(name='n', log_file=sys.argv[1])\n"
        "log = RunLog(o); log.say('Model: caf\\u00e9/\\udcff'); log.begin(); input()"
    )
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii:strict"}
    command = [sys.executable, "-c", code, str(tmp_path / "log.jsonl")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, **plain}, **pipes) as process:
        assert process.stdout.readline() == b"Model: caf\\xe9/\\udcff\n"  # while it waits: the line was flushed
        process.communicate(b"\n")
    assert process.returncode == 0


def test_due() -> None:
    log = RunLog(options(Path("log.jsonl"), log_every=10, eval_every_n_steps=4))
    assert [s for s in range(1, 33) if log.due(s, last=s == 32)] == [1, 10, 20, 30, 32]
    assert [s for s in range(1, 15) if log.eval_due(s, last=s == 14)] == [4, 8, 12, 14]
    assert not RunLog(options(Path("log.jsonl"), eval_every_n_steps=0)).eval_due(4, last=True)


def test_tables_come_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    before = time.time()
    write(path, range(1, 9))
    log = read_log(path)
    times = log.train["time"].tolist()
    assert before - 1 < times[0] and times == sorted(times) and times[-1] < time.time() + 1
    assert log.name == "try"
    assert log.header["options"]["learning_rate"] == 1e-5
    assert log.train["step"].tolist() == list(range(1, 9))
    assert log.train["loss"].tolist() == [1.0] * 8
    assert log.train["tps"][0] == pytest.approx(8191 / 0.4122)
    assert log.train["applied"].tolist() == [1.0] * 8
    assert log.eval["step"].tolist() == [4, 8]
    assert read_log(tmp_path).train["lr"].tolist() == [1e-5] * 8


def test_numbers_that_are_not_finite_are_valid_json(tmp_path: Path) -> None:
    path, console = tmp_path / "log.jsonl", io.StringIO()
    with RunLog(options(path), console) as log:
        log.begin()
        log.train(replace(TRAIN, loss=math.nan, norm=math.inf, applied=False, sol=None))
        log.record("end", worst=-math.inf, where=[np.float32("nan")], also={5: (Path("a/b"), np.arange(2), True)})

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    records = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert (records[1]["loss"], records[1]["norm"], records[1]["sol"]) == ("NaN", "Infinity", None)
    assert (records[-1]["worst"], records[-1]["where"]) == ("-Infinity", ["NaN"])
    assert records[-1]["also"] == {"5": ["a/b", [0, 1], True]}
    table = read_log(path).train
    assert math.isnan(table["loss"][0]) and table["norm"][0] == math.inf and math.isnan(table["sol"][0])


def test_a_continued_run_supersedes_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    """And the last line of a process that was killed; of a step's records the last one counts."""
    path = tmp_path / "log.jsonl"
    write(path, range(1, 13), loss=1.0)
    path.write_bytes(path.read_bytes()[:-9])
    assert read_log(path).train["step"].tolist() == list(range(1, 13))
    assert read_log(path).eval["step"].tolist() == [4, 8]
    write(path, range(9, 11), resume=8, loss=2.0)
    log = read_log(path)
    assert log.train["step"].tolist() == list(range(1, 11))  # 11 and 12 belong to the abandoned line
    assert log.train["loss"].tolist() == [1.0] * 8 + [2.0] * 2
    assert log.eval["step"].tolist() == [4, 8] and [event["type"] for event in log.events] == ["resume"]
    with open(path, "a") as file:
        file.write('{"type": "train", "step": 2, "loss": 5}\n')
    table = read_log(path).train
    assert table["loss"].tolist()[:3] == [1.0, 5.0, 1.0] and math.isnan(table["lr"][1])
    for left in (b"", b'{"type": "header' + b"x" * 70000):  # no whole line
        path.write_bytes(left)
        write(path, range(5, 7), resume=4)
        assert read_log(path).train["step"].tolist() == [5, 6]


def test_a_fresh_run_keeps_the_log_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for n in (2, 3, 4):
        write(path, range(1, n))
    sizes = [read_log(tmp_path / name).train["step"].size for name in ("log.jsonl", "log.jsonl.2", "log.jsonl.1")]
    assert sizes == [3, 2, 1]
    assert "log.jsonl.2" in read_log(path).events[0]["text"]


def test_a_resume_drops_what_belongs_to_later_steps(tmp_path: Path) -> None:
    """Numbers of callbacks, completions and errors of copies; what happened stays."""
    path = tmp_path / "log.jsonl"
    about = {"metrics": {"values": {"a": 1, "b": 2.5}}, "samples": {"samples": []}, "fp8": {"copies": []}}
    with RunLog(options(path), io.StringIO()) as log:
        log.begin()
        for step in (4, 5):
            for kind, facts in about.items():
                log.record(kind, step=step, **facts)
            log.notice("here")
        log.record("metrics", step=4, values={"a": math.nan})
    with RunLog(options(path), io.StringIO()) as log:
        log.begin(resume_step=4)
        log.record("metrics", step=5, values={"b": 7})
    found = read_log(path)
    kinds = [event["type"] for event in found.events]
    assert kinds == ["metrics", "samples", "fp8", "notice", "notice", "metrics", "resume", "metrics"]
    assert {name: [part.tolist() for part in parts] for name, parts in found.metrics.items()} == {
        "a": [[4], [pytest.approx(math.nan, nan_ok=True)]],
        "b": [[4, 5], [2.5, 7.0]],
    }


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "line 3"),
        (b"[1]", "not a JSON object"),
        (b'{"type": "train", "step": -1}', "step is -1"),
        (b'{"type": "train", "step": true}', "step is True"),
        (b'{"type": "train", "step": 3, "loss": "high", "lr": []}', "loss is 'high', lr is []"),
        (b'{"type": "train", "step": 3, "loss": NaN}', "NaN is not JSON"),
        (b'{"type": "eval", "step": 3, "loss": 1' + b"0" * 400 + b"}", "not a number"),
        (b'{"type": "eval", "step": 3, "loss": 1' + b"0" * 5000 + b"}", "line 3"),
        (b"[" * 100000, "line 3"),
        (b"\x00\xff\xfe", "line 3"),
    ],
)
def test_a_corrupt_line_is_named(tmp_path: Path, line: bytes, says: str) -> None:
    path = tmp_path / "log.jsonl"
    write(path, range(1, 3))
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2], line, *lines[2:]]))
    with pytest.raises(DataError, match="line 3") as caught:
        read_log(path)
    assert says in str(caught.value) and str(path) in str(caught.value)
    path.write_bytes(b"{\n" * 13)
    with pytest.raises(DataError, match="and 3 more") as caught:
        read_log(path)
    assert str(caught.value).count("  line ") == 10


def test_other_files_and_newer_schemas_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for text, says in (
        ("", "not a log"),
        ('{"type": "train", "step": 1}\n', "not a log"),
        ('{"type": "header", "schema": 2}\n', "schema 2"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=says):
            read_log(path)


def test_finding_the_log_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run folder"):
        find_log(tmp_path / "absent")
    with pytest.raises(DataError, match=r"no \.jsonl"):
        find_log(tmp_path)
    (tmp_path / "a.jsonl").touch()
    assert find_log(tmp_path) == tmp_path / "a.jsonl"
    (tmp_path / "b.jsonl").touch()
    with pytest.raises(DataError, match=r"several: a\.jsonl, b\.jsonl"):
        find_log(tmp_path)


def test_mutated_logs_raise_only_our_errors(tmp_path: Path) -> None:
    path, chance = tmp_path / "log.jsonl", random.Random(5)
    write(path, range(1, 6))
    whole = path.read_bytes()
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole[: chance.randrange(len(whole) + 1)])
        for _ in range(chance.randrange(3)):
            if damaged:
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(bytes(damaged))
        try:
            read_log(path)
        except LlmqError:
            refused += 1
    assert 50 < refused < 300


def test_storage_errors_are_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="--log-file"):
        RunLog(options(tmp_path / "file" / "log.jsonl"), io.StringIO()).begin()
    if os.path.exists("/dev/full"):
        log = RunLog(options(Path("/dev/full")), io.StringIO())
        with pytest.raises(StorageError, match="No space left"):
            log.begin()
