"""Megatron's dist_checkpointing saves and loads the optimizers of this package."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.launch import run_ranks

core = pytest.importorskip("megatron.core.optimizer")
from megatron.core import dist_checkpointing  # noqa: E402

from mp_optim import OptimizerConfig  # noqa: E402
from mp_optim.apps import megatron  # noqa: E402
from support import megatron_gpt as gpt  # noqa: E402

TYPE = "distrib_optim_sharding_type"
RESHARDABLE, BUCKETS = "fully_reshardable", "dp_reshardable"
THEIRS = core.get_megatron_optimizer


def OURS(*arguments: Any) -> Any:
    """Call our factory by its module, because megatron.uninstall() replaces names of the factory
    in other modules."""
    return megatron.get_megatron_optimizer(*arguments)


@pytest.fixture(autouse=True)
def process_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gpt.without_cuda(monkeypatch)
    gpt.initialize(dist.HashStore())
    yield
    gpt.finish()


def built(
    factory: Any = OURS, precision: str = "bf16", experts: int = 0, **settings: Any
) -> tuple[nn.Module, Any]:
    distributed = settings.get("use_distributed_optimizer", False)
    model = gpt.gpt(precision, experts=experts, distributed=distributed)
    if settings.keys() & {
        "exp_avg_dtype",
        "muon_momentum",
        "muon_moment2_method",
    }:  # the installed core lacks these fields
        config = OptimizerConfig(lr=1e-2, clip_grad=0.5, bf16=True, **settings)
        return model, factory(config, [model], {})
    return model, factory(gpt.optimizer_config(precision, **settings), [model])


def bits(optimizer: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for slot in optimizer.slots():
        for key, value in optimizer.full_slot_state(slot).items():
            local = getattr(value, "local", value)
            state[f"{optimizer.slot_name(slot)}.{key}"] = local.clone()
    return state


SHARED = {"use_distributed_optimizer": True}
OFFLOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
COMPACT = {
    **SHARED,
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bfloat16",
    "exp_avg_sq_dtype": "bfloat16",
}
RUNS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "experts": {"experts": 2},
    "fp16": {"precision": "fp16", "initial_loss_scale": 2.0**32, "hysteresis": 1},
    "fp32": {"precision": "fp32"},
    "offloaded": OFFLOADED,
    "muon": {"optimizer": "muon", "muon_momentum": 0.9},
    "shared out": SHARED,
    "shared out, fp32": {**SHARED, "precision": "fp32"},
    "shared out, compact": COMPACT,
}


ASKED = [(run, BUCKETS if "shared" in run else None) for run in RUNS]


@pytest.mark.parametrize(("run", "sharding"), [*ASKED, ("shared out", None)])
def test_sharded_checkpoint_resumes_to_the_bit_with_each_setting(run, sharding, tmp_path):
    model, optimizer = built(**RUNS[run])
    gpt.train(model, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = 0.5e-2
    gpt.save(tmp_path, model, optimizer, {} if sharding is None else {TYPE: sharding})
    saved = bits(optimizer)
    expected = gpt.train(model, optimizer, range(3, 6))

    model, optimizer = built(**RUNS[run])
    gpt.train(model, optimizer, range(7, 8))
    gpt.load(tmp_path, model, optimizer)
    loaded = bits(optimizer)
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    assert optimizer.param_groups[0]["lr"] == 0.5e-2
    assert gpt.train(model, optimizer, range(3, 6)) == expected


@pytest.mark.parametrize("run", ["bf16", "offloaded", "shared out", "shared out, fp32"])
def test_sharded_background_save_writes_old_values_when_training_continues(run, tmp_path):
    """Megatron's writer reads host tensors after the call, so the call has to copy state."""
    model, optimizer = built(**RUNS[run])
    gpt.train(model, optimizer, range(3))
    saved = bits(optimizer)
    state = optimizer.sharded_state_dict(model.module.sharded_state_dict())
    request = dist_checkpointing.save(state, str(tmp_path), async_sharded_save=True)
    gpt.train(model, optimizer, range(3, 5))
    request.execute_sync()
    asked = optimizer.sharded_state_dict(model.module.sharded_state_dict(), is_loading=True)
    main_params = {key for key in saved if key.endswith("master_param")}
    optimizer.load_state_dict(dist_checkpointing.load(asked, str(tmp_path)))
    loaded = bits(optimizer)
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    assert bool(main_params) == (not run.endswith("fp32"))


OF_THEIRS: dict[str, tuple[dict[str, Any], str | None]] = {
    "experts": ({"experts": 2}, None),
    "fp16": ({"precision": "fp16"}, None),
    "shared out": (SHARED, RESHARDABLE),
    "shared out, in buckets": (SHARED, BUCKETS),
    "shared out, experts in buckets": ({**SHARED, "experts": 2}, BUCKETS),
}


@pytest.mark.parametrize("run", OF_THEIRS)
def test_sharded_checkpoint_of_megatron_resumes_with_our_optimizer(run, tmp_path):
    settings, sharding = OF_THEIRS[run]
    metadata = {} if sharding is None else {TYPE: sharding}
    with gpt.CudaIsCpu():
        model, optimizer = built(THEIRS, **settings)
        gpt.train(model, optimizer, range(3))
        gpt.save(tmp_path, model, optimizer, metadata)
        expected = gpt.train(model, optimizer, range(3, 6))
    model, optimizer = built(**settings)
    gpt.load(tmp_path, model, optimizer)
    assert gpt.train(model, optimizer, range(3, 6)) == pytest.approx(expected, rel=1e-4)


def chain_of_megatron(model: nn.Module, rules: dict[str, str]) -> Any:
    named = {f"module.{name}": rule for name, rule in rules.items()}

    def of_adam(param: Any, name: str) -> bool:
        return named[name] == "adam"

    config = gpt.optimizer_config()
    key = core.ParamKey(with_name_predicate=core.ParamWithNamePredicate("rest", of_adam))
    parts: dict[tuple[Any, ...], list[Any]] = {}
    for group in core._get_param_groups([model], config, {key: {"optimizer": "adam"}}):
        parts.setdefault((group.get("optimizer"), group["is_expert_parallel"]), []).append(group)
    keys = {None: ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq")}

    def part(rule: str | None, groups: list[Any]) -> Any:
        def init(inner: Any, _: Any = None) -> None:
            for group in inner.param_groups:
                for param in group["params"]:
                    state = {key: torch.zeros_like(param) for key in keys[rule]}
                    inner.state[param].update(state)

        inner = torch.optim.AdamW(groups) if rule else torch.optim.SGD(groups, momentum=0.9)
        return core.Float16OptimizerWithFloat16Params(inner, config, None, init)

    return core.ChainedOptimizer([part(rule, groups) for (rule, _), groups in parts.items()])


def with_experts_apart() -> nn.Module:
    model = gpt.gpt("bf16", experts=2)
    for name, param in model.named_parameters():
        param.allreduce = ".experts." not in name
    return model


@pytest.mark.parametrize("prefix", [True, False])
def test_sharded_muon_checkpoint_loads_into_megatron_chain_and_back(prefix, tmp_path):
    metadata = {"chained_optim_avoid_prefix": not prefix}
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    config = OptimizerConfig(lr=1e-2, clip_grad=0.5, bf16=True, **RUNS["muon"])
    model = with_experts_apart()
    optimizer = OURS(config, [model], {})
    gpt.train(model, optimizer, range(3))
    rules = {
        name: group["optimizer"]
        for group in optimizer.param_groups
        for name in group.get("param_names", ())
    }
    gpt.save(ours, model, optimizer, dict(metadata))
    saved, expected = bits(optimizer), gpt.train(model, optimizer, range(3, 6))
    with gpt.CudaIsCpu():
        model = with_experts_apart()
        chain = chain_of_megatron(model, rules)
        gpt.load(ours, model, chain)
        assert len(chain.chained_optimizers) == 3
        gpt.save(theirs, model, chain, dict(metadata))
    model = with_experts_apart()
    optimizer = OURS(config, [model], {})
    gpt.load(theirs, model, optimizer)
    loaded = bits(optimizer)
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    assert gpt.train(model, optimizer, range(3, 6)) == expected


def test_sharded_state_dict_refuses_dp_reshardable_with_muon():
    model, optimizer = built(**RUNS["muon"], **SHARED)
    with pytest.raises(ValueError, match="optimizer='muon'; save the checkpoint again"):
        optimizer.sharded_state_dict(
            model.module.sharded_state_dict(), is_loading=True, metadata={TYPE: BUCKETS}
        )


@pytest.mark.parametrize("run", ["experts", "fp16"])
def test_legacy_state_of_megatron_resumes_with_our_optimizer(run, tmp_path):
    settings, _ = OF_THEIRS[run]
    path = tmp_path / "legacy.pt"
    with gpt.CudaIsCpu():
        model, optimizer = built(THEIRS, **settings)
        gpt.train(model, optimizer, range(3))
        torch.save([model.state_dict(), optimizer.state_dict()], path)
        copies = [param for group in optimizer.param_groups for param in group["params"]]
        saved = sorted(copy.double().sum().item() for copy in copies)
        expected = gpt.train(model, optimizer, range(3, 6))
    model, optimizer = built(**settings)
    of_model, state = torch.load(path, weights_only=False)
    model.load_state_dict(of_model)
    optimizer.load_state_dict(state)
    mains = [main for _, main in optimizer.named_main_params()]
    assert sorted(main.double().sum().item() for main in mains) == saved
    assert gpt.train(model, optimizer, range(3, 6)) == pytest.approx(expected, rel=1e-4)


def test_load_refuses_legacy_megatron_state_with_other_groups_and_changes_nothing():
    with gpt.CudaIsCpu():
        model, optimizer = built(THEIRS)
        gpt.train(model, optimizer, range(2))
        state = optimizer.state_dict()
    parts = state if isinstance(state, list) else [state]
    for group in parts[0]["optimizer"]["param_groups"]:
        group["wd_mult"] = 0.25
    model, optimizer = built()
    gpt.train(model, optimizer, range(1))
    before = bits(optimizer)
    with pytest.raises(ValueError, match=r"no param group matches.*wd_mult=0\.25"):
        optimizer.load_state_dict(state)
    assert all(torch.equal(value, before[key]) for key, value in bits(optimizer).items())


OURS_TO_THEM = ("experts", "fp16", "shared out, in buckets")


@pytest.mark.parametrize("run", OURS_TO_THEM)
def test_sharded_checkpoint_of_ours_resumes_with_megatron_optimizer(run, tmp_path, monkeypatch):
    settings, sharding = OF_THEIRS[run]
    model, optimizer = built(**settings)
    gpt.train(model, optimizer, range(3))
    gpt.save(tmp_path, model, optimizer, {} if sharding is None else {TYPE: sharding})
    expected = gpt.train(model, optimizer, range(3, 6))
    if sharding is not None:
        gpt.with_steps_in_groups(monkeypatch)
    with gpt.CudaIsCpu():
        model, optimizer = built(THEIRS, **settings)
        gpt.train(model, optimizer, range(7, 8))
        gpt.load(tmp_path, model, optimizer)
        losses = gpt.train(model, optimizer, range(3, 6))
    assert losses == pytest.approx(expected, rel=1e-4)


def test_sharded_checkpoint_loads_when_distributed_optimizer_is_switched_off(tmp_path):
    model, optimizer = built(**SHARED)
    gpt.train(model, optimizer, range(3))
    gpt.save(tmp_path, model, optimizer, {TYPE: BUCKETS})
    expected = gpt.train(model, optimizer, range(3, 6))
    model, optimizer = built()
    gpt.load(tmp_path, model, optimizer)
    assert gpt.train(model, optimizer, range(3, 6)) == expected


def test_sharded_checkpoint_keeps_group_settings_when_experts_are_split_off(tmp_path):
    """Megatron with one expert-parallel rank saves experts among dense parameters."""
    model, optimizer = built(experts=2)
    gpt.train(model, optimizer, range(3))
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    gpt.save(tmp_path, model, optimizer, {"chained_optim_avoid_prefix": True})
    expected = gpt.train(model, optimizer, range(3, 6))
    model = gpt.gpt(experts=2)
    for name, param in model.named_parameters():
        param.allreduce = "experts" not in name
    optimizer = OURS(gpt.optimizer_config(), [model])
    assert any(group["is_expert_parallel"] for group in optimizer.param_groups)
    gpt.load(tmp_path, model, optimizer)
    assert gpt.train(model, optimizer, range(3, 6)) == expected


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    run_ranks("megatron_checkpoints", 2, str(folder))
    return folder


def joined(folder: Path, name: str) -> dict[str, torch.Tensor]:
    ranks = [torch.load(folder / f"{name}{rank}.pt", weights_only=True) for rank in (0, 1)]
    whole: dict[str, torch.Tensor] = {}
    for key, (place, first) in ranks[0].items():
        other_place, second = ranks[1][key]
        if place is None or first.dim() == 0:
            whole[key] = first
        elif name == "split":
            whole[key] = torch.cat((first, second), dim=place)
        else:
            parts = sorted(((place, first), (other_place, second)), key=lambda x: x[0])
            whole[key] = torch.cat([part for _, part in parts])
    return whole


@pytest.mark.parametrize("name", ["shared", "split"])
def test_sharded_checkpoint_of_two_processes_loads_in_one_process(name, of_two_ranks):
    expected = joined(of_two_ranks, name)
    model, optimizer = built()
    gpt.load(of_two_ranks / name, model, optimizer)
    loaded = bits(optimizer)
    assert loaded.keys() == expected.keys()
    for key, value in loaded.items():
        flat = value.reshape(expected[key].shape)
        if name == "split" and "linear_fc1" in key and value.dim():
            # Each rank holds one half of the gate projection and one half of the up projection.
            gate, up = value.chunk(2)
            first = torch.cat((gate[:16], up[:16]))
            flat = torch.cat((first, torch.cat((gate[16:], up[16:]))))
        assert torch.equal(flat, expected[key]), key


def test_load_of_a_sharded_state_dict_changes_nothing_when_a_moment_is_missing(tmp_path):
    model, optimizer = built()
    gpt.train(model, optimizer, range(2))
    gpt.save(tmp_path, model, optimizer, {})
    gpt.train(model, optimizer, range(2, 3))
    model_state = model.module.sharded_state_dict()
    asked = optimizer.sharded_state_dict(model_state, is_loading=True)
    loaded = dist_checkpointing.load({"model": model_state, "optimizer": asked}, str(tmp_path))[
        "optimizer"
    ]
    before = bits(optimizer)
    del loaded["param_state"][len(optimizer.slots()) - 1]["exp_avg"]
    with pytest.raises(ValueError, match=r"missing \['exp_avg'\]"):
        optimizer.load_state_dict(loaded)
    after = bits(optimizer)
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_sharded_state_dict_names_a_parameter_the_model_does_not_save(monkeypatch):
    def whole_states(part):
        pytest.fail("the ranks gather state before the error")

    name = "mp_optim.apps.megatron.dist_checkpointing.whole_states"
    monkeypatch.setattr(name, whole_states)
    model, optimizer = built()
    state = model.module.sharded_state_dict()
    del state["output_layer.weight"]
    with pytest.raises(ValueError, match=r"output_layer.weight is not in the model's"):
        optimizer.sharded_state_dict(state)


def test_sharded_state_dict_refuses_normuon_state():
    model, optimizer = built(optimizer="muon", muon_moment2_method="normuon")
    with pytest.raises(ValueError, match=r"moment2_buffer does not have.*--ckpt-format"):
        optimizer.sharded_state_dict(model.module.sharded_state_dict())


def test_sharded_state_dict_refuses_parameters_with_different_step_counts():
    model, optimizer = built()
    gpt.train(model, optimizer, range(1))
    slot = optimizer.slots()[-1]
    optimizer.slot_state(slot)["step"].add_(1.0)
    with pytest.raises(ValueError, match=r"was stepped 1 times and .* 2 times, .*mp_optim"):
        optimizer.sharded_state_dict(model.module.sharded_state_dict())


def test_sharded_state_dict_names_a_sharding_type_that_is_not_supported():
    model, optimizer = built()
    state = model.module.sharded_state_dict()
    with pytest.raises(ValueError, match=r"'fsdp_dtensor': .*fully-reshardable"):
        optimizer.sharded_state_dict(state, metadata={TYPE: "fsdp_dtensor"})
    with pytest.raises(ValueError, match=r"use_distributed_optimizer=True and the"):
        optimizer.sharded_state_dict(state, is_loading=True, metadata={TYPE: BUCKETS})
