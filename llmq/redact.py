"""Secrets, and texts without them: what leaves the process as a line, a record, a file or an error has none.

Known are the values of variables that hold tokens and keys, the token of `hf auth login`, and the passwords of URLs in
variables and in what a command is given. Beside these, whatever looks like the user part of a URL or a token in its
query is hidden. A value of fewer than LEAST characters is hidden in URLs alone: elsewhere it would be part of words.
"""

import os
import re
import traceback
from collections.abc import Collection, Mapping
from functools import lru_cache
from types import TracebackType
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"
LEAST = 6
TOKENS = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "LLMQ_JOB_TOKEN"),
    *("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"),
)
URLS = tuple(
    spelled
    for name in ("http_proxy", "https_proxy", "all_proxy", "hf_endpoint", "wandb_base_url", "mlflow_tracking_uri")
    for spelled in (name, name.upper())
)
_USER = re.compile(r"(\b[a-z][a-z0-9+.-]*:/{1,2})([^\s/'\"<>]+)@", re.IGNORECASE)
_QUERY = re.compile(r"([?&;][\w.-]*?(?:token|key|secret|passw|sig|auth|cred)[\w.-]*=)([^&;#\s'\"<>]+)", re.IGNORECASE)
_given: set[str] = set()  # passwords of URLs that commands were given


def redacted(text: str) -> str:
    """A text with its secrets hidden."""
    return _hidden(text, _known())


def redacted_in(value: Any) -> Any:
    """A value of JSON with the secrets of all its texts hidden."""
    return _hidden_in(value, _known())


def note_secrets(text: str) -> None:
    """Takes note of the passwords and tokens in URLs of a text, which are hidden from then on wherever they are."""
    _given.update(_in_urls(text))


def print_redacted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What `sys.excepthook` prints of an error that ends the process, without secrets."""
    import sys

    print(redacted("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def _hidden(text: str, secrets: Collection[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    text = _USER.sub(rf"\1{HIDDEN}@", text)
    return _QUERY.sub(rf"\1{HIDDEN}", text)


def _hidden_in(value: Any, secrets: Collection[str]) -> Any:
    if isinstance(value, str):
        return _hidden(value, secrets)
    if isinstance(value, Mapping):
        return {_hidden_in(key, secrets): _hidden_in(item, secrets) for key, item in value.items()}
    return [_hidden_in(item, secrets) for item in value] if isinstance(value, list | tuple) else value


def _known() -> tuple[str, ...]:
    """All secrets by now: looking for them takes longer than hiding them in a line."""
    tokens, urls = (tuple(os.environ[name] for name in names if name in os.environ) for names in (TOKENS, URLS))
    return (*_secrets(tokens, urls, _token_file()), *_given)


def _in_urls(text: str) -> set[str]:
    parts = {user.partition(":")[2] or user for _, user in _USER.findall(text)}
    found = parts | {value for _, value in _QUERY.findall(text)}
    return {one for secret in found for one in (secret, unquote(secret)) if len(one) >= LEAST}


def _token_file() -> str:
    """Where `hf auth login` puts its token."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")


@lru_cache(maxsize=4)
def _secrets(tokens: tuple[str, ...], urls: tuple[str, ...], token_file: str) -> tuple[str, ...]:
    """The secrets in these values of TOKENS and URLS, and in a file; the longest first, as it may have others in it."""
    found = {value.strip() for value in tokens}
    try:
        with open(token_file, encoding="utf-8", errors="replace") as file:
            found.add(file.read(4096).strip())
    except OSError:
        pass
    found = {secret for secret in found if len(secret) >= LEAST}
    found = found.union(*map(_in_urls, urls))
    return tuple(sorted(found, key=len, reverse=True))
