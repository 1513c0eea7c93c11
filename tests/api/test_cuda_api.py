"""What Python's users have of GPUs: models that are read, and runs on several of which the caller is the first."""

import io

import numpy as np
import pytest
from tiny_runs import folder, on_weights, weights_of, write_weights

import llmq

pytestmark = pytest.mark.gpu
T, V = 32, 97
SHAPE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}  # what cuDNN and 16-byte accesses take


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    write_weights(folder(place / "source", **SHAPE), place / "base")
    return place / "base"


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_a_model_reads_as_on_the_cpu(model_folder, dtype, bound):
    import cupy

    ids = np.random.default_rng(0).integers(0, V, (25, T))  # more than a batch: a result is not that of the next one
    mine = llmq.load(model_folder, dtype=dtype, device="cuda", batch_size=2, seq_len=T)
    other = llmq.load(model_folder, device="cpu", batch_size=2, seq_len=T)
    for name in ("logits", "score", "hidden"):
        found = getattr(mine, name)(cupy.asarray(ids))
        assert isinstance(found, cupy.ndarray) and found.shape == getattr(other, name)(ids).shape
        np.testing.assert_allclose(cupy.asnumpy(found).astype(np.float32), getattr(other, name)(ids), atol=bound)
    view = mine.hidden(ids[:2], copy=False)
    assert np.array_equal(cupy.asnumpy(view), cupy.asnumpy(mine.hidden(ids[:2])))
    assert cupy.shares_memory(view, mine.hidden(ids[:2], copy=False))


def test_the_caller_is_the_first_of_two_ranks(tmp_path, monkeypatch):
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.chdir(tmp_path)
    given = {**on_weights(tmp_path, 8), "model": str(folder(tmp_path / "for the GPU", **SHAPE)), "from_scratch": True}
    given |= {"batch_size": 1, "global_batch_size": 4, "gpus": 2, "console": io.StringIO()}
    del given["grad_accumulation"]
    seen = []

    def stops(run, record):
        seen.append(record.step)
        if run.step == 3:
            run.stop("enough")

    stopped = llmq.train(**given, callbacks=[stops])
    assert (stopped.steps, stopped.stopped_by) == (3, "enough") and seen == [1, 2, 3, 3]
    resumed = llmq.train(**{**given, "continue": "newest"})
    whole = llmq.train(**{**given, "name": "whole"})
    assert weights_of(resumed.checkpoint_path) == weights_of(whole.checkpoint_path)
