"""Training on packed rows, and on padded ones: the whole run, its log, resuming with the same bits, refusals."""

import numpy as np
import pytest
from tiny_runs import write_documents

import llmq
from llmq.data.tokens.token_file import TokenWriter
from llmq.errors import MemoryLimitError, UsageError
from llmq.report.read import read_log

T = 24


@pytest.fixture
def given(given, tmp_path, monkeypatch):
    """Options of a small run on documents of 2 to 30 tokens."""
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for name, count in (("train", 120), ("eval", 20)):
        write_documents(name, count, rng)
    return {**given, "seq_len": T, "warmup": 0, "steps": 8, "packing": True}


def test_a_packed_run_trains_and_says_how_full_its_rows_are(given):
    result = llmq.train(**{**given, "steps": 30})
    assert result.exit_code == 0 and result.eval_loss < 0.9 * np.log(97)
    log = read_log(result.log_path)
    assert 0 < log.train["trained_tokens"][0] < log.train["tokens"][0] == 4 * T
    text = given["console"].getvalue()
    for says in ("rows", "% full, at most", "documents in each", "eval rows", "trained tokens"):
        assert says in text


def test_packed_and_padded_rows_have_the_same_evaluation(given):
    """Of the same weights on the same documents, however they lie in rows: nothing reaches across a border."""
    runs = [{"packing": True}, {"packing": True, "max_docs": 2}, {"packing": False}]
    losses = [
        llmq.train(**{**given, **run, "learning_rate": 0, "steps": 1, "name": str(n)}).eval_loss
        for n, run in enumerate(runs)
    ]
    # about 200 losses in f32, added up in another order
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_a_checkpoint_of_other_rows_is_refused(given):
    llmq.train(**given)
    with pytest.raises(UsageError, match=r"training samples|documents of a row"):
        llmq.train(**{**given, "continue": "auto", "max_docs": 2, "steps": 9, "overwrite": True})
    with pytest.raises(UsageError, match=r"trained on packed rows, .* on windows .*: add --packing to continue it"):
        llmq.train(**{**given, "continue": "auto", "packing": None, "steps": 9, "overwrite": True})


@pytest.mark.slow
def test_what_fits_dense_fits_packed(given, few_remedies):
    """On an H200, 16 rows of 8192 tokens, one filled by a document and others by many: whole, attention's workspace
    would be 8 times that of dense rows, as a row has 8 places of 8192 tokens."""
    with TokenWriter("long.bin", vocab_size=97) as file:
        for length in (8192, *[1000] * 16) * 50:
            file.append(np.ones(length, np.int32), stops=[length])
    given |= {"model": "Qwen2.5-0.5B", "model_dtype": "bf16", "batch_size": 16, "seq_len": 8192, "dry_run": True}
    given |= {"train_file": "long.bin", "eval_file": None, "eval_every_n_steps": 0, "recompute_block": True}
    given |= {"device": "cuda", "gpu": "H200"}
    llmq.train(**{**given, "packing": None})
    assert "chunks of the batch" not in given["console"].getvalue()
    llmq.train(**given)
    chunks = int(given["console"].getvalue().split("Attention's backward runs in ")[1].split()[0])
    assert 1 < chunks < 16
    with pytest.raises(MemoryLimitError, match=r"\n1 .* 0 bytes  --attn-bwd-chunks 2\n"):
        llmq.train(**given, attn_bwd_chunks=1)
