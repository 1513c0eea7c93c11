"""Packed rows through whole models: each document has the loss and the gradient that it has alone."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from tiny_engines import (
    BF16,
    EVERY,
    FP32,
    FP64,
    B,
    T,
    arrays,
    batch,
    bits,
    engine_of,
    next_logits,
    packed_batch,
    plan_of,
    tiny,
)

from llmq.blocks.packed import Packing
from llmq.data.batches.batch import Batch
from llmq.model.rope import document_positions
from llmq.plan.memory import ROLES, Memory

DOCS = 5
PACKING = Packing(DOCS, T)
FAMILIES = {
    "qwen2": tiny(),
    "llama": tiny(architecture="LlamaForCausalLM", qkv_bias=False, tie_embeddings=False),
    "mistral": tiny(architecture="MistralForCausalLM", qkv_bias=False, tie_embeddings=False, windows=(3, None)),
    "qwen3": tiny(architecture="Qwen3ForCausalLM", qkv_bias=False, qk_norm=True),
}


def gradients(engine):
    return {row.name: engine.gradient(row.name).astype(np.float64) for row in engine.plan.rows}


def alone(tokens, targets, borders):
    """Each document in a batch of its own, at the start of a row that holds nothing else."""
    for row, marks in enumerate(borders):
        for start, stop in pairwise(marks):
            if start < T:
                rows, aims = np.zeros((B, T), np.int32), np.full((B, T), -100, np.int32)
                rows[0, : stop - start], aims[0, : stop - start] = tokens[row, start:stop], targets[row, start:stop]
                yield rows, aims


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_a_pack_is_the_sum_of_its_documents(config):
    """In f64, to rounding: the sums of a matmul are in another order."""
    tokens, targets, borders = arrays(packed_batch())
    packed = engine_of(plan_of(FP64, config=config, packing=Packing(DOCS + 1, int(np.diff(borders).max()))))
    total, count = packed.evaluate(Batch(tokens, targets, borders))
    packed.micro_step(Batch(tokens, targets, borders))
    one = engine_of(plan_of(FP64, config=config))
    losses, counts = [], []
    for number, (rows, aims) in enumerate(alone(tokens, targets, borders)):
        loss, trained = one.evaluate(Batch(rows, aims))
        losses.append(loss)
        counts.append(trained)
        one.micro_step(Batch(rows, aims), first=number == 0)
    assert len(losses) == 2 * DOCS - 1
    assert count == sum(counts) and total == pytest.approx(sum(losses), rel=1e-14)
    found, expected = gradients(packed), gradients(one)
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= 1e-13 * np.linalg.norm(value), name
    mixed = engine_of(plan_of(FP64, config=config)).evaluate(Batch(tokens, targets))[0]
    assert abs(mixed - total) > 1e-3 * total  # documents that see each other have another loss


@EVERY
def test_rows_of_one_document_have_the_bits_of_dense_rows(precision):
    packed, dense = engine_of(plan_of(precision, packing=PACKING)), engine_of(plan_of(precision))
    for engine, borders in ((packed, np.array([[0, T, T]] * B, np.int32)), (dense, None)):
        engine.micro_step(replace(batch(3), borders=borders))
        engine.micro_step(replace(batch(4), borders=borders), first=False)
        engine.update(1, 1e-2)
    assert bits(packed) == bits(dense)
    prompt = batch().tokens[0, :7]
    assert np.array_equal(next_logits(packed, prompt), next_logits(dense, prompt))


def test_padding_and_what_lies_behind_it_change_nothing():
    tokens, targets, borders = arrays(packed_batch())
    engine = engine_of(plan_of(FP32, packing=PACKING))
    results = []
    for filler in (0, 42):
        tokens[1, -2:] = filler
        engine.micro_step(Batch(tokens, targets, borders))
        results.append((engine.evaluate(Batch(tokens, targets, borders)), gradients(engine)))
    (one, first), (other, second) = results
    assert one == other
    # tokens that are not trained have gradients of zero, but for the sign of it
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.quick("recompute_ffn", "recompute_block", "chunks")
@pytest.mark.parametrize("change", [*ROLES, "chunks"])
def test_recompute_flags_and_chunks_are_bit_equal(change):
    memory = Memory((), attention_chunks=B) if change == "chunks" else Memory((change,))
    engines = [engine_of(plan_of(BF16, m, packing=PACKING)) for m in (Memory(), memory)]
    for engine in engines:
        for step in (1, 2):
            engine.micro_step(packed_batch(step))
            engine.update(step, 1e-2)
    assert bits(engines[0]) == bits(engines[1])


def test_positions_start_anew_with_each_document():
    borders = np.array([[0, 3, 4, 6], [0, 6, 6, 6], [0, 5, 6, 6]], np.int32)
    assert document_positions(borders, 6).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 0]]
