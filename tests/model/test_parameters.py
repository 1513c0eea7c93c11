"""The parameter table: which rows are of which file."""

from dataclasses import replace

from tiny_engines import tiny

from llmq.model.parameters import parameter_rows, rows_of_file

CONFIG = tiny(tie_embeddings=False)
ROWS = {row.name: row for row in parameter_rows(CONFIG)}


def test_rows_by_file():
    rows = [*ROWS.values(), replace(ROWS["embed.weight"], name="embed.low", file="adapter")]
    assert rows_of_file(rows) == tuple(ROWS.values())
    assert [row.name for row in rows_of_file(rows, "adapter")] == ["embed.low"]
