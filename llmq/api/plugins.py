"""`llmq.register`: plug-ins of this process, in the tables where llmq's own are."""

from __future__ import annotations

import re
from typing import Any

from llmq.adapters.resolve import METHODS
from llmq.backends.opening import BACKENDS
from llmq.errors import UsageError, nearest
from llmq.model.family_table import FAMILIES
from llmq.ops import cuda, reference
from llmq.ops.cuda.launch import Kernel
from llmq.ops.seam import record
from llmq.optimizers import RULES
from llmq.plan.loss import LOSSES
from llmq.plugins import Table
from llmq.training.callbacks import CALLBACKS

TABLES: dict[str, Table[Any]] = {
    one.kind: one for one in (RULES, METHODS, LOSSES, FAMILIES, CALLBACKS, BACKENDS, reference.OPS, cuda.KERNELS)
}


def register(kind: str, name: str, item: Any) -> None:
    """Adds `item` to the plug-ins of this process, under a name that options then take.

    optimizer: `of(options, **own)`, which returns a Rule (llmq/optimizers/rule.py). method: a class of Method
    (llmq/adapters/method.py). loss: `f(xp, logits, targets, **own)`, or a class of LogitsReader (llmq/blocks/head.py).
    family: a Family (llmq/model/families.py), under the name of its architecture. callback: a class of Callback.
    backend: what returns a Backend (llmq/backends/__init__.py). op: a function with a record (llmq/ops/seam.py), under
    its own name; kernel: what launches an op on the GPU. `own` are the options after the name: `lion:beta_1=0.9`.

    A name that is registered again is that of the new item. UsageError for an unknown kind, and for names of ours;
    PluginError for an item that is nothing of the kind.
    """
    if kind not in TABLES:
        raise UsageError(f"{kind!r} is no kind of plug-in: known are {', '.join(TABLES)}{nearest(kind, TABLES)}")
    if not re.fullmatch(r"[A-Za-z_][\w.-]*", name):
        raise UsageError(f"a plug-in cannot be called {name!r}: use letters, digits, '.', '-' and '_'")
    if kind == "kernel":
        item = getattr(item, "kernel", None) or Kernel(item)
    TABLES[kind].register(name, item)
    record.cache_clear()
