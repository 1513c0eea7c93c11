"""The processes of Ray's actors on this machine."""

from pathlib import Path


def keepers():
    """Process ids of the actors."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "cmdline").read_bytes().startswith(b"ray::Keeper"):
                found.append(int(folder.name))
        except OSError:
            pass
    return found
