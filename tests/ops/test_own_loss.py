"""A loss of the caller's gets the columns of the vocabulary, and the padding has no gradient."""

import numpy as np

from .build import check_gradient, run
from .cases import ODD, make, squares


def test_its_results_are_those_of_the_function_on_the_vocabulary():
    case = make("own_loss", ODD)
    logits, targets = case.inputs.values()

    def values(logits):
        return run("own_loss", [*case.outputs.values()], logits, targets, **case.numbers)

    d_logits, loss = values(logits)
    expected, gradient = squares(np, logits[:, : ODD.v], targets)
    np.testing.assert_array_equal(loss, expected)
    np.testing.assert_array_equal(d_logits[:, : ODD.v], gradient)
    assert not d_logits[:, ODD.v :].any() and ODD.v < logits.shape[1]
    check_gradient(lambda logits: values(logits)[1].sum(), [logits], [d_logits], 10 * loss.sum())
