"""Data sets known by name: where their text comes from, kept in a cache so that it is fetched once."""

from __future__ import annotations

import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from llmq.data.token_file import write_whole
from llmq.errors import DataError

NAMES = ("tiny-shakespeare",)
TINY_SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
OVERRIDE = "LLMQ_TINY_SHAKESPEARE"  # a file or URL to take instead
TIMEOUT_S = 30.0


def tiny_shakespeare() -> Path:
    """The text of tiny-shakespeare (1.1 MB, public domain): from the cache, else downloaded into it.

    Raises DataError if it is not cached and cannot be fetched, or is not the text that it should be.
    """
    source = os.environ.get(OVERRIDE) or TINY_SHAKESPEARE
    if "://" not in source:
        if not Path(source).is_file():
            raise DataError(f"{OVERRIDE} is {source}, which is no file: set it to a text file or a URL, or unset it")
        return Path(source)
    official = source == TINY_SHAKESPEARE
    suffix = "" if official else "-" + hashlib.sha256(source.encode()).hexdigest()[:12]
    path = cache_folder() / "text" / f"tiny-shakespeare{suffix}.txt"
    if not path.is_file():
        way_out = f"save the text as {path}, or set {OVERRIDE} to a copy of it"
        content = _fetched(source, way_out)
        if official and hashlib.sha256(content).hexdigest() != TINY_SHAKESPEARE_SHA256:
            raise DataError(f"{source} gave {len(content)} bytes that are not tiny-shakespeare: {way_out}")
        write_whole(path, content)
    return path


def cache_folder() -> Path:
    """Where downloads are kept: LLMQ_CACHE, else `llmq` in XDG_CACHE_HOME or ~/.cache, or, without a home, in /tmp."""
    if folder := os.environ.get("LLMQ_CACHE"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "llmq"
    try:
        return Path.home() / ".cache" / "llmq"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"llmq-{os.getuid()}"


def _fetched(url: str, way_out: str) -> bytes:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise DataError(f"{url} is not in the cache, and HF_HUB_OFFLINE forbids to fetch it: unset that, {way_out}")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return response.read()
    except urllib.error.HTTPError as error:
        reason = f"HTTP {error.code} {error.reason}"
    except urllib.error.URLError as error:
        reason = str(error.reason)
    except http.client.IncompleteRead as error:
        reason = f"the connection ended after {len(error.partial)} bytes"
    except (http.client.HTTPException, OSError, ValueError) as error:
        reason = str(error) or type(error).__name__
    raise DataError(f"{url} cannot be fetched ({reason}): try again, {way_out}")
