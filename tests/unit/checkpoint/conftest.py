import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Run every test of this folder on one thread of torch."""
