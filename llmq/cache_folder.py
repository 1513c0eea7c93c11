"""What is worth keeping between runs (kernels, GEMM algorithms, tokenized data, downloads): where it lies.

The place is `$LLMQ_CACHE_DIR`, else `$XDG_CACHE_HOME/llmq`, else `~/.cache/llmq`, else, for a user without a home,
`llmq-<user id>` in the folder for temporary files. Everything in it may be deleted at any time.
"""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """Folder for one kind of thing (`kernels`, `gemm`, `tokens`); it need not exist yet."""
    if own := os.environ.get("LLMQ_CACHE_DIR"):
        return Path(own).expanduser() / kind
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "llmq" / kind
    try:
        home = Path.home()
    except RuntimeError:  # neither $HOME nor an entry in the password file
        home = Path(os.devnull)
    return (home / ".cache" / "llmq" if home.is_dir() else _temporary()) / kind


def _temporary() -> Path:
    """A folder that is this user's alone: what others can write into must not be run."""
    folder = Path(tempfile.gettempdir()) / f"llmq-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    own = found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if own else _of_this_process()


@cache
def _of_this_process() -> Path:
    return Path(tempfile.mkdtemp(prefix="llmq-"))
