"""Imports and exports of other libraries' state, bit for bit: real objects if installed, otherwise
their layout."""

import importlib.util
import json

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mp_optim import checkpoint, get_megatron_optimizer
from mp_optim.apps import convert as foreign
from mp_optim.apps.cli.command import main
from support.models import TinyMoE, build, config_for, same_bits, train
from support.one_rank import one_rank
from support.universal import write_universal


def same_state(a, b):
    one, other = ({name: dict(state) for name, state in each.state.items()} for each in (a, b))
    keys, other_keys = ({name: [*sorted(s)] for name, s in each.items()} for each in (one, other))
    return keys == other_keys and all(
        same_bits(value, other[name][key]) for name in one for key, value in one[name].items()
    )


def cloned(state):
    copies = {name: {k: v.clone() for k, v in found.items()} for name, found in state.state.items()}
    return foreign.ForeignState(state.groups, copies, state.grad_scaler)


def without(key, state):
    """Return the state of each parameter without one key."""
    return {name: {k: v for k, v in s.items() if k != key} for name, s in state.items()}


def bf16_run(optimizer_cls, steps=3, named=False, groups=1):
    model = TinyMoE(torch.bfloat16)
    named_params = list(model.named_parameters())
    masters = {name: p.detach().float().clone() for name, p in named_params}
    given = [(name, masters[name]) if named else masters[name] for name in masters]
    split = [given] if groups == 1 else [given[:3], given[3:]]
    optimizer = optimizer_cls([{"params": part} for part in split], lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        model.zero_grad()
        order = torch.randperm(11, generator=torch.Generator().manual_seed(step))
        model(torch.arange(11)[order]).backward()
        for name, param in named_params:
            masters[name].grad = param.grad.float()
        optimizer.step()
        with torch.no_grad():
            for name, param in named_params:
                param.copy_(masters[name])
    return model, optimizer, masters


def assert_imported(optimizer, model, expected, masters):
    found = foreign.export_state(optimizer)
    assert set(found.names) == set(masters)
    for name, state in expected.items():
        for key, value in state.items():
            assert same_bits(found.state[name][key].float(), value.float()), f"{name}.{key}"
        assert same_bits(found.state[name]["master_param"], masters[name])
    for name, param in model.named_parameters():
        assert same_bits(param.detach(), masters[name].to(param.dtype))


@pytest.mark.parametrize("fraction", [0.0, 0.5])
@pytest.mark.parametrize("precision", ["bf16", "bf16-remainder"])
def test_import_state_copies_torch_adamw_state_and_masters_exactly(precision, fraction):
    _, adamw, masters = bf16_run(torch.optim.AdamW)
    state = foreign.from_torch(adamw.state_dict(), list(masters), masters=masters)
    model, optimizer = build(precision, fraction, seed=5)
    foreign.import_state(optimizer, state)
    assert_imported(optimizer, model, without("master_param", state.state), masters)
    # Hyperparameters are those of our optimizer.
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}
    losses = train(model, optimizer, 2)
    assert optimizer.metrics()["skipped_steps"] == 0 and len(losses) == 2


def test_torch_adamw_continues_from_exported_state():
    model, optimizer = build("fp32")
    train(model, optimizer, 3)
    state = foreign.export_state(optimizer)
    fp32 = foreign.fp32_params(state)
    copies = {name: nn.Parameter(value.clone()) for name, value in fp32.items()}
    groups = [{"params": [(name, copies[name]) for name in group.names]} for group in state.groups]
    adamw = torch.optim.AdamW(groups)
    adamw.load_state_dict(foreign.to_torch(cloned(state)))
    decays = [group.settings["weight_decay"] for group in state.groups]
    assert [group["weight_decay"] for group in adamw.param_groups] == decays
    model.zero_grad()
    model(torch.arange(11)).backward()
    for name, param in model.named_parameters():
        copies[name].grad = param.grad.clone()
    torch.nn.utils.clip_grad_norm_(copies.values(), 1.0)
    adamw.step()
    optimizer.step()
    for name, param in model.named_parameters():
        torch.testing.assert_close(copies[name].detach(), param.detach(), rtol=0, atol=1e-2 * 1e-3)


@pytest.mark.parametrize(
    ("precision", "way"), [("bf16", "torch"), ("fp16", "file"), ("bf16-8bit", "file")]
)
def test_export_then_import_continues_with_equal_bits(tmp_path, precision, way):
    model, optimizer = build(precision)
    train(model, optimizer, 3)
    state = cloned(foreign.export_state(optimizer))
    if way == "torch":
        back = foreign.from_torch(foreign.to_torch(state), masters=foreign.fp32_params(state))
    else:
        foreign.to_file(state, tmp_path / "state.pt")
        back = foreign.from_file(tmp_path / "state.pt")
        assert back.groups == state.groups
    assert same_state(back, state)
    scale = optimizer.get_loss_scale().clone()
    expected = train(model, optimizer, 3, start=3)
    other, fresh = build(precision, 0.5, seed=8)
    foreign.import_state(fresh, back)
    if way == "file":
        assert torch.equal(fresh.get_loss_scale(), scale)
    assert train(other, fresh, 3, start=3) == expected
    assert all(map(same_bits, other.parameters(), model.parameters()))


def test_from_checkpoint_exports_state_without_a_model(tmp_path):
    model, optimizer = build("bf16", 0.5)
    train(model, optimizer, 2)
    checkpoint.save(tmp_path, model, optimizer)
    assert same_state(foreign.from_checkpoint(tmp_path), foreign.export_state(optimizer))
    compact, optimizer = build("bf16-8bit")
    train(compact, optimizer, 1)
    checkpoint.save(tmp_path / "compact", compact, optimizer)
    with pytest.raises(ValueError, match=r"compact format .*full_precision=True"):
        foreign.from_checkpoint(tmp_path / "compact")
    checkpoint.save(tmp_path / "compact", compact, optimizer, full_precision=True)
    found = foreign.from_checkpoint(tmp_path / "compact")
    assert same_state(found, foreign.export_state(optimizer))
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        foreign.from_checkpoint(tmp_path / "nothing")


def test_import_state_copies_sgd_momentum_and_needs_a_step_count():
    _, sgd, masters = bf16_run(lambda groups, **kw: torch.optim.SGD(groups, momentum=0.9, **kw))
    state = foreign.from_torch(sgd.state_dict(), list(masters), masters=masters, step=3)
    model, optimizer = build("bf16", optimizer="sgd")
    foreign.import_state(optimizer, state)
    momentum = {n: {"momentum_buffer": s["momentum_buffer"]} for n, s in state.state.items()}
    assert_imported(optimizer, model, momentum, masters)
    with pytest.raises(ValueError, match=r"the state of embed has no step.*pass step="):
        foreign.from_torch(sgd.state_dict(), list(masters))


def test_import_state_lists_parameter_names_that_do_not_match():
    _, adamw, masters = bf16_run(torch.optim.AdamW)
    names = list(masters)
    with pytest.raises(ValueError, match=r"no param_names; pass names= for its groups of \[7\]"):
        foreign.from_torch(adamw.state_dict())
    with pytest.raises(ValueError, match=r"the keys \['optimizer'\] instead of param_groups"):
        foreign.from_torch({"optimizer": adamw.state_dict()}, names)
    with pytest.raises(ValueError, match=r"names= has 6 names, but the groups have \[7\]"):
        foreign.from_torch(adamw.state_dict(), names[:6])
    with pytest.raises(ValueError, match=r"names= has \['embed'\] twice"):
        foreign.from_torch(adamw.state_dict(), ["embed", *names[:-1]])
    with pytest.raises(ValueError, match=r"masters= has entries for \['other'\]"):
        foreign.from_torch(adamw.state_dict(), names, masters={"other": torch.ones(1)})
    state = foreign.from_torch(adamw.state_dict(), names, masters=masters)
    prefixed = state.renamed(lambda name: f"policy.{name}")
    _, optimizer = build("bf16")
    before = cloned(foreign.export_state(optimizer))
    with pytest.raises(ValueError, match=r"missing \['bias', .*unknown \['policy.bias'"):
        foreign.import_state(optimizer, prefixed)
    with pytest.raises(ValueError, match=r"would have the name \['x'\]"):
        state.renamed(lambda name: "x")
    assert same_state(foreign.export_state(optimizer), before)
    foreign.import_state(optimizer, prefixed.renamed(lambda name: name.removeprefix("policy.")))
    imported = cloned(foreign.export_state(optimizer))
    # DDP prefixes the names in this way.
    foreign.import_state(optimizer, state.renamed(lambda name: f"module.{name}"))
    assert same_state(foreign.export_state(optimizer), imported)


def test_import_state_writes_nothing_when_shape_or_dtype_does_not_match():
    _, adamw, masters = bf16_run(torch.optim.AdamW)
    state = foreign.from_torch(adamw.state_dict(), list(masters), masters=masters)
    model, optimizer = build("bf16")
    before = cloned(foreign.export_state(optimizer))

    def changed(**new):
        dense = {"dense": {**state.state["dense"], **new}}
        return foreign.ForeignState(state.groups, {**state.state, **dense})

    for wrong, reason in (
        (changed(exp_avg=torch.ones(3, 3)), r"dense\.exp_avg: saved shape \(3, 3\)"),
        (changed(max_exp_avg_sq=torch.ones(8, 8)), r"unknown \['max_exp_avg_sq'\]"),
        (changed(exp_avg=torch.ones(8, 8).double() / 3), r"torch\.float64"),
    ):
        with pytest.raises(ValueError, match=reason):
            foreign.import_state(optimizer, wrong)
    bare = foreign.from_torch(adamw.state_dict(), list(masters))
    with pytest.raises(ValueError, match=r"embed is torch\.bfloat16, .*main_from_model=True"):
        foreign.import_state(optimizer, bare)
    assert same_state(foreign.export_state(optimizer), before)
    for name, param in model.named_parameters():
        assert same_bits(param.detach(), before.state[name]["master_param"].to(param.dtype))
    foreign.import_state(optimizer, bare, main_from_model=True)
    after = foreign.export_state(optimizer)
    for name in after.names:
        assert same_bits(after.state[name]["master_param"], before.state[name]["master_param"])
    assert same_bits(after.state["dense"]["exp_avg"], state.state["dense"]["exp_avg"])


def moments_of(shape):
    return {"exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}


def megatron_like(parts):
    shapes = [shape for _, shape, _ in parts]
    state = {i: moments_of(shape) for i, shape in enumerate(shapes)}
    groups = [{"lr": 1e-3, "step": 4, "params": list(state)}]
    scaler = {"scale": torch.tensor([2.0**9])}
    for name, count in (("growth_tracker", 3), ("hysteresis_tracker", 2)):
        scaler[name] = torch.tensor([count], dtype=torch.int32)
    return {
        "optimizer": {"state": state, "param_groups": groups},
        "grad_scaler": scaler,
        "fp32_from_fp16_params": [[torch.randn(s) for _, s, half in parts if half]],
    }


def test_from_megatron_reads_a_chain_with_fp32_params_and_a_loss_scale(tmp_path):
    model, optimizer = build("fp16")
    shapes = {name: (p.shape, p.dtype != torch.float32) for name, p in model.named_parameters()}
    dense = [(n, *shapes[n]) for n in shapes if not n.startswith("experts")]
    experts = [(n, *shapes[n]) for n in shapes if n.startswith("experts")]
    chain = {0: megatron_like(dense), 1: megatron_like(experts)}
    torch.save(chain, tmp_path / "chain.pt")
    chain = torch.load(tmp_path / "chain.pt", weights_only=True)
    names = [n for n, *_ in (*dense, *experts)]
    state = foreign.from_megatron(chain, names, fp32_names={"scale"})
    listed = foreign.from_megatron([chain[0], chain[1]], names, fp32_names={"scale"})
    assert same_state(listed, state)
    foreign.import_state(optimizer, state)
    assert float(optimizer.get_loss_scale()) == 2.0**9
    found = foreign.export_state(optimizer).state
    for (name, _, half), index in zip(dense, range(9), strict=False):
        assert same_bits(found[name]["exp_avg"], chain[0]["optimizer"]["state"][index]["exp_avg"])
        assert float(found[name]["step"]) == 4.0
        if not half:
            assert same_bits(found[name]["master_param"], model.get_parameter(name).detach())
    said = r"has 4 FP32 copies for 5 16-bit parameters; pass .*fp32_names="
    with pytest.raises(ValueError, match=said):
        foreign.from_megatron(chain, names)
    with pytest.raises(ValueError, match="names= has 8 entries"):
        foreign.from_megatron(chain, [*names, "more"])
    with pytest.raises(ValueError, match="without --use-distributed-optimizer"):
        foreign.from_megatron({"optimizer": {"param_groups": []}}, [])


def test_from_megatron_reads_fp32_optimizers_alone_and_in_a_chain():
    params = [nn.Parameter(torch.ones(shape)) for shape in (4, 3)]
    inner = torch.optim.AdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    inner.step()
    fp32, half = inner.state_dict(), megatron_like([("c", (2,), True)])
    for saved in (fp32, {"optimizer": fp32}):
        assert set(foreign.from_megatron(saved, ["a", "b"]).state) == {"a", "b"}
    chained = foreign.from_megatron([half, fp32], ["c", "a", "b"]).state
    assert same_bits(chained["c"]["master_param"], half["fp32_from_fp16_params"][0][0])
    assert same_bits(chained["b"]["exp_avg"], fp32["state"][1]["exp_avg"])


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)
def test_from_megatron_reads_state_of_the_installed_megatron(tmp_path):
    from benchmarks import megatron

    generator = torch.Generator().manual_seed(0)
    shapes = {"up": (6, 4), "down": (4, 6), "bias": (6,)}
    params, grads = (
        {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
        for _ in range(2)
    )
    with megatron.job_ended():
        step = megatron.megatron_step(list(params.values()), list(grads.values()), fused=True)
        for _ in range(3):
            step()
        held = [cell.cell_contents for cell in step.__closure__]
        saved = next(each for each in held if hasattr(each, "state_dict")).state_dict()
    torch.save(saved, tmp_path / "megatron.pt")
    saved = torch.load(tmp_path / "megatron.pt", weights_only=True)
    # The names follow the order of the only group.
    state = foreign.from_megatron(saved, list(shapes))
    model = nn.ParameterDict({n: nn.Parameter(torch.zeros_like(p)) for n, p in params.items()})
    optimizer = get_megatron_optimizer(config_for("bf16"), model)
    foreign.import_state(optimizer, state)
    masters = dict(zip(shapes, saved["fp32_from_fp16_params"][0], strict=True))
    assert {float(s["step"]) for s in state.state.values()} == {3.0}
    assert_imported(optimizer, model, without("master_param", state.state), masters)
    # Megatron's parameters have the values of its masters.
    assert all(same_bits(model[name].detach(), params[name]) for name in shapes)


def test_from_apex_reads_state_and_masters():
    shapes, names = [(4, 6), (6,), (3, 3)], ["w", "b", "v"]
    plain = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8}
    counts = torch.tensor([7], dtype=torch.int32), 7
    groups = [
        {**plain, "weight_decay": 0.1, "step": counts[0], "params": [0, 1]},
        {**plain, "weight_decay": 0.0, "step": counts[1], "params": [2]},
    ]
    saved = {"state": {i: moments_of(s) for i, s in enumerate(shapes)}, "param_groups": groups}
    flat = [torch.randn(shape) for shape in shapes]
    masters = [flat[:2], flat[2:]]
    state = foreign.from_apex(saved, masters, names)
    of = dict(zip(names, flat, strict=True))
    zeros = {n: nn.Parameter(torch.zeros_like(v).bfloat16()) for n, v in of.items()}
    model = nn.ParameterDict(zeros)
    optimizer = get_megatron_optimizer(config_for("bf16"), model)
    foreign.import_state(optimizer, state)
    assert_imported(optimizer, model, dict(zip(names, saved["state"].values(), strict=True)), of)
    assert {float(s["step"]) for s in state.state.values()} == {7.0}
    with pytest.raises(ValueError, match="masters"):
        foreign.from_apex(saved, masters[:1], names)
    assert foreign.fp32_params(foreign.from_apex(saved, None, names)) == {}


@pytest.mark.parametrize("flat", [False, True], ids=["zero 1 and 2", "zero 3"])
def test_from_deepspeed_reads_universal_checkpoints(tmp_path, flat):
    model, optimizer = build("bf16")
    params = {
        name: {"fp32": torch.randn(p.shape), **moments_of(p.shape)}
        for name, p in model.named_parameters()
    }
    write_universal(tmp_path, params, flat=flat)
    if flat:
        with pytest.raises(ValueError, match=r"step\.pt is missing .*pass step="):
            foreign.from_deepspeed(tmp_path)
    state = foreign.from_deepspeed(tmp_path, step=5 if flat else None)
    foreign.import_state(optimizer, state)
    masters = {name: state["fp32"] for name, state in params.items()}
    assert_imported(optimizer, model, without("fp32", params), masters)
    assert {float(s["step"]) for s in foreign.export_state(optimizer).state.values()} == {5.0}


def test_from_deepspeed_lists_missing_and_damaged_files(tmp_path):
    tensors = {key: torch.ones(2) for key in ("fp32", "exp_avg", "exp_avg_sq")}
    write_universal(tmp_path, {"w": tensors})
    torch.save({"other": 1}, tmp_path / "zero/w/exp_avg.pt")
    with pytest.raises(ValueError, match=r"exp_avg\.pt holds no tensor under 'param'"):
        foreign.from_deepspeed(tmp_path)
    (tmp_path / "zero/w/exp_avg.pt").unlink()
    with pytest.raises(ValueError, match=r"lacks \['w/exp_avg\.pt'\]"):
        foreign.from_deepspeed(tmp_path)
    with pytest.raises(FileNotFoundError, match="ds_to_universal"):
        foreign.from_deepspeed(tmp_path / "zero")


def test_import_state_shards_values_over_dtensor_params(tmp_path):
    with one_rank():
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        whole = torch.randn(4, 6)
        part = distribute_tensor(torch.zeros(4, 6).bfloat16(), mesh, [Shard(0)])
        model = nn.ParameterDict({"w": nn.Parameter(part)})
        optimizer = get_megatron_optimizer(config_for("bf16"), model)
        of_w = {"step": torch.tensor(3.0), **moments_of((4, 6)), "master_param": whole}
        state = foreign.ForeignState((foreign.ForeignGroup(("w",)),), {"w": of_w})
        foreign.import_state(optimizer, state)
        assert isinstance(optimizer.state[model["w"]]["exp_avg"], DTensor)
        assert same_state(foreign.export_state(optimizer), state)
        assert same_bits(model["w"].detach().full_tensor(), whole.bfloat16())


def command(arguments):
    assert main(["convert", "--source-format", *arguments.split()]) == 0


def test_convert_command_round_trips_torch_state_with_equal_bits(tmp_path, capsys):
    """The state goes from torch to a file of mp_optim and to torch."""
    _, adamw, masters = bf16_run(torch.optim.AdamW)
    torch.save({"step": 3, "optimizer": adamw.state_dict()}, tmp_path / "adamw.pt")
    prefixed = {f"module.{name}": value for name, value in masters.items()}
    (tmp_path / "names.json").write_text(json.dumps([*prefixed]))
    torch.save(prefixed, tmp_path / "masters.pt")
    here, torch_names = tmp_path, "--key optimizer --strip-prefix module."
    names = f"--names {here}/names.json --masters {here}/masters.pt"
    command(f"torch --source {here}/adamw.pt --target {here}/a.pt {names} {torch_names}")
    assert "7 parameters" in capsys.readouterr().out
    command(f"mp_optim --source {here}/a.pt --target-format torch --target {here}/torch")
    last = foreign.from_torch(
        torch.load(tmp_path / "torch/optimizer.pt", weights_only=True),
        masters=torch.load(tmp_path / "torch/fp32_params.pt", weights_only=True),
    )
    first = foreign.from_torch(adamw.state_dict(), list(masters), masters=masters)
    assert same_state(last, first)
    state = dict.fromkeys(("fp32", "exp_avg", "exp_avg_sq"), masters["dense"])
    write_universal(tmp_path, {"w": state})
    command(f"deepspeed --source {here} --target {here}/b.pt")
    assert foreign.from_file(tmp_path / "b.pt").names == ["w"]
