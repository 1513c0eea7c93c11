"""Slurm's short forms, as its own documentation writes them."""

import pytest

from llmq.comm.node_list import node_names, tasks_of_nodes
from llmq.errors import UsageError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node7", ["node7"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("a,b[9-11]-ib,c", ["a", "b9-ib", "b10-ib", "b11-ib", "c"]),
        ("rack[1-2]node[08-09]", ["rack1node08", "rack1node09", "rack2node08", "rack2node09"]),
        ("tux[0098-0101].cluster", ["tux0098.cluster", "tux0099.cluster", "tux0100.cluster", "tux0101.cluster"]),
    ],
)
def test_the_names_of_nodes(text: str, names: list[str]) -> None:
    assert node_names(text) == names


@pytest.mark.parametrize("text", ["", "a[1-3", "a]", "a,,b", "a,", "a[3-1]", "a[1-]", "a[,1]", "a[]"])
def test_what_is_no_list_of_nodes(text: str) -> None:
    with pytest.raises(UsageError):
        node_names(text)


def test_tasks_of_each_node() -> None:
    assert tasks_of_nodes("8(x2),4") == [8, 8, 4] and tasks_of_nodes("1") == [1]
    with pytest.raises(UsageError, match="'8x2' is not a list of tasks"):
        tasks_of_nodes("8x2")
