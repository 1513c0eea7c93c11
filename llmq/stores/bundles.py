"""Attribute access to the tensors of one sublayer or site: `w.up.weight`, with None for what a model does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmq.tensor import Ref


class Bundle:
    """A tree of Refs by dotted name; an absent leaf (the bias of a site without one) is None."""

    def __init__(self) -> None:
        self._children: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return self._children.get(name)


def bundle_tree(refs: Mapping[str, Ref]) -> Bundle:
    """All of `refs` as one tree: `tree.layers.3` is reached with `branch(tree, "layers.3")`."""
    root = Bundle()
    for path, ref in refs.items():
        *parents, leaf = path.split(".")
        node = root
        for parent in parents:
            node = node._children.setdefault(parent, Bundle())
        node._children[leaf] = ref
    return root


def branch(tree: Bundle, path: str) -> Bundle:
    """The subtree at a dotted path; empty if there is none."""
    for name in path.split("."):
        tree = tree._children.get(name) or Bundle()
    return tree
