"""What the options on sharing become."""

import pytest

from llmq.comm.world import Copying
from llmq.errors import UsageError
from llmq.options.maths import ShardingOptions
from llmq.plan.levels import copying, refuse_copies


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Copying(None, False)),  # nothing is exchanged, so nothing is timed
        ({"all_to_all_reduce": True}, Copying(None, None)),
        ({"gradient_compression": "e4m3", "memcpy_send_recv": False}, Copying(None, False)),
        ({"gradient_compression": "e4m3", "memcpy_send_recv": True}, Copying(None, True)),
        ({"memcpy_all_gather": True}, Copying(True, False)),
        ({"memcpy_all_gather": False, "all_to_all_reduce": True}, Copying(False, None)),
    ],
)
def test_copies_are_as_given_or_as_timed(given, expected):
    assert copying(ShardingOptions(**given)) == expected


def test_a_cpu_is_asked_for_no_copies():
    refuse_copies(ShardingOptions(memcpy_all_gather=False), "cpu")
    refuse_copies(ShardingOptions(memcpy_all_gather=True), "cuda")
    with pytest.raises(UsageError, match="--memcpy-all-gather: copy engines are parts of GPUs"):
        refuse_copies(ShardingOptions(memcpy_all_gather=True), "cpu")
