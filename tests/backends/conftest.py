"""The GPU of a file's tests."""

import pytest


@pytest.fixture(scope="module")
def backend():
    """One backend for all tests of a file, graphs on."""
    from llmq.backends.cuda import CudaBackend

    return CudaBackend()


@pytest.fixture(scope="module", params=[True, False], ids=["graphs", "eager"])
def either_backend(request):
    """A backend with graphs, and one without."""
    from llmq.backends.cuda import CudaBackend

    return CudaBackend(use_graphs=request.param)
