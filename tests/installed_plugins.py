"""The example's plug-ins as an installation leaves them, and tables that are afterwards as they were."""

import re
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

from llmq import plugins
from llmq.api.plugins import TABLES
from llmq.ops.seam import record

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin"


def install(folder):
    """The package of examples/plugin and its metadata, in a folder for the search path."""
    shutil.copytree(EXAMPLE / "llmq_example", folder / "llmq_example", ignore=shutil.ignore_patterns("__pycache__"))
    text = (EXAMPLE / "pyproject.toml").read_text("utf-8")
    lines = re.findall(r'^"(\w+\.\w+)" = "(.+)"$', text, re.MULTILINE)
    write_metadata(folder, "llmq-example", "".join(f"{name} = {place}\n" for name, place in lines))
    return folder


def write_metadata(folder, name, entries):
    """What names entry points, lines of `name = module:object`."""
    about = folder / f"{name.replace('-', '_')}-0.1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{entries}")


@contextmanager
def tables_kept():
    """Afterwards no plug-in is there that was not."""
    before = {kind: (dict(one), set(one.local)) for kind, one in TABLES.items()}
    try:
        yield
    finally:
        for kind, (items, local) in before.items():
            TABLES[kind].clear()
            TABLES[kind].update(items)
            TABLES[kind].local = local
        record.cache_clear()
        for name in [name for name in sys.modules if name.startswith("llmq_example")]:
            del sys.modules[name]
