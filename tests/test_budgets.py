"""What the house may grow to. A feature that needs more raises a number in its own commit, which says why."""

import io
import tokenize
from functools import cache
from pathlib import Path

import pytest
from dense_step import dense_step

ROOT = Path(__file__).parents[1]
MOST_LINES = 54_640  # of llmq/: what was reached with families, multimodal folders and added tokens
MOST_FILES, MOST_LINES_OF_STEP = 30, 3_400  # of a dense step, by tests/dense_step.py
LEAST_COMMENTS = 0.04  # of the lines where decisions are made: comments say why


def lines_of(folder):
    """Every file of Python below a folder, as lines."""
    return {path: path.read_text("utf-8").splitlines() for path in sorted((ROOT / folder).rglob("*.py"))}


def test_llmq_is_no_larger_than_this():
    assert sum(map(len, lines_of("llmq").values())) <= MOST_LINES


@cache
def found_step():
    """The list, made once."""
    return dense_step()


def test_a_dense_step_is_short_to_read():
    found = found_step()
    assert {"llmq/training/loop.py", "llmq/engine/engine.py", "llmq/blocks/mlp.py"} <= found.keys()
    assert len(found) <= MOST_FILES, "\n".join(found)
    assert sum(lines for lines, _ in found.values()) <= MOST_LINES_OF_STEP


@pytest.mark.parametrize("feature", ["adapters", "comm", "data", "bench", "report", "generation"])
def test_a_dense_step_meets_no_file_of_a_feature(feature):
    """But the one that says what a batch is."""
    none = {"llmq/data/batches/batch.py"}
    assert not [file for file in found_step() if file.startswith(f"llmq/{feature}/") and file not in none]


@pytest.mark.parametrize("folder", ["plan", "stores", "engine", "sites"])
def test_decisions_have_comments(folder):
    found = lines_of(f"llmq/{folder}")
    texts = ("\n".join(lines) for lines in found.values())
    tokens = (token for text in texts for token in tokenize.generate_tokens(io.StringIO(text).readline))
    comments = sum(token.type == tokenize.COMMENT for token in tokens)
    assert comments >= LEAST_COMMENTS * sum(map(len, found.values()))
