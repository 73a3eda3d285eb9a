"""Load the programs of tools by path, and list the examples that tests run."""

import importlib.util
from types import ModuleType
from typing import Any

from support.launch import TOOLS


def program(name: str) -> ModuleType:
    path = TOOLS / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROGRAMS: dict[str, dict[str, Any]] = {
    "hf_trainer_class": {},
    "trl_sft": {},
    "trl_dpo": {},
    "accelerate_loop": {},
    "lightning_trainer": {},
    "lightning_trainer manual": {"manual": True},
    "torchtitan_container": {},
    "vision_ema": {},
}
"""Names of examples, and the arguments of their ``main``. Text after a space tells two runs of one
program apart."""
