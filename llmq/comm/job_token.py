"""What the ranks of a run prove to each other: that they belong to one job of one user.

LLMQ_JOB_TOKEN, where it is set. `--gpus N` draws one for its processes. Elsewhere it follows from a secret of the user,
a file that the first run makes in the cache folder, and the name of the job: so the machines of a cluster that share
their home folders need no token, and others do.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from llmq.cache_folder import cache_folder
from llmq.disk import storage
from llmq.errors import UsageError

NO_SHARED_HOME = (
    "where the machines of a run do not share the home folder, set LLMQ_JOB_TOKEN to the same random text on each "
    "(such as the output of `openssl rand -hex 16`, kept in a secret of the cluster)"
)


def drawn_token() -> str:
    """A new one, for processes that get it from this one."""
    return secrets.token_hex(16)


def derived_token(job: str) -> str:
    """That of this user and this job. StorageError if the secret can be neither read nor made."""
    return hmac.new(_secret(), job.encode(), hashlib.sha256).hexdigest()


def _secret() -> bytes:
    """The user's secret; UsageError if others can read it."""
    path = cache_folder("job") / "secret"
    with storage(path, "the secret of jobs cannot be made"):
        if not path.exists():
            _make(path)
        found = path.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise UsageError(f"{path} can be read by others: delete it, and the next run makes a new one")
        return path.read_bytes()


def _make(path: Path) -> None:
    """The file appears whole, and only once however many ranks begin together: a link is never made over another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"secret.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
