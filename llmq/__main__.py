"""`python -m llmq` is `llmq-train`, for where the scripts' folder is not on the PATH."""

from llmq.cli.start import train

train()
