"""The examples of README and docs, and those in examples/, under mypy's strict rules, with the types that we ship."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import llmq

ROOT = Path(llmq.__file__).parents[1]
# Reading these takes most of a minute, and no type of ours depends on theirs.
LIBRARIES = "chardet.*,databricks.*,huggingface_hub.*,matplotlib.*,mlflow.*,PIL.*,ray.*,rich.*,torch.*,transformers.*"
WRONG = """import llmq

llmq.Trainer(model="m").train([], callbacks=5)
llmq.Config(model="m").replace(steps=1).steps
llmq.generate("m", "Hi")[0].text, llmq.load("m").generate("Hi")[0].text
llmq.generate("m", "Hi", stream=True)[0]
"""


@pytest.mark.slow
def test_the_examples_are_typed(tmp_path):
    """And mistakes are found, so that the types are no `Any`."""
    assert (ROOT / "llmq" / "py.typed").is_file()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
        if blocks:
            (tmp_path / f"example_{page.stem}.py").write_text("\n".join(blocks))
    (tmp_path / "wrong.py").write_text(WRONG)
    files = sorted(path.name for path in tmp_path.glob("*.py"))
    scripts = [str(path) for path in (*(ROOT / "examples").glob("*.py"), ROOT / "examples/plugin/llmq_example")]
    config = tmp_path / "mypy.ini"
    config.write_text(f"[mypy]\nstrict = True\nfollow_imports = silent\n[mypy-{LIBRARIES}]\nfollow_imports = skip\n")
    about = ["--config-file", str(config), "--cache-dir", str(ROOT / ".mypy_cache" / "examples")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *about, *files, *scripts],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "example_python.py" in files and not done.stderr
    found = [line.partition(": error: ") for line in done.stdout.splitlines() if ": error: " in line]
    assert [place for place, *_ in found] == ["wrong.py:3", "wrong.py:4", "wrong.py:6"], done.stdout
