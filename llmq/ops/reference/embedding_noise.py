"""Noise on the embedded tokens of a training batch (NEFTune); its backward is the identity."""

import math

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.reference.random import EMBEDDING, random_words
from llmq.ops.seam import op


@op(family="embedding", shares={"out": "res"}, temporaries=lambda a: a.copies("res") + 5 * a.size("res"))
def embedding_noise(out: Output, /, res: Tensor, samples: Tensor, *, alpha: float, seed: int, stream: int) -> None:
    """out (B,T,C) <- res (B,T,C), samples (B,) int32: res + u alpha / sqrt(T C), u uniform in [-1, 1).

    Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning", 2023, where T is the length of the sample:
    here it is the row's, padding and all documents of a pack included. `samples` are the rows' places in the run's
    sequence, modulo 2^32. Element i = t C + c of a row has word i % 4 of block i // 4 of random_words, with the row's
    place as the step, and u = floor(word / 2^8) / 2^23 - 1, so that every factor is exact in f32.
    """
    values = res.read()
    b, t, c = values.shape
    blocks = (0, -(-t * c // 4))
    words = (random_words(seed, int(place), stream, EMBEDDING, *blocks) for place in samples.read())
    bits = np.stack([word.T.ravel()[: t * c] for word in words])
    kind = values.dtype.type
    u = (bits >> np.uint32(8)).astype(kind).reshape(b, t, c) * kind(2.0**-23) - kind(1)
    out.write(values + u * kind(np.float32(alpha / math.sqrt(t * c))))
