"""The export to W&B: with a stand-in that keeps what it is given, and with the real library, offline."""

import io
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import sample_files
from offline_trackers import wandb_run
from pydantic import ValidationError, create_model

from llmq.errors import DataError, StorageError, UsageError
from llmq.options.run import LogOptions
from llmq.report.read import read_log
from llmq.report.wandb import export_wandb, follow_wandb
from llmq.training.log import RunLog
from llmq.training.records import TrainRecord
from llmq.training.trackers import run_id_of

ROOT = Path(__file__).parents[2]


def write_run(folder: Path, steps: int = 6) -> Path:
    losses = [math.nan if step == 2 else 5 / step for step in range(1, steps + 1)]
    text = {"prompt": "Once\nupon", "text": " a time", "new_tokens": [1, 2], "end": "length"}
    samples = [text, {"tokens": [4], "text": None, "new_tokens": [5], "end": "stop"}]
    sample_files.write_run(folder, losses, {3: 1.0, 6: 0.5}, name="try", samples=samples)
    return folder / "log.jsonl"


@dataclass
class FakeRun:
    """Keeps what is logged; a second init with its id goes on where it was."""

    dir: str
    url: str = "https://wandb.example/run"
    logged: dict[int, dict[str, float]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    finished: int = 0

    @property
    def step(self) -> int:
        return max(self.logged, default=-1) + 1

    def log(self, values: dict[str, float], step: int) -> None:
        assert step >= self.step - 1, "W&B drops what comes out of order"
        self.logged.setdefault(step, {}).update(values)

    def finish(self, exit_code: int) -> None:
        self.finished += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Stands in for wandb."""
    seen = SimpleNamespace(calls=[], runs={}, error=None)
    module: Any = ModuleType("wandb")

    class Error(Exception):
        pass

    def init(**arguments: Any) -> FakeRun:
        if seen.error:
            raise seen.error
        seen.calls.append(arguments)
        return seen.runs.setdefault(arguments["id"], FakeRun(str(tmp_path / "wandb" / "run-x" / "files")))

    module.Error, module.init, module.Settings = Error, init, SimpleNamespace
    module.Table, module.__spec__ = SimpleNamespace, ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return seen


def test_metrics_come_at_their_steps(tmp_path: Path, fake: SimpleNamespace) -> None:
    path = write_run(tmp_path)
    done = export_wandb(path, project="p", entity="team")
    (call,) = fake.calls
    assert (call["project"], call["entity"], call["name"]) == ("p", "team", "try")
    assert (call["mode"], call["resume"]) == ("online", "allow")
    assert call["config"]["learning_rate"] == 1e-5
    assert call["config"]["llmq"]["model"] == {"path": "tinyllama", "num_parameters": 7}
    run = fake.runs[call["id"]]
    assert list(run.logged) == [1, 2, 3, 4, 5, 6]
    assert run.logged[3]["train/loss"] == 5 / 3 and run.logged[3]["eval/loss"] == 1.0
    assert "eval/loss" not in run.logged[4] and "train/sol" not in run.logged[4]  # not measured
    assert math.isnan(run.logged[2]["train/loss"]) and run.logged[2]["train/applied"] == 0
    assert run.logged[6]["epoch"] == 1.0 and run.logged[6]["train/tps"] == pytest.approx(5120)
    assert run.summary == {"end/reason": "finished", "end/eval_loss": 0.5}
    assert run.finished == 1
    assert (done.url, done.num_steps) == (run.url, 6)
    samples = {step: values["samples"] for step, values in run.logged.items() if "samples" in values}
    rows = [["Once\nupon", " a time", "length"], ["[4]", "[5]", "stop"]]
    assert samples == {3: SimpleNamespace(columns=["prompt", "completion", "end"], data=rows)}


def test_numbers_of_callbacks_come_at_their_steps(tmp_path: Path, fake: SimpleNamespace) -> None:
    path = write_run(tmp_path)
    numbers = [(1, {"mine": 2.0}), (2, {"mine": 3.0, "other": 4}), (5, {"mine": 9.0})]
    lines = [json.dumps({"type": "metrics", "step": step, "values": values}) for step, values in numbers]
    resumed = [
        json.dumps({"type": "resume", "step": 3}),
        json.dumps({"type": "metrics", "step": 3, "values": {"mine": 5}}),
    ]
    path.write_text(path.read_text() + "\n".join([*lines, *resumed]) + "\n")
    export_wandb(path, run_id="own")
    logged = fake.runs["own"].logged
    found = {step: {k: v for k, v in values.items() if k.startswith("metrics/")} for step, values in logged.items()}
    wanted = {1: {"metrics/mine": 2.0}, 2: {"metrics/mine": 3.0, "metrics/other": 4.0}, 3: {"metrics/mine": 5.0}}
    assert {step: values for step, values in found.items() if values} == wanted


def test_steps_keep_their_times_and_a_project_has_a_default(tmp_path: Path, fake: SimpleNamespace) -> None:
    path = write_run(tmp_path)
    export_wandb(path)
    (call,) = fake.calls
    log = read_log(path)
    logged = fake.runs[call["id"]].logged
    assert call["project"] == "llmq" and "train/time" not in logged[1]
    assert [logged[step]["_timestamp"] for step in (1, 2)] == log.train["time"][:2].tolist()
    assert logged[3]["_timestamp"] == log.eval["time"][0]
    old = [line.replace('"time":', '"was":') for line in path.read_text().splitlines(keepends=True)]
    path.write_text("".join(old))  # a log of an earlier release
    export_wandb(path, run_id="old")
    assert "_timestamp" not in fake.runs["old"].logged[1]


def test_exporting_again_adds_only_what_is_new(tmp_path: Path, fake: SimpleNamespace) -> None:
    path = write_run(tmp_path)
    first = export_wandb(path, project="p")
    assert export_wandb(path, project="p").num_steps == 0
    with RunLog(LogOptions(name="try", log_file=str(path)), io.StringIO()) as log:
        log.begin(resume_step=6)
        log.train(TrainRecord(7, 1.2, 1.0, 1.0, 1e-4, 100.0, 512, 512))
    again = export_wandb(path, project="p", name="other")
    assert (again.run_id, again.num_steps) == (first.run_id, 1)
    assert len(fake.runs) == 1 and fake.calls[-1]["name"] == "other"


def test_ids(tmp_path: Path, fake: SimpleNamespace) -> None:
    log = read_log(write_run(tmp_path))
    assert run_id_of(log.header) == run_id_of(read_log(tmp_path).header) == export_wandb(tmp_path).run_id
    log.header["started"] = "another time"
    assert run_id_of(log.header) != run_id_of(read_log(tmp_path).header)
    assert export_wandb(tmp_path, project="p", run_id="mine").run_id == "mine"
    with pytest.raises(UsageError, match="--run-id"):
        export_wandb(tmp_path, project="p", run_id="a/b")


@pytest.mark.parametrize(
    ("variable", "offline", "mode"),
    [(None, True, "offline"), ("offline", False, "offline"), ("online", False, "online"), ("online", True, "offline")],
)
def test_modes(tmp_path, fake, monkeypatch, variable: str | None, offline: bool, mode: str) -> None:
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    done = export_wandb(write_run(tmp_path), project="p", offline=offline)
    assert fake.calls[0]["mode"] == mode
    assert (done.url is None) == (mode == "offline")
    assert done.folder == tmp_path / "wandb" / "run-x"


def test_what_cannot_be_exported(tmp_path: Path, fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path)
    fake.error = sys.modules["wandb"].Error("api_key not configured")
    with pytest.raises(UsageError, match=r"(?s)api_key not configured.*wandb login.*--offline"):
        export_wandb(path, project="p")
    fake.error = OSError(28, "No space left on device")
    with pytest.raises(StorageError, match="No space left"):
        export_wandb(path, project="p")
    with pytest.raises(ValidationError) as caught:
        create_model("Settings", silent=(bool, ...)).model_validate({"silent": ""})  # what `WANDB_SILENT=` gives
    fake.error = caught.value
    with pytest.raises(UsageError, match=r"environment variables \(WANDB_\.\.\.\).*silent ''"):
        export_wandb(path, project="p")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(UsageError, match="WANDB_MODE=disabled"):
        export_wandb(path, project="p")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"\[wandb\]"):
        export_wandb(path, project="p", offline=True)
    with pytest.raises(DataError, match="no run folder"):
        export_wandb(tmp_path / "absent", project="p")
    with pytest.raises(DataError, match="no steps"):
        export_wandb(write_run(tmp_path / "new", 0), project="p")


class Growing:
    """Writes the next part of a log in place of each wait."""

    def __init__(self, *parts) -> None:
        self.parts = list(parts)

    def __call__(self, seconds: float) -> None:
        self.parts.pop(0)()


def test_a_log_is_followed_to_the_end_of_its_run(tmp_path: Path, fake: SimpleNamespace, monkeypatch) -> None:
    path = write_run(tmp_path)
    whole = path.read_text().splitlines(keepends=True)
    end = json.dumps({"type": "end", "step": 4, "reason": "finished"}) + "\n"
    step = '{"type": "train", "step": %d, "loss": %s}\n'

    def appended(*lines: str) -> Callable[[], None]:
        return lambda: path.write_text(path.read_text() + "".join(lines))

    def resumed() -> None:  # without the torn line; step 6 is made again, as no step of W&B's can be
        path.write_text(path.read_text().rpartition("\n")[0] + "\n")
        appended(json.dumps({"type": "resume", "step": 5}) + "\n", step % (6, 6.5), step % (7, 7.5), end)()

    path.write_text(whole[0])
    growing = Growing(lambda: None, appended(*whole[1:-1]), appended(step[:20]), resumed)
    monkeypatch.setattr("llmq.report.wandb.time.sleep", growing)
    (done,) = follow_wandb(path)
    run = fake.runs[done.run_id]
    assert (done.num_steps, run.finished, not growing.parts) == (7, 1, True)
    assert (run.logged[6]["train/loss"], run.logged[7]["train/loss"]) == (5 / 6, 7.5)
    assert done.run_id == export_wandb(path).run_id

    def again() -> None:  # another run at this path
        path.rename(tmp_path / "log.jsonl.1")
        path.write_text(whole[0].replace("try", "new"))

    def interrupted() -> None:
        raise KeyboardInterrupt

    path.write_text("".join(whole[:-1]))
    growing.parts = [again, appended(step % (1, 2.5)), interrupted]
    first, second = follow_wandb(path)
    assert first.run_id == done.run_id != second.run_id and fake.runs[second.run_id].logged[1]["train/loss"] == 2.5


def test_the_command(tmp_path: Path, fake: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    from llmq.cli import export_wandb, shell

    arguments = ["--log-file", str(write_run(tmp_path)), "--project", "p"]
    for more, code, says in (
        ([], 0, "6 steps sent to https://wandb.example/run"),
        (["--offline", "--run-id", "new"], 0, f"wandb sync {tmp_path / 'wandb' / 'run-x'}"),
        (["--log-file", str(tmp_path / "absent")], 3, "no run folder"),
        (["--nonsense"], 2, "nonsense"),
    ):
        with pytest.raises(SystemExit) as caught:
            shell.main(export_wandb.command, [*arguments, *more])
        assert caught.value.code == code
        printed = capsys.readouterr()
        assert says in (printed.err if code else printed.out)


@pytest.mark.slow
def test_the_real_library_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: extra [wandb]")
    path = write_run(tmp_path / "run")
    script = ROOT / "tools" / "export-wandb.py"
    command = [sys.executable, script, "--log-file", path, "--project", "p", "--offline", "--run-id", "abc"]
    environment = {"HOME": str(tmp_path), "WANDB_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"6 steps written to {tmp_path}")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-abc.wandb")
    steps, config, _ = wandb_run(file)
    assert list(steps) == [1, 2, 3, 4, 5, 6] and config["learning_rate"] == 1e-5
    assert (steps[3]["train/loss"], steps[3]["eval/loss"]) == (5 / 3, 1.0) and math.isnan(steps[2]["train/loss"])
    assert steps[3]["samples/_type"] == "table-file"
