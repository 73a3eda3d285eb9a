import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """For every test of this folder."""
