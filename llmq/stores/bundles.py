"""Attribute access to the tensors of one part, sublayer or site: `w.up.weight`, with None for what a model lacks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Any, TypeVar

from llmq.row import Row
from llmq.stores.sharding import part_of
from llmq.tensor import Ref

Fetched = TypeVar("Fetched")


class Bundle:
    """A tree of Refs by dotted name; an absent leaf (the bias of a site without one) is None."""

    def __init__(self) -> None:
        self._children: dict[str, Any] = {}

    # None, not an error: ops take None for an operand that a model lacks, and block code stays a straight line.
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


def names_by_part(rows: Iterable[Row]) -> dict[str | int, list[str]]:
    """Names of the rows that each part of a model reads; a tied head reads the embedding."""
    found = defaultdict(list)
    for row in rows:
        found[part_of(row)].append(row.name)
    if "head.weight" not in found["head"]:
        found["head"].append("embed.weight")
    return found


def one_ahead(fetched: Iterable[Fetched]) -> Iterator[Fetched]:
    """Yields what is fetched, each after the next one was."""
    # pairwise asks for the next one before it gives this one: that is all that runs a copy ahead.
    for here, _ in pairwise(chain(fetched, [None])):
        assert here is not None
        yield here
