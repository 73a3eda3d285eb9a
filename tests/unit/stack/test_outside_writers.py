"""No write to a tensor by other code is lost, for any of torch's ways to write a tensor."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import mp_optim
from support.models import same_bits
from support.places import PLACES, settings_of

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
    x.mul_(0.5)


@torch.library.custom_op("outside::clear_secretly", mutates_args=())
def undeclared_op(x: Tensor) -> None:
    clear_by_numpy(x)


def clear_by_numpy(tensor: Tensor) -> None:
    bits = local(tensor).detach().view(torch.int16)  # NumPy has no bfloat16.
    bits.numpy()[...] = 0


halved = torch.compile(lambda x: x.mul_(0.5), backend="aot_eager")

WRITERS: dict[str, Writer] = {
    "`mul_` and every other operation in place": lambda t: t.mul_(0.5),
    "operations in place on `tensor.detach()` or a view": lambda t: local(t).detach()[:1].zero_(),
    "`tensor[i] = value`": put,
    "`out=tensor`": lambda t: torch.mul(t.detach(), 0.5, out=t),
    "`copy_` in `torch.inference_mode()`": in_inference_mode,
    "`torch._foreach_*_`": lambda t: torch._foreach_mul_([t], 0.5),
    "`torch.compile`d operations in place": lambda t: halved(local(t)),
    "`torch.library` operations with `mutates_args`": lambda t: declared_op(local(t)),
    "`tensor.set_(...)`": lambda t: t.set_(t.detach() * 0.5),
    "`tensor.data = ...`": exchange_data,
    "`torch.utils.swap_tensors`": exchange,
    "`tensor.data.mul_`": lambda t: t.data.mul_(0.5),
    "`GradScaler.unscale_`, `torch._amp_*`": unscale,
    "`torch._fused_sgd_`: `torch.optim.SGD(fused=True)`": fused_sgd,
    "`torch._fused_adamw_`: `torch.optim.AdamW(fused=True)`": fused_adamw,
    "`tensor.numpy()`": clear_by_numpy,
    "`torch.from_dlpack`": lambda t: torch.from_dlpack(local(t).detach()).mul_(0.5),
    "`tensor.untyped_storage()`": lambda t: local(t).untyped_storage().fill_(0),
    "kernels: Triton, CUDA, `torch.library` without `mutates_args`": (
        lambda t: undeclared_op(local(t).detach())
    ),
}
NEW_MEMORY = ("`tensor.set_(...)`", "`tensor.data = ...`", "`torch.utils.swap_tensors`")
"""Writers that DTensors skip, because FSDP2 owns the memory of their local tensors."""


FORMS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "FP32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "remainder16": (torch.bfloat16, {"main_params": "remainder16"}),
    "8-bit, remainder8": (torch.bfloat16, {"state": "8bit", "main_params": "remainder8"}),
    "no main params": (torch.bfloat16, {"main_params": "none"}),
}


def test_outside_writes_page_lists_every_tested_writer():
    section = PAGE.read_text().split("## Gradients")[0].split("plain tensors and DTensors:")[1]
    rows = re.findall(r"^- (.+)$", section, re.M)
    assert set(rows) == set(WRITERS)


CASES = [(name, "plain") for name in WRITERS]
CASES += [(name, "DTensor") for name in WRITERS if name not in NEW_MEMORY]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_step_continues_from_params_written_by_other_code(name, layout, one_rank, tmp_path):
    """The learning rate is 0, so the written value must stay. Each writer runs in every placement.
    All writers together cover every pair of placement and state form."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    forms = itertools.islice(itertools.cycle(FORMS), [*WRITERS].index(name), None)
    for place, form in zip(PLACES, forms, strict=False):
        dtype, settings = FORMS[form]
        settings = {**settings, **settings_of(place, tmp_path)}
        values = torch.linspace(0.4, 1.7, 256).view(16, 16).to(dtype)
        if layout == "DTensor":
            values = distribute_tensor(values, mesh, [Shard(0)])
        param = nn.Parameter(values.clone())
        optimizer = mp_optim.AdamW([("p", param)], lr=0.0, weight_decay=0.0, **settings)
        step_with_gradients(optimizer, param)
        for _ in range(2):
            with torch.no_grad():
                WRITERS[name](param)
            written = local(param).detach().clone()
            step_with_gradients(optimizer, param)
            assert same_bits(local(param).detach(), written), (place, form)
        # torch's fused SGD does not change bfloat16 tensors on a CPU.
        assert form != "FP32" or not torch.equal(written, local(values)), place


def step_with_gradients(optimizer: torch.optim.Optimizer, param: Tensor) -> None:
    (param * param).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
