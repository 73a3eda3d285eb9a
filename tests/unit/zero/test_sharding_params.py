"""Parameters of every kind in flat buckets on one rank."""

import contextlib
import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from mp_optim import (
    ChainedOptimizer,
    DistributedOptimizer,
    MegatronOptimizer,
    checkpoint,
    get_megatron_optimizer,
)
from mp_optim.zero.buckets import SHARD_ALIGNMENT
from mp_optim.zero.sharded_params import ParamShard
from support.models import config_for

pytestmark = pytest.mark.usefixtures("one_rank")


STRATEGIES = ("no_shard", "optim", "optim_grads")


def sharded(
    model: nn.Module, precision: str = "fp32", strategy: str = "optim", **settings
) -> MegatronOptimizer:
    config = config_for(
        precision,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=strategy,
        **settings,
    )
    return get_megatron_optimizer(config, model)


def memory_of(view):
    return torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())


def test_sharded_params_and_gradients_are_aligned_views_of_flat_buckets():
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    before = {name: (value.clone(), value.data_ptr()) for name, value in model.state_dict().items()}
    optimizer = sharded(model)
    params, grads = (memory_of(view) for view in (model[0].weight, model[0].weight.main_grad))
    assert isinstance(optimizer, DistributedOptimizer)
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name][0]) and param.data_ptr() != before[name][1]
        assert param.untyped_storage().data_ptr() == params.data_ptr()
        assert param.main_grad.untyped_storage().data_ptr() == grads.data_ptr()
        assert (param.data_ptr() - params.data_ptr()) % (SHARD_ALIGNMENT * 4) == 0
        assert param.grad is None
    model(torch.ones(1, 5)).sum().backward()
    assert all(
        param.grad is None and param.main_grad.abs().sum() > 0 for param in model.parameters()
    )
    assert grads.any()
    optimizer.zero_grad()
    assert not grads.any()


def test_zero_grad_announces_no_bucket_that_waits_for_reduction():
    """A listener would read gradients while ``zero_grad`` clears them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = sharded(model, overlap_grad_reduce=True, bucket_size=20)
    announced: list[int] = []
    reducer = optimizer.grad_reducer
    reducer.on_reduced = announced.append
    model(torch.ones(1, 4)).sum().backward()
    early = list(announced)
    assert len(early) < len(reducer.buckets)
    optimizer.zero_grad()
    assert announced == early
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert sorted(announced[len(early) :]) == list(range(len(reducer.buckets)))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backward_reduces_gradients_after_no_sync_ends_or_raises(strategy, fails):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = sharded(model, "fp32", strategy, overlap_grad_reduce=True, bucket_size=20)
    with contextlib.suppress(KeyboardInterrupt), optimizer.no_sync():
        model(torch.ones(1, 4)).sum().backward()
        if fails:
            raise KeyboardInterrupt
    assert optimizer.grad_reducer.bytes_reduced == 0
    model(torch.ones(1, 4)).sum().backward()
    assert optimizer.grad_reducer.bytes_reduced > 0
    assert optimizer.step().success


@pytest.mark.quick
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sharded_step_warns_when_no_backward_ran(strategy):
    optimizer = sharded(nn.Linear(4, 4), strategy=strategy)
    with pytest.warns(UserWarning, match="none of the optimizer's 2 parameters has a gradient"):
        optimizer.step()


@pytest.mark.quick
@pytest.mark.parametrize("first", [0, 1, 2])
def test_param_shard_localize_returns_the_scales_of_the_rows_of_the_shard(first):
    start, shape = first * SHARD_ALIGNMENT, torch.Size((4, SHARD_ALIGNMENT))
    owned = torch.empty(2 * SHARD_ALIGNMENT)
    shard = ParamShard("w", shape, start, start + owned.numel(), owned, None, shown_whole=False)
    assert shard.localize("exp_avg_scale", torch.arange(4.0)).tolist() == [first, first + 1]


def test_bucket_of_one_param_does_not_share_the_param_memory():
    """torch's ``_flatten_dense_tensors`` returns a single tensor without copying."""
    model = nn.ParameterDict({"only": nn.Parameter(torch.ones(4))})
    old = model["only"].data
    optimizer = sharded(model)
    model["only"].grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(old, torch.ones(4)) and not torch.equal(model["only"], torch.ones(4))


@pytest.mark.parametrize(
    "param, name",
    [
        (torch.zeros(4, 3, 2, 2).contiguous(memory_format=torch.channels_last), "channels_last"),
        (torch.zeros(4, 3).t(), "transposed"),
        (torch.zeros(8, 8)[:, :4], "sliced"),
    ],
)
def test_sharding_refuses_params_that_are_not_row_major_and_keeps_strides(param, name):
    model = nn.ParameterDict({name: nn.Parameter(param)})
    strides = model[name].stride()
    with pytest.raises(ValueError, match=rf"^{name} has shape .*row-major.*\.contiguous\(\)"):
        sharded(model)
    assert model[name].stride() == strides


def test_sharding_refuses_two_params_that_share_memory():
    base = torch.zeros(8)
    model = nn.ParameterDict({"all": nn.Parameter(base), "part": nn.Parameter(base[4:])})
    with pytest.raises(ValueError, match="all and part are two parameters that share memory"):
        sharded(model)
    fine = nn.ParameterDict({"one": nn.Parameter(base[:4]), "other": nn.Parameter(base[4:])})
    sharded(fine)


def test_sharding_refuses_a_dtensor_parameter():
    mesh = dist.init_device_mesh("cpu", (1,))
    model = nn.ParameterDict(
        {"w": nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))}
    )
    with pytest.raises(ValueError, match="w is a DTensor, which FSDP2 shards already"):
        sharded(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sharding_steps_empty_params_and_keeps_their_shape(strategy):
    model = nn.ParameterDict(
        {"empty": nn.Parameter(torch.zeros(0, 8)), "some": nn.Parameter(torch.ones(3))}
    )
    optimizer = sharded(model, strategy=strategy)
    (model["some"].sum() + model["empty"].sum()).backward()
    assert optimizer.step().success and model["empty"].shape == (0, 8)
    assert optimizer.state[model["empty"]]["exp_avg"].numel() == 0
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    nothing = sharded(
        nn.ParameterDict({"empty": nn.Parameter(torch.zeros(0, 8))}), strategy=strategy
    )
    assert nothing.step().grad_norm == 0.0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sharding_leaves_frozen_params_unchanged_and_refuses_late_unfreezing(strategy):
    model = nn.ParameterDict(
        {
            "frozen": nn.Parameter(torch.ones(3), requires_grad=False),
            "some": nn.Parameter(torch.ones(3)),
        }
    )
    groups = [
        {"params": [model[name]], "param_names": [name], "lr": 0.1} for name in ("frozen", "some")
    ]
    config = config_for(
        "fp32", use_distributed_optimizer=True, data_parallel_sharding_strategy=strategy
    )
    optimizer = get_megatron_optimizer(config, model, param_groups=groups)
    before = model["frozen"].data_ptr()
    (model["some"] * model["frozen"]).sum().backward()
    optimizer.step()
    assert torch.equal(model["frozen"], torch.ones(3)) and model["frozen"].data_ptr() == before
    assert not torch.equal(model["some"], torch.ones(3))
    assert [name for name, _ in optimizer.named_main_params()] == ["frozen", "some"]
    assert list(optimizer.state_dict()["state"]) == [1]
    # A parameter frozen later is not stepped, even with non-zero moments.
    model["some"].requires_grad_(False)
    before = model["some"].clone()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(model["some"], before)
    model["frozen"].requires_grad_(True)
    with pytest.raises(RuntimeError, match="frozen was frozen when the optimizer was built"):
        optimizer.step()


class Tied(nn.Module):
    """Model with an embedding tied to the output layer, a dense layer and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dense, self.frozen = (nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens):
        return self.head(self.frozen(torch.tanh(self.dense(self.embed(tokens)))))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_deepspeed_7948_sharding_steps_flat_views_without_autograd_errors(strategy):
    """Views of a flat buffer made with autograd enabled are not leaves, so in-place steps on these
    views raise."""
    torch.manual_seed(0)
    model = Tied()
    plain = copy.deepcopy(model)
    optimizer = sharded(model, strategy=strategy)
    reference = get_megatron_optimizer(config_for("fp32"), plain)
    tokens = torch.tensor([1, 2, 3])
    for _ in range(3):
        for net, stepper in ((model, optimizer), (plain, reference)):
            stepper.zero_grad()
            net(tokens).square().mean().backward()
            assert stepper.step().success
    assert len(list(optimizer.named_main_params())) == 3
    for name, param in model.named_parameters():
        assert param.is_leaf and param.grad_fn is None
        assert torch.equal(param, plain.get_parameter(name)), name
    assert model.head.weight is model.embed.weight
    loss = model(tokens).sum()  # Autograd must refuse the values that it saved before the step.
    with torch.no_grad():
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sharded_step_continues_from_replaced_or_written_params(strategy, precision):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    values = [torch.full((3,), value, dtype=dtype) for value in (2.0, 3.0, 4.0)]
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(3, dtype=dtype))})
    optimizer = sharded(model, precision, strategy, lr=0.0)
    bucket = memory_of(model["w"].detach())

    def check(value):
        optimizer.zero_grad()
        model["w"].float().sum().backward()
        norm = optimizer.step().grad_norm
        assert torch.equal(model["w"], value) and norm == pytest.approx(3**0.5)
        main = dict(optimizer.named_main_params())["w"]
        assert torch.equal(getattr(main, "local", main).float(), value.float())
        assert model["w"].untyped_storage().data_ptr() == bucket.data_ptr()

    with torch.no_grad():
        model["w"].copy_(values[0])
    check(values[0])
    model["w"].data = values[1].clone()
    check(values[1])
    model["w"] = nn.Parameter(values[2].clone())
    optimizer.param_groups[0]["params"][0] = model["w"]
    check(values[2])
    assert model["w"] in optimizer.state
    model["w"].data.copy_(values[0])  # This write does not change the version counter.
    optimizer.reload_model_params()
    check(values[0])
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(4, dtype=dtype))
    with pytest.raises(ValueError, match="w was replaced by a tensor of"):
        optimizer.step()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_autograd_refuses_backward_after_a_load_wrote_the_params(strategy):
    def trained(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
        optimizer = sharded(model, "bf16", strategy)
        model(torch.ones(1, 4).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    model, optimizer = trained(0)
    loss = model(torch.ones(1, 4).bfloat16()).sum()
    with pytest.warns(UserWarning, match="overwritten with these values"):
        optimizer.load_state_dict(trained(1)[1].state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_new_distributed_optimizer_replaces_an_earlier_optimizer_of_the_model():
    model = nn.Linear(3, 3)
    first = sharded(model)
    gone, grads_of_first = weakref.ref(first), memory_of(model.bias.main_grad)
    second = sharded(model)
    model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(model.bias.main_grad, torch.ones(3)) and not grads_of_first.any()
    assert second.step().grad_norm == pytest.approx(12**0.5)
    del first
    gc.collect()
    assert gone() is None
    assert torch.equal(pickle.loads(pickle.dumps(model)).bias, model.bias)
    del second
    gc.collect()
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()  # The deleted optimizers reduce no gradients.
    assert torch.equal(model.bias.grad, torch.ones(3))


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("backward broke off")


def test_sharded_step_finishes_the_reductions_of_a_backward_that_raised(monkeypatch):
    """Other ranks have launched every reduction of that backward pass and wait for this rank."""
    model = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
    optimizer = sharded(model, strategy="optim_grads", overlap_grad_reduce=True, bucket_size=300)

    def backward(fails):
        value = torch.ones(2, 16)
        for index, layer in enumerate(model):
            value = layer(value)
            if fails and index == 1:
                value = _Fails.apply(value)
        value.sum().backward()

    reducer = optimizer.chained_optimizers[0].grad_reducer
    launch, launched = reducer.launch, []
    monkeypatch.setattr(reducer, "launch", lambda index: (launched.append(index), launch(index)))
    backward(fails=False)
    with pytest.raises(RuntimeError, match="broke off"):
        backward(fails=True)
    assert len(reducer.buckets) < len(launched) < 2 * len(reducer.buckets)
    optimizer.step()
    assert len(launched) == 2 * len(reducer.buckets)


def without_the_module(model):
    return (model[0].weight * 2.0).sum()


@pytest.mark.parametrize("experts", [False, True])
def test_params_are_usable_outside_their_module_after_finish_param_sync(experts):
    """Before the call, the error names ``finish_param_sync``. The optimizer has one part or two
    parts."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = get_megatron_optimizer(
        config_for("fp32", use_distributed_optimizer=True, overlap_param_gather=True),
        model,
        expert_predicate=lambda _, name: experts and name.startswith("1"),
    )
    assert isinstance(optimizer, ChainedOptimizer) == experts
    without_the_module(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"call optimizer\.finish_param_sync"):
        without_the_module(model).backward()
    optimizer.finish_param_sync()
    without_the_module(model).backward()
    assert optimizer.step().success


def test_distributed_optimizer_refuses_a_ddp_model():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="DistributedDataParallel, which reduces gradients"):
        get_megatron_optimizer(
            config_for("fp32", use_distributed_optimizer=True),
            nn.parallel.DistributedDataParallel(model),
        )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sharded_load_refuses_state_of_a_param_frozen_before_construction(strategy, tmp_path):
    """The parameter was trained before the save, and frozen before the buckets were built."""
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(3)) for name in "ab"})

    def built():
        fields = {"data_parallel_sharding_strategy": strategy}
        config = config_for("fp32", use_distributed_optimizer=True, **fields)
        groups = [{"params": [model[name]], "param_names": [name]} for name in "ab"]
        return get_megatron_optimizer(config, model, param_groups=groups)

    def step(optimizer):
        optimizer.zero_grad()
        sum(param.sum() for param in model.values() if param.requires_grad).backward()
        optimizer.step()

    def second_moment(optimizer):
        shown = optimizer.state_dict()["state"][1]["exp_avg_sq"]
        return getattr(shown, "local", shown).clone()

    optimizer = built()
    step(optimizer)
    checkpoint.save(tmp_path, model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    model["a"].requires_grad_(False)
    later = built()
    step(later)
    before = second_moment(later)
    with pytest.raises(ValueError, match=r"a: the parameter was frozen when .*convert=True"):
        later.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"a: the parameter was frozen when|does not fit"):
        checkpoint.load(tmp_path, model, later)
    assert list(later.state_dict()["state"]) == [1]
    assert torch.equal(second_moment(later), before)
    later.load_state_dict(saved, convert=True)
    assert list(later.state_dict()["state"]) == [1]
    model["a"].requires_grad_(True)
    again = built()
    model["a"].requires_grad_(False)
    checkpoint.load(tmp_path, model, again)
    assert list(again.state_dict()["state"]) == [0, 1]
