"""One call for a token's linear map, the norm before and SwiGLU after it: a step of generation is bound by launches."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from llmq.ops.record import Call
from llmq.tensor import Ref, stored_bytes

MOST_TOKENS = 4  # with more, reading x takes as long as reading the weight from memory
MOST_NORM_BYTES = 96 * 1024  # of tokens, for which a block of any GPU has room

Reads = Mapping[Ref | None, int]  # how many calls read a tensor


def fuse(calls: Sequence[Call]) -> list[Call]:
    """The calls with `token_linear` in place of rmsnorm_forward, linear_forward and swiglu_forward of so few tokens.

    A norm or SwiGLU is taken in where its call is the neighbour and nothing else reads what lies between.
    """
    reads: Reads = Counter(ref for call in calls for ref in call.inputs)
    made: list[Call] = []
    for call in calls:
        # Neighbours only: a call between them could write what the first of them reads.
        last = made[-1] if made else None
        if call.op == "linear_forward" and _is_plain(call):
            x, *rest = call.inputs
            call = replace(call, op="token_linear", inputs=(x, None, *rest), numbers={"eps": 0.0, "gated": False})
            assert x is not None
            fits = stored_bytes(x) <= MOST_NORM_BYTES
            if fits and last is not None and last.op == "rmsnorm_forward" and _passes(last, x, reads):
                made.pop()
                call = replace(call, inputs=(*last.inputs, *rest), numbers={**last.numbers, "gated": False})
        elif (
            call.op == "swiglu_forward"
            and last is not None
            and last.op == "token_linear"
            and last.inputs[-1] is None  # a residual is added to what SwiGLU makes, not to what it is made of
            and _passes(last, call.inputs[0], reads)
        ):
            made.pop()
            call = replace(last, outputs=call.outputs, numbers={**last.numbers, "gated": True, **call.numbers})
        made.append(call)
    return made


def _is_plain(call: Call) -> bool:
    """Whether a linear map is of few tokens and reads values, not copies, of whole tensors."""
    x = call.inputs[0]
    assert x is not None
    written = (result.ref for result in call.outputs if result is not None)
    whole = not any(ref.form or ref.view for ref in (*call.inputs, *written) if ref is not None)
    # Never the head of a prompt, or training: with more tokens the weight is read more than once.
    few = x.space == "activation" and prod(x.shape[:-1]) <= MOST_TOKENS
    return few and whole and call.numbers.get("alpha", 1) == 1


def _passes(maker: Call, ref: Ref | None, reads: Reads) -> bool:
    """Whether a call's first result is this, which is read once, and no other result is read at all."""
    first, *others = (None if result is None else result.ref for result in maker.outputs)
    return first == ref and reads[ref] == 1 and not any(other is not None and reads[other] for other in others)
