"""llmq's kernels in PyTorch: `patch_model` puts them into a Hugging Face model, `unpatch_model` takes them out again.

PyTorch is the user's own; nothing else of llmq imports it.
"""

from importlib.util import find_spec

from llmq.errors import UsageError

if find_spec("torch") is None:
    raise UsageError("llmq.torch is for PyTorch, which is not there: pip install torch")

from llmq.torch.patch import Patch, patch_model, unpatch_model

__all__ = ["Patch", "patch_model", "unpatch_model"]
