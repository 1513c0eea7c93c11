"""tiny-shakespeare against a local server: fetched once, cached, checked; and every way in which that fails."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from llmq.data.rows import datasets
from llmq.errors import DataError

TEXT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"


class Stand(BaseHTTPRequestHandler):
    requests: list[str] = []

    def do_GET(self) -> None:
        self.requests.append(self.path)
        found = self.path in ("/text", "/short")
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(TEXT) if self.path == "/text" else 9999 if found else 0))
        self.end_headers()
        self.wfile.write(TEXT if found else b"")

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch, tmp_path: Path) -> Iterator[str]:
    for name in (datasets.OVERRIDE, "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "cache"))
    Stand.requests.clear()
    stand = ThreadingHTTPServer(("127.0.0.1", 0), Stand)
    thread = threading.Thread(target=stand.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{stand.server_address[1]}"
    stand.shutdown()
    stand.server_close()
    thread.join()


def test_it_is_fetched_once_and_found_offline(server: str, monkeypatch) -> None:
    monkeypatch.setattr(datasets, "TINY_SHAKESPEARE", f"{server}/text")
    monkeypatch.setattr(datasets, "TINY_SHAKESPEARE_SHA256", hashlib.sha256(TEXT).hexdigest())
    path = datasets.tiny_shakespeare()
    assert path.read_bytes() == TEXT and path.name == "tiny-shakespeare.txt"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert datasets.tiny_shakespeare() == path
    assert Stand.requests == ["/text"] and list(path.parent.iterdir()) == [path]


def test_another_text_in_its_place_is_refused(server: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets, "TINY_SHAKESPEARE", f"{server}/text")
    with pytest.raises(DataError, match=f"{len(TEXT)} bytes that are not tiny-shakespeare"):
        datasets.tiny_shakespeare()
    assert not (tmp_path / "cache").exists()


def test_an_override_url_is_taken_as_it_is_with_a_cache_of_its_own(server: str, monkeypatch) -> None:
    monkeypatch.setenv(datasets.OVERRIDE, f"{server}/text")
    path = datasets.tiny_shakespeare()
    assert path.read_bytes() == TEXT and path.name != "tiny-shakespeare.txt"


def test_an_override_file_is_taken_where_it_lies(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_bytes(TEXT)
    monkeypatch.setenv(datasets.OVERRIDE, str(tmp_path / "my.txt"))
    assert datasets.tiny_shakespeare() == tmp_path / "my.txt"
    monkeypatch.setenv(datasets.OVERRIDE, str(tmp_path / "gone.txt"))
    with pytest.raises(DataError, match=r"gone\.txt, which is not a file"):
        datasets.tiny_shakespeare()


@pytest.mark.parametrize(("where", "says"), [("/absent", "HTTP Error 404"), ("/short", f"{len(TEXT)} bytes read")])
def test_what_the_server_does_wrong_is_said(server: str, monkeypatch, tmp_path: Path, where: str, says: str) -> None:
    monkeypatch.setenv(datasets.OVERRIDE, server + where)
    with pytest.raises(DataError, match=says):
        datasets.tiny_shakespeare()
    assert not (tmp_path / "cache").exists()


def test_no_server_and_no_sense_are_said(server: str, monkeypatch) -> None:
    for url, says in (("http://127.0.0.1:9/x", "refused"), ("nonsense://x", "unknown url type")):
        monkeypatch.setenv(datasets.OVERRIDE, url)
        with pytest.raises(DataError, match=says):
            datasets.tiny_shakespeare()


def test_offline_without_cache_names_the_ways_out(server: str, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        DataError, match=r"HF_HUB_OFFLINE forbids.*save the text as .*tiny-shakespeare\.txt, or set LLMQ_"
    ):
        datasets.tiny_shakespeare()
    assert Stand.requests == []
