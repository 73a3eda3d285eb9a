"""A fixture that writes the Hugging Face config of a small model to a file."""

import json
from pathlib import Path

import pytest

from support.llama import LLAMA


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path
