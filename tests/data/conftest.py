"""What the tests of the data share: a tokenizer, and the data folder beside the checkout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import EOS, byte_level, save

from llmq.data.tokens.token_file import TokenFile
from llmq.data.tokens.tokenize import tokenize_data

SHARED = Path(__file__).parents[3] / "shared/data"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test leaves in the cache is its own."""
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def small_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a GPT-2 style tokenizer whose configuration names EOS."""
    return save(byte_level(), tmp_path_factory.mktemp("tokenizer") / "small", {"eos_token": EOS})


@pytest.fixture
def call(tmp_path: Path, small_tokenizer: Path) -> Callable[..., list[TokenFile]]:
    """`tokenize_data` of a path, with the small tokenizer unless another is named, into a folder of `tmp_path`."""

    def call(path: Path, out: str | Path = "out", **more: Any) -> list[TokenFile]:
        given = {"tokenizer": str(small_tokenizer), "inputs": [str(path)], "out_dir": tmp_path / out, **more}
        return tokenize_data(**given)

    return call


@pytest.fixture
def shared() -> Callable[[str], Path]:
    """A file of the shared data folder beside the checkout; skips where there is none."""

    def find(name: str) -> Path:
        if not (SHARED / name).exists():
            pytest.skip(f"no ../shared/data/{name} beside the checkout")
        return SHARED / name

    return find
