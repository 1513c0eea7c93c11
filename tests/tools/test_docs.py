"""The site of README and docs: it builds, and what leads nowhere is an error that names it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "docs", "examples", "cuda/README.md")
PARTS += ("data/README.md", "tools/docs.sh", "tools/docs", "tools/python.sh")


@pytest.fixture
def checkout(tmp_path):
    """What the site is made of, beside an environment that is there already."""
    for part in PARTS:
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, tmp_path / part)
    (tmp_path / "tools/environment.py").touch()
    python = tmp_path / ".test-venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return tmp_path


def build(checkout):
    """The script's exit code and what it printed."""
    command, environ = ["bash", checkout / "tools/docs.sh"], {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_site_has_every_page_and_refuses_what_leads_nowhere(checkout):
    code, said = build(checkout)
    assert code == 0 and "WARNING" not in said, said
    pages = {path.relative_to(checkout / "out/docs").as_posix() for path in checkout.glob("out/docs/**/*.html")}
    assert {"index.html", "docs/options.html", "docs/kernels/lanes.html", "cuda/index.html"} <= pages
    readme = checkout / "README.md"
    readme.write_text(readme.read_text() + "[a](docs/away.md) [b](docs/data.md#away) [c](examples/away.py) [d](docs)")
    (checkout / "docs/unlisted.md").write_text("# Unlisted")
    code, said = build(checkout)
    assert code and "5 warnings" in said, said
    for name in ("docs/away.md", "docs/data.md#away", "examples/away.py", "'docs'", "docs/unlisted.md"):
        assert name in said
