"""The programs of tools/examples train with this package's optimizers."""

import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mp_optim.apps.fit import command as fit
from support.launch import TOOLS, run_forked_program, run_program_of_ranks
from support.programs import PROGRAMS, program

EXAMPLES = TOOLS / "examples"
ALONE = {
    "plain_loop": 0.2,
    "adapter_server": 0.5,
    "fabric": 0.2,
    "peft_lora": 0.95,
    "float8_weights": 0.3,
}
"""Examples that return losses, with the largest allowed fraction of the last by the first loss."""
LAUNCHED = {"accelerate_fsdp2": (2, 0.2), "megatron_gpt": (0, 0.8), "muon_moe": (4, 0.2)}
"""Examples that start processes, with the number of processes (0 without a launcher) and the
largest allowed fraction of the last by the first loss."""


def test_examples_folder_has_a_test_for_each_program():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        *ALONE,
        *LAUNCHED,
        *(case.split()[0] for case in PROGRAMS),
        *{"any_ranks", "diffusion_ema", "fp16_fsdp2", "fsdp2_qwen3_moe", "full_finetune"},
        "sick_run",
        "rl_deltas",
        "rl_loop",
    }


@pytest.mark.parametrize("name", ALONE)
def test_single_process_examples_reduce_their_loss(name):
    losses = program(f"examples/{name}").main()
    assert losses[-1] < ALONE[name] * losses[0]


def test_rl_loop_example_increases_the_reward():
    rewards = program("examples/rl_loop").main(60)
    assert rewards[0] < 0.4 and rewards[-1] > 0.7


@pytest.mark.parametrize("name", LAUNCHED)
def test_launched_examples_reduce_their_loss(name):
    processes, factor = LAUNCHED[name]
    path = str(EXAMPLES / f"{name}.py")
    written = run_program_of_ranks(processes, path) if processes else run_forked_program(path)
    first, last = losses_in(written)
    assert last < factor * first


def losses_in(written: str) -> tuple[float, float]:
    found = re.search(r"([0-9.]+) -> ([0-9.]+)", written)
    assert found is not None, written
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("machine", ["24GB", "16GB"])
def test_full_finetune_example_reduces_its_loss_with_the_settings_for_each_machine(
    machine, tmp_path
):
    disk = str(tmp_path) if machine == "24GB" else ""
    losses = program("examples/full_finetune").main(machine, disk=disk, lr=3e-3, steps=30)
    assert losses[-1] < 0.2 * losses[0]


def test_fsdp2_moe_example_gives_equal_losses_on_host_and_disk(tmp_path):
    """A third run starts from weights that rank 0 reads from a folder."""
    path = str(EXAMPLES / "fsdp2_qwen3_moe.py")
    first, last = losses_in(run_program_of_ranks(2, path))
    assert last < 0.2 * first
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM
    tiny = made.from_config(program("examples/fsdp2_qwen3_moe").TINY, dtype=torch.bfloat16)
    tiny.save_pretrained(tmp_path / "model")
    saved, disk = str(tmp_path / "model"), str(tmp_path)
    assert losses_in(run_program_of_ranks(2, path, saved, "1e-2", disk)) == (first, last)


def test_diffusion_ema_example_samples_near_the_data_and_fits_a_48_gb_gpu(capsys):
    losses, distance = program("examples/diffusion_ema").main()
    assert losses[-1] < 0.6 * losses[0] and distance < 0.2
    model = f"{EXAMPLES / 'diffusion_ema.py'}:build"
    assert fit.main(["--model", model, "--gpu", "48GB", "--ram", "64GB"]) == 0
    assert "fits: " in capsys.readouterr().out


def test_sick_run_example_skips_and_names_bad_batches():
    skipped = program("examples/sick_run").main()
    late = {step: reason for step, reason in skipped.items() if step > 10}
    assert list(late) == [150, 151, 180]
    assert "skip_step_sigma_factor" in late[150] and "inf or nan" in late[180]


def test_any_ranks_example_continues_when_the_rank_count_changes(tmp_path):
    """The rank count falls from 3 to 2 and rises to 3; the loss continues from the last value."""
    path, last = str(EXAMPLES / "any_ranks.py"), 1.0
    for ranks, end in ((3, 30), (2, 60), (3, 90)):
        written = run_program_of_ranks(ranks, path, str(tmp_path), str(end))
        assert f"{ranks} ranks, steps {end - 30} to {end}" in written
        before, (first, last) = last, losses_in(written)
        assert first < 1.5 * before
    assert last < 0.01


@pytest.mark.parametrize("scaling", ["ours", "torch"])
def test_fp16_fsdp2_example_learns_and_resumes_to_equal_bits(scaling):
    written = run_program_of_ranks(2, str(EXAMPLES / "fp16_fsdp2.py"), scaling)
    found = re.search(r"reward ([0-9.]+) -> ([0-9.]+), skipped (\d+) of 60", written)
    assert found is not None, written
    assert float(found[1]) < 0.3 and float(found[2]) > 0.9 and int(found[3]) > 2
    assert "resumed to the bit" in written
