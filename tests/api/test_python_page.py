"""The examples of docs/python.md, run one after the other on a tiny model."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from installed_plugins import tables_kept
from tiny_runs import text_model, write_weights

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "cache"))
    text_model(tmp_path / "source")
    write_weights("source", tmp_path / "model", tokenizer=tmp_path / "source")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text("utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    with tables_kept(), redirect_stdout(io.StringIO()) as out:
        for block in blocks:
            exec(block.replace("Qwen/Qwen2.5-0.5B", "model"), names)
    assert len(blocks) == 7 and names["result"].steps == 20 and names["run"].model_path.is_dir()
    assert "tokens_seen" in names["result"].history and "(2, 4, 420)" in out.getvalue()
    assert names["loss"].shape == (2, 16) and names["copy"].columns.shape == (64, 100)
    assert (tmp_path / "runs" / "watched" / "checkpoints").is_dir()
