"""Virtual tokens: trained vectors in place of what a model computes at the first positions of each document.

Prompt tuning has them in place of embeddings, prefix tuning in place of the keys and values of every layer, which are
the last channels of packed heads.
"""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.seam import Arguments, op
from llmq.tensor import DTYPES, stored_bytes


def _others(call: Arguments) -> int:
    """Bytes of real tokens, where the output lies in its input's memory or is unwanted; a row has one document or
    more."""
    given, (count, width) = next(iter(call.reads.values())), (call.numbers["num_virtual"], call.numbers["channels"])
    replaced = given.shape[0] * min(count, given.shape[1]) * width * DTYPES[given.dtype].itemsize
    passes = 2 if call.in_place else int(not (call.writes.get("out") or call.writes.get("d_x")))
    return passes * (stored_bytes(given) - replaced)


@op(family="adapters", shares={"out": "x"}, untouched=_others)
def virtual_tokens_forward(
    out: Output, /, x: Tensor, virtual: Tensor, positions: Tensor, *, num_virtual: int, channels: int
) -> None:
    """out (B,T,W) <- x (B,T,W), virtual (N,D), positions (B,T) int32.

    out is x, but for the last D channels of a token at position p < N of its document, which are virtual[p]. N is
    `num_virtual`, D the `channels`, up to W.
    """
    found, at = np.array(x.read()), positions.read()
    there = at < num_virtual
    found[there, found.shape[-1] - channels :] = virtual.read()[at[there]]
    out.write(found)


@op(family="adapters", shares={"d_x": "d_out"}, untouched=_others)
def virtual_tokens_backward(
    d_x: Output, d_virtual: Output, /, d_out: Tensor, positions: Tensor, *, num_virtual: int, channels: int
) -> None:
    """d_x (B,T,W), d_virtual (N,D) <- d_out (B,T,W), positions (B,T) int32.

    d_virtual[p] is the sum of d_out over the documents, in their order, and d_x is zero there.
    """
    found, at = np.array(d_out.read()), positions.read()
    there, first = at < num_virtual, found.shape[-1] - channels
    sums = np.zeros((num_virtual, channels), found.dtype)
    np.add.at(sums, at[there], found[there, first:])
    d_virtual.write(sums)
    found[there, first:] = 0
    d_x.write(found)
