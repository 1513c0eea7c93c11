"""Optimizers: each is a rule in a file of its own, from which stores, plan and checkpoints derive what they need."""

from collections.abc import Callable

from llmq.optimizers.adamw import AdamW
from llmq.optimizers.rule import Rule
from llmq.optimizers.sgd import Sgd
from llmq.plugins import Table, table

# By the value of --optimizer: the rule, from the options of that section by name, and as keywords a plug-in's own.
RULES: Table[Callable[..., Rule]] = table("optimizer", {"adamw": AdamW.of, "sgd": Sgd.of}, gives=("states", "update"))
