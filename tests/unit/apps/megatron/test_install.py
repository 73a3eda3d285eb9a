"""``megatron.install()`` gives Megatron-core's callers the optimizer of this package."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mp_optim import OptimizerConfig
from support.launch import run_forked_program
from support.models import TinyMoE, tokens_of, train

core = pytest.importorskip("megatron.core.optimizer")
from megatron.core import parallel_state  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402

from mp_optim.apps import megatron  # noqa: E402


@pytest.fixture
def installed() -> Iterator[None]:
    megatron.install()
    try:
        yield
    finally:
        megatron.uninstall()


def build(**settings: Any) -> tuple[nn.Module, Any]:
    model = TinyMoE(torch.bfloat16)
    config = core.OptimizerConfig(**{"lr": 1e-2, "bf16": True, **settings})
    return model, core.get_megatron_optimizer(config, [model])


def test_megatron_install_replaces_factory_names_in_programs_imported_earlier():
    theirs = core.get_megatron_optimizer
    program = ModuleType("a_training_program")
    program.get_megatron_optimizer = theirs  # type: ignore[attr-defined]
    sys.modules[program.__name__] = program
    try:
        megatron.install()
        megatron.install()
        ours = megatron.get_megatron_optimizer
        assert core.get_megatron_optimizer is program.get_megatron_optimizer is ours
        megatron.uninstall()
        assert core.get_megatron_optimizer is program.get_megatron_optimizer is theirs
    finally:
        megatron.uninstall()
        del sys.modules[program.__name__]


def test_install_names_unknown_arguments_of_a_newer_factory(monkeypatch):
    def newer(config: Any, model_chunks: Any, buckets_of_tomorrow: Any) -> None: ...

    newer.__module__ = core.__name__

    monkeypatch.setattr(core, "get_megatron_optimizer", newer)
    with pytest.raises(RuntimeError, match=r"has arguments buckets_of_tomorrow, which"):
        megatron.install()
    assert core.get_megatron_optimizer is newer


@pytest.mark.usefixtures("installed")
def test_installed_factory_trains_like_our_factory_with_equal_settings():
    from mp_optim import get_megatron_optimizer

    model, optimizer = build(clip_grad=0.5, weight_decay=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    other = TinyMoE(torch.bfloat16)
    config = OptimizerConfig(lr=1e-2, bf16=True, clip_grad=0.5, weight_decay=0.1)
    plain = get_megatron_optimizer(config, other)
    assert train(model, optimizer, 8) == train(other, plain, 8)


@pytest.mark.usefixtures("installed")
def test_installed_optimizer_supports_the_calls_of_megatrons_training_loop():
    model, optimizer = build()
    parts = optimizer.chained_optimizers
    assert len(parts) == 2
    assert not optimizer.is_stub_optimizer
    assert optimizer.get_loss_scale().item() == 1.0
    assert all(group["default_config"] for group in optimizer.param_groups)
    scheduler = scheduler_of(optimizer)
    rates = []
    for step in range(4):
        train(model, optimizer, 1, step)
        scheduler.step(increment=1)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == pytest.approx(5e-3) and max(rates) == rates[1] == 1e-2
    optimizer.prepare_model_params_for_param_sync()
    optimizer.reload_model_params()
    plain = optimizer.step
    optimizer.step = lambda: (True, 1.0, None)
    assert optimizer.step() == (True, 1.0, None)
    del optimizer.step
    assert optimizer.step == plain


def inner_of(optimizer: Any) -> list[Any]:
    is_chain = isinstance(optimizer, core.ChainedOptimizer)
    return [part.optimizer for part in (optimizer.chained_optimizers if is_chain else [optimizer])]


def state_of(optimizer: Any) -> Any:
    is_chain = isinstance(optimizer, core.ChainedOptimizer)
    return optimizer.state if is_chain else optimizer._get_state()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("has_experts", [False, True])
def test_factory_returns_a_chained_optimizer_of_megatron_with_and_without_experts(has_experts):
    model = TinyMoE(torch.bfloat16)
    if not has_experts:
        for param in model.parameters():
            param.allreduce = True
    config = core.OptimizerConfig(lr=1e-2, bf16=True, params_dtype=torch.bfloat16)
    optimizer = core.get_megatron_optimizer(config, [model])
    train(model, optimizer, 1)
    parts = optimizer.chained_optimizers
    assert len(parts) == 1 + has_experts and optimizer.model_chunks == [model]
    count = len(list(model.parameters()))
    assert sum(len(inner.state) for inner in inner_of(optimizer)) == count
    assert len(state_of(optimizer)) == count == sum(len(state_of(part)) for part in parts)
    assert isinstance(optimizer, core.MegatronOptimizer)
    assert not any(isinstance(part, core.ChainedOptimizer) for part in parts)
    public = {name for name in dir(core.ChainedOptimizer) if not name.startswith("_")}
    assert [name for name in public if not hasattr(optimizer, name) and name != "optimizer"] == []


def scheduler_of(optimizer: Any, **settings: Any) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        **{
            "init_lr": 0.0,
            "max_lr": 1e-2,
            "min_lr": 1e-3,
            "lr_warmup_steps": 2,
            "lr_decay_steps": 10,
            "lr_decay_style": "cosine",
            "start_wd": 0.1,
            "end_wd": 0.1,
            "wd_incr_steps": 10,
            "wd_incr_style": "constant",
            **settings,
        },
    )


def scheduled(optimizer: Any, model: nn.Module) -> tuple[list[Any], list[float]]:
    scheduler = scheduler_of(optimizer)
    rates, losses = [], []
    for step in range(5):
        scheduler.step(increment=1)
        losses += train(model, optimizer, 1, step)
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates, losses


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": "sgd"},
        {"optimizer": "muon"},
        {"decoupled_lr": 5e-3, "decoupled_min_lr": 1e-3},
        {"min_lr": 1e-3},
    ],
    ids=str,
)
def test_step_raises_until_a_scheduler_sets_lr_when_the_config_has_no_lr(settings):
    model, optimizer = build(lr=None, **settings)
    assert any(group["lr"] is None for group in optimizer.param_groups)
    before = [param.detach().clone() for param in model.parameters()]
    model(tokens_of(0)).backward()
    with pytest.raises(ValueError, match=r"lr=None: no learning rate has been set"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    (other, given) = build(lr=1e-2, **settings)
    assert scheduled(optimizer, model) == scheduled(given, other)


@pytest.mark.usefixtures("installed")
def test_installed_optimizer_uses_process_groups_of_megatron():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        parallel_state.initialize_model_parallel()
        _, optimizer = build()
        dense, experts = optimizer.chained_optimizers
        assert dense.process_groups.grad_stats is parallel_state.get_model_parallel_group()
        assert experts.process_groups.grad_stats is not None
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.mark.parametrize("missing", ["dp", "expt_dp", "mp", "tp_ep_pp"])
def test_get_megatron_optimizer_names_a_process_group_that_pg_collection_lacks(missing):
    groups = dict.fromkeys({"dp", "expt_dp", "mp", "tp_ep_pp"} - {missing})
    config = core.OptimizerConfig(lr=1e-2)
    with pytest.raises(ValueError, match=rf"pg_collection\.{missing} is missing"):
        megatron.get_megatron_optimizer(
            config, [nn.Linear(2, 2)], pg_collection=SimpleNamespace(**groups)
        )


def test_get_megatron_optimizer_accepts_only_standard_overrides_that_match_no_param():
    config = core.OptimizerConfig(lr=1e-2)
    overrides = core.get_standard_config_overrides(config)
    model = nn.Linear(2, 2, bias=False)
    megatron.get_megatron_optimizer(config, [model], overrides)
    overrides[core.ParamKey(name="*.wieght")] = {"wd_mult": 0.0}
    with pytest.raises(ValueError, match=r"wieght.* matches no parameter"):
        megatron.get_megatron_optimizer(config, [model], overrides)


def test_megatron_module_runs_a_script_with_our_factory(tmp_path):
    script = tmp_path / "pretrain.py"
    script.write_text(
        "import sys\n"
        "from megatron.core.optimizer import get_megatron_optimizer\n"
        "print(get_megatron_optimizer.__module__, __name__, sys.argv[1:])\n"
    )
    said = run_forked_program("-m", "mp_optim.megatron", str(script), "--bf16")
    assert said.split() == ["mp_optim.apps.megatron.install", "__main__", "['--bf16']"]


def test_megatron_launcher_passes_fields_of_its_set_option_to_the_optimizer(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_OFFLOADED)
    fields = ("--set", "offload_mode=overlap", "--set", "offload_bucket_bytes=4096")
    said = run_forked_program("-m", "mp_optim.megatron", *fields, str(script))
    assert said.split() == ["overlap", "4096", "host"]


_OFFLOADED = """
import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
config = OptimizerConfig(
    lr=0.1, bf16=True, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0
)
model = torch.nn.Linear(2, 2).bfloat16()
optimizer = get_megatron_optimizer(config, [model], {})
ours = optimizer.stack.config
print(ours.offload_mode, ours.offload_bucket_bytes, optimizer.describe().rows[0].place)
"""
