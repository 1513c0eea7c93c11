"""Work in slices of rows changes no bit: `Output.write`, casts and the cross-entropy, against one slice for all."""

import numpy as np
import pytest

import llmq.operands
from llmq.operands import Output, Tensor
from llmq.ops.reference.cross_entropy import cross_entropy
from llmq.ops.reference.quantize import cast
from llmq.tensor import DTYPES, IGNORED, Form, stored_shape

ROWS, COLUMNS = 37, 29
FORMS = {
    "plain": None,
    "col": Form("bf16", "col"),
    "fp8": Form("e4m3", "row", "delayed"),
    "fp8 col": Form("e5m2", "col", "delayed"),
    "colsum": Form("fp32", "colsum"),
}


def output(dtype: str, forms: list[str], *, accumulate: bool = False) -> Output:
    rng = np.random.default_rng(3)
    tensors = []
    for name in forms:
        form = FORMS[name]
        array = rng.normal(size=stored_shape((ROWS, COLUMNS), form)).astype(DTYPES[form.dtype if form else dtype])
        scale = np.array([0.25], np.float32) if form and form.scaling else None
        tensors.append(Tensor(name, array, (ROWS, COLUMNS), form, scale))
    amax = {"e4m3": np.zeros(1, np.float32)} if len(forms) > 1 else {}
    return Output("out", (ROWS, COLUMNS), dtype, tuple(tensors), accumulate, amax)


def bits(out: Output) -> list[bytes]:
    return [target.array.tobytes() for target in out.tensors] + [cell.tobytes() for cell in out.amax.values()]


@pytest.fixture
def same_in_one_and_in_many(monkeypatch):
    """Asserts that slices change nothing of what a function gives, which it returns."""

    def both(run) -> list[bytes]:
        found = []
        for size in (1 << 30, 3 * COLUMNS):
            monkeypatch.setattr(llmq.operands, "SLICE", size)
            found.append(run())
        assert found[0] == found[1]
        return found[0]

    return both


def normal(seed=0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, COLUMNS)).astype(np.float32)


def after(out: Output, work, *given) -> list[bytes]:
    work(out, *given)
    return bits(out)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "forms", [["plain"], ["plain", "col", "fp8", "fp8 col"], ["fp8"], ["plain", "colsum"]], ids=str
)
@pytest.mark.parametrize("wrong", [None, np.nan, np.inf])
def test_a_write(same_in_one_and_in_many, dtype, forms, wrong):
    value = normal() * 100
    if wrong is not None:
        value[20, 3] = wrong
    same_in_one_and_in_many(lambda: after(output(dtype, forms), Output.write, value))


def test_a_sum_into_what_is_there(same_in_one_and_in_many):
    found = same_in_one_and_in_many(lambda: after(output("bf16", ["plain"], accumulate=True), Output.write, normal()))
    assert found != bits(output("bf16", ["plain"]))


@pytest.mark.parametrize("forms", [["plain"], ["col", "fp8"], ["plain", "colsum"]], ids=str)
def test_a_cast(same_in_one_and_in_many, forms):
    x = Tensor("x", normal(), (ROWS, COLUMNS))
    same_in_one_and_in_many(lambda: after(output("bf16", forms), cast, x))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("forms", [["plain"], ["fp8", "fp8 col"], []], ids=str)
def test_a_loss(same_in_one_and_in_many, dtype, forms):
    logits = Tensor("x", (10 * normal()).astype(DTYPES[dtype]), (ROWS, COLUMNS))
    ids = np.random.default_rng(0).integers(0, COLUMNS - 4, ROWS).astype(np.int32)
    ids[::5] = IGNORED

    def run() -> list[bytes]:
        out, losses = output(dtype, forms), Tensor("loss", np.zeros(ROWS, np.float32), (ROWS,))
        hits = Tensor("hits", np.zeros(ROWS, np.int32), (ROWS,))
        of_tokens = (Output(x.name, x.shape, kind, (x,)) for x, kind in ((losses, "fp32"), (hits, "int32")))
        cross_entropy(out, *of_tokens, logits, Tensor("targets", ids, (ROWS,)), vocab_size=COLUMNS - 3, z_loss=1e-3)
        return [*bits(out), losses.array.tobytes(), hits.array.tobytes()]

    same_in_one_and_in_many(run)
