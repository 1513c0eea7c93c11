"""Packed rows through whole models: what borders, padding and memory options change, and what not."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_engines import BF16, EVERY, FP32, B, T, arrays, batch, bits, engine_of, next_logits, packed_batch, plan_of

from llmq.blocks.packed import Packing
from llmq.data.batches.batch import Batch
from llmq.model.rope import document_positions
from llmq.plan.memory import ROLES, Memory

PACKING = Packing(5, T)


def gradients(engine):
    return {row.name: engine.gradient(row.name).astype(np.float64) for row in engine.plan.rows}


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


def test_padding_and_what_follows_it_change_nothing():
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


def test_positions_start_over_with_each_document():
    borders = np.array([[0, 3, 4, 6], [0, 6, 6, 6], [0, 5, 6, 6]], np.int32)
    assert document_positions(borders, 6).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 0]]
