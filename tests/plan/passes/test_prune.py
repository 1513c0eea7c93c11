"""Prune: what something outlasting the program depends on stays, and nothing else."""

import pytest
from hand_made import grad, recorded, slot, weight

from llmq.plan.passes.forms import prune
from llmq.tensor import Ref

IN, DEAD, DEADER, X, Y = (slot(name) for name in ("in", "dead", "deader", "x", "y"))
EMBED = recorded("embedding_forward", (IN,), (Ref("tokens", "batch", (2, 4), "int32"), weight("embed")))
WGRAD = recorded("linear_wgrad", (grad("w"),), (X, IN))


def test_a_dead_chain_goes_whole_and_what_else_reads_its_source_stays():
    chain = [recorded("swiglu_forward", (DEAD,), (IN,)), recorded("swiglu_forward", (DEADER,), (DEAD,))]
    alive = recorded("swiglu_forward", (X,), (IN,))
    assert prune([EMBED, *chain, alive, WGRAD]) == [EMBED, alive, WGRAD]
    assert prune([EMBED, *chain]) == []


def test_one_output_that_is_read_is_enough():
    norm = recorded("rmsnorm_forward", (X, DEAD), (IN, weight("norm")))
    backward = recorded("rmsnorm_backward", (DEADER, grad("norm")), (slot("d_x"), None, IN, weight("norm"), DEAD))
    assert prune([EMBED, norm, WGRAD]) == [EMBED, norm, WGRAD]
    assert prune([EMBED, norm, backward]) == [EMBED, norm, backward]


@pytest.mark.parametrize("space", ["weight", "master", "grad", "sum", "cell", "scale"])
def test_what_outlasts_the_program_is_never_pruned(space):
    call = recorded("cast", (Ref("w", space, (8, 8), "bf16"),), (Ref("w", "master", (8, 8), "fp32"),))
    assert prune([call]) == [call]


def test_the_lives_of_a_slot_are_kept_apart():
    """What is dropped is read in its second life alone."""
    first, second = (recorded("swiglu_forward", (slot("x", again=again),), (IN,)) for again in (False, True))
    read = recorded("linear_wgrad", (grad("w"),), (slot("x", again=True), IN))
    assert prune([EMBED, first, second, read]) == [EMBED, second, read]


def test_what_adds_to_a_slot_stays_with_what_it_adds_to():
    """As an adapter's branch to its base."""
    base = recorded("linear_forward", (X,), (IN, weight("w")))
    branch = recorded("linear_forward", (X,), (IN, weight("a"), None, X))
    late = recorded("linear_forward", (X,), (IN, weight("b"), None, X))
    assert prune([EMBED, base, branch, WGRAD, late]) == [EMBED, base, branch, WGRAD]
