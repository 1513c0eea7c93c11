"""What Python's users have of GPUs: models that are read, and runs on several of which the caller is the first."""

import io

import numpy as np
import pytest
from dlpack import Shared
from tiny_runs import folder, on_weights, weights_of, write_weights

import llmq
from llmq.errors import UsageError

pytestmark = pytest.mark.gpu
T, V = 32, 97
SHAPE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}  # what cuDNN and 16-byte accesses take


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    write_weights(folder(place / "source", max_position=4 * T, **SHAPE), place / "base")
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


@pytest.mark.parametrize("kind", [lambda ids: ids, Shared], ids=["CuPy", "DLPack"])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_ids_on_the_gpu_stay_there_and_views_take_no_memory(model_folder, monkeypatch, kind, dtype):
    """With everything that would copy to or from the host, or allocate on the GPU, refused."""
    import cupy

    model = llmq.load(model_folder, device="cuda", batch_size=2, seq_len=T)
    drawn = np.random.default_rng(0).integers(0, V, (3, 2, T - 3)).astype(dtype)
    first, ids, goals = (kind(cupy.asarray(part)) for part in drawn)
    row = kind(cupy.asarray(drawn[1, :1]))
    calls = {
        "logits": lambda ids, goals, **about: model.logits(row, **about),
        "score": model.score,
        "score of what follows": lambda ids, goals, **about: model.score(ids, **about),
        "hidden": lambda ids, goals, **about: model.hidden(ids, **about),
    }
    wanted = {name: call(ids, goals) for name, call in calls.items()}
    on_host = {"score": model.score(*drawn[1:]), "hidden": model.hidden(drawn[1])}
    for call in calls.values():
        for _ in range(2):  # eagerly, then as a graph
            call(first, goals, copy=False)

    def refused(*arguments, **about):
        raise AssertionError("a copy was made")

    monkeypatch.setattr(cupy, "asnumpy", refused)
    monkeypatch.setattr(type(model._reader), "write", refused)
    for name, call in calls.items():
        pool = cupy.get_default_memory_pool()
        before = pool.used_bytes(), pool.total_bytes()
        with cupy.cuda.using_allocator(refused):
            view = call(ids, goals, copy=False)
        assert (pool.used_bytes(), pool.total_bytes()) == before
        assert bool((view == wanted[name]).all()), name
        assert not cupy.shares_memory(view, wanted[name])
    assert all(bool((cupy.asarray(found) == wanted[name]).all()) for name, found in on_host.items())


def test_short_rows_are_read_beside_long_ones(model_folder):
    """By a plan of their own, in bf16, between calls of the one whose weights it has."""
    mine = llmq.load(model_folder, device="cuda", batch_size=2, seq_len=4 * T)
    other = llmq.load(model_folder, device="cpu", batch_size=2, seq_len=4 * T)
    for length in (T, 4 * T, T, 3 * T, 5):
        ids = np.random.default_rng(length).integers(0, V, (3, length))
        for name in ("logits", "score", "hidden"):
            found = getattr(mine, name)(ids).get().astype(np.float32)
            np.testing.assert_allclose(found, getattr(other, name)(ids), atol=0.05)


def test_wrong_ids_on_the_gpu_are_named(model_folder):
    import cupy

    model = llmq.load(model_folder, device="cuda", batch_size=2, seq_len=T)
    ids = cupy.arange(4 * T, dtype=np.int64).reshape(4, T) % V
    ids[2, 5], ids[3, 1] = V, -1
    with pytest.raises(UsageError, match="tokens: number 5 of row 2 is 97, and the vocabulary has ids 0 to 96"):
        model.score(ids)
    with pytest.raises(UsageError, match="targets: number 1 of row 1 is -1"):
        model.score(ids[:2], cupy.asarray([[-100] * T, [-100, -1] + [3] * (T - 2)]))
    for wrong, match in (
        (ids * 1.0, "of float64"),
        (ids[None], r"tokens are \(1, 4, 32\)"),
        (ids[:, :0], "tokens are"),
    ):
        with pytest.raises(UsageError, match=match):
            model.score(wrong)
    ids[2, 5] = ids[3, 1] = 2**32 + 1  # which is 1 in 32 bits
    with pytest.raises(UsageError, match="number 5 of row 2 is 4294967297"):
        model.score(ids)


def test_results_are_what_others_take(model_folder):
    import cupy

    for dtype in ("fp32", "bf16"):
        found = llmq.load(model_folder, dtype=dtype, device="cuda", batch_size=2, seq_len=T).hidden([1, 2, 3])
        assert bool((cupy.from_dlpack(Shared(found)) == found).all())


def test_a_model_writes_with_the_weights_that_it_has(model_folder, monkeypatch):
    """Between calls that read, whose results stay those of the first."""
    model = llmq.load(model_folder, device="cuda", batch_size=2, seq_len=T)
    ids, about = np.arange(T) % V, {"max_tokens": 6, "ignore_end": True}
    wanted, scores = llmq.generate(model_folder, [3, 1, 4], device="cuda", **about), model.score(ids)
    monkeypatch.setattr("llmq.generation.weights.ModelWeights.values", None)
    for _ in range(3):
        assert model.generate([3, 1, 4], **about) == wanted
        assert bool((model.score(ids) == scores).all())


@pytest.mark.parametrize("level", [1, 3])
def test_the_caller_is_the_first_of_two_ranks(tmp_path, monkeypatch, level):
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.chdir(tmp_path)
    given = {**on_weights(tmp_path, 8), "model": str(folder(tmp_path / "for the GPU", **SHAPE)), "from_scratch": True}
    given |= {
        "batch_size": 1,
        "global_batch_size": 4,
        "zero_level": level,
        "gpus": 2,
        "sample_length": 16,
        "console": io.StringIO(),
    }
    del given["grad_accumulation"]
    seen, ids = [], np.random.default_rng(0).integers(0, V, 100)

    def stops(run, record):
        seen.append(record.step)
        if not hasattr(record, "lr"):
            assert run.evaluate() == record.loss and np.isfinite(run.evaluate(ids))
            assert np.isfinite(run.parameter("model.layers.0.mlp.up_proj.weight")).all()
            assert all(len(one.tokens) <= 4 for one in run.generate([[1, 2], [3]], max_tokens=4))
        if run.step == 3:
            run.stop("enough")

    stopped = llmq.train(**given, callbacks=[stops])
    assert (stopped.steps, stopped.stopped_by) == (3, "enough") and seen == [1, 2, 3, 3]
    resumed = llmq.train(**{**given, "continue": "newest"})
    whole = llmq.train(**{**given, "name": "whole"})
    assert weights_of(resumed.checkpoint_path) == weights_of(whole.checkpoint_path)
