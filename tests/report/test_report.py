"""The report: a page that has what the logs have, needs nothing beside itself, and takes no text of theirs as HTML."""

import html
import http.client
import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.metadata import EntryPoint
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import sample_files
from test_mutants import whole
from tiny_runs import tiny_options

import llmq
from llmq.cli import report, shell
from llmq.errors import DataError
from llmq.report import callback, charts, facts, serve
from llmq.report.page import page, read_ladders, write_report
from llmq.report.read import Log, read_log, read_runs

ROOT = Path(__file__).parents[2]
HOSTILE = "</script><script>x()</script><img src=x onerror=x()>\"'><b>&amp; {{ 7*7 }} {% raw %}"


class Parsed(HTMLParser):
    """The tags of a page with their attributes, its text, and the JSON in it."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.text, self.script = "", ""
        self.feed(content.decode())
        found = re.search(r'<script type="application/json" id="data">(.*?)</script>', content.decode())
        assert found
        self.data = json.loads(found[1])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.script = tag
        self.tags.append((tag, tuple(name for name, _ in attrs)))

    def handle_data(self, data: str) -> None:
        self.text += "" if self.script in ("script", "style") else data


def write(path: Path, records: list[dict[str, Any]]) -> Log:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_log(path)


def series(data: Any, name: str) -> list[dict[str, Any]]:
    return next(chart["series"] for chart in data["charts"] if chart["id"] == name)


def test_the_page_has_what_the_log_has(tmp_path: Path) -> None:
    found = Parsed(page([write(tmp_path / "a.jsonl", whole())]))
    loss = series(found.data, "loss")
    assert [one["kind"] for one in loss] == ["training", "evaluation"]
    assert loss[0]["s"] == [1, 2, 3, 5, 6] and loss[0]["v"] == [5, 2.5, 1.66667, 1, 0.833333]
    assert loss[1]["s"] == [2, 6] and loss[1]["v"] == [2, 0.666667]
    assert series(found.data, "sol")[0]["v"] == [50] * 5  # percent
    assert series(found.data, "accuracy")[0]["v"] == [10, 20, 30, 50, 60]
    assert series(found.data, "metric mine")[0]["v"] == [0.5, 1, 1.5, 2.5, 3]
    assert series(found.data, "snr_db")[0]["s"] == [2, 6]
    assert found.data["axes"][0]["resumed"] == [3, 6]
    texts = (
        "finished",
        "2.2000",
        "best 0.6667 at 6",
        "50%",
        "Careful",
        "power cap",
        "Once\nupon",
        " a <i>time",
        "user: hi",
    )
    texts += ("0.mlp.x@e4m3", "ckpt/step_2", "Weights", "SM clock 1,755 MHz", "Resumed at step 3", "learning_rate")
    for text in texts:
        assert text in found.text, text


def test_nothing_of_a_log_is_markup(tmp_path: Path) -> None:
    """Whatever text is in any place, the page has the same tags with the same attributes."""

    tags, shown = [], []
    for text in ("plain", HOSTILE):
        records = whole()
        records[0] = {**records[0], "options": {"name": f"a{text}", text: text, "x": {text: [text]}}}
        records[0] |= {"system": {"device": text, text: text}, "model": {"path": text}, "dataset": {text: [text]}}
        records[0] |= {"allocator": {text: 1.0}, "host_memory": {text: 2.0}, "started": text}
        for record in records[1:]:
            record |= {name: text for name in ("text", "path", "reason") if name in record}
            if record["type"] == "metrics":
                record["values"] = {text: 1.0}
            if record["type"] == "gpu":
                record["throttled"] = [text]
            if record["type"] == "samples":
                record["samples"] = [{"prompt": text, "text": text, "new_tokens": [], "end": text}]
            if record["type"] == "fp8":
                record["copies"] = [{**record["copies"][0], "name": text, "sites": [text]}]
            if record["type"] == "end":
                record |= {"warnings": [text], text: text}
        log = write(tmp_path / "a.jsonl", records)
        content = page([log, log])
        found = Parsed(content)
        tags.append(found.tags)
        shown.append(found.text.count(text))
        assert content.decode().count("<script") == 2
        assert found.data["labels"][0].startswith(str(tmp_path))
    assert tags[0] == tags[1] and min(shown) > 60


def test_the_page_needs_nothing_beside_itself(tmp_path: Path) -> None:
    content = page([write(tmp_path / "a.jsonl", whole())]).decode()
    assert not re.search(
        r"""(src|href)=["'](?!#|data:,)|url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)""", content
    )
    assert "default-src 'none'; script-src 'sha256-" in html.unescape(content)


def test_a_log_of_any_length_makes_a_page_of_one_size(tmp_path: Path) -> None:
    """Means of parts, and of each the least and the largest value: no spike is lost."""
    steps, rng = np.arange(1, 100_001), np.random.default_rng()
    values = rng.normal(3.0, 0.1, steps.size)
    values[[777, 50_000]] = 40.0, math.nan
    values[2000:2500] = math.inf
    found = charts.thinned(steps, values, 1200)
    assert len(found["s"]) == len(found["v"]) == len(found["hi"]) == 1200 and max(filter(None, found["hi"])) == 40
    assert found["v"].count(None) == 6 and abs(found["v"][600] - 3) < 0.1  # 500 steps, whole parts of which are lost
    assert found["s"] == sorted(found["s"]) and found["s"][0] < 100 and found["s"][-1] > 99_900
    short = charts.thinned(steps[:3], np.array([1.0, math.nan, 1e200]), 1200)
    assert short == {"s": [1, 2, 3], "v": [1, None, None]}
    train = [{"type": "train", "step": step, "loss": 2.0 + step % 7, "tps": 5.0 + step % 5} for step in range(1, 6001)]
    log = write(tmp_path / "a.jsonl", [{"type": "header", "schema": 1}, *train])
    assert len(page([log])) < 400_000


def test_steps_have_places_in_tokens_and_in_time(tmp_path: Path) -> None:
    """Each fifth step is logged. Neither what came after the checkpoint of a resume nor the pause before it counts."""
    about = {"time_ms": 1000.0, "tokens": 10}
    times = {1: 101.0, 5: 105.0, 10: 110.0, 15: 115.0}
    records: list[dict[str, Any]] = [{"type": "header", "schema": 1, "time": 100.0}]
    records += [{"type": "train", "step": step, "time": time, **about} for step, time in times.items()]
    records += [{"type": "resume", "step": 12, "time": 500.0}]
    records += [{"type": "train", "step": step, "time": 500 + step - 12.0, **about} for step in (15, 20)]
    log = write(tmp_path / "a.jsonl", records)
    assert charts.tokens_so_far(log).tolist() == [10, 50, 100, 150, 200]
    assert charts.elapsed_s(log).tolist() == [1, 5, 10, 13, 18]
    for record in records:
        record.pop("time", None)
    assert charts.elapsed_s(write(tmp_path / "a.jsonl", records)).tolist() == [1, 5, 10, 15, 20]


def test_where_the_time_went_and_the_ladder(tmp_path: Path) -> None:
    train = {"time_ms": 1000.0, "wait_ms": 100.0, "tokens": 50, "sol": 0.25, "tps": 50.0}
    records: list[dict[str, Any]] = [{"type": "header", "schema": 1, "time": 0.0}]
    records += [{"type": "train", "step": step, "time": 2.0 * step, **train} for step in range(1, 11)]
    records += [{"type": "eval", "step": 10, "time": 21.0, "time_ms": 4000.0, "loss": 1.0}]
    log = write(tmp_path / "a.jsonl", records)
    shares = [0.125, 0.325, 0.05, 0.2, 0.3]  # of 20 s: the matmuls' 2.5, the rest of 10 s, waits, evaluation, others
    assert [share for _, share, _ in facts.time_of(log)] == pytest.approx(shares)
    rungs = [(rate, share) for _, rate, share in facts.ladder(log)]
    want = [(200, 1), (50, 0.25), (50 / 0.9, 0.25 / 0.9), (50, 0.25), (25, 0.125)]
    assert [pytest.approx(pair) for pair in want] == rungs


def test_a_run_that_goes_on_and_one_that_does_not(tmp_path: Path) -> None:
    """By the time of the last step; how long is left follows from the steps so far."""
    for now, state in ((time.time(), "running"), (1e9, "no end")):
        records: list[dict[str, Any]] = [{"type": "header", "schema": 1, "dataset": {"steps": 100}}]
        records += [{"type": "train", "step": step, "time": now - 10 + step, "tokens": 5} for step in range(1, 11)]
        found = {fact.name: fact for fact in facts.summary(write(tmp_path / "a.jsonl", records))}
        assert found["State"].value == state and found["Time"].note == "50 tokens, 0:01:30 left"
        assert found["Steps"].note == "of 100, 10%"


def test_options_and_their_changes(tmp_path: Path) -> None:
    one, two = whole(), whole()
    two[0]["options"] = {"name": "b", "learning_rate": 1e-5, "seed": 0, "seq_len": 77}
    logs = [write(tmp_path / f"{name}.jsonl", records) for name, records in (("a", one), ("b", two))]
    rows = {row["name"]: (row["values"], row["differ"], row["own"]) for row in facts.options(logs)}
    assert rows["name"] == (["a", "b"], True, True) and rows["learning_rate"] == (["1e-05", "1e-05"], False, False)
    assert rows["seq_len"] == (["-", "77"], True, True)
    assert facts.changes(logs[0]) == [(3, [("learning_rate", "1e-05", "-"), ("train_file", "x.bin", "-")])]


def test_what_is_not_finite_is_shown_as_such(tmp_path: Path) -> None:
    log = read_log(sample_files.write_run(tmp_path / "a", [2.0, math.nan, 3.0], {2: math.inf}))
    found = Parsed(page([log]))
    assert series(found.data, "loss")[0]["v"] == [2, None, 3] and found.data["axes"][0]["lost"] == [2]
    assert "1 steps without an update" in found.text and "step changed nothing: loss nan" in found.text
    assert "inf" in found.text


def test_logs_without_steps_and_of_llm_q(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text(sample_files.log_of_llm_q())
    empty = write(tmp_path / "a.jsonl", whole()[:1])
    found = Parsed(page([*read_runs([tmp_path / "log.json"]), empty]))
    assert "NVIDIA RTX 4090" in found.text and "running" in found.text
    assert series(found.data, "metric forward_ms")[0]["v"] == [30] * 4


def test_the_ladder_of_a_bench(tmp_path: Path) -> None:
    rung = {"family": "linear", "calls": 3, "ms": 4.0, "roofline_ms": 3.0}
    result = {"model": "Qwen", "dtype": "bf16", "batch_size": 2, "seq_len": 16, "micro_batch_ms": 8.0, "gaps_ms": 4.0}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"kind": "llmq-bench", "results": [{**result, "ladder": [rung]}]}))
    ((title, (one, gaps)),) = read_ladders(path)
    assert title == "Qwen, bf16, micro-batch 2 x 16"
    assert (one["share"], one["light"], gaps["share"]) == (0.5, 0.75, 0.5)
    found = Parsed(page([write(tmp_path / "a.jsonl", whole())], ladders=read_ladders(path)))
    assert "Ladder of ops: Qwen" in found.text and "75%" in found.text
    for text in ("{", "[]", '{"kind": "x"}', '{"kind": "llmq-bench", "results": [{}]}'):
        path.write_text(text)
        with pytest.raises(DataError, match="no file of llmq-bench --save"):
            read_ladders(path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", whole())
    assert shell.run(report.command, ["a.jsonl", "a.jsonl"]) == 0 and capsys.readouterr().out == "report.html\n"
    assert "2 runs" in Parsed(Path("report.html").read_bytes()).text
    assert shell.run(report.command, ["a.jsonl", "-o", "new/x.html"]) == 0 and Path("new/x.html").exists()


def test_a_run_writes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At evaluations while that is cheap, and at the end; what cannot be written is a warning of the run."""
    monkeypatch.chdir(tmp_path)
    given = {**tiny_options(tmp_path), "steps": 6, "eval_every_n_steps": 2}
    written: list[int] = []

    def note(logs: list[Log], out: Path) -> Path:
        written.append(logs[0].last_step)
        return write_report(logs, out)

    monkeypatch.setattr(callback, "write_report", note)
    result = llmq.train(**given, callbacks=[callback.Report()])
    found = Parsed((result.log_path.parent / "report.html").read_bytes())
    assert "finished" in found.text and found.data["axes"][0]["step"][-1] == 6 and written == [2, 6]
    blocked = llmq.train(**{**given, "name": "b"}, callbacks=[callback.Report("train.bin/x.html")])
    assert blocked.steps == 6 and "report is not written" in blocked.warnings[0]
    named = re.search(r'^"callback.report" = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert named and EntryPoint("", named[1], "").load() is callback.Report


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """The port of a server, and the log that it shows."""
    write(tmp_path / "a.jsonl", whole())
    server = serve.Server(serve.Live([tmp_path / "a.jsonl"]), 0)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_port, tmp_path / "a.jsonl"
    server.shutdown()
    thread.join()
    server.server_close()


def asked(port: int, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read(), answer.headers.get("ETag")
    connection.close()
    return found


def test_a_served_report_is_renewed(served: tuple[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    port, path = served
    monkeypatch.setattr(serve, "LEAST_PAUSE", 0)
    status, content, tag = asked(port)
    assert status == 200 and tag and Parsed(content).data["axes"][0]["step"][-1] == 6
    assert f'data-watch="{serve.EVERY_MS}"' in content.decode()
    assert asked(port, **{"If-None-Match": tag})[:2] == (304, b"")
    with path.open("a") as file:
        file.write('{"type": "train", "step": 7, "loss": 0.5}\n{"type": "train", "st')
    monkeypatch.setattr(serve.time, "monotonic", lambda: math.inf)
    status, content, newer = asked(port, **{"If-None-Match": tag})
    assert status == 200 and newer != tag and Parsed(content).data["axes"][0]["step"][-1] == 7
    path.write_text("")  # as a run does that begins again
    assert asked(port)[1] == content


def test_new_runs_of_a_folder_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LEAST_PAUSE", 0)
    sample_files.write_run(tmp_path / "a", [2.0, 1.0], {})
    live = serve.Live([tmp_path])
    assert Parsed(live.get()[0]).data["labels"] == ["a"]
    sample_files.write_run(tmp_path / "b", [2.0, 1.0], {})
    monkeypatch.setattr(serve.time, "monotonic", lambda: math.inf)
    assert Parsed(live.get()[0]).data["labels"] == ["a", "b"]


def test_only_this_machine_may_read_it_and_nothing_else(served: tuple[int, Path]) -> None:
    port, _ = served
    assert asked(port, Host=f"localhost:{port}")[0] == 200
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1:{port + 1}", "127.0.0.1", ""):
        status, content, _ = asked(port, Host=host)
        assert status == 421 and b"own address" in content
    for path in ("/a.jsonl", "/../a.jsonl", "/?x", "http://evil.example/", "/%2e%2e/etc/passwd"):
        assert asked(port, path)[0] in (404, 421)
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
        assert asked(port, method=method)[0] == 501


@pytest.mark.slow
def test_it_is_served_until_ctrl_c(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", whole())
    command = [sys.executable, "-m", "llmq.cli.report", str(tmp_path / "a.jsonl"), "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout and child.stderr
        address = re.match(r"http://127\.0\.0\.1:(\d+)/ has the report", child.stdout.readline())
        assert address and asked(int(address[1]))[0] == 200
        taken = subprocess.run([*command, "--port", address[1]], capture_output=True, text=True, cwd=ROOT, check=False)
        assert taken.returncode == 2 and f"--port {address[1]} is taken" in taken.stderr
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 0 and child.stderr.read() == ""
