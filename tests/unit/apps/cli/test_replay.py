"""``mp-optim replay`` repeats recorded steps on a CPU, and names tensor and element that differ."""

import pytest
import torch
from torch import nn

import mp_optim
from mp_optim.apps.cli.command import main
from support.launch import results_of_ranks

RULES = {
    "AdamW": {"max_grad_norm": 1.0, "state": "8bit", "main_params": "remainder16"},
    "Lion": {"state": "bf16", "stochastic_rounding": True},
    "SGD": {"momentum": 0.9, "nesterov": True, "offload": 0.5},
    "LAMB": {"max_grad_norm": 0.5},
    "Muon": {"ema_decay": 0.9},
}


def model_of(dtype=torch.bfloat16):
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(70, 96), nn.Linear(96, 30), nn.Linear(30, 96)).to(dtype)


def set_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def recorded(folder, rule="AdamW", change=lambda model, optimizer: None, **settings):
    model = model_of()
    model[0].weight.data[:3].zero_()
    settings = {**RULES[rule], **settings}
    optimizer = getattr(mp_optim, rule)(model.named_parameters(), lr=1e-2, **settings)
    for seed in range(2):
        set_gradients(model, seed)
        optimizer.step()
    set_gradients(model, 2)
    with mp_optim.record_step(optimizer, folder):
        change(model, optimizer)
        optimizer.step()


@pytest.mark.parametrize("rule", RULES)
def test_replay_reports_equal_bits_when_it_repeats_a_recorded_step(rule, tmp_path, capsys):
    recorded(tmp_path, rule)
    assert main(["replay", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "every bit is as it was recorded\n"


def test_replay_reports_equal_bits_when_the_recorded_fp16_step_was_clipped(tmp_path):
    model = model_of(torch.float16)
    config = mp_optim.OptimizerConfig(fp16=True, lr=1e-3, clip_grad=0.1, initial_loss_scale=64.0)
    optimizer = mp_optim.get_megatron_optimizer(config, model)
    for seed in range(3):
        set_gradients(model, seed)
        with mp_optim.record_step(optimizer, tmp_path):
            optimizer.step()
        assert main(["replay", str(tmp_path)]) == 0
    model[1].bias.grad[3] = torch.inf
    with mp_optim.record_step(optimizer, tmp_path):
        assert not optimizer.step().success
    assert main(["replay", str(tmp_path)]) == 0


def flip_gradient(model, optimizer):
    model[1].weight.grad.view(torch.int16)[3, 5] ^= 1 << 9


def flip_moment(model, optimizer):
    optimizer.state[model[1].weight]["exp_avg"].view(torch.int32)[3, 5] ^= 1 << 20


@pytest.mark.parametrize("flip", [flip_gradient, flip_moment])
def test_replay_names_tensor_and_element_when_one_bit_was_flipped(flip, tmp_path, capsys):
    recorded(tmp_path, change=flip, state="fp32", main_params="fp32")
    assert main(["replay", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    if flip is flip_gradient:
        assert lines.pop(0).startswith("gradient norm: ")
    first, *others = lines
    assert first.startswith("optimizer.state.exp_avg.1.weight, element 293: ")
    assert all("1.weight, element 293: " in line for line in others)


def test_replay_names_the_tensor_when_a_file_of_the_record_is_damaged(tmp_path, capsys):
    recorded(tmp_path)
    for folder in ("gradients", "before"):
        path = next(tmp_path.glob(f"{folder}/version-1/*.distcp"))
        good = path.read_bytes()
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 4]))
        assert main(["replay", str(tmp_path)]) == 1
        assert "weight: " in capsys.readouterr().err
        path.write_bytes(good)
    assert main(["replay", str(tmp_path)]) == 0


def test_replay_in_one_process_repeats_a_step_of_two_ranks_that_shard_state(tmp_path, capsys):
    results_of_ranks("recording", 2, tmp_path)
    assert main(["replay", str(tmp_path / "equal")]) == 0
    assert main(["replay", str(tmp_path / "second")]) == 0
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "flipped")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("gradient norm: ") and ", element " in lines[1]


def test_record_step_refuses_foreign_optimizers_and_blocks_without_a_step(tmp_path):
    model = model_of()
    foreign = mp_optim.Adafactor(model.named_parameters())
    for optimizer in (torch.optim.AdamW(model.parameters()), foreign):
        with (
            pytest.raises(TypeError, match=r"record a step of mp_optim\.AdamW"),
            mp_optim.record_step(optimizer, tmp_path),
        ):
            pass
    recorded(tmp_path)
    optimizer = mp_optim.AdamW(model.named_parameters())
    with (
        pytest.raises(RuntimeError, match="took 0 steps"),
        mp_optim.record_step(optimizer, tmp_path),
    ):
        pass
    assert main(["replay", str(tmp_path)]) == 1
