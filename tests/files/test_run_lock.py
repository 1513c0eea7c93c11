"""The lock of a run: two never write to one place, and a run that is gone is in no one's way."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tiny_runs import tiny_options

import llmq
from llmq.engine.engine import Engine
from llmq.errors import StorageError
from llmq.files.run_lock import held, kept_folder, replaced_whole, this_process

ROOT = Path(__file__).parents[2]
HOLDS = """
import errno, fcntl, sys, time
{before}
from pathlib import Path
from llmq.files.run_lock import held, replaced_whole
with held(replaced_whole("--log-file", Path(sys.argv[1])), print):
    print("holds", flush=True)
    {what}
"""


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Options of a small run in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tiny_options(tmp_path)


@pytest.fixture
def output(tmp_path):
    return replaced_whole("--log-file", tmp_path / "runs" / "a" / "log.jsonl")


def holding(path, what="time.sleep(60)", before=""):
    """A process that holds the lock of `path`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLDS.format(what=what, before=before), str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout.readline() == "holds\n"
    return process


def end(process, number=signal.SIGKILL):
    process.send_signal(number)
    process.wait()
    process.stdout.close()


def refused(output, said=None):
    """The message with which a second holder is refused."""
    with pytest.raises(StorageError) as caught, held(output, (said if said is not None else []).append):
        pytest.fail("two hold it")
    return str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_second_run_is_refused_until_a_signal_ends_the_first(output, number):
    process = holding(output.path)
    try:
        message = refused(output)
        for part in (str(output.path), f"process {process.pid} of", f"on {socket.gethostname()}, since 20", "UTC: -c"):
            assert part in message
        end_it = f"end that run with `kill {process.pid}` on {socket.gethostname()}"
        assert message.endswith(f"another --name (or --log-file), or {end_it}")
    finally:
        end(process, number)
    assert number != signal.SIGKILL or output.holder.exists()  # which the kill left
    with held(output, pytest.fail):
        assert f"process {os.getpid()} of" in output.holder.read_text()


def test_a_forked_child_that_outlives_a_killed_run_does_not_hold_its_lock(output):
    process = holding(output.path, "import os; os.write(1, b'%d\\n' % (os.fork() or os.getpid())); time.sleep(60)")
    (child,) = {int(process.stdout.readline()) for _ in range(2)}  # as it and the run say
    try:
        refused(output)
        end(process)
        os.kill(child, 0)
        with held(output, pytest.fail):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_nothing_is_left_of_a_lock(tmp_path):
    places = [
        kept_folder("--checkpoint-dir", tmp_path / "a" / "b" / "c"),
        replaced_whole("--out-dir", tmp_path / "a" / "d"),
    ]
    with pytest.raises(KeyboardInterrupt), ExitStack() as stack:
        for place in places:
            stack.enter_context(held(place, pytest.fail))
        assert places[0].lock == tmp_path / "a" / "b" / "c" / ".lock" and places[0].lock.exists()
        assert f" on {socket.gethostname()}, since 20" in places[1].holder.read_text()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_another_path_to_the_same_place_is_the_same_place(tmp_path, output):
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    with held(output, pytest.fail):
        refused(replaced_whole("--log-file", tmp_path / "link" / "a" / ".." / "a" / "log.jsonl"))
    with held(output, pytest.fail), held(replaced_whole("--log-file", output.path.with_name("b.jsonl")), pytest.fail):
        pass  # logs of two runs in one folder


def test_a_holder_that_has_not_written_its_name(output):
    with held(output, pytest.fail):
        for incomplete in (lambda: output.holder.write_text(""), output.holder.unlink):
            incomplete()
            message = refused(output)
            assert "by another process, which has not written its name yet" in message
            assert message.endswith("or end that run")


def test_devices_have_no_lock():
    with held(replaced_whole("--log-file", Path(os.devnull)), pytest.fail):
        assert not Path("/dev/.null.lock").exists()


def test_what_is_in_the_way_is_named(tmp_path):
    (tmp_path / "file").touch()
    no_folder, no_files = f"({tmp_path}/file is not a folder)", "(/proc takes no new files)"
    for make, path, why in (
        (replaced_whole, tmp_path / "file" / "x", no_folder),
        (kept_folder, tmp_path / "file", no_folder),
        *((make, Path(path), no_files) for make in (replaced_whole, kept_folder) for path in ("/proc/x", "/proc/x/y")),
    ):
        with pytest.raises(StorageError) as refusal, held(make("--out-dir", path), print):
            pass
        assert str(refusal.value) == f"{path}: cannot be written {why}: choose another --out-dir"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["mkdir", "open", "fsync"])
def test_a_disk_that_refuses_the_lock_is_a_storage_error(output, monkeypatch, number, call):
    def fails(*arguments, **more):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Path if call == "mkdir" else os, call, fails)
        with pytest.raises(StorageError, match=r"log\.jsonl(\.\S+)?: .*cannot be written"), held(output, pytest.fail):
            pytest.fail("it has no lock")
    with held(output, pytest.fail):
        pass  # the one that failed is not held


def no_locks(monkeypatch, number=errno.ENOLCK):
    """Makes this a file system without locks."""

    def flock(fd, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


def marker_of(output):
    """The file that is the lock where a file system has none."""
    return output.lock.with_name(f"{output.lock.name}.pid")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_a_file_is_the_lock(output, monkeypatch, tmp_path, number):
    no_locks(monkeypatch, number)
    with held(output, pytest.fail):
        message = refused(output)
        assert (
            f"process {os.getpid()} of" in message and f"if that run has ended, delete {marker_of(output)}" in message
        )
    assert list(tmp_path.iterdir()) == []
    with held(output, pytest.fail):
        pass


def test_without_locks_the_file_of_a_process_that_is_gone_is_stale(output, monkeypatch):
    no_locks(monkeypatch)
    refuses = "fcntl.flock = lambda *given: exec('raise OSError(errno.ENOLCK, str())')"
    process = holding(output.path, before=refuses)
    try:
        assert f"`kill {process.pid}`" in refused(output)
    finally:
        end(process)
    said = []
    with held(output, said.append):
        assert f"process {os.getpid()} of" in output.holder.read_text()
    assert len(said) == 1 and f"is stale, since its process has ended: replacing it (process {process.pid} " in said[0]
    output.holder.parent.mkdir(parents=True, exist_ok=True)
    output.holder.write_text("end that run with `kill 7` on elsewhere\nprocess 7")
    marker_of(output).write_text("7\nelsewhere\n")  # whose processes cannot be seen from here
    assert "by process 7\n" in (message := refused(output)) and "`kill 7` on elsewhere;" in message
    assert output.holder.exists() and marker_of(output).exists()


def test_a_long_command_line_is_cut_and_a_user_without_a_name_has_a_number(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/llmq-train", "x" * 500])
    monkeypatch.setattr("getpass.getuser", lambda: {}["nobody"])
    end, who = this_process().splitlines()
    assert end == f"end that run with `kill {os.getpid()}` on {socket.gethostname()}"
    assert f" of {os.getuid()} on " in who and " UTC: llmq-train xxx" in who and who.endswith("x ...")
    assert len(who.partition("UTC: ")[2]) == 200


# runs


@contextmanager
def running(given, monkeypatch):
    """A run that is at rest at its third step, and its result once it has gone on."""
    real, there, go_on, results = Engine.update, threading.Event(), threading.Event(), []

    def update(self, step, rate, *more):
        if step == 3 and not there.is_set():
            for thread in threading.enumerate():
                if thread.name.startswith("llmq-save"):
                    thread.join()
            there.set()
            assert go_on.wait(60)
        return real(self, step, rate, *more)

    monkeypatch.setattr(Engine, "update", update)
    thread = threading.Thread(target=lambda: results.append(llmq.train(**given, ckpt_interval=1)))
    thread.start()
    try:
        assert there.wait(60)
        yield results
    finally:
        go_on.set()
        thread.join()


SHARED = (
    {},
    {"name": "other", "log_file": "runs/run/log.jsonl"},
    {"name": "other", "checkpoint_dir": "runs/run/checkpoints", "continue": "auto"},
    {"name": "other", "out_dir": "runs/run/model", "overwrite": True},
)


def test_two_runs_at_a_time_share_nothing(given, monkeypatch):
    """But a dry run takes no lock."""
    with running(given, monkeypatch) as results:
        before = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
        for shared in SHARED:
            with pytest.raises(StorageError, match=f"in use by process {os.getpid()} of"):
                llmq.train(**{**given, **shared, "train_file": "absent.bin"})  # before the data is read
        llmq.train(**{**given, "continue": "newest", "dry_run": True})
        assert {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()} == before
        apart = {"name": "apart", "log_file": "runs/run/apart.jsonl", "steps": 2}
        assert llmq.train(**{**given, **apart}).steps == 2
    assert results[0].steps == 12 and list(Path("runs/run").rglob(".*")) == []
