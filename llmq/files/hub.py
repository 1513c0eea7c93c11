"""Models and tokenizers by name: a local folder, or a download from the Hugging Face Hub.

Only configs, tokenizer files and safetensors are ever fetched, by their exact names: nothing that could run code. The
hub library keeps the cache, the token, mirrors (HF_ENDPOINT) and offline mode (HF_HUB_OFFLINE); what is decided here is
which files, whether they fit on the disk, and what to say when it does not work. Small files come first, so that a
model that cannot be trained is refused before its weights are fetched.
"""

import difflib
import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from llmq.disk import free_bytes
from llmq.errors import DataError, StorageError, UsageError
from llmq.files.carried import PROCESSOR_FILES
from llmq.files.huggingface import TEMPLATE_FOLDER, TOKENIZER_FILES
from llmq.files.tensor_files import INDEX, WEIGHTS, index_files, other_weights, weight_files
from llmq.model.config import from_folder

CONFIG_FILES = ("config.json", "generation_config.json", *PROCESSOR_FILES)
Kind = Literal["model", "config", "tokenizer"]
SPACE_LEFT = 100 << 20  # bytes to leave free on the cache's disk
TIMEOUT_S = 30
AGAIN = "run the same command again, complete files are kept"
_TEMPLATE = re.compile(TEMPLATE_FOLDER + r"/[\w.-]+\.jinja")
_COMMIT = re.compile(r"[0-9a-f]{40}")
T = TypeVar("T")


class HubUnreachable(DataError):
    """The Hub does not answer."""


def model_folder(
    name: str,
    revision: str | None = None,
    kind: Kind = "model",
    say: Callable[[str], None] = lambda text: None,
    check: Callable[[Path], object] = from_folder,
) -> Path:
    """The folder of a model: `name` is a folder, or ORG/NAME on the Hub at `revision` (default: main).

    `kind` says what must be there: "model" is all of it, "config" leaves the weights out, and "tokenizer" needs
    tokenizer.json only. Files are downloaded into the hub's cache if they are not there. Where the Hub cannot be
    reached, a complete copy in the cache is taken, and `say` gets a notice of it. DataError where the model is
    absent, gated, unusable (which `check` says by its configs) or cut off; StorageError where the disk is too full;
    UsageError for an impossible name.
    """
    local = Path(os.path.expanduser(name))
    if os.path.isdir(local):
        if revision is not None:
            raise UsageError(f"--revision {revision} is for models of the Hub, but {name} is a local folder")
        if kind == "tokenizer":
            _check_tokenizer(name, (path.name for path in local.iterdir()))
        return local
    if os.path.exists(local):
        raise DataError(f"{name} is a file: give the folder that it is in")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(f"there is no folder {name}{_nearest(name, _matches(local.parent, '*/'))}")
    from huggingface_hub import constants

    revision = revision or "main"
    if constants.HF_HUB_OFFLINE:
        return _cached(name, revision, kind)
    try:
        return _downloaded(name, revision, kind, check)
    except HubUnreachable as error:
        try:
            folder = _cached(name, revision, kind)
        except DataError:
            raise error from None
        say(f"{constants.ENDPOINT} cannot be reached: {name} ({revision_of(folder, revision)}) is taken from the cache")
        return folder


def revision_of(folder: Path, revision: str | None) -> str:
    """`main, 060db6499f32`: a revision with the commit that its folder in the cache is of."""
    commit, asked = folder.name[:12], revision or "main"
    return commit if asked.startswith(commit) else f"{asked}, {commit}"


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" (nearest: {', '.join(near)})" if near else ""


def _check_tokenizer(name: str, files: Iterable[str]) -> None:
    """DataError with the way out unless there is a tokenizer.json."""
    there = set(files)
    if "tokenizer.json" in there:
        return
    other = next((file for file in ("tokenizer.model", "tekken.json", "vocab.json") if file in there), None)
    if other is None:
        raise DataError(f"{name} has no tokenizer.json: give a folder or model that has one")
    what = "a sentencepiece tokenizer.model" if other == "tokenizer.model" else f"a {other}"
    raise DataError(
        f"{name} has only {what}, and tokenizer.json is needed: convert it once with transformers: python -c "
        f"\"from transformers import AutoTokenizer as T; T.from_pretrained('{name}').save_pretrained('NEW_FOLDER')\" "
        "and give NEW_FOLDER instead"
    )


def _cached(name: str, revision: str, kind: Kind) -> Path:
    """The folder in the cache, if it is complete; DataError where it is not."""
    from huggingface_hub import constants, try_to_load_from_cache

    anchor = "tokenizer.json" if kind == "tokenizer" else "config.json"
    found = ask(name, revision, "", partial(try_to_load_from_cache, name, anchor, revision=revision))
    problem = ""
    if isinstance(found, str):
        try:
            if kind == "model":
                weight_files(Path(found).parent)
            return Path(found).parent
        except DataError as error:
            problem = f"; what is there is not complete: {error}"
    raise DataError(
        f"there is no folder {name}, and the model of that name (revision {revision}) is not in the cache "
        f"{constants.HF_HUB_CACHE}{_suggestion(name)}, and HF_HUB_OFFLINE forbids downloading it: unset it, or give a "
        f"local folder{problem}"
    )


def _matches(folder: Path, pattern: str) -> list[str]:
    """Paths in a folder, for a suggestion: none where it cannot be read."""
    try:
        return [str(path) for path in folder.glob(pattern)]
    except (OSError, ValueError):
        return []


def _downloaded(name: str, revision: str, kind: Kind, check: Callable[[Path], object]) -> Path:
    """The folder in the cache, downloaded as far as it is not there."""
    from huggingface_hub import HfApi

    if _COMMIT.fullmatch(revision):  # a commit never changes, so a complete copy needs no question to the Hub
        with suppress(DataError):
            return _cached(name, revision, kind)
    look = partial(HfApi().model_info, name, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    info = ask(name, revision, "", look)
    sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or []}
    if kind == "tokenizer":
        _check_tokenizer(name, sizes)
    elif "config.json" not in sizes:
        adapter = "an adapter (it has adapter_config.json): give its base model, or a model with it merged"
        what = adapter if "adapter_config.json" in sizes else "not a transformers model"
        raise DataError(f"{name} has no config.json: it is {what}")
    if kind == "model" and WEIGHTS not in sizes and INDEX not in sizes:
        raise DataError(f"{name} has no {WEIGHTS} or {INDEX}{other_weights(sizes)}")
    names = (TOKENIZER_FILES, CONFIG_FILES) if kind == "tokenizer" else (CONFIG_FILES, TOKENIZER_FILES)
    wanted = [*names[0], *names[1], *([INDEX] if kind == "model" and WEIGHTS not in sizes else [])]
    small = [file for file in wanted if file in sizes] + [file for file in sizes if _TEMPLATE.fullmatch(file)]
    # The first file is requested by the revision's name, so that the cache records its commit.
    folder = fetch(name, revision, small[:1], sizes)
    if folder.name != info.sha:
        raise DataError(f"{name} changed on the Hub just now: run the same command again")
    fetch(name, info.sha, small[1:], sizes)
    if kind != "tokenizer":
        check(folder)
    if kind == "model":
        weights = [WEIGHTS] if WEIGHTS in sizes else index_files(folder / INDEX)
        if absent := [file for file in weights if file not in sizes]:
            raise DataError(f"{name} lacks weight files that its index names: {', '.join(absent)}")
        fetch(name, info.sha, weights, sizes)
    return folder


def fetch(name: str, revision: str, files: list[str], sizes: Mapping[str, int], repo_type: str = "model") -> Path:
    """Downloads files that are not cached, after a look at the disk; returns the folder (Path() for no files).

    Of a data set, `revision` is a commit.
    """
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    cache = Path(constants.HF_HUB_CACHE)
    at = {"revision": revision, "repo_type": repo_type}
    missing = [file for file in files if not isinstance(try_to_load_from_cache(name, file, **at), str)]
    needed, free = sum(sizes[file] for file in missing), free_bytes(cache)
    if missing and needed + SPACE_LEFT > free:
        raise StorageError(
            f"{name} needs {needed:,} bytes more in {cache}, but {free:,} are free there: free "
            f"{needed + SPACE_LEFT - free:,} bytes, or set HF_HOME to a folder on another disk"
        )
    folder = Path()
    for file in files:
        path = ask(name, revision, file, partial(hf_hub_download, name, file, **at), repo_type)
        folder = Path(path).parents[file.count("/")]
    return folder


def ask(name: str, revision: str, file: str, request: Callable[[], T], repo_type: str = "model") -> T:
    """Runs a request to the Hub (for `file`, or the description); what goes wrong becomes one clear error."""
    from huggingface_hub import constants, errors

    at, doing = constants.ENDPOINT, f"downloading {file} of {name}" if file else f"looking for {name}"
    page = f"{at}/{name}" if repo_type == "model" else f"{at}/datasets/{name}"
    absent = f"there is no folder {name}, and " if repo_type == "model" and not file else ""
    # The library's transport changes with its version (requests, httpx, httpx2); the one it has loaded is meant.
    transports = (("requests", "RequestException"), ("httpx", "HTTPError"), ("httpx2", "HTTPError"))
    loaded = tuple(getattr(sys.modules[module], kind) for module, kind in transports if module in sys.modules)
    xet = (errors.XetDownloadError,) if hasattr(errors, "XetDownloadError") else ()
    try:
        return request()
    except errors.HFValidationError as error:
        raise UsageError(f"{name!r} is neither a local folder nor a name on the Hub (ORG/NAME): {error}") from None
    except errors.GatedRepoError:
        raise DataError(
            f"{name} is gated: accept its terms at {page}, then log in with `hf auth login` "
            "(or set HF_TOKEN to a token of that account) and run the same command again"
        ) from None
    except errors.RepositoryNotFoundError:
        if repo_type == "dataset":
            raise DataError(
                f"there is no file or folder {name}, and {at} has no public data set of that name: give a path, or a "
                "data set as ORG/NAME; a private one needs `hf auth login` or HF_TOKEN"
            ) from None
        raise DataError(
            f"there is no folder {name}, and {at} has no public model of that name{_suggestion(name)}: give a folder, "
            "ORG/NAME, or a preset with --from-scratch; a private model needs `hf auth login` or HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise DataError(f"{name} has no revision {revision!r}: see {page}/tree/main for its branches") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no status"
        way_out = "the token in HF_TOKEN or of `hf auth login` is not valid" if status == 401 else "try again later"
        if status != 401 and file:
            way_out = AGAIN
        kind = HubUnreachable if isinstance(status, int) and status >= 500 and not file else DataError
        raise kind(f"{absent}{at} answered {status} while {doing}: {way_out}") from None
    except (OSError, RuntimeError, ValueError, *loaded, *xet) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise StorageError(
                f"{doing} failed in {constants.HF_HUB_CACHE}: {error.strerror}; make room or rights there, or set "
                "HF_HOME to another folder"
            ) from None
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        if file and constants.HF_HUB_OFFLINE:
            there = f"{file} of {name} is not in {constants.HF_HUB_CACHE}"
            raise DataError(f"{there}, and HF_HUB_OFFLINE forbids to fetch it: unset it") from None
        if file:
            raise DataError(f"{doing} was cut off ({said}): {AGAIN}") from None
        raise HubUnreachable(
            f"{absent}{at} cannot be reached, {doing} ({said}): check the network, HF_ENDPOINT and proxies"
            + (", or give a local folder" if repo_type == "model" else "")
        ) from None


def _suggestion(name: str) -> str:
    """Near names among local folders and the cache."""
    from huggingface_hub import constants

    cached = _matches(Path(constants.HF_HUB_CACHE), "models--*")
    names = [Path(path).name.removeprefix("models--").replace("--", "/") for path in cached]
    folders = [path for pattern in ("*/config.json", "*/*/config.json") for path in _matches(Path(), pattern)]
    return _nearest(name, [*names, *(str(Path(path).parent) for path in folders)])
