"""llmq: a standalone quantized LLM trainer with explicit forward and backward passes."""

__version__ = "0.1.0"

__all__ = ["train"]


def __getattr__(name: str) -> object:
    # Lazy, so that `llmq-train --help` does not pay for NumPy.
    if name == "train":
        from llmq.train import train

        return train
    raise AttributeError(f"module 'llmq' has no attribute {name!r}")
