"""Where the CUDA sources are: `cuda/` of a checkout, `llmq/_cuda` of an installed wheel (setup.py puts it there)."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def cuda_folder() -> Path:
    """Folder with the `.cu` and `.cuh` files; also the include path of a compilation."""
    carried = PACKAGE / "_cuda"
    return carried if carried.is_dir() else PACKAGE.parent / "cuda"


def cuda_sources() -> dict[str, Path]:
    """The kernel files by the name of their op."""
    return {path.stem: path for path in sorted(cuda_folder().glob("*.cu"))}
