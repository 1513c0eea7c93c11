"""llmq: a standalone quantized LLM trainer with explicit forward and backward passes."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmq.api import presets as presets
    from llmq.api.config import Config as Config
    from llmq.api.load import load as load
    from llmq.api.plugins import register as register
    from llmq.api.quick_start import quick_start as quick_start
    from llmq.api.trainer import Trainer as Trainer
    from llmq.api.trainer import train as train
    from llmq.generation.text import write as generate
    from llmq.training.callbacks import Callback as Callback
    from llmq.training.callbacks import EarlyStopping as EarlyStopping
    from llmq.training.callbacks import Run as Run

__version__ = "0.1.0"

# Nothing is imported before it is used, so that `import llmq` and `llmq-train --help` do not pay for NumPy. A module
# `llmq.train` would take the name of the function.
_HOMES = {
    "Callback": "llmq.training.callbacks.Callback",
    "Config": "llmq.api.config.Config",
    "EarlyStopping": "llmq.training.callbacks.EarlyStopping",
    "Run": "llmq.training.callbacks.Run",
    "Trainer": "llmq.api.trainer.Trainer",
    "generate": "llmq.generation.text.write",
    "load": "llmq.api.load.load",
    "quick_start": "llmq.api.quick_start.quick_start",
    "register": "llmq.api.plugins.register",
    "train": "llmq.api.trainer.train",
}
__all__ = [
    "Callback",
    "Config",
    "EarlyStopping",
    "Run",
    "Trainer",
    "generate",
    "load",
    "presets",
    "quick_start",
    "register",
    "train",
]


def __getattr__(name: str) -> object:
    if name == "presets":
        return import_module("llmq.api.presets")
    if name not in _HOMES:
        raise AttributeError(f"module 'llmq' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].rpartition(".")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
