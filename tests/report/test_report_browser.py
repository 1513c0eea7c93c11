"""The report in a browser: Debian's chromium without a window. Its console says what is wrong with the page."""

import re
import shutil
import subprocess
from pathlib import Path
from threading import Thread

import pytest
from test_mutants import whole
from test_report import HOSTILE, write

from llmq.report import serve
from llmq.report.page import page, write_report

CHROMIUM = shutil.which("chromium")
QUIET = ("no-first-run", "disable-quic", "disable-background-networking", "disable-component-update", "disable-sync")
pytestmark = [pytest.mark.slow]
if CHROMIUM is None:
    pytestmark.append(pytest.mark.skip(reason="Debian's package chromium is not installed"))
# Uses every control, and says in the page what it found.
VISITOR = """
const found = {}, plot = document.querySelector("#curves .plot"), box = plot.getBoundingClientRect();
const send = (kind, x) => plot.dispatchEvent(new PointerEvent(kind, {
  clientX: box.left + x * box.width, clientY: box.top + 50, pointerType: "mouse", pointerId: 1, bubbles: true}));
const ticks = () => [...plot.querySelectorAll(".along")].map(one => one.textContent).join(" ");
plot.setPointerCapture = () => {};
const put = (name, value, index = 0) => {
  const one = [...document.getElementById("tools").elements].filter(one => one.name === name)[index];
  if (one.type === "radio" || one.type === "checkbox") one.checked = value; else one.value = value;
  one.dispatchEvent(new Event("input", {bubbles: true}));
};
found.steps = ticks();
send("pointermove", 0.5);
found.tip = document.getElementById("tip").innerText;
put("x", true, 1); found.tokens = ticks();
put("x", true, 2); found.time = ticks();
put("x", true, 0);
put("smooth", 100);
const button = plot.parentElement.querySelector("button");
button.click(); found.log = button.getAttribute("aria-pressed");
button.click();
send("pointerdown", 0.4); send("pointermove", 0.6); send("pointerup", 0.9);
found.zoomed = ticks(); found.whole = !document.querySelector("button[name=whole]").hidden;
document.querySelector("button[name=whole]").click();
found.again = ticks();
const before = plot.querySelectorAll("path.line").length;
put("run", false, 1); found.hidden = `${before} ${plot.querySelectorAll("path.line").length}`;
put("find", "norm");
found.charts = [...document.querySelectorAll("figure:not([hidden]) b")].map(one => one.textContent).join();
dispatchEvent(new Event("beforeprint"));
found.open = document.querySelectorAll("details:not([open]):not(#defaults)").length;
const said = document.body.appendChild(document.createElement("pre"));
said.id = "found"; said.textContent = Object.entries(found).map(([name, text]) => `${name}=${text}`).join("|");
"""


def visited(address: str, folder: Path) -> tuple[str, list[str]]:
    """The page as it is after some seconds of its own clock, and what its console said."""
    assert CHROMIUM
    flags = ["--headless", "--no-sandbox", "--disable-gpu", *(f"--{flag}" for flag in QUIET), "--window-size=1200,900"]
    flags += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=6000", "--enable-logging=stderr"]
    done = subprocess.run([CHROMIUM, *flags, "--dump-dom", address], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def hostile() -> list[dict[str, object]]:
    """A log whose texts try to be HTML, and whose numbers are at the ends of what there is."""
    records = whole()
    ends = ((1e308, 1e99, 1e99), (2.0, -1e99, 5e-324), (0.0, 1e-99, 1.0))
    for step, (loss, lr, norm) in zip((2**61, 2**62, 2**62 + 1), ends, strict=True):
        records.append(
            {"type": "train", "step": step, "loss": loss, "lr": lr, "norm": norm, "tps": 1e99, "time": 1e300}
        )
    records[0]["options"] = {"name": HOSTILE, HOSTILE: HOSTILE}
    for record in records:
        record |= {"text": HOSTILE} if record["type"] == "notice" else {}
        record |= {"values": {HOSTILE: 1.0}} if record["type"] == "metrics" else {}
    return records


def test_it_draws_every_chart_and_runs_no_text_of_a_log(tmp_path: Path) -> None:
    logs = [write(tmp_path / "a.jsonl", hostile())]
    dom, console = visited(f"file://{write_report(logs, tmp_path / 'report.html')}", tmp_path)
    assert console == [] and 'data-drawn="' in dom
    charts = re.findall(r"<figure.*?</figure>", dom, re.DOTALL)
    assert len(charts) > 5 and all("<svg" in chart and "<path" in chart for chart in charts)
    assert "<img" not in dom and "x()</script>" not in dom


def test_its_controls_work(tmp_path: Path) -> None:
    """The policy of the page keeps the visitor's script out; without it the visitor uses everything."""
    log = write(tmp_path / "a.jsonl", whole())
    content = page([log, log]).decode()
    file = tmp_path / "report.html"
    file.write_text(content.replace("</body>", f"<script>{VISITOR}</script></body>"))
    dom, console = visited(f"file://{file}", tmp_path)
    assert len(console) == 1 and "Content Security Policy" in console[0] and 'id="found"' not in dom
    file.write_text(re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", file.read_text()))
    dom, console = visited(f"file://{file}", tmp_path)
    assert console == []
    found = dict(
        pair.split("=", 1) for pair in re.findall(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)[0].split("|")
    )
    assert found["steps"] == found["again"] == "1 2 3 4 5 6"
    assert re.match(r"(near )?step 3\n", found["tip"]) and "1.6667" in found["tip"]
    assert found["tokens"].startswith("600 800 ") and " s" in found["time"] and found["log"] == "true"
    assert found["zoomed"] == "3 4 5" and found["whole"] == "true"
    assert found["hidden"] == "4 2" and found["charts"] == "Gradient norm" and found["open"] == "0"


def test_a_served_page_renews_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    write(path, whole())
    monkeypatch.setattr(serve, "LEAST_PAUSE", 0)
    live = serve.Live([path])
    first, _ = live.get()
    with path.open("a") as file:
        file.write('{"type": "train", "step": 9, "loss": 0.5}\n')
    asked = iter([(first, '"first"')])
    get = live.get
    monkeypatch.setattr(live, "get", lambda: next(asked, None) or get())
    server = serve.Server(live, 0)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        dom, console = visited(f"http://127.0.0.1:{server.server_port}/", tmp_path)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert console == [] and b"of 9, 67%" in first and "of 9, 100%" in dom
    assert 'data-lost=""' in dom
