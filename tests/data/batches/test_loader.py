"""The loader: order, ranks, seeking, the background thread, and what a run's data must be."""

import gc
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_files import write_tokens

from llmq.data.batches.loader import PREFETCHED, Loader, RankBatches, eval_batches, open_data
from llmq.data.batches.packing import Packs
from llmq.data.batches.rows import RowForm, Rows, Windows
from llmq.data.stream import Stopped
from llmq.data.tokens.token_file import TokenFile, TokenWriter
from llmq.errors import DataError, UsageError
from llmq.options.data import DataOptions

T = 4


def options(train: object, evaluation: object = None, **more: Any) -> DataOptions:
    small: dict[str, Any] = {"batch_size": 2, "seq_len": T, "grad_accumulation": 1}
    held = None if evaluation is None else str(evaluation)
    return DataOptions(train_file=str(train), eval_file=held, **{**small, **more})


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    gc.collect()
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def make_windows(folder: Path, num_windows: int, before: Callable[[], None] = lambda: None) -> Windows:
    """Windows whose first token is the window's number; `before` is called when some are read."""

    class Watched(Windows):
        def read(self, samples: np.ndarray) -> Rows:
            before()
            return super().read(samples)

    tokens = np.repeat(np.arange(num_windows + 1), T)[: num_windows * T + 1]
    write_tokens(folder / "a.bin", tokens, vocab_size=num_windows + 1)
    return Watched([TokenFile.open(folder / "a.bin")], RowForm(T, num_windows + 1))


def samples(loader: Loader, batches: int) -> list[int]:
    return [int(row[0]) for _ in range(batches) for row in loader.next().tokens]


def test_epochs_have_every_window_once_in_an_order_of_their_own_and_wrap_into_the_next(tmp_path: Path) -> None:
    orders = []
    for seed in (1, 2):
        with Loader(RankBatches(make_windows(tmp_path, 30), 9, seed)) as loader:
            seen = samples(loader, 10)
        orders += [tuple(seen[30 * e : 30 * e + 30]) for e in range(3)]
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert len({*orders, tuple(range(30))}) == 7


def test_an_error_in_the_thread_is_raised_by_next_after_the_good_batches(tmp_path: Path) -> None:
    reads: list[threading.Thread] = []

    def read() -> None:
        reads.append(threading.current_thread())
        if len(reads) == 3:
            raise DataError("token 5 is bad")

    with Loader(RankBatches(make_windows(tmp_path, 8, read), 2, 0)) as loader:
        assert len(samples(loader, 2)) == 4
        for _ in range(2):
            with pytest.raises(DataError, match="token 5 is bad"):
                loader.next()
    assert threading.main_thread() not in reads


def test_it_reads_ahead_but_not_without_bound(tmp_path: Path) -> None:
    """What was read ahead is there without another read: the fifth one waits until four batches are taken.

    Nor is what lies in the queue waited for, in the best of several turns, however busy the machine is.
    """
    assert PREFETCHED >= 4
    held, reads = threading.Event(), list[int]()

    def read() -> None:
        reads.append(1)
        if len(reads) == PREFETCHED + 1:
            held.wait(60)

    with Loader(RankBatches(make_windows(tmp_path, 8, read), 2, 0)) as loader:
        samples(loader, PREFETCHED)
        assert not held.is_set() and len(reads) <= PREFETCHED + 1
        held.set()
        loader.next()
        most = 2 * (PREFETCHED + 1)  # taken, in the queue, and one in the thread's hand
        deadline = time.monotonic() + 60
        while len(reads) < most and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        assert len(reads) == most
        assert min(loader.next().wait_ms for _ in range(PREFETCHED)) < 50


def test_the_wait_is_measured(tmp_path: Path, monkeypatch) -> None:
    clock, asked = [0.0], threading.Event()

    def read() -> None:
        asked.wait(60)
        clock[0] += 0.05

    def now() -> float:
        found = clock[0]
        asked.set()
        return found

    monkeypatch.setattr("llmq.data.batches.loader.time.perf_counter", now)
    with Loader(RankBatches(make_windows(tmp_path, 8, read), 2, 0)) as loader:
        assert loader.next().wait_ms >= 50


def test_reading_is_far_faster_than_training(tmp_path: Path) -> None:
    """32 x 1024 with masks: 14 million tokens/s on a core, in the time of six empty loops of Python over the tokens.

    Those measure the machine as it is at this moment. A model of 250,000 tokens/s, which must never wait, takes 300.
    By the clock, the best turn has 2 million tokens/s at least: the processor's time does not count what is waited for.
    """
    b, t = 32, 1024
    tokens = np.random.default_rng(0).integers(0, 50_000, 400 * t + 1)
    write_tokens(tmp_path / "a.bin", tokens, vocab_size=50_257, mask=tokens % 3 > 0)
    windows = Windows([TokenFile.open(tmp_path / "a.bin")], RowForm(t, 50_257))
    batches = RankBatches(windows, b, 0).read()
    ours, walls, loops = [], [], []
    for _ in range(15):
        start, clock = time.process_time(), time.perf_counter()
        next(batches)
        ours.append(time.process_time() - start)
        walls.append(time.perf_counter() - clock)
        start = time.process_time()
        for _ in range(b * t):
            pass
        loops.append(time.process_time() - start)
    assert min(ours) < 20 * min(loops)
    assert b * t / min(walls) > 2_000_000


def test_closing_is_quick_repeatable_and_final_and_a_forgotten_loader_leaves_no_thread(tmp_path: Path) -> None:
    loader, forgotten = (Loader(RankBatches(make_windows(tmp_path, 8), 2, 0)) for _ in range(2))
    for _ in range(2):
        loader.close()
    with pytest.raises(Stopped):
        loader.next()
    forgotten.next()
    del forgotten  # the fixture waits for the thread's end


@pytest.mark.parametrize(("num_steps", "batches"), [(None, 3), (2, 2), (9, 3), (0, 0)])
def test_evaluation_goes_through_the_file_and_fills_up_with_untrained_rows(tmp_path: Path, num_steps, batches) -> None:
    got = list(eval_batches(make_windows(tmp_path, 8), 3, num_steps))
    assert len(got) == batches
    firsts = [(int(ids[0]), aims[0]) for batch in got for ids, aims in zip(batch.tokens, batch.targets, strict=True)]
    assert [first for first, aim in firsts if aim >= 0] == list(range(min(8, batches * 3)))
    if batches == 3:
        assert got[-1].tokens.shape == (3, T) and (got[-1].targets[2] == -100).all() and got[-1].position == 8


def test_a_run_is_opened_with_its_counts(tmp_path: Path) -> None:
    data = open_data(options_of(tmp_path, 41, 9, grad_accumulation=5), 9, 3)
    assert (data.train.num_windows, data.train.num_tokens, data.samples_per_step) == (10, 41, 10)
    assert data.eval is not None and data.eval.num_windows == 2 and data.layout.kind == "windows"
    assert [file.path for file in data.train.token_files] == [tmp_path / "train.bin"]
    assert data.tokenizer_folder() is None
    with data.loader() as loader:
        assert loader.next().tokens.shape == (2, T)
    assert open_data(options(tmp_path / "train.bin"), 9, 3).eval is None


@pytest.mark.parametrize(
    ("global_batch", "world", "gives"),
    [(2, 1, 1), (6, 1, 3), (8, 2, 2), (7, 1, "use 6 or 8"), (1, 1, "use 2 or 4"), (6, 2, "4, which .* on 2 ranks")],
)
def test_a_global_batch_becomes_accumulation(tmp_path: Path, global_batch: int, world: int, gives: int | str) -> None:
    asked = options_of(tmp_path, 99, 9, global_batch_size=global_batch, grad_accumulation=4)
    refused = pytest.raises(UsageError, match=f"global_batch_size {global_batch} is not a multiple of .*{gives}")
    with refused if isinstance(gives, str) else nullcontext():
        assert open_data(asked, 9, 0, world=world).grad_accumulation == gives


def options_of(folder: Path, train: int, evaluation: int, **more: Any) -> DataOptions:
    """Options for files of this many tokens."""
    for name, count in (("train", train), ("eval", evaluation)):
        write_tokens(folder / f"{name}.bin", np.arange(count) % 9, vocab_size=9)
    return options(folder / "train.bin", folder / "eval.bin", **more)


def test_a_set_of_less_than_a_step_wraps_within_it_and_that_is_said(tmp_path: Path) -> None:
    data = open_data(options_of(tmp_path, 3 * T + 1, 9, batch_size=5, grad_accumulation=2), 9, 0)
    says = "the data has 3 windows and a step takes 10, so that it sees windows more than once: a smaller"
    assert data.facts()["note"].startswith(says)
    with data.loader() as loader:
        step = np.concatenate([loader.next().tokens for _ in range(2)])
    counts = np.unique(step, axis=0, return_counts=True)[1]
    assert sorted(counts.tolist()) == [3, 3, 4]
    enough = open_data(options_of(tmp_path, 10 * T + 1, 9, batch_size=5, grad_accumulation=2), 9, 0)
    assert "note" not in enough.facts()


@pytest.mark.parametrize(
    ("more", "advice"),
    [
        ({"packing": False}, ": --seq-len 16 keeps all documents whole, and --packing puts several in a row"),
        ({"packing": True, "max_docs": 1}, ": --seq-len 16 keeps all documents whole"),
        ({"packing": False, "long": 200}, ": --packing puts several in a row"),
        ({"packing": True, "max_docs": 1, "long": 200}, ""),
    ],
)
def test_rows_of_padding_are_a_warning_with_what_fills_them(tmp_path: Path, more: dict[str, Any], advice: str) -> None:
    long = more.pop("long", 10)
    with TokenWriter(tmp_path / "a.bin", vocab_size=9) as file:
        for length in [10] * 40 + [long]:
            file.append(np.ones(length, np.int32), stops=[length])
    found = open_data(options(tmp_path / "a.bin", seq_len=200, **more), 9, 0)
    assert isinstance(found.train, Packs) and len(found.train.index.lengths) == 41
    share = 95 if long == 10 else 93
    assert list(found.warnings()) == [f"{share}% of the training rows of 200 tokens is padding{advice}"]
    assert not list(open_data(options(tmp_path / "a.bin", seq_len=16, **more), 9, 0).warnings())
    assert not list(open_data(options(tmp_path / "a.bin", seq_len=200), 9, 0).warnings())  # windows


def test_evaluation_needs_a_token_to_predict_and_training_a_window(tmp_path: Path) -> None:
    """The evaluation has the tail of its file, too."""
    with pytest.raises(DataError) as caught:
        open_data(options_of(tmp_path, T, 1), 9, 0)
    assert "the training data (4 tokens) has no sample of seq_len 4: one is 5 tokens of a file" in str(caught.value)
    assert "the evaluation data (1 tokens) has nothing to predict" in str(caught.value)
    with pytest.raises(DataError, match=r"(?s)one\.bin.*two\.bin"):
        open_data(options(tmp_path / "one.bin", tmp_path / "two.bin"), 9, 0)
    for count in (2, 2 * T + 3):
        data = open_data(options_of(tmp_path, T + 1, count), 9, 0)
        assert data.eval is not None and data.train.num_windows == 1
        targets = np.concatenate([batch.targets for batch in eval_batches(data.eval, 2)])
        assert targets[targets != -100].tolist() == [n % 9 for n in range(1, count)]
