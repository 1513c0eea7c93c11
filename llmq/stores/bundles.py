"""Attribute access to the tensors of one part, sublayer or site: `w.up.weight`, with None for what a model lacks."""

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


def bundle_tree(refs: Mapping[str, Ref | None]) -> Bundle:
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


def part_bundle(tree: Bundle, part: str | int) -> Bundle:
    """The tensors of a part of the model: `embed`, a layer by its number, or `head`."""
    return branch(tree, f"layers.{part}" if isinstance(part, int) else part)


def part_tree(refs: Mapping[str, Ref | None]) -> Bundle:
    """Refs by row name as one tree; a tied head, which has no row of its own, is the embedding."""
    return bundle_tree({"head.weight": refs["embed.weight"], **refs} if "embed.weight" in refs else refs)
