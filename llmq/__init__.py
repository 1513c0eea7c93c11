"""llmq: a standalone quantized LLM trainer with explicit forward and backward passes."""

__version__ = "0.1.0"

__all__ = ["generate", "train"]


def __getattr__(name: str) -> object:
    # The function is in `llmq.training.train`: a module `llmq.train` would take its name once it is imported.
    # Lazy, so that `llmq-train --help` does not pay for NumPy.
    if name == "train":
        from llmq.training.train import train

        return train
    if name == "generate":
        from llmq.generation.text import write

        return write
    raise AttributeError(f"module 'llmq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
