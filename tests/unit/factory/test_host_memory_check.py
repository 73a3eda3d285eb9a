"""An optimizer that needs more host memory than is available is refused before it allocates."""

import ast
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import mp_optim
from mp_optim import OptimizerConfig, get_megatron_optimizer
from mp_optim.factory import host_memory_check
from support.fake_host import FakeHost
from support.launch import run_forked_program

ELEMENTS = 1 << 22
MIB = 1 << 20


@pytest.fixture
def grant(tmp_path, monkeypatch):
    def granted(num_bytes: int, ranks: int = 1) -> None:
        host = FakeHost(tmp_path)
        kib = num_bytes // 1024
        host.write("proc/meminfo", f"MemTotal: {kib} kB\nMemAvailable: {kib} kB")
        monkeypatch.setattr(host_memory_check, "this_host", lambda: host.seen_by(0, ranks))
        monkeypatch.setattr(host_memory_check, "MOST_PER_ELEMENT", 1 << 40)

    return granted


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(ELEMENTS // 4, dtype=torch.bfloat16)) for _ in range(4)]


def step(model: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for param in model:
        param.grad = torch.ones_like(param)
    optimizer.step()


def in_config(**settings: object) -> OptimizerConfig:
    return OptimizerConfig(lr=1e-3, bf16=True, optimizer_cpu_offload=True, **settings)


def test_adamw_names_smaller_settings_when_host_memory_is_short(grant):
    grant(60 * MIB)  # Main params and moments take 48 MiB, staging 16 MiB, temporary tensors 2 MiB.
    model = params()
    optimizer = mp_optim.AdamW(model, offload=1.0, offload_mode="overlap")
    said = r"offload=1.0: the optimizer needs 66.00 MiB of host memory \(main params 16.00 MiB, .*"
    said += r"MemAvailable \(60.00 MiB\) leaves .*; set offload_mode='sync', or state='8bit' and "
    with pytest.raises(ValueError, match=said):
        step(model, optimizer)
    fitting = mp_optim.AdamW(model, offload=1.0, state="bf16", main_params="remainder16")
    step(model, fitting)


def test_get_megatron_optimizer_names_config_fields_when_host_memory_is_short(grant):
    grant(50 * MIB)
    config = in_config(optimizer_offload_fraction=1.0, offload_mode="speculative")
    said = r"^optimizer_offload_fraction=1.0: .*exp_avg_dtype='uint8'"
    with pytest.raises(ValueError, match=said):
        get_megatron_optimizer(config, nn.ParameterList(params()))


RELEASED = {"offload_mode": "overlap", "release_gradients": True}
REMAINDERS = {"main_params": "remainder16"}
EIGHT_BITS = {"exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"}


@pytest.mark.parametrize(
    ("is_class", "settings", "count"),
    [
        (True, {}, 2),
        (True, {"offload": 1.0, **RELEASED}, 2),
        (True, {"state": "8bit", **REMAINDERS}, 1),
        (False, {}, 2),
        (False, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, **RELEASED}, 2),
        (False, {"use_precision_aware_optimizer": True, **EIGHT_BITS}, 1),
        (True, {"offload": 1.0, "optimizer_state_path": "", "state": "4bit", **REMAINDERS}, 0),
    ],
)
def test_host_memory_check_names_only_settings_that_the_optimizer_accepts(
    grant, tmp_path, monkeypatch, is_class, settings, count
):
    def build(chosen: dict[str, object]) -> None:
        model = params()
        if is_class:
            step(model, mp_optim.AdamW(model, **chosen))
            return
        config = OptimizerConfig(lr=1e-3, bf16=True, **chosen)
        get_megatron_optimizer(config, nn.ParameterList(model))

    grant(MIB)
    if "optimizer_state_path" in settings:
        settings = {**settings, "optimizer_state_path": str(tmp_path)}
    with pytest.raises(ValueError, match=r"the optimizer needs .* of host memory") as caught:
        build(settings)
    advice = str(caught.value).rpartition("shard the state")[0]
    ways = advice.partition("; set ")[2].removesuffix("; or ").split(", or ")
    ways = [dict(re.findall(r"(\w+)=('[^']*'|[\w.]+)", way)) for way in ways if way]
    assert len(ways) == count
    monkeypatch.setenv("MP_OPTIM_HOST_MEMORY_CHECK", "off")
    for way in ways:
        changed = {name: ast.literal_eval(value) for name, value in way.items()}
        if "optimizer_state_path" in changed:
            changed["optimizer_state_path"] = str(tmp_path)
        assert settings != settings | changed
        build(settings | changed)


@pytest.mark.parametrize("of_ranks", [1, 4])
def test_host_memory_check_passes_when_memory_exceeds_the_need_by_a_32nd(grant, of_ranks):
    model = params()
    for param in model:
        param.grad = torch.ones_like(param)
    optimizer = mp_optim.AdamW(model)
    need = 12 * ELEMENTS * 33 // 32  # Main params and moments take 12 bytes per element.
    grant(of_ranks * (need + 4096), of_ranks)
    optimizer.step()
    grant(of_ranks * (need - 4096), of_ranks)
    with pytest.raises(ValueError, match=r"offload=0\.0 with a model on the CPU: "):
        step(model, mp_optim.AdamW(model))


def test_host_memory_check_counts_momentum_of_each_param_group(grant):
    model = params()
    for param in model:
        param.grad = torch.ones_like(param)
    grant(4 * ELEMENTS * 33 // 32 + 4096)  # Enough for FP32 main params and temporary tensors.
    groups = [{"params": model[:2], "momentum": 0.0}, {"params": model[2:], "momentum": 0.0}]
    step(model, mp_optim.SGD(groups, lr=0.1))
    groups[0] = {"params": model[:2], "momentum": 0.9}
    with pytest.raises(ValueError, match=r"moments 8\.00 MiB"):
        step(model, mp_optim.SGD(groups, lr=0.1))


def test_get_megatron_optimizer_refuses_state_file_larger_than_free_disk_space(
    grant, tmp_path, monkeypatch
):
    usage = host_memory_check.shutil.disk_usage(tmp_path)._replace(free=40 * MIB)
    monkeypatch.setattr(host_memory_check.shutil, "disk_usage", lambda _: usage)
    grant(1 << 40)
    config = in_config(optimizer_offload_fraction=1.0, optimizer_state_path=str(tmp_path))
    said = r"needs 48.00 MiB of disk, and free disk space of .* leaves 40.00 MiB; set .*'uint8'"
    with pytest.raises(ValueError, match=said):
        get_megatron_optimizer(config, nn.ParameterList(params()))
    config = replace(config, offload_mode="overlap")
    with pytest.raises(ValueError, match=said) as caught:  # The mode changes no file's size.
        get_megatron_optimizer(config, nn.ParameterList(params()))
    assert "sync" not in str(caught.value)


def test_host_memory_check_refuses_a_step_without_memory_unless_switched_off(grant, monkeypatch):
    grant(MIB)
    model = params()
    with pytest.raises(ValueError, match="or shard the state over more ranks, train"):
        step(model, mp_optim.AdamW(model))
    monkeypatch.setenv("MP_OPTIM_HOST_MEMORY_CHECK", "off")
    step(model, mp_optim.AdamW(model))


_UNDER_A_LIMIT = """
import re, resource, torch, mp_optim
from torch import nn

def used():
    found = re.search(r"VmData:\\s+(\\d+) kB", open("/proc/self/status").read())
    return int(found[1]) << 10

def train(**settings):
    model = [nn.Parameter(torch.zeros(6 << 20, dtype=torch.bfloat16)) for _ in range(4)]
    optimizer = mp_optim.AdamW(model, **settings)
    for _ in range(2):
        for param in model:
            param.grad = torch.ones_like(param)
        optimizer.step()

train(offload=1.0, offload_mode="speculative")  # imports what is imported late
limit = used() + (500 << 20)  # 48 of them for the model
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    train(offload=1.0, offload_mode="speculative")
except ValueError as error:
    print(error)
train()
train(offload=1.0, offload_mode="sync")
print("trained")
"""


def test_adamw_trains_under_rlimit_data_with_settings_that_its_refusal_names():
    refusal, trained = run_forked_program("-c", _UNDER_A_LIMIT).splitlines()
    assert re.search(r"RLIMIT_DATA \(ulimit -d\) .* set offload_mode='sync', or ", refusal)
    assert trained == "trained"
