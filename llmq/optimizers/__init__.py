"""Optimizers: each is a rule in a file of its own, from which stores, plan and checkpoints derive what they need."""

from collections.abc import Callable, Mapping
from typing import Any

from llmq.optimizers.adamw import AdamW
from llmq.optimizers.rule import Rule
from llmq.optimizers.sgd import Sgd

# by the value of --optimizer: the rule, from the options of that section by name
RULES: dict[str, Callable[[Mapping[str, Any]], Rule]] = {"adamw": AdamW.of, "sgd": Sgd.of}
