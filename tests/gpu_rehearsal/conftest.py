"""The pretend GPU of these tests, one for each process that runs them."""

from collections.abc import Iterator

import pytest

from tests.gpu_rehearsal.pretend import PretendCuda, build, compiler


@pytest.fixture(scope="session")
def pretend_cuda() -> Iterator[PretendCuda]:
    """A process in which device "cuda" exists for fake tensors."""
    if compiler() is None:
        pytest.skip("no C++ compiler on this machine, which the pretend GPU is built with")
    process = PretendCuda(build())
    yield process
    process.close()
