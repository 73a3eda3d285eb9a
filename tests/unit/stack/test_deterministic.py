"""Tests on a GPU that need deterministic algorithms can have them, and leave nothing behind."""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def off_afterwards() -> Iterator[None]:
    yield
    assert not torch.are_deterministic_algorithms_enabled()


def test_they_are_on_for_one_test_and_cublas_is_prepared(
    off_afterwards: None, deterministic: None
) -> None:
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")
