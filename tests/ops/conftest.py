"""Where there is no GPU, tests of kernels that can be run on the CPU are."""

import pytest

from ops.emulated.gpu import install


@pytest.fixture(autouse=True)
def emulated(request, monkeypatch, tmp_path_factory):
    """Puts the CPU in the GPU's place for a test that was chosen for it."""
    if request.node.get_closest_marker("emulated"):
        folder = tmp_path_factory.getbasetemp().parent / "llmq-kernels"  # one for all processes of a run
        folder.mkdir(exist_ok=True)
        install(monkeypatch, folder)
