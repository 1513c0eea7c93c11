"""Fine-tune on a table of your own, from Python: name its columns, train, read the result.

    python examples/own_data.py
    python examples/own_data.py model=my-model steps=50

Each argument is an option of `llmq-train` as KEY=VALUE; it overrides the one below.
"""

import csv
import random
import sys
from pathlib import Path
from typing import Any

import llmq
from llmq.errors import LlmqError

TABLE = Path("data/sums.csv")


def write_table(path: Path, num_rows: int = 2000) -> None:
    """Writes exercises with their solutions: in place of this, bring your own .csv, .jsonl or .parquet."""
    draw = random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["exercise", "solution"])
        for _ in range(num_rows):
            a, b = draw.randrange(1000), draw.randrange(1000)
            table.writerow([f"What is {a} + {b}?", f"{a} + {b} = {a + b}"])


def main(arguments: list[str]) -> None:
    """Trains on the table, and prints the losses and the places of the log and the model."""
    write_table(TABLE)
    options: dict[str, Any] = {
        "model": "Qwen/Qwen2.5-0.5B",
        "data": str(TABLE),
        "map": ["question=exercise", "answer=solution"],  # our names for the table's columns
        "seq_len": 256,
        "learning_rate": 1e-5,
        "name": "own-data",
    }
    options |= dict(argument.split("=", 1) for argument in arguments)
    try:
        result = llmq.train(**options)
    except LlmqError as error:  # what you can fix: the message names the value, the limit and the fix
        sys.exit(f"error: {error}")
    print(f"held-out loss {result.eval_loss:.3f} after {result.steps} steps; log {result.log_path}")
    print(f"load it with transformers from {result.model_path}")


if __name__ == "__main__":
    main(sys.argv[1:])
