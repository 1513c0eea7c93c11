"""How many chunks the logits come in when nobody says."""

import pytest

from llmq.plan.memory import fewest_chunks

GIB = 2**30
TOKENS, LOGITS = 32 * 1024, 2 * 152064  # Qwen2.5-0.5B in bf16: 9.3 GiB in all


@pytest.mark.parametrize(("gpu_bytes", "chunks"), [(0, 16), (24 * GIB, 16), (80 * GIB, 8), (141 * GIB, 4)])
def test_chunks_grow_with_the_gpu(gpu_bytes, chunks):
    assert fewest_chunks(TOKENS, LOGITS, gpu_bytes) == chunks


def test_small_logits_are_whole_and_a_chunk_has_a_token_at_least():
    assert fewest_chunks(2 * 1024, 2 * 32000) == 1
    assert fewest_chunks(7, 2 * GIB) == 7


@pytest.mark.parametrize(
    ("tokens", "chunks"),
    [(8191, 1), (2 * 8191, 2), (8190, 3), (12 * 1024, 4), (13 * 1024, 4), (2**20, 512), (11 * 1009, 11), (4 * 4093, 4)],
)
def test_an_odd_number_of_tokens_is_not_cut_to_pieces(tokens, chunks):
    assert fewest_chunks(tokens, LOGITS) == chunks
