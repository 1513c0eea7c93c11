"""A stand-in for the Hub on 127.0.0.1, reached through HF_ENDPOINT as a user would set it.

The hub library reads its environment when it is imported, so each environment is a Python process of its own.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONVERTED = "89abcdef0123456789abcdef0123456789abcdef"


@dataclass
class Repo:
    """A model or a data set; of that, what its card says of configs, and what the Hub has converted."""

    files: dict[str, bytes]
    configs: list[dict[str, Any]] | None = None
    converted: dict[str, bytes] | None = None


@dataclass
class Hub:
    """Repositories by name, what was asked of it, and what it does wrong."""

    repos: dict[str, Repo]
    gated: set[str] = field(default_factory=set)
    cut: dict[str, bool] = field(default_factory=dict)  # file -> whether its first half has been sent
    requests: list[tuple[str, str]] = field(default_factory=list)  # method, path
    url: str = ""

    def fetched(self) -> list[str]:
        """The paths whose content was asked for."""
        return [path for method, path in self.requests if method == "GET" and "/resolve/" in path]


@contextmanager
def serve(repos: dict[str, Repo]) -> Iterator[Hub]:
    """The stand-in with these repositories, as long as it is entered."""
    hub = Hub(repos)
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(hub))
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.url = f"http://127.0.0.1:{http.server_address[1]}"
    yield hub
    http.shutdown()
    thread.join()
    http.server_close()


def ask(driver: str, home: Path, url: str, cases: Sequence[Any], *more: str, **environment: str) -> list[Any]:
    """The lines of JSON that a process with this environment answers to the cases, in order."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "TRANSFORMERS"))}
    kept |= {"HF_HOME": str(home / "hf"), "LLMQ_CACHE_DIR": str(home / "llmq"), "HF_ENDPOINT": url}
    kept |= {"PYTHONPATH": str(ROOT), "NO_PROXY": "*", "no_proxy": "*"}
    command = [sys.executable, "-c", driver, json.dumps(cases), *more]
    done = subprocess.run(command, env={**kept, **environment}, cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or each answer waits 40 ms for the acknowledgement of its headers

        def log_message(self, *arguments: object) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body) if length is None else length), **headers}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def error(self, status: int, code: str) -> None:
            self.answer(status, X_Error_Code=code, X_Error_Message=code)

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            words = path.strip("/").split("/")
            is_api = words[0] == "api" and words[1] in ("models", "datasets")
            words = words[2:] if is_api else words[1:] if words[0] == "datasets" else words
            if len(words) < (2 if is_api else 4):
                return self.answer(404)  # what else the library asks for
            name, revision = "/".join(words[:2]), "/".join(words[3:]) or "main" if is_api else words[3]
            if (repo := hub.repos.get(name)) is None:
                return self.error(401, "RepoNotFound")
            is_converted = revision in ("refs/convert/parquet", CONVERTED)
            files, commit = (repo.converted, CONVERTED) if is_converted else (repo.files, COMMIT)
            if files is None or revision not in ("main", COMMIT, "refs/convert/parquet", CONVERTED):
                return self.error(404, "RevisionNotFound")
            if is_api:
                siblings = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
                about: dict[str, Any] = {"_id": "1", "id": name, "modelId": name, "sha": commit, "siblings": siblings}
                about |= {"cardData": {"configs": repo.configs}} if repo.configs else {}
                return self.answer(200, json.dumps(about).encode(), Content_Type="application/json")
            file = "/".join(words[4:])
            if name in hub.gated and self.headers.get("Authorization") != "Bearer hf_good":
                return self.error(401, "GatedRepo")
            if file not in files:
                return self.error(404, "EntryNotFound")
            data = files[file]
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X_Repo_Commit": commit}
            if self.command == "GET" and file in hub.cut:
                if hub.cut[file]:
                    return self.answer(503)
                hub.cut[file] = self.close_connection = True
                return self.answer(200, data[: len(data) // 2], len(data), **headers)
            return self.answer(200, data, **headers)

        do_HEAD = do_GET

    return Handler
