"""The programs of tools/examples: other people's training code, and what they learn with our
optimizer."""

from __future__ import annotations

import re

import pytest

from support.launch import TOOLS, run_forked_program, run_program_of_ranks
from support.programs import PROGRAMS, program

EXAMPLES = TOOLS / "examples"
ALONE = {
    "plain_loop": 0.2,
    "fabric": 0.2,
    "hf_trainer": 0.6,
    "peft_lora": 0.95,
    "float8_weights": 0.3,
}
"""Examples that return losses, and what fraction of the first one the last may be."""
LAUNCHED = {"accelerate_fsdp2": (2, 0.2), "fsdp2_qwen3_moe": (2, 0.2), "megatron_gpt": (0, 0.8)}
"""Examples with processes of their own: how many, or 0 for no launcher; and the same."""


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        *ALONE,
        *LAUNCHED,
        *(case.split()[0] for case in PROGRAMS),
        "fp16_fsdp2",
        "rl_deltas",
        "rl_loop",
    }


@pytest.mark.parametrize("name", ALONE)
def test_example_learns(name: str) -> None:
    losses = program(f"examples/{name}").main()
    assert losses[-1] < ALONE[name] * losses[0]


def test_rl_example_learns() -> None:
    rewards = program("examples/rl_loop").main(60)
    assert rewards[0] < 0.4 and rewards[-1] > 0.7


@pytest.mark.parametrize("name", LAUNCHED)
def test_launched_example_learns(name: str) -> None:
    processes, factor = LAUNCHED[name]
    path = str(EXAMPLES / f"{name}.py")
    written = run_program_of_ranks(processes, path) if processes else run_forked_program(path)
    found = re.search(r"([0-9.]+) -> ([0-9.]+)", written)
    assert found is not None, written
    first, last = map(float, found.groups())
    assert last < factor * first


@pytest.mark.parametrize("scaling", ["ours", "torch"])
def test_policies_in_float16_learn_and_resume(scaling: str) -> None:
    written = run_program_of_ranks(2, str(EXAMPLES / "fp16_fsdp2.py"), scaling)
    found = re.search(r"reward ([0-9.]+) -> ([0-9.]+), skipped (\d+) of 60", written)
    assert found is not None, written
    assert float(found[1]) < 0.3 and float(found[2]) > 0.9 and int(found[3]) > 2
    assert "resumed to the bit" in written
