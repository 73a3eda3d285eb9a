"""The programs of tools/examples: other people's training code, and what they learn with our
optimizer."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

from support.launch import TOOLS, run, torchrun
from support.programs import PROGRAMS

EXAMPLES = TOOLS / "examples"
ALONE = {
    "plain_loop": 0.2,
    "fabric": 0.2,
    "hf_trainer": 0.6,
    "peft_lora": 0.95,
    "float8_weights": 0.3,
}
"""Examples that return losses, and what fraction of the first one the last may be."""
LAUNCHED = {
    "accelerate_fsdp2": (2, 0.2),
    "fsdp2_qwen3_moe": (2, 0.2),
    "megatron_gpt": (0, 0.8),
}
"""Examples with processes of their own: how many, or 0 for no launcher; and the same."""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"example_{name}", EXAMPLES / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        *ALONE,
        *LAUNCHED,
        *(program.split()[0] for program in PROGRAMS),
        "rl_loop",
    }


@pytest.mark.parametrize("name", ALONE)
def test_example_learns(name: str) -> None:
    losses = load(name).main()
    assert losses[-1] < ALONE[name] * losses[0]


def test_rl_example_learns() -> None:
    rewards = load("rl_loop").main(60)
    assert rewards[0] < 0.4 and rewards[-1] > 0.7


@pytest.mark.parametrize("name", LAUNCHED)
def test_launched_example_learns(name: str) -> None:
    processes, factor = LAUNCHED[name]
    program = str(EXAMPLES / f"{name}.py")
    written = torchrun(processes, program) if processes else run(program)
    found = re.search(r"([0-9.]+) -> ([0-9.]+)", written)
    assert found is not None, written
    first, last = map(float, found.groups())
    assert last < factor * first
