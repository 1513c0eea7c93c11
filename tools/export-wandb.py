"""llmq-export-wandb, from a checkout that is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llmq.cli.start import export_wandb

if __name__ == "__main__":
    export_wandb()
