"""Puts `cuda/` into the wheel as `llmq/_cuda`; everything else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithCuda(build_py):
    """The usual build, then the CUDA sources, which are no package of the checkout and so need a hand."""

    def run(self) -> None:
        """Copies the sources, except for an editable install, which finds them in the checkout."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "llmq", "_cuda")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("cuda", target)


setup(cmdclass={"build_py": BuildWithCuda})
