"""Everything in torch that writes to a tensor, done from outside to parameters and to gradients:
what of it is noticed is what ``docs/outside_writes.md`` says."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import mp_optim
from mp_optim import HybridDeviceOptimizer, OptimizerConfig, get_megatron_optimizer
from support.models import AdversarialTransfer
from support.offload import MODES, build_mode, differing, finish_early_work, hybrids, run, snapshot

PAGE = Path(__file__).parents[3] / "docs" / "outside_writes.md"
Writer = Callable[[Tensor], object]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def unscale(tensor: Tensor) -> None:
    flag, half = torch.zeros(1), torch.full((1,), 0.5)
    torch._amp_foreach_non_finite_check_and_unscale_([tensor], flag, half)


def fused_sgd(tensor: Tensor) -> None:
    here = local(tensor)
    grads = [torch.ones_like(here)]
    how = {"momentum": 0, "dampening": 0, "nesterov": False, "maximize": False}
    torch._fused_sgd_([here], grads, [], weight_decay=0, lr=0.25, is_first_step=True, **how)


def fused_adamw(tensor: Tensor) -> None:
    state = [[torch.zeros_like(tensor)] for _ in range(2)]
    numbers = {"lr": 0.25, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0, "eps": 1e-8}
    torch._fused_adamw_(
        [tensor],
        [torch.ones_like(tensor)],
        *state,
        [],
        [torch.ones(())],
        amsgrad=False,
        maximize=False,
        **numbers,
    )


def exchange_data(tensor: Tensor) -> None:
    tensor.data = tensor.data * 0.5


def exchange(tensor: Tensor) -> None:
    torch.utils.swap_tensors(tensor, nn.Parameter(tensor.detach() * 0.5))


def put(tensor: Tensor) -> None:
    local(tensor)[0] = 0.25


@torch.inference_mode()
def in_inference_mode(tensor: Tensor) -> None:
    tensor.copy_(tensor * 0.5)


@torch.library.custom_op("outside::halve", mutates_args=("x",))
def declared_op(x: Tensor) -> None:
    x.numpy()[...] *= 0.5


@torch.library.custom_op("outside::halve_secretly", mutates_args=())
def undeclared_op(x: Tensor) -> None:
    x.numpy()[...] *= 0.5


halved = torch.compile(lambda x: x.mul_(0.5), backend="aot_eager")

WRITERS: dict[str, Writer] = {
    "`mul_` and every other operation in place": lambda t: t.mul_(0.5),
    "the same to `tensor.detach()` or a view": lambda t: local(t).detach()[:1].zero_(),
    "`tensor[i] = value`": put,
    "`out=tensor`": lambda t: torch.mul(t.detach(), 0.5, out=t),
    "`copy_` in `torch.inference_mode()`": in_inference_mode,
    "`torch._foreach_*_`": lambda t: torch._foreach_mul_([t], 0.5),
    "`torch.compile`d operations in place": lambda t: halved(local(t)),
    "`torch.library` operation, `mutates_args` right": lambda t: declared_op(local(t)),
    "`tensor.set_(...)`": lambda t: t.set_(t.detach() * 0.5),
    "`tensor.data = ...`": exchange_data,
    "`torch.utils.swap_tensors`": exchange,
    "`tensor.data.mul_`": lambda t: t.data.mul_(0.5),
    "`GradScaler.unscale_`, `torch._amp_*`": unscale,
    "`torch._fused_sgd_`: `torch.optim.SGD(fused=True)`": fused_sgd,
    "`torch._fused_adamw_`: `torch.optim.AdamW(fused=True)`": fused_adamw,
    "`tensor.numpy()`": lambda t: local(t).detach().numpy().__imul__(0.5),
    "`torch.from_dlpack`": lambda t: torch.from_dlpack(local(t).detach()).mul_(0.5),
    "`tensor.untyped_storage()`": lambda t: local(t).untyped_storage().fill_(0),
    "kernels: Triton, CUDA, `torch.library` without `mutates_args`": (
        lambda t: undeclared_op(local(t).detach())
    ),
}
NEW_MEMORY = ("`tensor.set_(...)`", "`tensor.data = ...`", "`torch.utils.swap_tensors`")
"""Not done to DTensors: FSDP2 owns the memory of their local tensors."""


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def is_followed(writer: Writer, param: nn.Parameter) -> bool:
    """Whether the values that a parameter is given from outside are those that are stepped on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = mp_optim.SGD([("p", param)], lr=0.0, offload=1.0)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        param.grad = None
        before = local(param).detach().clone()
        with torch.no_grad():
            writer(param)
        expected = local(param).detach().clone()
        assert not torch.equal(expected, before)
        param.grad = torch.zeros_like(param)
        optimizer.step()
    return torch.equal(local(param).detach(), expected)


def rows_of_page() -> dict[str, tuple[str, str]]:
    """For each writer of the page what it says of plain tensors and of DTensors."""
    rows = re.findall(r"^\| (.+) \| (yes|no|-) \| (yes|no|-) \|$", PAGE.read_text(), re.M)
    return {name: (plain, sharded) for name, plain, sharded in rows}


def test_the_page_has_every_writer() -> None:
    assert rows_of_page().keys() == WRITERS.keys()


@pytest.mark.parametrize("name", WRITERS)
def test_parameters_are_followed_where_the_page_says_so(name: str, one_rank: None) -> None:
    plain = is_followed(WRITERS[name], nn.Parameter(torch.ones(4, 4)))
    said = "yes" if plain else "no"
    if name in NEW_MEMORY:
        assert rows_of_page()[name] == (said, "-")
        return
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    sharded = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    also = "yes" if is_followed(WRITERS[name], sharded) else "no"
    assert rows_of_page()[name] == (said, also)


OF_GRADIENTS = [name for name in WRITERS if "swap_tensors" not in name]


@pytest.mark.parametrize("adversarial", [True, False], ids=["accelerator", "host"])
@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_every_write_to_a_gradient_counts(name: str, adversarial: bool) -> None:
    def after(model: nn.Module, step: int) -> None:
        finish_early_work(optimizer)
        if step % 3 == 2:
            with torch.no_grad():
                WRITERS[name](model.dense.grad)

    expected = None
    for mode in MODES:
        model, optimizer = build_mode(
            mode, "fp32", 1.0, experts=False, adversarial=adversarial, clip_grad=0.5
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = run(model, optimizer, 7, after_backward=after)
        bits = snapshot(model, optimizer)
        if expected is None:
            expected, expected_results = bits, results
        assert differing(bits, expected) == [] and results == expected_results, mode


@pytest.mark.parametrize("adversarial", [True, False], ids=["accelerator", "host"])
@pytest.mark.parametrize("name", [n for n in OF_GRADIENTS if n not in NEW_MEMORY])
def test_every_write_to_a_gradient_of_fsdp_counts(
    name: str, adversarial: bool, one_rank: None
) -> None:
    expected = None
    for mode in MODES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        fully_shard(model)
        config = OptimizerConfig(
            lr=1e-2,
            clip_grad=0.5,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=1.0,
            offload_mode=mode,
        )
        optimizer = get_megatron_optimizer(config, model)
        for hybrid in hybrids(optimizer):
            if adversarial:
                hybrid.stepper.use_transfer(AdversarialTransfer())
        for seed in range(5):
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            model(inputs).square().mean().backward()
            finish_early_work(optimizer)
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                WRITERS[name](model[0].weight.grad)
                optimizer.step()
            optimizer.zero_grad()
        params = [local(param).detach().clone() for param in model.parameters()]
        expected = expected or params
        assert all(map(torch.equal, params, expected)), mode


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["SGD", "AdamW"])
def test_grad_scaler_means_the_same_in_every_mode(
    rule: str, dtype: torch.dtype, clip: float | None, unscales: bool, mode: str
) -> None:
    def trained(**settings: object) -> tuple[Tensor, list[float]]:
        torch.manual_seed(0)
        model, norms = nn.Linear(7, 5).to(dtype), []
        cls = getattr(mp_optim, rule)
        optimizer = cls(model.parameters(), lr=0.1, max_grad_norm=clip, **settings)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            inputs = torch.randn(6, 7, generator=torch.Generator().manual_seed(step))
            scaler.scale(model(inputs.to(dtype)).float().square().mean()).backward()
            if "offload_mode" in settings:
                finish_early_work(optimizer.stack)  # at its worst
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            norms.append(optimizer.last_step.grad_norm)
        return model.weight.detach().clone(), norms

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, expected_norms = trained()
        weight, norms = trained(offload=1.0, offload_mode=mode)
    assert torch.equal(weight, expected) and norms == expected_norms


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_a_hybrid_optimizer_alone_follows_its_parameters(fraction: float) -> None:
    params = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    optimizer = HybridDeviceOptimizer(params, fraction, lr=0.5, weight_decay=0.0)
    for value in (1.0, 3.0, 5.0):
        with torch.no_grad():
            for param in params:
                param.fill_(value)
                param.grad = torch.zeros(4)
        optimizer.step()
        assert [param.tolist() for param in params] == [[value] * 4] * 2
